"""Fp8Format: matrices in eight bits, whose blocks have scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoinfer.kernels.fp8 import BLOCK, FP8, HAS_FP8
from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.fp8.experts import Fp8Experts
from nanoinfer.weights.formats.fp8.layout import Fp8Layout
from nanoinfer.weights.formats.fp8.matrix import Fp8Matrix
from nanoinfer.weights.shards import ROWS_TOGETHER, Section


@dataclass(frozen=True)
class Fp8Format(Fp8Layout, Format):
    """The format of checkpoints in FP8, and of others that are quantized as they load."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return "FP8"

    @property
    def details(self) -> str:
        """The blocks that share a scale."""
        rows, columns = (size or "all" for size in self.block)
        return f"blocks of {rows} x {columns}"

    def make_matrix(self, sections: list[Section], in_features: int, bias: bool) -> Fp8Matrix:
        """Make the matrix."""
        return Fp8Matrix(sections, in_features, bias, self)

    def make_experts(
        self, tensors: ExpertTensors, sizes: ExpertSizes, output_share: OutputShare | None, biases: bool
    ) -> Fp8Experts:
        """Make a layer's experts."""
        assert not biases
        return Fp8Experts(tensors, sizes, self, output_share)

    @property
    def outputs_together(self) -> int:
        """A block's: if a tile's rows share a scale, the kernel applies it in another place; that of experts never."""
        return ROWS_TOGETHER if self.own_block[0] == ROWS_TOGETHER else 1

    def inputs_together(self, size: int, ranks: int) -> int:
        """Return what kernels multiply with one scale, if the checkpoint's blocks have it, and there is one a rank."""
        unit = BLOCK.value
        takes_blocks = size % unit == (self.block[1] or unit) % unit == 0
        return unit if takes_blocks and size >= ranks * unit else 1

    def stores_parts(self, size: int, count: int) -> bool:
        """Return whether no part shares a block's scale with the next one."""
        return all(block is not None and size % block == 0 for block in self.block)

    def weight_bytes(self, itemsize: int) -> float:
        """Return one: few numbers are scales."""
        return FP8.itemsize

    def multiplied_in(self, dtype: torch.dtype, device: str) -> torch.dtype:
        """Return FP8 if the device has units that multiply such numbers."""
        return FP8 if device == "cuda" and torch.cuda.get_device_capability() >= HAS_FP8 else dtype
