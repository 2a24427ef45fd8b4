"""What the tower takes of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

PIXEL_VALUES = "pixel_values"  # the one input of a tower whose numbers depend on more than an image's size
Pixels = Mapping[str, Tensor]


class PixelsOnDemand(Pixels):
    """Pixels that are made whenever they are read, so that a prompt that waits holds none; pickled, they are a dict.

    others: the inputs that are known by the image's size; num_bytes: what all take together
    load: returns the pixel values
    """

    def __init__(self, others: Pixels, num_bytes: int, load: Callable[[], Tensor]) -> None:
        self.num_bytes = num_bytes
        self._others, self._load = others, load

    def __getitem__(self, name: str) -> Tensor:
        return self._load() if name == PIXEL_VALUES else self._others[name]

    def __iter__(self) -> Iterator[str]:
        return iter((PIXEL_VALUES, *self._others))

    def __len__(self) -> int:
        return 1 + len(self._others)

    def __reduce__(self) -> tuple[type, tuple[Pixels]]:
        return dict, (dict(self),)


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
