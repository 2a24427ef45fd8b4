"""Blocks: the codes, the scales and the minima in a tensor of few bits, as formats of groups keep them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.gguf.header import Entry, block_of
from nanoinfer.gguf.tensor import Change, GgufTensor

# What tensors are called instead of "weight".
CODES, SCALES, MINIMA, FACTORS = "weight_codes", "weight_scales", "weight_minima", "weight_factors"
Blocks = np.ndarray  # [rows, blocks, bytes]
Numbers = Literal["int4", "int6", "int8", "e2m1"]
PER_K_BLOCK, K_BLOCK = 8, 256  # groups, and numbers


class Part(NamedTuple):
    """A part of a type's blocks.

    read: makes [rows, blocks, groups of a block, numbers of a group] of them, or one number less: of a group; or of
        factors, which multiply a block's scales and its minima, [rows, blocks, factors]
    dtype: of what it makes, as safetensors names it
    """

    read: Callable[[Blocks], np.ndarray]
    dtype: str


class Kind(NamedTuple):
    """A type that stays in its bits.

    numbers: what the codes are once they are packed
    group: the neighbouring inputs that share a scale
    parts: by the ends of their names
    """

    numbers: Numbers
    group: int
    parts: dict[str, Part]


def _kind(
    numbers: Numbers,
    codes: Callable[[Blocks], np.ndarray],
    scales: Part,
    minima: Part | None = None,
    factors: Part | None = None,
    group: int = 32,
) -> Kind:
    parts = {CODES: Part(codes, "I8"), SCALES: scales, MINIMA: minima, FACTORS: factors}
    return Kind(numbers, group, {name: part for name, part in parts.items() if part is not None})


def _of_one_group(read: Callable[[Blocks], np.ndarray]) -> Callable[[Blocks], np.ndarray]:
    """Return what reads a part of blocks that are a group each."""
    return lambda blocks: read(blocks)[:, :, None]


def _halves(packed: Blocks) -> np.ndarray:
    """Return the codes of four bits: the first half of a block's in the low bits, the second in the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _halves_from(place: int) -> Callable[[Blocks], np.ndarray]:
    """Return what reads codes of four bits, which begin at a byte of their block."""
    return _of_one_group(lambda blocks: _halves(blocks[..., place:]).view(np.int8))


def _five_bits_from(place: int, more: int = 0) -> Callable[[Blocks], np.ndarray]:
    """Return codes of blocks whose fifth bits are apart, and begin at a byte. more: they are so much more in memory"""

    def read(blocks: Blocks) -> np.ndarray:
        fifth = np.unpackbits(blocks[..., place : place + 4], axis=-1, bitorder="little")
        return (_halves(blocks[..., place + 4 :]) | fifth << 4).view(np.int8) + np.int8(more)

    return _of_one_group(read)


def _half_at(blocks: Blocks, place: int) -> np.ndarray:
    """Return the number of 16 bits at a byte of each block."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0]


def _k_halves(blocks: Blocks) -> np.ndarray:
    """Return the codes of four bits of a K block's groups, which lie two by two, [..., 8, 32]."""
    pairs = blocks[..., -128:].reshape(*blocks.shape[:-1], 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*blocks.shape[:-1], PER_K_BLOCK, 32)


def _k_five_bits(blocks: Blocks) -> np.ndarray:
    """Return the codes of Q5_K; of a byte's fifth bits, each is another group's."""
    shifts = np.arange(PER_K_BLOCK, dtype=np.uint8)[:, None]
    fifth = blocks[..., None, 16:48] >> shifts & 1
    return (_k_halves(blocks) | fifth << 4).view(np.int8)


def _k_scales(blocks: Blocks, is_minimum: bool) -> np.ndarray:
    """Return the six bits of a K block's scales or minima, [..., 8] float16."""
    first, second, rest = (blocks[..., 4 + 4 * part : 8 + 4 * part] for part in range(3))
    own, low = (second, rest >> 4) if is_minimum else (first, rest & 15)
    return np.concatenate([own & 63, low | own >> 2 & 48], axis=-1).astype(np.float16)


def _k_six_bits(blocks: Blocks) -> np.ndarray:
    """Return the codes of Q6_K, [..., 16, 16]; each half of a block has its own bytes."""
    shape = blocks.shape[:-1]
    low, high = blocks[..., :128].reshape(*shape, 2, 1, 64), blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*shape, 2, 4, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return (low | high << 4).view(np.int8).reshape(*shape, 16, 16)


