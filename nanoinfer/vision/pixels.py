"""What the tower takes of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PIXEL_VALUES = "pixel_values"  # the one input of a tower whose numbers depend on more than an image's size
Pixels = Mapping[str, Tensor]


class Source(NamedTuple):
    """An image as a user gave it, as Opener takes it; name: begins the messages of errors; key: as ImageSpan has it."""

    name: str
    image: Any
    key: bytes


class PixelsOnDemand(Pixels):
    """Pixels that are made whenever they are read, so that a prompt that waits holds none.

    others: the inputs that are known by the image's size; num_bytes: what all take together
    source: what is known of the image
    load: returns the pixel values of a source; None: these were pickled, and who has them next sets it
    """

    def __init__(
        self, others: Pixels, num_bytes: int, source: Source, load: Callable[[Source], Tensor] | None = None
    ) -> None:
        self.num_bytes, self.load = num_bytes, load
        self._others, self._source = others, source

    def __getitem__(self, name: str) -> Tensor:
        if name != PIXEL_VALUES:
            return self._others[name]
        assert self.load is not None
        return self.load(self._source)

    def __iter__(self) -> Iterator[str]:
        return iter((PIXEL_VALUES, *self._others))

    def __len__(self) -> int:
        return 1 + len(self._others)

    def __reduce__(self) -> tuple[type, tuple[Pixels, int, Source]]:
        return PixelsOnDemand, (self._others, self.num_bytes, self._source)


def bytes_of(pixels: Pixels) -> int:
    """Return how many bytes an image's pixels have, and what comes with them."""
    if isinstance(pixels, PixelsOnDemand):
        return pixels.num_bytes
    return sum(tensor.nbytes for tensor in pixels.values())


def join(tensors: list[Tensor]) -> Tensor:
    """Concatenate along the first axis; zeros behind the ends of the other axes make these equally long."""
    longest = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_pad(tensor, longest) for tensor in tensors])


def _pad(tensor: Tensor, lengths: list[int]) -> Tensor:
    missing = [length - own for length, own in zip(lengths, tensor.shape[1:], strict=True)]
    return F.pad(tensor, [end for axis in reversed(missing) for end in (0, axis)]) if any(missing) else tensor
