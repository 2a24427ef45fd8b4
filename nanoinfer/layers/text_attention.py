"""Attention of encoders: within whole texts of a step, in both directions, without a KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.attention.context import Context
from nanoinfer.kernels.attention.prefill.texts import attend_to_texts
from nanoinfer.kernels.attention.projected.qkv import norm_rotate_reference, norm_rotate_store
from nanoinfer.layers.norm import NormLayer
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.weights.shards import Shard


@dataclass(frozen=True)
class DistanceBiases:
    """Biases of scores by the distance of a key from its query (Raffel et al., 2020), the same in all layers.

    name: of the tensor, [buckets, heads], without ".weight"
    buckets: half of them are of keys behind the query, and half of these of a distance each
    most: the largest distance that has a bucket of its own kind; the last bucket has all that are farther
    """

    name: str
    buckets: int = 32
    most: int = 128

    def numbers(self, distances: Tensor) -> Tensor:
        """Return the bucket of each distance, in host memory, of a key behind its query."""
        half, exact = self.buckets // 2, self.buckets // 4
        far = distances.abs()
        ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(self.most / exact)
        spread = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(far < exact, far, spread) + half * (distances > 0)


class BiasTable(nn.Module):
    """The biases that a rank's heads have."""

    def __init__(self, biases: DistanceBiases, heads: range, count: int, most_tokens: int) -> None:
        """heads: the rank's, of `count`; most_tokens: in a text"""
        super().__init__()
        self.biases, self.heads, self.count = biases, heads, count
        self.weight = nn.Parameter(torch.empty(biases.buckets, len(heads), dtype=torch.float32), requires_grad=False)
        numbers = biases.numbers(torch.arange(1 - most_tokens, most_tokens, device="cpu"))  # as a GPU rounds otherwise
        self.register_buffer("numbers", numbers.to(self.weight.device), persistent=False)

    def by_distance(self) -> Tensor:
        """Return what attend_to_texts takes as biases."""
        assert isinstance(self.numbers, Tensor)
        return self.weight[self.numbers].T.contiguous()

    def shards(self) -> Iterator[Shard]:
        """Yield the shard of the rank's columns."""
        shape = self.biases.buckets, self.count
        yield Shard(f"{self.biases.name}.weight", self.weight, shape, self.heads.start, dim=1)


class TextAttention(nn.Module):
    """One layer's attention: it normalises and rotates the heads, and attends within each text."""

    def __init__(
        self,
        kv_heads: int,
        scale: float,
        window: int | None,
        rotary: RotaryEmbedding | None,
        norms: tuple[NormLayer, NormLayer] | None,
        value_norm: bool = False,
    ) -> None:
        """kv_heads: the rank's heads of keys; window: as for attend_to_texts; norms: of queries, and of keys

        value_norm: as for norm_rotate_store
        """
        super().__init__()
        self.kv_heads, self.scale, self.window = kv_heads, scale, window
        self.rotary, self.value_norm = rotary, value_norm
        self.norms = None if norms is None else nn.ModuleList(norms)
        self.q_norm = None if norms is None else norms[0].norm
        self.k_norm = None if norms is None else norms[1].norm

    def forward(self, qkv: Tensor, context: Context) -> Tensor:
        """Attend from a step's tokens.

        qkv: [tokens, heads of queries, of keys and of values, head_dim]; returns [tokens, heads, head_dim]
        """
        packed = context.prefill
        assert packed is not None
        q, k, v = self._prepared(qkv, context)
        how = self.scale, self.window, context.distance_biases
        return attend_to_texts(q, k, v, packed.query_lens, packed.cu_query_lens, *how)

    def _prepared(self, qkv: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, normalised and rotated."""
        heads, rotary = qkv.shape[1] - 2 * self.kv_heads, self.rotary
        if rotary is None and self.q_norm is None:
            q, k, v = qkv.tensor_split([heads, heads + self.kv_heads], dim=1)
            return q, k, v
        how = self.q_norm, self.k_norm, None, None if rotary is None else rotary.cos_sin
        how_rotated = rotary is not None and rotary.interleaved, None, context.rotary_rows
        if not qkv.is_cuda:
            return norm_rotate_reference(qkv, heads, *how, *how_rotated, value_norm=self.value_norm)
        k, v = torch.empty((2, 1, len(qkv), self.kv_heads, qkv.shape[2]), dtype=qkv.dtype, device=qkv.device)
        slots = torch.arange(len(qkv), dtype=torch.int32, device=qkv.device)
        return norm_rotate_store(qkv, *how, *how_rotated, k, v, slots, value_norm=self.value_norm), k[0], v[0]
