"""Fp8Layout: which numbers of a matrix in eight bits share a scale."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fp8Layout:
    """How a checkpoint stores a matrix.

    block: how many rows and columns of a matrix share a scale; None: all
    scale: the end of the name of a matrix's scales, which its weight has instead of "weight"
    """

    block: tuple[int | None, int | None] = (128, 128)
    scale: str = "weight_scale_inv"

    @property
    def own_block(self) -> tuple[int, int | None]:
        """The block of matrices that are quantized here: a row, where the checkpoint has one scale for a matrix."""
        return self.block[0] or 1, self.block[1]

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix of this shape."""
        if self.block == (None, None):
            return (1,)
        return tuple(1 if own is None else -(-size // own) for size, own in zip(shape, self.block, strict=True))
