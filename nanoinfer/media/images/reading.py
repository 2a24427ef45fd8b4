"""Reads how a checkpoint's images are processed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.media.files import OF_IMAGES, check_whole
from nanoinfer.media.images.placeholders import CLASSES, Placeholder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def read_images(folder: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Placeholder, Any]:
    """Return what stands for an image, and transformers' image processor; raises ValueError for what cannot be."""
    placeholder = CLASSES[config.architectures[0]](config, tokenizer)
    processor = _read_processor(folder, placeholder.image_processor)
    check_whole(folder, placeholder.ignored, placeholder.fixed)
    _check_required(processor, placeholder)
    return placeholder, processor


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
