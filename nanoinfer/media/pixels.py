"""What the tower takes of images, of videos' frames and of audio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PIXEL_VALUES = "pixel_values"  # the one input of a tower whose numbers depend on more than an image's size
# Beside pixel values that are bytes: what to subtract and to divide by, for each of a tower's frames of an image, which
# are equal, [2, channels, frames] float32
SCALES = "scales"
GRIDS = "image_grid_thw"  # what Qwen's towers also take: how many frames, rows and columns of patches there are
SIZES = "image_sizes"  # what Mistral's takes
TARGETS = "target_sizes"  # what MiniCPM-V's takes: how many rows and columns of patches an image and its slices have
SHAPES = "spatial_shapes"  # what LFM2-VL's takes: the same of each tile
MASK = "pixel_attention_mask"  # what towers of padded tiles take: which are there
COUNT = "count"  # beside those, too: how many embeddings are made of the image, a number that no tower takes
FEATURES = "input_features"  # in place of pixel values: what a tower takes of audio, [1, bins, frames]
GIVEN = "embeddings"  # in place of pixel values: embeddings that a caller gives, [count, hidden_size]
FRAMES = "frames"  # beside these: how many of the frames are audio's, and no padding
Pixels = Mapping[str, Tensor]


class PixelSource(NamedTuple):
    """An image or audio as a user gave it, or a Group of a video's frames.

    name: begins the messages of errors; key: as MediaSpan has it
    """

    name: str
    given: Any
    key: bytes


@dataclass(frozen=True)
class TowerInput:
    """What a tower encodes by itself: an image, frames of a video, or audio.

    key: as MediaSpan has it; count: how many embeddings are made of it; pixels: what the tower takes
    """

    key: bytes
    count: int
    pixels: PixelsOnDemand


class PixelsOnDemand(Pixels):
    """Pixels that are made whenever they are read, so that a prompt that waits holds none.

    others: the inputs that are known by the image's size; num_bytes: what all take together
    scales, count: as SCALES and COUNT have them
    source: what is known of the image
    load: returns the pixel values of a source, in bytes; None: these were pickled, and who has them next sets it
    made: what the loaded values are called; scales: None: they are no bytes
    """

    def __init__(
        self,
        others: Pixels,
        num_bytes: int,
        scales: Tensor | None,
        count: int,
        source: PixelSource,
        load: Callable[[PixelSource], Tensor] | None = None,
        made: str = PIXEL_VALUES,
    ) -> None:
        self.num_bytes, self.load, self._made = num_bytes, load, made
        self._others, self._scales, self._count, self._source = others, scales, count, source

    def in_bytes(self) -> Pixels:
        """Return the pixels with values that are still to be normalised: an eighth of Qwen's memory."""
        assert self.load is not None
        scales = {} if self._scales is None else {SCALES: self._scales}
        return {self._made: self.load(self._source), **scales, COUNT: torch.tensor(self._count), **self._others}

    def __getitem__(self, name: str) -> Tensor:
        if name == self._made:
            return normalised(self.in_bytes())
        return torch.tensor(self._count) if name == COUNT else self._others[name]

    def __iter__(self) -> Iterator[str]:
        return iter((self._made, COUNT, *self._others))

    def __len__(self) -> int:
        return 2 + len(self._others)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        own = self._others, self.num_bytes, self._scales, self._count, self._source
        return PixelsOnDemand, (*own, None, self._made)


def normalised(pixels: Pixels) -> Tensor:
    """Return the pixel values as an image processor normalises them, in float32; bytes have scales beside them.

    Their shape says where the channels are: [images, channels, height, width]; [patches, channels * ...], which become
    [patches, channels * frames * ...]; or [images, patches, ... * channels], as in Gemma 4.
    """
    values, scales = _values(pixels), pixels.get(SCALES)
    if scales is None:
        return values
    _, channels, frames = scales.shape
    if values.ndim == 3:
        less, by = scales[..., 0]
        return values.float().view(-1, channels).sub_(less).div_(by).view(values.shape)
    less, by = scales[..., None]
    made = (values.float().view(len(values), channels, 1, -1) - less).div_(by)
    return made.flatten(1) if frames > 1 else made.view(values.shape)


def count_values(pixels: Pixels) -> int:
    """Return how many pixel values there are once they are normalised."""
    frames = pixels[SCALES].shape[2] if SCALES in pixels else 1
    return frames * _values(pixels).numel()


def _values(pixels: Pixels) -> Tensor:
    return next(pixels[name] for name in (GIVEN, FEATURES, PIXEL_VALUES) if name in pixels)


def count_embeddings(pixels: Pixels) -> int:
    """Return how many embeddings are made of an image."""
    return int(pixels[COUNT])


def bytes_of(pixels: Pixels) -> int:
    """Return how many bytes an image's pixels have, and what comes with them."""
    if isinstance(pixels, PixelsOnDemand):
        return pixels.num_bytes
    return sum(tensor.nbytes for name, tensor in pixels.items() if name != COUNT)


def join(tensors: list[Tensor]) -> Tensor:
    """Concatenate along the first axis; zeros behind the ends of the other axes make these equally long."""
    longest = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_pad(tensor, longest) for tensor in tensors])


def _pad(tensor: Tensor, lengths: list[int]) -> Tensor:
    missing = [length - own for length, own in zip(lengths, tensor.shape[1:], strict=True)]
    return F.pad(tensor, [end for axis in reversed(missing) for end in (0, axis)]) if any(missing) else tensor
