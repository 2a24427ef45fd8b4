"""What a decoder for a single row computes, and for which shapes one launch does."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference
from nanoinfer.kernels.attention.projected.qkv import norm_rotate_store_reference
from nanoinfer.kernels.decoder.shares import WAVE
from nanoinfer.kernels.launch import is_measured, num_multiprocessors
from nanoinfer.kernels.norm.norm import Norm, normalize_reference

PROGRAMS = 128  # at most; each has a multiprocessor to itself
MAX_SHARE = 48 * 1024  # numbers of a weight that a program's registers hold beside all else
MAX_HIDDEN = 1024
WIDEST = 2048  # numbers of a product's input in a tile


class RowLayer(NamedTuple):
    """A layer's weights, and its part of the KV cache; all contiguous but for the pages."""

    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    o: Tensor  # [hidden, heads * head_dim]
    gate_up: Tensor  # [2 * inter, hidden], the gates first
    down: Tensor  # [hidden, inter]
    mixer_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    k_cache: Tensor  # [pages, block_size, kv_heads, head_dim]
    v_cache: Tensor


class RowModel(NamedTuple):
    """Layers of one shape, and what is before and behind them.

    embeddings: [tokens, hidden]; last_norm: [hidden]
    cos_sin: [positions, head_dim] float32, as kernels.attention.projected.qkv rotates pairs i and i + head_dim / 2
    eps: of all norms; scale: a score's factor
    """

    layers: list[RowLayer]
    embeddings: Tensor
    last_norm: Tensor
    cos_sin: Tensor
    eps: float
    scale: float


class RowShape(NamedTuple):
    """The sizes of a layer, and how many programs compute it."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    programs: int

    @classmethod
    def of(cls, model: RowModel, programs: int | None = None) -> RowShape:
        """Return a model's. programs: None: as many as its device runs at once; the interpreter runs one"""
        layer = model.layers[0]
        kv_heads, head_dim = layer.k_cache.shape[2:]
        if programs is None:
            device = layer.o.device
            programs = min(PROGRAMS, num_multiprocessors(device)) if device.type == "cuda" else 1
        heads = len(layer.qkv) // head_dim - 2 * kv_heads
        return cls(len(layer.o), heads, kv_heads, head_dim, layer.down.shape[1], programs)

    @property
    def qkv(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def splits(self) -> int:
        """Programs for each KV head."""
        return self.programs // self.kv_heads

    @property
    def words(self) -> int:
        """What programs hand each other in a layer."""
        attended = self.heads * self.head_dim
        return 2 * self.hidden + self.qkv + self.inter + attended + (attended + self.heads) * self.splits

    def divides(self) -> bool:
        """Return whether the kernel takes this shape: all programs have equal shares, and tiles are powers of 2."""
        attended, count = self.heads * self.head_dim, self.programs
        if self.heads % self.kv_heads or count % self.kv_heads:
            return False
        group, widths = self.heads // self.kv_heads, (attended, self.inter)
        return (
            all(size & (size - 1) == 0 for size in (self.hidden, self.head_dim, group))
            and self.hidden >= WAVE.value
            and 32 <= self.head_dim <= 256
            and group <= 8
            and all(rows % (8 * count) == 0 for rows in (self.hidden, self.qkv, self.inter))
            and group * self.head_dim % self.splits == 0
            and all(width % WAVE.value == 0 and width // block_of(width) <= 3 for width in widths)
        )

    def fits(self, itemsize: int) -> bool:
        """Return whether a program's registers also hold its share of each weight; itemsize: bytes of a number"""
        if itemsize != 2:  # words keep no longer ones
            return False
        widest = max(self.heads * self.head_dim, self.inter)
        products = (self.qkv, self.hidden), (2 * self.inter, self.hidden), (self.hidden, widest)
        shares = (rows // self.programs * width for rows, width in products)
        return self.divides() and self.hidden <= MAX_HIDDEN and max(shares) <= MAX_SHARE


def is_faster(model: RowModel) -> bool:
    """Return whether one launch is faster than one for each product, as far as was measured."""
    return is_measured(model.embeddings.device) and RowShape.of(model).fits(model.embeddings.itemsize)


def decoder_row_reference(model: RowModel, token: Tensor, position: Tensor, slot: Tensor, pages: Tensor) -> Tensor:
    """Run the layers over one token, and write its keys and values to the cache.

    token, position: [1] int32; a position of -1 is an empty row's, whose result means nothing
    slot: [1] int32, as for norm_rotate_store; pages: [1, columns] int32, the row's block table
    Returns the last norm's result, [1, hidden].
    """
    shape = RowShape.of(model)
    h = model.embeddings[token.long()]
    length = position + 1
    for layer in model.layers:
        qkv = F.linear(normalize_reference(h, Norm(layer.mixer_norm, model.eps)), layer.qkv)
        norms = Norm(layer.q_norm, model.eps), Norm(layer.k_norm, model.eps)
        caches = layer.k_cache, layer.v_cache
        heads = qkv.view(1, -1, shape.head_dim)
        q = norm_rotate_store_reference(heads, *norms, None, model.cos_sin, False, None, position, *caches, slot)
        attended = paged_decode_reference(q, *caches, pages, length, int(length), model.scale)
        h = h + F.linear(attended.flatten(1), layer.o)
        gate, up = F.linear(normalize_reference(h, Norm(layer.mlp_norm, model.eps)), layer.gate_up).chunk(2, dim=1)
        h = h + F.linear(F.silu(gate) * up, layer.down)
    return normalize_reference(h, Norm(model.last_norm, model.eps))


def block_of(width: int) -> int:
    """Return how many numbers of a product's input a tile has: a power of 2 that divides the width."""
    return min(width & -width, WIDEST)