HALF = Part(_of_one_group(lambda blocks: _half_at(blocks, 0)), "F16")
MINUS_SECOND = Part(_of_one_group(lambda blocks: -_half_at(blocks, 2)), "F16")  # what is added is no minimum
K_PARTS = (
    Part(lambda blocks: _k_scales(blocks, False), "F16"),
    Part(lambda blocks: _k_scales(blocks, True), "F16"),
    Part(lambda blocks: np.ascontiguousarray(blocks[..., :4]).view(np.float16), "F16"),
)
SCALES_OF_16 = Part(lambda blocks: blocks[..., 192:208].view(np.int8).astype(np.float16), "F16")
BEHIND = Part(lambda blocks: np.ascontiguousarray(blocks[..., 208:]).view(np.float16), "F16")
KINDS = {
    "Q8_0": _kind("int8", _of_one_group(lambda blocks: blocks[..., 2:].view(np.int8)), HALF),
    "Q5_0": _kind("int6", _five_bits_from(2, more=16), HALF),
    "Q5_1": _kind("int6", _five_bits_from(4), HALF, MINUS_SECOND),
    "Q4_0": _kind("int4", _halves_from(2), HALF),
    "Q4_1": _kind("int4", _halves_from(4), HALF, MINUS_SECOND),
    "MXFP4": _kind("e2m1", _halves_from(1), Part(_of_one_group(lambda blocks: blocks[..., 0]), "U8")),
    "Q4_K": _kind("int4", lambda blocks: _k_halves(blocks).view(np.int8), *K_PARTS),
    "Q5_K": _kind("int6", _k_five_bits, *K_PARTS),
    "Q6_K": _kind("int6", _k_six_bits, SCALES_OF_16, factors=BEHIND, group=16),
}


@dataclass(frozen=True)
class GgufPart:
    """Reads the codes of a matrix, its scales or its minima, as safetensors' slice objects read a tensor.

    name: a key of the type's parts
    """

    tensor: GgufTensor
    name: str

    @property
    def kind(self) -> Kind:
        """That of the tensor's type."""
        return KINDS[self.tensor.entry.type]

    @property
    def _covered(self) -> int:
        """The inputs of an index."""
        return {CODES: 1, FACTORS: span_of(self.tensor.change)}.get(self.name, self.kind.group)

    def get_shape(self) -> list[int]:
        """Return [outputs, inputs], of codes, [outputs, groups], or [outputs, blocks, factors]."""
        rows, inputs = self.tensor.shape
        shape = [rows, inputs // self._covered]
        return [*shape, factors_of(self.kind)] if self.name == FACTORS else shape

    def get_dtype(self) -> str:
        """Return the type of the part."""
        return self.kind.parts[self.name].dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Return some; no other rows are read."""
        rows, columns = (slice(None), slice(None)) if index is ... else index[:2]
        blocks = self.tensor.stored_rows(rows)
        inputs, unit = self.tensor.shape[1], max(self._covered, self.kind.group)
        blocks = blocks.reshape(len(blocks), inputs // block_of(self.tensor.entry.type)[0], -1)
        found = self.kind.parts[self.name].read(blocks)
        if self.name == FACTORS:
            found = found.repeat(K_BLOCK // unit, axis=1)
        if (order := self.tensor.change.columns) is not None:
            by_unit = found.reshape(len(found), inputs // unit, -1)
            found = by_unit[:, order.places(inputs, unit).numpy()]
        return torch.from_numpy(np.ascontiguousarray(found)).reshape(len(found), *self.get_shape()[1:])[:, columns]


def stays_in_bits(entry: Entry, change: Change) -> bool:
    """Whether a tensor's type does, and nothing moves columns out of their groups."""
    if (kind := KINDS.get(entry.type)) is None:
        return False
    return change.columns is None or change.columns.size % kind.group == 0


def span_of(change: Change) -> int:
    """Return the inputs of a K block whose factors stay neighbours: all, if no columns move."""
    return K_BLOCK if change.columns is None else math.gcd(K_BLOCK, change.columns.size)


def type_of(name: str, span: int) -> str:
    """Return what a quantization_config calls a type whose blocks are of so many inputs."""
    return name if FACTORS not in KINDS[name].parts or span == K_BLOCK else f"{name}/{span}"


def factors_of(kind: Kind) -> int:
    """Return how many factors a block has: of scales, and of minima."""
    return 2 if MINIMA in kind.parts else 1


def parts_of(tensor: GgufTensor) -> dict[str, GgufPart]:
    """Return the parts of a matrix by the ends of their names; none, if its type does not stay in its bits."""
    if not stays_in_bits(tensor.entry, tensor.change) or len(tensor.shape) != 2:
        return {}
    return {name: GgufPart(tensor, name) for name in KINDS[tensor.entry.type].parts}
