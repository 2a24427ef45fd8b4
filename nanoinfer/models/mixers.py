"""Mixers: what lets a layer's token see those before it: attention, or another that its description names."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.cache_layout import Pages, kinds_of
from nanoinfer.attention.context import Context, Scoring
from nanoinfer.kernels.attention.output_gate import gate_heads
from nanoinfer.layers.attention import Attention, FullWidth
from nanoinfer.layers.delta import GatedDelta, GatedDeltaMixer
from nanoinfer.layers.linear import (
    ColumnParallelLinear,
    Projection,
    RowParallelLinear,
    share_of_heads,
    side_by_side,
    unit_by_unit,
)
from nanoinfer.layers.norm import Joint, RMSNorm
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.layers.short_convolution import ShortConvolutionMixer
from nanoinfer.models.description import Description
from nanoinfer.parallel.tensor_parallel import TensorParallel

Mixer: TypeAlias = "SelfAttention | GatedDeltaMixer | ShortConvolutionMixer"


def make_mixer(
    model: Description,
    layer: int,
    rotary: RotaryEmbedding | None,
    scales: Tensor | None,
    backend: AttentionBackend,
    tp: TensorParallel,
) -> Mixer:
    """Make a layer's mixer. rotary, scales, backend: for attention"""
    sizes, prefix = model.mixers[layer], f"model.layers.{layer}."
    if sizes is None:
        return SelfAttention(model, layer, rotary, scales, backend, tp)
    if isinstance(sizes, GatedDelta):
        return GatedDeltaMixer(f"{prefix}linear_attn.", layer, sizes, model.hidden_size, model.norm_eps, tp, model.fp8)
    return ShortConvolutionMixer(f"{prefix}conv.", layer, sizes, tp, model.fp8)


class SelfAttention(nn.Module):
    """Grouped-query attention: projects the joint's output to queries, keys and values, attends, and projects back."""

    def __init__(
        self,
        model: Description,
        layer: int,
        rotary: RotaryEmbedding | None,
        scales: Tensor | None,
        backend: AttentionBackend,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        prefix, memory = f"model.layers.{layer}.", model.memory(tp.size)
        pages = memory[layer]
        assert isinstance(pages, Pages)
        self.head_dim = model.head_dim
        self.gates = share_of_heads(model.num_heads, tp.size) if model.output_gate else 0
        self.qkv_proj = ColumnParallelLinear(
            _projections(model, prefix), model.hidden_size, tp, model.qkv_bias, model.fp8
        )
        self.attention = Attention(
            f"{prefix}self_attn",
            tp,
            layer,
            kinds_of(memory).index(pages),
            _scoring(model, layer, tp),
            backend,
            rotary,
            scales,
            _query_and_key_norms(model, prefix, tp),
            _full_width(model, tp),
        )
        self.o_proj = RowParallelLinear(
            prefix + model.names.o,
            model.num_heads * model.head_dim,
            model.hidden_size,
            tp,
            model.o_bias,
            model.fp8,
        )

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        projected, residual = self.qkv_proj(x, residual, joint)
        qkv = projected.unflatten(-1, (-1, self.head_dim))
        if self.gates:
            qkv, gates = qkv.tensor_split([-self.gates], dim=1)
            return self.o_proj(gate_heads(self.attention(qkv, context), gates)), residual
        return self.o_proj(self.attention(qkv, context).flatten(1)), residual


def _scoring(model: Description, layer: int, tp: TensorParallel) -> Scoring:
    heads = share_of_heads(model.num_heads, tp.size)
    return Scoring(
        model.attention_scale,
        model.windows[layer],
        model.score_cap,
        torch.ones(2, dtype=torch.float32),
        torch.empty(heads, dtype=torch.float32) if model.sinks else None,
    )


def _projections(model: Description, prefix: str) -> list[Projection]:
    """Return where a checkpoint has queries, keys, values, and gates: each head's beside its queries, or apart."""
    names = tuple(prefix + name for name in model.names.qkv)
    heads, dim = (model.num_heads, model.num_kv_heads, model.num_kv_heads), model.head_dim
    if not model.output_gate:
        return side_by_side(names, heads, dim)
    if model.names.output_gate is not None:
        return side_by_side((*names, prefix + model.names.output_gate), (*heads, model.num_heads), dim)
    queries, gates = unit_by_unit(names[0], model.num_heads, (dim, dim))
    return [queries, *side_by_side(names[1:], heads[1:], dim), gates]


def _query_and_key_norms(model: Description, prefix: str, tp: TensorParallel) -> tuple[RMSNorm, RMSNorm] | None:
    if model.qk_norm is None:
        return None

    def norm(name: str, heads: int) -> RMSNorm:
        path = prefix + name
        if model.qk_norm == "head":
            return RMSNorm(path, model.head_dim, model.norm_eps, model.norm_plus_one)
        share = share_of_heads(heads, tp.size) * model.head_dim
        start = tp.rank * heads // tp.size * model.head_dim
        return RMSNorm(path, heads * model.head_dim, model.norm_eps, model.norm_plus_one, start, share)

    return norm(model.names.q_norm, model.num_heads), norm(model.names.k_norm, model.num_kv_heads)


def _full_width(model: Description, tp: TensorParallel) -> FullWidth | None:
    if model.qk_norm != "full":
        return None
    copies = max(tp.size // model.num_kv_heads, 1)
    return FullWidth(model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, copies, tp)
