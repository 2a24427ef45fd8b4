"""The image processor: what transformers' own makes of one image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.checks import check_int, short
from nanoinfer.media.images.largest import EDGES, SIDE, counts_pixels, largest_size
from nanoinfer.media.images.opening import Opener
from nanoinfer.media.images.placeholders import Placeholder
from nanoinfer.media.kept import Kept
from nanoinfer.media.pixels import (
    MASK,
    PIXEL_VALUES,
    SCALES,
    Pixels,
    PixelsOnDemand,
    PixelSource,
    bytes_of,
    count_values,
)
from nanoinfer.media.prepared import Prepared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY_BYTES = 16
KEPT_BYTES = 64 << 20  # of what stands for images in prompts: an image has some thousand tokens
FLOAT_BYTES = 4  # of a pixel's value, once it is normalised
TOKEN_BYTES = 8  # of a token's place in a list
# These say how large an image becomes in other classes.
OPTIONS = ("do_pan_and_scan", "max_patches", "max_slice_nums", "max_soft_tokens", "size")
CHANNELS = 3
FRAMES = "temporal_patch_size"  # of an image processor: a tower for videos takes an image so many times


@dataclass(frozen=True)
class Standin:
    """What is made of all images of one size: no pixel is looked at for it.

    text, token_ids: what stands for the image in a prompt
    count: how many of these tokens are placeholders
    others: what the tower takes beside the pixel values
    pixel_bytes: how much memory all takes that the tower takes
    """

    text: str
    token_ids: list[int]
    count: int
    others: Pixels
    pixel_bytes: int

    @property
    def num_bytes(self) -> int:
        """How much memory it takes."""
        return len(self.text) + TOKEN_BYTES * len(self.token_ids) + bytes_of(self.others)


class ImageProcessor:
    """Prepares images, in any number of threads.

    processor: transformers' image processor
    tokenizer, placeholder: make the prompt's part
    image_id: the token in whose place an embedding is put
    options: as for MediaProcessor, without those of videos
    opener: opens what users give
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        placeholder: Placeholder,
        image_id: int,
        options: Mapping[str, Any],
        opener: Opener,
    ) -> None:
        self._processor, self._tokenizer, self._placeholder = processor, tokenizer, placeholder
        self._image_id = image_id
        self._scales = scales_of(processor)
        own: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "do_convert_rgb": False}
        if hasattr(processor, FRAMES):
            own[FRAMES] = 1
        self._options = {**placeholder.options, **_resolve_options(processor, options), **own}
        self._settings = f"{processor.to_json_string()} {sorted(self._options.items())}".encode()
        self._opener = opener
        self._of_sizes: Kept[Standin] = Kept(KEPT_BYTES)
        self._blank = f"image_options={dict(options)}: a blank image"
        self.prepare(self._blank, _blank(SIDE, SIDE))  # an error comes now, not with the first prompt

    def prepare(self, name: str, source: Any) -> Prepared:
        """Return what a prompt needs to know of an image.

        Its pixels are made of the source each time that they are read: then ValueError is raised if it has changed.
        name: begins the messages of errors; source: as Opener takes it, or what this has returned before
        Raises ValueError if it cannot be opened, or the processor does not take it.
        """
        if isinstance(source, Prepared):
            return source
        image = np.asarray(self._opener.open(name, source))
        key, size = self._key(image), b"%d x %d" % image.shape[:2]
        known = self._of_sizes.find(size)
        if known is None:
            known = self._stand_in(self._process(name, image))
            self._of_sizes.keep(size, known)
        if isinstance(source, memoryview):
            source = bytes(source)  # which may be pickled
        own = PixelSource(name, source, key)
        pixels = PixelsOnDemand(known.others, known.pixel_bytes, self._scales, known.count, own, self.load)
        return Prepared(key, known.text, known.token_ids, known.count, pixels)

    def largest(self) -> Prepared:
        """Return what is made of a blank image so large that of none more is made, for plans of memory."""
        size = {**_size_of(self._processor), **self._options.get("size", {})}
        return self.prepare(self._blank, _blank(*largest_size(self._processor, {**self._options, "size": size})))

    def numbered(self, image: Prepared, number: int) -> Prepared:
        """Return an image with what is written before it; number: how many are before it in the prompt"""
        if self._placeholder.number is None:
            return image
        text = self._placeholder.number(number)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return replace(image, text=text + image.text, token_ids=token_ids + image.token_ids)

    def load(self, source: PixelSource) -> Tensor:
        """Return the pixel values, in bytes, of an image that was prepared before, here or in another process."""
        name, given, key = source
        image = np.asarray(self._opener.open(name, given))
        if self._key(image) != key:
            raise ValueError(f"{name} has changed since it was first read: must not before its prompt begins")
        return self._process(name, image)[PIXEL_VALUES].to(torch.uint8)

    def _stand_in(self, made: Pixels) -> Standin:
        """Return what stands for the images of one size, of what the image processor has made of one."""
        text = self._placeholder.expand(made)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        others = {name: made[name] for name in self._placeholder.inputs}
        pixel_bytes = FLOAT_BYTES * count_values({**made, SCALES: self._scales}) + bytes_of(others)
        return Standin(text, token_ids, token_ids.count(self._image_id), others, pixel_bytes)

    def _process(self, name: str, image: np.ndarray) -> Pixels:
        """Let the image processor make pixels, whose values stay bytes: it would normalise them in float64.

        image: [height, width, 3] uint8; to make one of PIL's takes the interpreter for a millisecond
        """
        try:
            made: Pixels = self._processor(
                [image], return_tensors="pt", input_data_format="channels_last", **self._options
            )
        except Exception as error:
            height, width, _ = image.shape
            raise ValueError(f"{name}, {width} x {height} pixels: cannot be processed: {error}") from error
        if made[PIXEL_VALUES].ndim < 5:
            return made
        # Tiles come by images, as LLaVA-OneVision's do, or by prompts.
        return {**made, **{name: made[name][0] for name in (PIXEL_VALUES, MASK) if name in made}}

    def _key(self, image: np.ndarray) -> bytes:
        """Return the digest of an image in RGB and of the settings."""
        digest = hashlib.blake2b(self._settings, digest_size=KEY_BYTES)
        digest.update(b"%d %d " % image.shape[:2])
        digest.update(image.data)
        return digest.digest()


def scales_of(image_processor: Any) -> Tensor:
    """Return what an image processor subtracts from bytes, and divides them by, as SCALES has it."""
    has_mean = bool(image_processor.do_normalize)
    mean, deviation = (image_processor.image_mean, image_processor.image_std) if has_mean else (0.0, 1.0)
    factor = image_processor.rescale_factor if image_processor.do_rescale else 1.0
    by_channel = torch.stack([torch.tensor(each).expand(CHANNELS) for each in (mean, deviation)]) / factor
    return by_channel[..., None].repeat(1, 1, getattr(image_processor, FRAMES, 1))


def _blank(height: int, width: int) -> np.ndarray:
    return np.zeros((height, width, 3), np.uint8)


def _size_of(image_processor: Any) -> dict[str, int]:
    return dict(getattr(image_processor, "size", None) or {})


def _resolve_options(image_processor: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as the image processor names them."""
    size = _size_of(image_processor)
    edges = EDGES if counts_pixels(size) else {}
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
