"""What stands in a layer's self-attention by its description: the attention itself, projections and norms."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.cache_layout import kinds_of, pages_of
from nanoinfer.attention.context import Scoring
from nanoinfer.layers.attention import Attention, FullWidth
from nanoinfer.layers.head_norm import HeadNorm, QKNorms
from nanoinfer.layers.linear import Projection, side_by_side, unit_by_unit
from nanoinfer.layers.norm import NormLayer
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.layers.text_attention import TextAttention
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description
from nanoinfer.parallel.shares import share_of
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.shards import Shard


def over_cache(
    model: Description,
    layer: int,
    rotary: RotaryEmbedding | None,
    scales: Tensor | None,
    backend: AttentionBackend,
    tp: TensorParallel,
) -> Attention:
    """Return the attention of a decoder's layer."""
    prefix, memory, heads = model.names.prefix(layer), model.memory(tp.size), model.kv_heads[layer]
    source = layer if heads.source is None else heads.source
    pages = pages_of(memory[source])
    assert pages is not None
    return Attention(
        f"{model.names.prefix(source)}self_attn",
        tp,
        source,
        kinds_of(memory).index(pages),
        scoring_of(model, layer, tp),
        backend,
        rotary,
        scales,
        _query_and_key_norms(model, heads, prefix, tp),
        _full_width(model, heads, tp),
        heads.parts,
        model.value_norm,
        model.names.sinks,
        norm_last=model.qk_norm == "rotated",
        value_scale=model.value_scale,
    )


def within_texts(model: Description, layer: int, rotary: RotaryEmbedding | None, tp: TensorParallel) -> TextAttention:
    """Return the attention of an encoder's layer."""
    heads = model.kv_heads[layer]
    kv_heads = len(share_of(heads.count * heads.dim, tp.rank, tp.size, heads.dim)) // heads.dim
    norms = _query_and_key_norms(model, heads, model.names.prefix(layer), tp)
    q_norm, k_norm = norms or (None, None)
    both = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    scoring = model.attention_scale, model.windows[layer]
    return TextAttention(kv_heads, *scoring, rotary, both, model.value_norm)


def scoring_of(model: Description, layer: int, tp: TensorParallel) -> Scoring:
    """Return how a layer of a decoder scores keys."""
    heads = share_of(model.num_heads, tp.rank, tp.size)
    slopes = model.alibi[heads.start : heads.stop]
    return Scoring(
        model.attention_scale,
        model.windows[layer],
        model.score_cap,
        torch.ones(2, dtype=torch.float32),
        torch.empty(len(heads), dtype=torch.float32) if model.sinks and model.sinks[layer] else None,
        torch.tensor(slopes, dtype=torch.float32) if slopes else None,
        whole_images=bool(model.whole_images) and model.whole_images[layer],
    )


def projections(model: Description, heads: KVHeads, prefix: str) -> list[Projection]:
    """Return where a checkpoint has queries, keys, values, and gates: each head's beside its queries, or apart."""
    count = len(heads.parts)
    names = tuple(prefix + name for name in model.names.qkv[:count])
    units, dim = (model.num_heads, heads.count, heads.count)[:count], heads.dim
    if model.qkv_layout == "groups":
        return unit_by_unit(names[0], heads.count, (model.num_heads // heads.count * dim, dim, dim))
    if model.qkv_layout == "quarters":
        q, v, k = unit_by_unit(names[0], 4, (model.num_heads // 4 * dim,) * 3)
        return [q, k, v]
    if heads.value_dim is not None:
        assert len(names) == 3
        assert not model.output_gate
        return [*side_by_side(names[:2], units[:2], dim), *side_by_side(names[2:], units[2:], heads.value_dim)]
    if not model.output_gate:
        return side_by_side(names, units, dim)
    if model.names.output_gate is not None:
        return side_by_side((*names, prefix + model.names.output_gate), (*units, model.num_heads), dim)
    queries, gates = unit_by_unit(names[0], model.num_heads, (dim, dim))
    return [queries, *side_by_side(names[1:], units[1:], dim), gates]


def unused_shards(model: Description, heads: KVHeads, prefix: str) -> list[Shard]:
    """Return shards of which a layer needs no row; published checkpoints of Gemma 4 have the tensors."""
    names, rows = model.names, heads.count * heads.dim
    none, no_rows = torch.empty(0), torch.empty(0, model.hidden_size)
    tensors = [
        (names.k_norm, none, (heads.dim,)),
        *((name, no_rows, (rows, model.hidden_size)) for name in names.qkv[1:]),
    ]
    return [Shard(f"{prefix}{name}.weight", target, shape, optional=True) for name, target, shape in tensors]


def _query_and_key_norms(
    model: Description, heads: KVHeads, prefix: str, tp: TensorParallel
) -> tuple[NormLayer, NormLayer | None] | None:
    if model.qk_norm is None:
        return None
    kind = replace(model.inner_norm or model.norm, has_bias=False)

    def norm(name: str, count: int) -> NormLayer:
        path, dim = prefix + name, heads.dim
        if model.qk_norm != "full":
            return NormLayer(path, dim, model.norm_eps, kind)
        share = share_of(count * dim, tp.rank, tp.size, unit=dim)
        return NormLayer(path, count * dim, model.norm_eps, kind, share.start, len(share))

    k_norm = None if heads.parts == "q" else norm(model.names.k_norm, heads.count)
    return norm(model.names.q_norm, model.num_heads), k_norm


def head_norms_of(model: Description, heads: KVHeads, prefix: str, tp: TensorParallel) -> QKNorms | None:
    """Return the norms of each head's own weight; None: the model has none."""
    norms = model.head_norms
    if norms is None:
        return None

    def norm(name: str, count: int) -> HeadNorm:
        share = share_of(count * heads.dim, tp.rank, tp.size, unit=heads.dim)
        own = range(share.start // heads.dim, share.stop // heads.dim)
        return HeadNorm(norms, prefix + name, own, count, heads.dim, model.norm_eps)

    return QKNorms(norm(norms.q, model.num_heads), norm(norms.k, heads.count))


def _full_width(model: Description, heads: KVHeads, tp: TensorParallel) -> FullWidth | None:
    if model.qk_norm != "full":
        return None
    copies = max(tp.size // heads.count, 1)
    return FullWidth(model.num_heads * heads.dim, heads.count * heads.dim, copies, tp)
