"""Blocks: the codes, the scales and the minima in a tensor of few bits, as formats of groups keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.gguf.header import Entry, block_of
from nanoinfer.gguf.tensor import Change, GgufTensor

CODES, SCALES, MINIMA = "weight_codes", "weight_scales", "weight_minima"  # what tensors are called instead of "weight"
Blocks = np.ndarray  # [rows, blocks, bytes]
Numbers = Literal["int4", "int8", "e2m1"]
PER_K_BLOCK = 8  # groups


class Part(NamedTuple):
    """A part of a type's blocks.

    read: makes [rows, blocks, groups of a block, numbers of a group] of them, or one number less: of a group
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
    numbers: Numbers, codes: Callable[[Blocks], np.ndarray], scales: Part, minima: Part | None = None, group: int = 32
) -> Kind:
    parts = {CODES: Part(codes, "I8"), SCALES: scales, **({} if minima is None else {MINIMA: minima})}
    return Kind(numbers, group, parts)


def _of_one_group(read: Callable[[Blocks], np.ndarray]) -> Callable[[Blocks], np.ndarray]:
    """Return what reads a part of blocks that are a group each."""
    return lambda blocks: read(blocks)[:, :, None]


def _halves(packed: Blocks) -> np.ndarray:
    """Return the codes of four bits: the first half of a block's in the low bits, the second in the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _halves_from(place: int) -> Callable[[Blocks], np.ndarray]:
    """Return what reads codes of four bits, which begin at a byte of their block."""
    return _of_one_group(lambda blocks: _halves(blocks[..., place:]).view(np.int8))


def _five_bits_from(place: int) -> Callable[[Blocks], np.ndarray]:
    """Return codes less 16 of blocks whose fifth bits are apart, and begin at a byte."""

    def read(blocks: Blocks) -> np.ndarray:
        fifth = np.unpackbits(blocks[..., place : place + 4], axis=-1, bitorder="little")
        return (_halves(blocks[..., place + 4 :]) | fifth << 4).view(np.int8) - np.int8(16)

    return _of_one_group(read)


def _half_at(blocks: Blocks, place: int) -> np.ndarray:
    """Return the number of 16 bits at a byte of each block."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0]


def _k_halves(blocks: Blocks) -> np.ndarray:
    """Return the codes of four bits of a K block's groups, which lie two by two, [..., 8, 32]."""
    pairs = blocks[..., -128:].reshape(*blocks.shape[:-1], 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*blocks.shape[:-1], PER_K_BLOCK, 32)


def _k_five_bits(blocks: Blocks) -> np.ndarray:
    """Return the codes less 16 of Q5_K; of a byte's fifth bits, each is another group's."""
    shifts = np.arange(PER_K_BLOCK, dtype=np.uint8)[:, None]
    fifth = blocks[..., None, 16:48] >> shifts & 1
    return (_k_halves(blocks) | fifth << 4).view(np.int8) - np.int8(16)


def _k_scales(blocks: Blocks, is_minimum: bool) -> np.ndarray:
    """Return a K block's scales or minima, [..., 8] float32: products of six bits with a number of the block."""
    first, second, rest = (blocks[..., 4 + 4 * part : 8 + 4 * part] for part in range(3))
    own, low = (second, rest >> 4) if is_minimum else (first, rest & 15)
    six_bits = np.concatenate([own & 63, low | own >> 2 & 48], axis=-1)
    return _half_at(blocks, 2 if is_minimum else 0)[..., None].astype(np.float32) * six_bits


def _k_six_bits(blocks: Blocks) -> np.ndarray:
    """Return the codes of Q6_K, from -32 on, [..., 16, 16]; each half of a block has its own bytes."""
    shape = blocks.shape[:-1]
    low, high = blocks[..., :128].reshape(*shape, 2, 1, 64), blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*shape, 2, 4, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return ((low | high << 4).view(np.int8) - np.int8(32)).reshape(*shape, 16, 16)


def _k_scales_of_16(blocks: Blocks) -> np.ndarray:
    """Return the scales of Q6_K, [..., 16] float32."""
    return _half_at(blocks, 208)[..., None].astype(np.float32) * blocks[..., 192:208].view(np.int8)


HALF = Part(_of_one_group(lambda blocks: _half_at(blocks, 0)), "F16")
MINUS_SECOND = Part(_of_one_group(lambda blocks: -_half_at(blocks, 2)), "F16")  # what is added is no minimum
K_SCALES = Part(lambda blocks: _k_scales(blocks, False), "F32"), Part(lambda blocks: _k_scales(blocks, True), "F32")
KINDS = {
    "Q8_0": _kind("int8", _of_one_group(lambda blocks: blocks[..., 2:].view(np.int8)), HALF),
    "Q5_0": _kind("int8", _five_bits_from(2), HALF),
    "Q5_1": _kind("int8", _five_bits_from(4), HALF, MINUS_SECOND),
    "Q4_0": _kind("int4", _halves_from(2), HALF),
    "Q4_1": _kind("int4", _halves_from(4), HALF, MINUS_SECOND),
    "MXFP4": _kind("e2m1", _halves_from(1), Part(_of_one_group(lambda blocks: blocks[..., 0]), "U8")),
    "Q4_K": _kind("int4", lambda blocks: _k_halves(blocks).view(np.int8), *K_SCALES),
    "Q5_K": _kind("int8", _k_five_bits, *K_SCALES),
    "Q6_K": _kind("int8", _k_six_bits, Part(_k_scales_of_16, "F32"), group=16),
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

    def get_shape(self) -> list[int]:
        """Return [outputs, inputs], of codes, or [outputs, groups]."""
        rows, inputs = self.tensor.shape
        return [rows, inputs if self.name == CODES else inputs // self.kind.group]

    def get_dtype(self) -> str:
        """Return the type of the part."""
        return self.kind.parts[self.name].dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Return some; no other rows are read."""
        rows, columns = (slice(None), slice(None)) if index is ... else index
        blocks = self.tensor.stored_rows(rows)
        inputs, group = self.tensor.shape[1], self.kind.group
        blocks = blocks.reshape(len(blocks), inputs // block_of(self.tensor.entry.type)[0], -1)
        found = self.kind.parts[self.name].read(blocks)
        if (order := self.tensor.change.columns) is not None:
            by_group = found.reshape(len(found), inputs // group, -1)
            found = by_group[:, order.places(inputs, group).numpy()]
        return torch.from_numpy(np.ascontiguousarray(found.reshape(len(found), -1)))[:, columns]


def stays_in_bits(entry: Entry, change: Change) -> bool:
    """Whether a tensor's type does, and nothing moves columns out of their groups."""
    if (kind := KINDS.get(entry.type)) is None:
        return False
    return change.columns is None or change.columns.size % kind.group == 0


def parts_of(tensor: GgufTensor) -> dict[str, GgufPart]:
    """Return the parts of a matrix by the ends of their names; none, if its type does not stay in its bits."""
    if not stays_in_bits(tensor.entry, tensor.change) or len(tensor.shape) != 2:
        return {}
    return {name: GgufPart(tensor, name) for name in KINDS[tensor.entry.type].parts}
