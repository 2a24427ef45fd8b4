"""Reads how a checkpoint's images are processed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.checks import check_settings
from nanoinfer.hub import reason_of
from nanoinfer.media.images.placeholders import CLASSES, Placeholder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

FILES = OF_IMAGES, OF_ALL = "preprocessor_config.json", "processor_config.json"  # may say how images are processed
PARTS = ("image_processor", "video_processor", "feature_extractor", "tokenizer", "chat_template")  # others read these
NAMES = ("processor_class", "auto_map")
MOST_SHOWN = 300  # characters of transformers' reason


def read_images(folder: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Placeholder, Any]:
    """Return what stands for an image, and transformers' image processor; raises ValueError for what cannot be."""
    placeholder = CLASSES[config.architectures[0]](config, tokenizer)
    processor = _read_processor(folder, placeholder.image_processor)
    _check_whole(Path(folder) / OF_ALL, placeholder)
    _check_required(processor, placeholder)
    return placeholder, processor


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


def _check_whole(file: Path, placeholder: Placeholder) -> None:
    """Raise ValueError for settings of the class's processor by which a prompt would be another."""
    said = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    check_settings(str(file), said, (*PARTS, *NAMES, *placeholder.ignored), placeholder.fixed)


def _check_required(image_processor: Any, placeholder: Placeholder) -> None:
    """Raise ValueError for settings of an image processor by which a prompt, or a tower's input, would be another."""
    for name, allowed in placeholder.required.items():
        value = getattr(image_processor, name)
        if value not in allowed:
            raise ValueError(f"{OF_IMAGES} has {name}={value!r}: must be {' or '.join(map(repr, allowed))}")


def _read_processor(folder: str, name: str) -> Any:
    """Return transformers' image processor of a class, by torchvision if there is one, for it is faster than PIL."""
    import transformers
    from transformers.utils import is_torchvision_available

    name = name if is_torchvision_available() else f"{name}Pil"
    try:
        return getattr(transformers, name).from_pretrained(folder)
    except ImportError as error:
        raise ValueError("images need pillow: pip install 'nanoinfer[images]'") from error
