"""The options of images: their checks, and whether an LLM of a checkpoint sees."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.checks import check_flag, short
from nanoinfer.hub import has_tokenizer
from nanoinfer.media.audio.processor import CLASSES as AUDIO_CLASSES
from nanoinfer.media.files import FILES
from nanoinfer.media.images.placeholders import BY_TORCHVISION, CLASSES
from nanoinfer.weights.names import OfTower
from nanoinfer.weights.roll import FILE_NAMES
from nanoinfer.weights.shards import FLOATS
from nanoinfer.weights.sources import FileSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger("nanoinfer")

AUTO = "auto"


def check_images(value: Any) -> bool | str:
    """Return "auto", True or False; raises ValueError for anything else."""
    is_auto = isinstance(value, str) and value == AUTO
    return AUTO if is_auto else check_flag("images", value, f"{AUTO!r}, True or False")


def check_image_options(value: Any) -> dict[str, Any] | None:
    """Return a copy, or None for no option; raises ValueError for what is no mapping of names.

    The processor checks the values.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"image_options={short(value)}: must be a mapping, such as {{'max_pixels': 1048576}}")
    return dict(value) or None


def check_image_folder(value: Any) -> str | None:
    """Return the folder's whole path; raises ValueError if there is no such folder."""
    if value is None:
        return None
    try:
        folder = Path(value).expanduser().resolve()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError, TypeError, ValueError):  # no path, or none that this user may follow
        is_folder = False
    if not is_folder:
        raise ValueError(f"image_folder={short(value)}: must be a folder, from which images may be read")
    return str(folder)


def can_see(
    images: bool | str, folder: str, tokenizer: str, config: PretrainedConfig, is_loaded: bool, lacks_behind: bool
) -> bool:
    """Return whether an LLM sees; a warning says why not, if the checkpoint has other parts than a language model.

    images: the option
    folder: the checkpoint's; config: its config.json; tokenizer: the tokenizer's folder
    is_loaded: the weights come from the folder
    lacks_behind: no token can see those behind it, as some of its images' would have to

    Raises ValueError if it must see, and cannot.
    """
    if images is False:
        return False
    fault = _find_fault(folder, tokenizer, config, is_loaded)
    if fault is None and lacks_behind:
        fault = "with deterministic=True no token sees those behind it, as tokens of an image do in this model"
    if fault is not None and images is True:
        raise ValueError(f"images=True: must be 'auto' or False: {fault}")
    if fault is not None and config.get_text_config() is not config:
        log.warning("%s: its language model is run, as text only: %s", folder, fault)
    return fault is None


def _find_fault(folder: str, tokenizer: str, config: PretrainedConfig, is_loaded: bool) -> str | None:
    """Return why an LLM of a checkpoint cannot see; None: it can."""
    classes = config.architectures or []
    hears = any(name in AUDIO_CLASSES for name in classes)
    if not hears and not any(name in CLASSES for name in classes):
        return f"{', '.join(classes)} sees no images here; those that do are {', '.join(CLASSES)}"
    if not any((Path(folder) / name).is_file() for name in FILES):
        return f"the checkpoint has no processor of images: neither {' nor '.join(FILES)}"
    if not has_tokenizer(tokenizer):
        return "the checkpoint has no tokenizer, which makes room for images in prompts"
    if is_loaded and (fault := _find_fault_of_tower(FileSource(folder, OfTower(hears)).number_types)):
        return fault
    if not hears and not find_spec("PIL"):
        return "images need pillow: pip install 'nanoinfer[images]'"
    if any(name in BY_TORCHVISION for name in classes) and not find_spec("torchvision"):
        return f"images of {', '.join(classes)} need torchvision: pip install 'nanoinfer[torchvision]'"
    return None


def _find_fault_of_tower(number_types: set[str]) -> str | None:
    """Return why a tower of such numbers cannot be run; None: it can."""
    others = sorted(number_types - {FILE_NAMES[dtype] for dtype in FLOATS})
    if others:
        return f"the checkpoint's tower has numbers of type {', '.join(others)}; those of 16 bits or more are run"
    return None if number_types else "the checkpoint's files hold no tower for images"
