"""What the tower takes of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Pixels = Mapping[str, Tensor]


class PixelsOnDemand(Pixels):
    """Pixels that are made when they are read, so that a prompt that waits holds none; pickled, they are a dict.

    load: returns them, at once if they are still kept
    """

    def __init__(self, load: Callable[[], Pixels]) -> None:
        self._load = load

    def __getitem__(self, name: str) -> Tensor:
        return self._load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def __reduce__(self) -> tuple[type, tuple[Pixels]]:
        return dict, (self._load(),)


def bytes_of(pixels: Pixels) -> int:
    """Return how many bytes an image's pixels have, and what comes with them."""
    return sum(tensor.nbytes for tensor in pixels.values())


def join(tensors: list[Tensor]) -> Tensor:
    """Concatenate along the first axis; zeros behind the ends of the other axes make these equally long."""
    longest = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_pad(tensor, longest) for tensor in tensors])


def _pad(tensor: Tensor, lengths: list[int]) -> Tensor:
    missing = [length - own for length, own in zip(lengths, tensor.shape[1:], strict=True)]
    return F.pad(tensor, [end for axis in reversed(missing) for end in (0, axis)]) if any(missing) else tensor
