"""Fp8Format: how a checkpoint stores its matrices in eight bits."""

from __future__ import annotations

import re
from dataclasses import dataclass

INPUTS_TOGETHER = 128  # that kernels multiply at once, with one scale: kernels.fp8.BLOCK
ROWS_TOGETHER = 128  # a tensor may be cut after a multiple of so many rows, and no block is cut


@dataclass(frozen=True)
class Fp8Format:
    """How a checkpoint stores its matrices.

    block: how many rows and columns of a matrix share a scale; None: all
    scale: the end of the name of a matrix's scales, which its weight has instead of "weight"
    ignored: the modules that are stored in the model's dtype: names, or beginnings or ends of names, or with "re:"
        regular expressions
    """

    block: tuple[int | None, int | None] = (128, 128)
    scale: str = "weight_scale_inv"
    ignored: tuple[str, ...] = ()

    @property
    def own_block(self) -> tuple[int, int | None]:
        """The block of matrices that are quantized here: a row, where the checkpoint has one scale for a matrix."""
        return self.block[0] or 1, self.block[1]

    def stores(self, name: str) -> bool:
        """Whether a module's matrix is in FP8."""
        return not any(_names(entry, name) for entry in self.ignored)

    def unit_of(self, size: int, ranks: int) -> int:
        """Return how many neighbouring inputs of a product stay on one of the ranks that share them.

        Whole blocks stay together where kernels take these, and there is one for each rank. Else all shares are equal.
        """
        width = self.block[1] or INPUTS_TOGETHER
        takes_blocks = size % INPUTS_TOGETHER == width % INPUTS_TOGETHER == 0
        return INPUTS_TOGETHER if takes_blocks and size >= ranks * INPUTS_TOGETHER else 1

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix of this shape."""
        if self.block == (None, None):
            return (1,)
        return tuple(1 if own is None else -(-size // own) for size, own in zip(shape, self.block, strict=True))


def _names(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}")
