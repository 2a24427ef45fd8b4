"""Reads what a user gives as audio."""

from __future__ import annotations

from typing import Any

import numpy as np

from nanoinfer.checks import short

A_SOURCE = "a pair (array, rate): numbers from -1 to 1, [samples], and how many of these a second has"
MOST_SHOWN = 60  # characters of a source in an error message


def read_audio(name: str, source: Any, rate: int) -> np.ndarray:
    """Return samples, [samples] float32, at the rate that a model takes.

    name: begins the messages of errors; source: as A_SOURCE says; the array may be a tensor or a list
    Raises ValueError for another source, another rate, and for no samples or ones that are not finite.
    """
    if not isinstance(source, (tuple, list)) or len(source) != 2:
        raise ValueError(f"{name} is {short(source, MOST_SHOWN)}: must be {A_SOURCE}")
    given, own_rate = source
    try:
        samples = np.asarray(given)
    except Exception as error:  # as of a list of lists of several lengths
        raise ValueError(f"{name} has {short(given, MOST_SHOWN)}: must be {A_SOURCE}: {error}") from error
    if samples.ndim != 1 or not samples.size or not np.issubdtype(samples.dtype, np.floating):
        raise ValueError(f"{name} has an array of {samples.dtype}, {list(samples.shape)}: must be {A_SOURCE}")
    if isinstance(own_rate, bool) or own_rate != rate:
        raise ValueError(f"{name} has {short(own_rate, MOST_SHOWN)} samples a second: must have {rate}; resample it")
    if not np.isfinite(samples).all():
        raise ValueError(f"{name} has samples that are NaN or infinite: must not")
    return np.ascontiguousarray(samples, np.float32)
