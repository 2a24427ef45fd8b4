"""Blocks: the codes and the scales in a tensor of few bits, as formats of groups keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.gguf.header import Entry
from nanoinfer.gguf.tensor import Change, GgufTensor

CODES, SCALES = "weight_codes", "weight_scales"  # what a matrix's tensors have instead of "weight"
GROUP = 32  # inputs that share a scale: one block
Blocks = np.ndarray  # [..., bytes]


class Kind(NamedTuple):
    """A type that stays in its bits.

    codes, scales: make these of blocks
    per_byte: how many codes are in a byte
    dtypes: those of codes and scales, as safetensors names them
    """

    codes: Callable[[Blocks], np.ndarray]
    scales: Callable[[Blocks], np.ndarray]
    per_byte: int
    dtypes: tuple[str, str]


def _halves(packed: Blocks) -> np.ndarray:
    """Return the codes of four bits: the first half of a block's in the low bits, the second in the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _in_pairs(codes: np.ndarray) -> np.ndarray:
    """Pack neighbours, the first in the low bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _five_bits(blocks: Blocks) -> np.ndarray:
    """Return the codes less 16 of blocks whose fifth bits are apart."""
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return (_halves(blocks[..., 6:]) | fifth << 4).view(np.int8) - np.int8(16)


def _first_half(blocks: Blocks) -> np.ndarray:
    """Return the number of 16 bits with which blocks begin."""
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]


KINDS = {
    "Q8_0": Kind(lambda blocks: blocks[..., 2:].view(np.int8), _first_half, 1, ("I8", "F16")),
    "Q5_0": Kind(_five_bits, _first_half, 1, ("I8", "F16")),
    "Q4_0": Kind(lambda blocks: _in_pairs(_halves(blocks[..., 2:])), _first_half, 2, ("U8", "F16")),
    "MXFP4": Kind(lambda blocks: _in_pairs(_halves(blocks[..., 1:])), lambda blocks: blocks[..., 0], 2, ("U8", "U8")),
}


@dataclass(frozen=True)
class GgufPart:
    """Reads the codes of a matrix, or its scales, as safetensors' slice objects read a tensor."""

    tensor: GgufTensor
    is_codes: bool

    @property
    def kind(self) -> Kind:
        """That of the tensor's type."""
        return KINDS[self.tensor.entry.type]

    def get_shape(self) -> list[int]:
        """Return [outputs, bytes of codes] or [outputs, groups]."""
        rows, inputs = self.tensor.shape
        return [rows, inputs // (self.kind.per_byte if self.is_codes else GROUP)]

    def get_dtype(self) -> str:
        """Return the type of the codes or scales."""
        return self.kind.dtypes[0 if self.is_codes else 1]

    def __getitem__(self, index: Any) -> Tensor:
        """Return some; no other rows are read."""
        rows, columns = (slice(None), slice(None)) if index is ... else index
        blocks = self.tensor.stored_rows(rows)
        blocks = blocks.reshape(len(blocks), self.tensor.shape[1] // GROUP, -1)
        if (order := self.tensor.change.columns) is not None:
            blocks = blocks[:, order.places(self.tensor.shape[1], GROUP).numpy()]
        found = (self.kind.codes if self.is_codes else self.kind.scales)(blocks)
        return torch.from_numpy(np.ascontiguousarray(found.reshape(len(found), -1)))[:, columns]


def stays_in_bits(entry: Entry, change: Change) -> bool:
    """Whether a tensor's type does, and nothing moves columns out of their groups."""
    return entry.type in KINDS and (change.columns is None or change.columns.size % GROUP == 0)


def parts_of(tensor: GgufTensor) -> dict[str, GgufPart]:
    """Return the parts of a matrix by the ends of their names; none, if its type does not stay in its bits."""
    if not stays_in_bits(tensor.entry, tensor.change) or len(tensor.shape) != 2:
        return {}
    return {CODES: GgufPart(tensor, True), SCALES: GgufPart(tensor, False)}
