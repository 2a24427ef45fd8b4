"""The files that say how a checkpoint's images and audio are processed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoinfer.checks import check_settings
from nanoinfer.hub import reason_of

FILES = OF_IMAGES, OF_ALL = "preprocessor_config.json", "processor_config.json"
PARTS = ("image_processor", "video_processor", "feature_extractor", "tokenizer", "chat_template")  # others read these
NAMES = ("processor_class", "auto_map")
MOST_SHOWN = 300  # characters of transformers' reason


@contextmanager
def named_errors(folder: str) -> Iterator[None]:
    """Say what is wrong with a checkpoint's files, or missing."""
    if not any((Path(folder) / name).is_file() for name in FILES):
        raise ValueError(f"model={folder!r}: must have a {OF_IMAGES}, which says how images are processed")
    try:
        yield
    except Exception as error:
        reason = reason_of(error)[:MOST_SHOWN]
        raise ValueError(
            f"model={folder!r}: cannot read how images are processed, without which images=False works: {reason}"
        ) from error


def check_whole(folder: str, ignored: Collection[str], fixed: Mapping[str, Collection[Any]] | None = None) -> None:
    """Raise ValueError for settings of the class's processor by which a prompt would be another.

    ignored: further names of settings that change nothing; fixed: of others, and the values that they must have
    """
    file = Path(folder) / OF_ALL
    said = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    check_settings(str(file), said, (*PARTS, *NAMES, *ignored), fixed or {})
