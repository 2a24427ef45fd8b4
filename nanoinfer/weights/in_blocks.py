"""InBlocks: what blocks of a GGUF file fill, which are taken apart where that is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanoinfer.gguf.tensors.blocks import GgufPart
from nanoinfer.weights.shards import NUMBERS_AT_ONCE, Filled, Target
from nanoinfer.weights.together import is_together


@dataclass(frozen=True)
class InBlocks(Filled):
    """A target, and the part of a matrix that fills it.

    index: which of the part's indices do
    """

    target: Target
    part: GgufPart
    index: Any

    def copy_(self, stored: Tensor) -> None:
        """Write all of it. stored: what GgufPart.stored returns, on any device"""
        many = max(NUMBERS_AT_ONCE // self.part.tensor.shape[1], 1)
        for first in range(0, len(stored), many):
            rows = slice(first, min(first + many, len(stored)))
            self.target[rows].copy_(self.part.unpacked(stored[rows], self.index))

    @property
    def likeness(self) -> Hashable:
        """What targets have in common that are filled alike; None: this one is filled by itself."""
        own = getattr(self.target, "likeness", None)
        columns = None if self.index is ... else (self.index[1].start, self.index[1].stop)
        tensor = self.part.tensor
        return own and (own, self.part.name, tensor.entry.type, tensor.shape, tensor.change, columns)

    @staticmethod
    def copy_all(parts: Sequence[InBlocks], stored: Tensor) -> None:
        """Write all of several, whose likeness is one; stored: [parts, ...]"""
        first, targets = parts[0], [part.target for part in parts]
        assert is_together(first.target)
        read = first.part.unpacked(stored.flatten(0, 1), first.index)
        first.target.copy_all(targets, read.unflatten(0, (len(parts), -1)))
