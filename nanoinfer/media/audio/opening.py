"""Reads what a user gives as audio."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.checks import short
from nanoinfer.media.images.opening import Opener

A_PAIR = "a pair (array, rate): numbers from -1 to 1, [samples], and how many of these a second has"
A_SOURCE = f"{A_PAIR}; or a path, or the bytes of a file"
MOST_SHOWN = 60  # characters of a source in an error message


def read_audio(name: str, source: Any, rate: int, opener: Opener) -> np.ndarray:
    """Return samples, [samples] float32, at the rate that a model takes; of several channels their mean.

    name: begins the messages of errors
    source: as A_SOURCE says; the array may be a tensor or a list; soundfile reads files
    opener: finds files

    Raises ValueError for another source, another rate, and for no samples or ones that are not finite.
    """
    if isinstance(source, (str, Path)):
        source = _read_file(name, opener.find_file(name, str(source), "audio", A_SOURCE))
    elif isinstance(source, (bytes, bytearray, memoryview)):
        source = _read_file(name, BytesIO(bytes(source)))
    if not isinstance(source, (tuple, list)) or len(source) != 2:
        raise ValueError(f"{name} is {short(source, MOST_SHOWN)}: must be {A_SOURCE}")
    given, own_rate = source
    try:
        samples = np.asarray(given)
    except Exception as error:  # as of a list of lists of several lengths
        raise ValueError(f"{name} has {short(given, MOST_SHOWN)}: must be {A_PAIR}: {error}") from error
    if samples.ndim != 1 or not samples.size or not np.issubdtype(samples.dtype, np.floating):
        raise ValueError(f"{name} has an array of {samples.dtype}, {list(samples.shape)}: must be {A_PAIR}")
    if isinstance(own_rate, bool) or own_rate != rate:
        raise ValueError(f"{name} has {short(own_rate, MOST_SHOWN)} samples a second: must have {rate}; resample it")
    if not np.isfinite(samples).all():
        raise ValueError(f"{name} has samples that are NaN or infinite: must not")
    return np.ascontiguousarray(samples, np.float32)


def _read_file(name: str, file: Path | BytesIO) -> tuple[np.ndarray, int]:
    """Return a file's samples and its rate."""
    try:
        import soundfile  # here, for it comes with an extra
    except ImportError as error:
        raise ValueError(f"{name} is a file: soundfile reads these: pip install 'nanoinfer[audio]'") from error
    try:
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except Exception as error:
        raise ValueError(f"{name} cannot be read as audio: {error}") from error
    return samples.mean(axis=1), rate
