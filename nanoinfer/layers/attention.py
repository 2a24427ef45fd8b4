"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, Scoring
from nanoinfer.kernels.attention.projected.qkv import Parts, norm_rotate_store
from nanoinfer.kernels.attention.projected.sum_squares import sum_squares
from nanoinfer.layers.linear import gather
from nanoinfer.layers.norm import NormLayer
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.shards import Shard


class Attention(nn.Module):
    """One layer's attention: it normalises and rotates the heads, writes keys and values to the cache, and attends."""

    def __init__(
        self,
        name: str,
        tp: TensorParallel,
        layer: int,
        group: int,
        scoring: Scoring,
        backend: AttentionBackend,
        rotary: RotaryEmbedding | None = None,
        query_scales: Tensor | None = None,
        norms: tuple[NormLayer, NormLayer | None] | None = None,
        full_norms: FullWidth | None = None,
        parts: Parts = "qkv",
        value_norm: bool = False,
        sinks: tuple[str, ...] = ("sinks",),
        norm_last: bool = False,
        value_scale: float = 1.0,
    ) -> None:
        """Store the layer's settings.

        name: the module in the checkpoint of the attention that writes the keys and values
        layer: that layer's index in the KV cache; group: its group's
        rotary: None: the layer does not rotate its queries and keys
        query_scales: [positions] float32, factors of the rotated queries (kernels.attention.projected.qkv); None: none
        norms: the norm of the queries, and that of the keys unless another layer writes these; None: the model has none
        full_norms: given if each norm goes over all heads of a token at once
        parts, value_norm, norm_last, value_scale: as for norm_rotate_store
        sinks: the names that those of `scoring` may have
        """
        super().__init__()
        self.name, self.tp = name, tp
        self.layer, self.group = layer, group
        self.scoring = scoring
        self.backend = backend
        self.rotary = rotary
        self.query_scales = query_scales
        self.norms = None if norms is None else nn.ModuleList(filter(None, norms))
        self.full_norms = full_norms
        self.q_norm = None if norms is None else norms[0].norm
        self.k_norm = None if norms is None or norms[1] is None else norms[1].norm
        self.parts, self.value_norm, self.norm_last = parts, value_norm, norm_last
        self.value_scale, self.sink_names = value_scale, sinks

    def forward(self, qkv: Tensor, context: Context, values: Tensor | None = None) -> Tensor:
        """Attend from a step's tokens.

        qkv: [tokens, the heads of `parts`, head_dim]; values: as for norm_rotate_store
        Returns [tokens, heads, numbers of a value].
        """
        k_cache, v_cache = context.layers[self.layer]
        group, rotary = context.groups[self.group], self.rotary
        q = norm_rotate_store(
            qkv,
            self.q_norm,
            self.k_norm,
            None if self.full_norms is None else self.full_norms.mean_squares(qkv, k_cache.shape[2]),
            None if rotary is None else rotary.cos_sin,
            rotary is not None and rotary.interleaved,
            None if rotary is None else self.query_scales,
            context.rotary_rows,
            k_cache,
            v_cache,
            group.slot_mapping,
            self.scoring.kv_scales,
            self.parts,
            self.value_norm,
            None if rotary is None else rotary.sections,
            self.norm_last,
            values,
            self.value_scale,
        )
        attend = self.backend.decode if context.prefill is None else self.backend.prefill
        return attend(q, k_cache, v_cache, context, group, self.scoring)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the sinks, and of the scales that a checkpoint may have for a KV cache of FP8."""
        sinks = self.scoring.sinks
        if sinks is not None:
            first, *others = (f"{self.name}.{name}" for name in self.sink_names)
            where = sinks, (self.tp.size * len(sinks),), self.tp.rank * len(sinks)
            yield Shard(first, *where)
            yield from (Shard(other, *where, replaces=(first,)) for other in others)
        assert self.scoring.kv_scales is not None
        for scale, kind in zip(self.scoring.kv_scales.split(1), "kv", strict=True):
            for name in (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"{kind}_proj.output_scale"):
                yield Shard(f"{self.name}.{name}", scale, (1,), random="ones", optional=True)


class FullWidth:
    """The statistics of norms that go over all heads of a token, although a rank holds only some of the heads."""

    def __init__(self, q_size: int, k_size: int, copies: int, tp: TensorParallel) -> None:
        """q_size, k_size: numbers in a token's queries and keys, over all ranks; copies: ranks that hold one KV head"""
        self.tp = tp
        self.shares = torch.tensor([1 / q_size, 1 / (k_size * copies)], dtype=torch.float32)

    def mean_squares(self, qkv: Tensor, kv_heads: int) -> Tensor:
        """Return the mean squares of each token's queries and of its keys over all ranks, [tokens, 2] float32.

        qkv: this rank's, [tokens, heads + 2 * kv_heads, head_dim]; the ranks call this together
        """
        heads = qkv.shape[1] - 2 * kv_heads
        if self.tp.splits_outputs:  # then no sum is cut: every rank sees all heads
            ranks = self.tp.size
            parts = gather(qkv.flatten(1), self.tp).unflatten(1, (ranks, *qkv.shape[1:]))
            kinds = parts.split([heads, kv_heads, kv_heads], dim=2)
            whole = torch.cat([kind.flatten(1, 2) for kind in kinds], dim=1)
            return sum_squares(whole, heads * ranks, kv_heads * ranks) * self.shares
        return self.tp.all_reduce(sum_squares(qkv, heads, kv_heads)) * self.shares
