"""The image processor: what transformers' own makes of one image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.checks import check_int, short
from nanoinfer.vision.kept import Kept
from nanoinfer.vision.opening import Opener
from nanoinfer.vision.pixels import Pixels, PixelsOnDemand, bytes_of
from nanoinfer.vision.placeholders import Placeholder

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

KEY_BYTES = 16
KEPT_BYTES = 1 << 30  # of pixels: a megapixel has up to 25 MB, and very many prompts may wait
EDGES = {"max_pixels": "longest_edge", "min_pixels": "shortest_edge"}  # sizes that have both edges count pixels
OPTIONS = ("do_pan_and_scan", "max_soft_tokens", "size")  # that say how large an image becomes in other classes
COUNTS = ("num_crops", "num_soft_tokens_per_image")  # are made for the prompt alone
ASPECT = 200  # no longer image is taken where sizes count pixels
SIDE = 256  # of a blank image, where the size of what is made of an image does not depend on it


@dataclass(frozen=True)
class PreparedImage:
    """What the processor makes of an image.

    key: as ImageSpan has it
    text, token_ids: what stands for it in a prompt
    count: how many of these tokens are placeholders
    pixels: what the tower takes
    """

    key: bytes
    text: str
    token_ids: list[int]
    count: int
    pixels: Pixels

    @property
    def num_bytes(self) -> int:
        """How much memory its pixels take."""
        return bytes_of(self.pixels)


class ImageProcessor:
    """Prepares images, in any number of threads; what it made of the last ones is kept.

    processor: transformers' image processor
    tokenizer, placeholder: make the prompt's part
    image_id: the token in whose place an embedding is put
    options, image_folder: as for VisionProcessor
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        placeholder: Placeholder,
        image_id: int,
        options: Mapping[str, Any],
        image_folder: str | Path | None,
    ) -> None:
        self._processor, self._tokenizer, self._placeholder = processor, tokenizer, placeholder
        self._image_id = image_id
        self._options = {**placeholder.options, **_resolve_options(processor, options)}
        self._settings = f"{processor.to_json_string()} {sorted(self._options.items())}".encode()
        self._opener = Opener(image_folder)
        self._kept: Kept[PreparedImage] = Kept(KEPT_BYTES)
        self._blank = f"image_options={dict(options)}: a blank image"
        self.prepare(self._blank, _blank(SIDE, SIDE))  # an error comes now, not with the first prompt

    def prepare(self, name: str, source: Any) -> PreparedImage:
        """Return what the processor makes of an image.

        name: begins the messages of errors; source: as Opener takes it
        Raises ValueError if it cannot be opened, or the processor does not take it.
        """
        image = self._opener.open(name, source)
        key = self._key(image)
        prepared = self._kept.find(key)
        if prepared is None:
            prepared = self._process(name, key, image)
            self._kept.keep(key, prepared)
        return prepared

    def largest(self) -> PreparedImage:
        """Return what is made of a blank image so large that of none more is made, for plans of memory."""
        return self.prepare(self._blank, _blank(*self._largest_size()))

    def _largest_size(self) -> tuple[int, int]:
        """Return the height and the width of an image of which the most tokens are made."""
        size = {**_size_of(self._processor), **self._options.get("size", {})}
        if self._setting("do_pan_and_scan"):
            height = self._setting("pan_and_scan_min_crop_size")
            return height, height * self._setting("pan_and_scan_max_num_crops")
        if _counts_pixels(size):
            side = self._setting("patch_size") * self._setting("merge_size")
            most = size["longest_edge"] // side**2
            return _fill(most, side) if most > ASPECT else (side, ASPECT * side)  # of a long image, few become more
        if most := self._setting("max_soft_tokens"):
            return _fill(most, self._setting("patch_size") * self._setting("pooling_kernel_size"))
        return (size.get("longest_edge", SIDE),) * 2

    def _setting(self, name: str) -> Any:
        return self._options.get(name, getattr(self._processor, name, None))

    def on_demand(self, name: str, source: Any, key: bytes) -> Pixels:
        """Return pixels that are made when they are read, of an image that was prepared before and had this key.

        Then a ValueError is raised if the image has changed.
        """
        return PixelsOnDemand(partial(self._load, name, source, key))

    def _load(self, name: str, source: Any, key: bytes) -> Pixels:
        prepared = self._kept.find(key) or self.prepare(name, source)
        if prepared.key != key:
            raise ValueError(f"{name} has changed since it was first read: must not before its prompt begins")
        return prepared.pixels

    def _process(self, name: str, key: bytes, image: Image) -> PreparedImage:
        """Let the image processor make pixels, and write what stands for the image in a prompt."""
        try:
            made = self._processor([image], return_tensors="pt", **self._options)
        except Exception as error:
            raise ValueError(f"{name}, {image.width} x {image.height} pixels: cannot be processed: {error}") from error
        text = self._placeholder.expand(made)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        pixels = {name: tensor for name, tensor in made.items() if name not in COUNTS}
        return PreparedImage(key, text, token_ids, token_ids.count(self._image_id), pixels)

    def _key(self, image: Image) -> bytes:
        """Return the digest of an image in RGB and of the settings."""
        digest = hashlib.blake2b(self._settings, digest_size=KEY_BYTES)
        digest.update(b"%d %d " % image.size)
        digest.update(image.tobytes())
        return digest.digest()


def _blank(height: int, width: int) -> np.ndarray:
    return np.zeros((height, width, 3), np.uint8)


def _fill(most: int, side: int) -> tuple[int, int]:
    """Return the height and the width, alike, of a rectangle that has as many squares as can be, of at most so many."""
    rows = max(range(isqrt(most) // 2 + 1, isqrt(most) + 1), key=lambda rows: rows * (most // rows))
    return rows * side, most // rows * side


def _size_of(image_processor: Any) -> dict[str, int]:
    return dict(getattr(image_processor, "size", None) or {})


def _counts_pixels(size: Mapping[str, int]) -> bool:
    """Whether the edges in an image processor's size are numbers of pixels."""
    return size.keys() >= set(EDGES.values())


def _resolve_options(image_processor: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as the image processor names them."""
    size = _size_of(image_processor)
    edges = EDGES if _counts_pixels(size) else {}
    known = [*edges, *(name for name in OPTIONS if name in image_processor.valid_kwargs.__annotations__)]
    resolved: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"image_options has {short(name)}: {short(value)}: this model's are {', '.join(known)}")
        if name == "size" and not isinstance(value, Mapping):
            raise ValueError(f"image_options['size']={short(value)}: must be a mapping, such as {size}")
        if name in edges:
            size[edges[name]] = check_int(f"image_options[{name!r}]", value, 1)
            resolved["size"] = size
        else:
            resolved[name] = value
    return resolved
