"""From the q/k/v projection to attention in one pass: q/k norm, rotary embedding, keys and values to the cache."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.fp8 import put
from nanoinfer.kernels.attention.projected.rotary import finite, in_fp8, load_pairs, rotated, store_pairs
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import cdiv, launch_options, load_complete, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.norm.norm import Norm

Parts = Literal["qkv", "qk", "q"]  # what a layer projects for its heads of queries, keys and values
HEADS_PER_PROGRAM = 8


def norm_rotate_store(
    qkv: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    mean_squares: Tensor | None,
    cos_sin: Tensor | None,
    interleaved: bool,
    query_scales: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    parts: Parts = "qkv",
    value_norm: bool = False,
    sections: Tensor | None = None,
    norm_last: bool = False,
    values: Tensor | None = None,
    value_scale: float = 1.0,
) -> Tensor:
    """RMSNorm the query and key heads, rotate them by their token's angles, and write keys and values to the cache.

    qkv: [tokens, heads + 2 * kv_heads, head_dim], the query heads first and the value heads last; head_dim is even, and
        tokens may lie apart
    parts: "qk": qkv has no value heads; the values are the keys as they come. "q": qkv has query heads alone; the cache
        has another layer's keys and values, and gets none
    norm_last: the norm's weights multiply behind the rotation, which leaves mean squares as they are; with weights of
        [head_dim], without query_scales
    value_norm: value heads are normalised, too, each by itself and without weights; only with such norms of the others
    values: [tokens, kv_heads, value_dim], if they are of another size, an even one: then qkv ends with the key heads,
        and tokens lie as far apart in both
    value_scale: factor of the values
    q_norm, k_norm: both None: no norm. They differ in their weights alone: [head_dim], each head by itself
    mean_squares: [tokens, 2] float32, of all query heads and of all key heads of a token, over all ranks. With it the
        norms go over all heads together, and their weights are [heads * head_dim] and [kv_heads * head_dim]
    cos_sin: [positions, rotary_dim] float32, the cosines in the first half and the sines in the second; rotary_dim is
        even, and the rotation leaves a head's elements beyond it alone; None: no rotation
    interleaved: rotates the pairs (0, 1), (2, 3) ... of the first rotary_dim elements; else (i, i + rotary_dim / 2)
    query_scales: [positions] float32, factors of the rotated queries; None: no factors; without cos_sin it must be None
    positions: [tokens] int32, indices into cos_sin and query_scales; -1 (a padding token) counts as 0. Or [3, tokens],
        without query_scales: sections, [rotary_dim / 2] int32, says which of the three turns a pair (Wang et al., 2024)
    k_cache, v_cache: [blocks, block_size, kv_heads, head_dim], or value_dim, alike in memory; slot s is place
        s % block_size of block s // block_size
    slot_mapping: [tokens] int32; the keys and values of a token whose slot is -1 are written nowhere
    kv_scales: [2] float32, the scale of the keys and that of the values in a cache of FP8 (see fp8.py)
    Returns the queries, [tokens, heads, head_dim]. The rotation is that of Su et al., 2021.

    Of a value head with an infinite number or NaN, 0 is written for these, and NaN for its key. So a query that sees it
    gets NaN, and one that does not gets nothing of it, though a product may count it, with the weight 0.
    """
    assert parts == "q" or (q_norm is None) == (k_norm is None)
    assert mean_squares is None or (q_norm is not None and parts == "qkv")
    assert not value_norm or (q_norm is not None and mean_squares is None)
    assert query_scales is None or (cos_sin is not None and positions.ndim == 1)
    assert not norm_last or (q_norm is not None and mean_squares is None and query_scales is None)
    assert values is None or (parts == "qkv" and mean_squares is None and not value_norm)
    function = norm_rotate_store_triton if qkv.is_cuda else norm_rotate_store_reference
    return function(
        qkv,
        q_norm,
        k_norm,
        mean_squares,
        cos_sin,
        interleaved,
        query_scales,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        kv_scales,
        parts,
        value_norm,
        sections,
        norm_last,
        values,
        value_scale,
    )


def norm_rotate_store_reference(
    qkv: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    mean_squares: Tensor | None,
    cos_sin: Tensor | None,
    interleaved: bool,
    query_scales: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    parts: Parts = "qkv",
    value_norm: bool = False,
    sections: Tensor | None = None,
    norm_last: bool = False,
    values: Tensor | None = None,
    value_scale: float = 1.0,
) -> Tensor:
    """norm_rotate_store in torch."""
    own: Parts = parts if values is None else "qk"
    heads = qkv.shape[1] - (len(own) - 1) * k_cache.shape[2]
    how = q_norm, k_norm, mean_squares, cos_sin, interleaved, query_scales, positions, own, value_norm, sections
    q, k, v = norm_rotate_reference(qkv, heads, *how, norm_last)
    if parts == "q":
        return q
    v = v if values is None else values
    if value_scale != 1:
        v = v * value_scale
    if int(slot_mapping.min()) < 0:  # padding tokens
        written = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[written], k[written], v[written]
    k = k + (v * 0).sum(dim=-1, keepdim=True)  # of what is not finite, a product with 0 is NaN
    v = v.nan_to_num(0, 0, 0)
    block_size = k_cache.shape[1]
    slots = slot_mapping // block_size, slot_mapping % block_size
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales
    put(k_cache, slots, k, k_scale)
    put(v_cache, slots, v, v_scale)
    return q


def norm_rotate_reference(
    qkv: Tensor,
    heads: int,
    q_norm: Norm | None,
    k_norm: Norm | None,
    mean_squares: Tensor | None,
    cos_sin: Tensor | None,
    interleaved: bool,
    query_scales: Tensor | None,
    positions: Tensor,
    parts: Parts = "qkv",
    value_norm: bool = False,
    sections: Tensor | None = None,
    norm_last: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm_rotate_store's queries, keys and values, each [tokens, its heads, head_dim]."""
    kv_heads = (qkv.shape[1] - heads) // max(len(parts) - 1, 1)
    qk, v = qkv[:, : heads + kv_heads], qkv[:, qkv.shape[1] - kv_heads :]
    if q_norm is not None:
        if not norm_last:
            qk = _normed(qk, heads, q_norm, k_norm or q_norm, mean_squares)
        if value_norm:
            v = F.rms_norm(v.float(), v.shape[-1:], eps=q_norm.eps).to(v.dtype)
    if cos_sin is not None:
        at = positions.clamp(min=0)
        angles = cos_sin.index_select(0, at) if at.ndim == 1 else _in_sections(cos_sin, at, sections)
        qk = rotated(qk, angles, interleaved)
        if query_scales is not None:
            qk[:, :heads] *= query_scales[at, None, None]
        qk = qk.to(qkv.dtype)
    if q_norm is not None and norm_last:
        qk = _normed(qk, heads, q_norm, k_norm or q_norm, None)
    return qk[:, :heads], qk[:, heads:], v


def _normed(qk: Tensor, heads: int, q_norm: Norm, k_norm: Norm, mean_squares: Tensor | None) -> Tensor:
    """Normalise qk, [tokens, heads + kv_heads, head_dim]; mean_squares: as for norm_rotate_store."""
    head_dim = qk.shape[-1]
    if mean_squares is None:
        normed = F.rms_norm(qk.float(), (head_dim,), eps=q_norm.eps)
    else:
        counts = torch.tensor([heads, qk.shape[1] - heads], device=qk.device)
        normed = qk.float() * torch.rsqrt(mean_squares + q_norm.eps).repeat_interleave(counts, dim=1).unsqueeze(-1)
    if not q_norm.plus_one:
        normed = normed.to(qk.dtype)
    for x, norm in ((normed[:, :heads], q_norm), (normed[:, heads:], k_norm)):
        weight = norm.weight.view(-1, head_dim)
        x *= 1 + weight.float() if norm.plus_one else weight
    return normed.to(qk.dtype)


def _in_sections(cos_sin: Tensor, positions: Tensor, sections: Tensor | None) -> Tensor:
    """Return each token's row of cos_sin, [tokens, rotary_dim], put together from those of its three positions."""
    assert sections is not None
    columns = torch.arange(cos_sin.shape[1], device=cos_sin.device)
    return cos_sin[positions[sections.repeat(2)].T, columns]


def norm_rotate_store_triton(
    qkv: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    mean_squares: Tensor | None,
    cos_sin: Tensor | None,
    interleaved: bool,
    query_scales: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    parts: Parts = "qkv",
    value_norm: bool = False,
    sections: Tensor | None = None,
    norm_last: bool = False,
    values: Tensor | None = None,
    value_scale: float = 1.0,
) -> Tensor:
    """norm_rotate_store as one launch."""
    (tokens, all_heads, head_dim), kv_heads = qkv.shape, k_cache.shape[2]
    assert qkv[0].is_contiguous()
    assert head_dim % 2 == 0
    assert q_norm is None or k_norm is None or q_norm[1:] == k_norm[1:]
    assert k_cache.stride() == v_cache.stride()
    value_dim = v_cache.shape[3]
    if values is not None:
        assert values[0].is_contiguous()
        assert tokens == 1 or values.stride(0) == qkv.stride(0)
        assert value_dim % 2 == 0
        all_heads += kv_heads
    heads = all_heads - (len(parts) - 1) * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _norm_rotate_store_kernel[(tokens, cdiv(all_heads, HEADS_PER_PROGRAM))](
        qkv,
        values,
        q_norm.weight if q_norm else None,
        k_norm.weight if k_norm else None,
        q_norm.eps if q_norm else 0.0,
        mean_squares,
        cos_sin,
        query_scales,
        positions,
        sections if positions.ndim == 2 else None,
        k_cache,
        v_cache,
        slot_mapping,
        q,
        kv_scales,
        TOKEN_STRIDE=qkv.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        VALUE_DIM=value_dim,
        STRIDE=k_cache.stride(2),
        VALUE_SCALE=value_scale,
        NORM="none" if q_norm is None else "head" if mean_squares is None else "full",
        PLUS_ONE=q_norm is not None and q_norm.plus_one,
        PARTS=parts,
        VALUE_NORM=value_norm,
        NORM_LAST=norm_last,
        ROTARY_DIM=0 if cos_sin is None else cos_sin.shape[1],
        INTERLEAVED=interleaved and cos_sin is not None,
        SCALE_QUERIES=query_scales is not None,
        IN_FP8=k_cache.dtype == FP8,
        BLOCK_HALF=next_power_of_2(max(head_dim, value_dim) // 2),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        num_warps=2 if head_dim <= 256 else 4,
        **launch_options(qkv),
    )
    return q


@triton.jit
def _norm_rotate_store_kernel(
    qkv_ptr,
    values_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    mean_squares_ptr,
    cos_sin_ptr,
    query_scales_ptr,
    positions_ptr,
    sections_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    q_ptr,
    kv_scales_ptr,
    TOKEN_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALE_QUERIES: tl.constexpr,
    IN_FP8: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    in_head = i < HALF
    turns = i < ROTARY_DIM // 2
    # Lane i has the elements `at` and `at + apart` of a head: a pair to rotate, or two of the rest.
    if INTERLEAVED:
        at, apart = 2 * i, 1
    elif ROTARY_DIM == 0 or ROTARY_DIM == 2 * HALF:
        at, apart = i, HALF
    else:
        at = tl.where(turns, i, i + ROTARY_DIM // 2)
        apart = tl.where(turns, ROTARY_DIM // 2, HALF - ROTARY_DIM // 2)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < (HEADS if PARTS == "q" else HEADS + KV_HEADS))
    is_v = (head >= HEADS + KV_HEADS) & (head < (HEADS + 2 * KV_HEADS if PARTS == "qkv" else 0))
    if NORM == "head":
        q_weight1, q_weight2 = load_pairs(q_weight_ptr + at, apart, in_head)
        if PARTS == "q":
            k_weight1, k_weight2 = q_weight1, q_weight2
        else:
            k_weight1, k_weight2 = load_pairs(k_weight_ptr + at, apart, in_head)
    elif NORM == "full":
        q_weight1, q_weight2 = load_pairs(q_weight_ptr + head * (2 * HALF) + at, apart, is_q & in_head)
        k_weight1, k_weight2 = load_pairs(k_weight_ptr + (head - HEADS) * (2 * HALF) + at, apart, is_k & in_head)
    # The predecessor, a product, does not write these, so they are complete.
    slot = -1
    if PARTS != "q":
        slot = load_complete(slot_mapping_ptr + token).to(tl.int64)  # a cache may have more than 2^31 elements
    if ROTARY_DIM > 0:
        position_ptr = positions_ptr + token
        if sections_ptr is not None:
            position_ptr += tl.load(sections_ptr + i, mask=turns, other=0) * tl.num_programs(0)
        position = tl.maximum(load_complete(position_ptr), 0)
        angle = cos_sin_ptr + position * ROTARY_DIM + i
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + ROTARY_DIM // 2, mask=turns, other=0.0)
        if SCALE_QUERIES:
            query_scale = tl.where(is_q, tl.load(query_scales_ptr + position), 1.0)
    wait_for_predecessor(EARLY)

    source = qkv_ptr + token * TOKEN_STRIDE + head * (2 * HALF) + at
    v_at, v_apart, in_value = at, apart, in_head
    if values_ptr is None:
        first, second = load_pairs(source, apart, (is_q | is_k | is_v) & in_head)
        value1, value2 = first, second
    else:
        first, second = load_pairs(source, apart, (is_q | is_k) & in_head)
        v_at, v_apart, in_value = i, VALUE_DIM // 2, i < VALUE_DIM // 2
        v_source = values_ptr + token * TOKEN_STRIDE + (head - HEADS - KV_HEADS) * VALUE_DIM + v_at
        value1, value2 = load_pairs(v_source, v_apart, is_v & in_value)
    out1, out2 = first.to(tl.float32), second.to(tl.float32)
    if PARTS == "qkv":  # the value of each key
        next_value = source + KV_HEADS * (2 * HALF) if values_ptr is None else v_source + KV_HEADS * VALUE_DIM
        seen1, seen2 = load_pairs(next_value, v_apart, is_k & in_value)
    else:
        seen1, seen2 = first, second
    if NORM != "none":
        if NORM == "head":
            scale = tl.rsqrt(tl.sum(out1 * out1 + out2 * out2, axis=1) / (2 * HALF) + eps)[:, None]
            if VALUE_NORM:
                value1, value2 = (out1 * scale).to(first.dtype), (out2 * scale).to(first.dtype)
        else:
            mean_square = tl.load(mean_squares_ptr + 2 * token + tl.where(is_q, 0, 1))
            scale = tl.rsqrt(mean_square + eps)
        if not NORM_LAST:
            out1 = _norm(out1, scale, is_q, q_weight1, k_weight1, first.dtype, PLUS_ONE)
            out2 = _norm(out2, scale, is_q, q_weight2, k_weight2, first.dtype, PLUS_ONE)
    if VALUE_SCALE != 1.0:
        value1 = (value1.to(tl.float32) * VALUE_SCALE).to(first.dtype)
        value2 = (value2.to(tl.float32) * VALUE_SCALE).to(first.dtype)
    if ROTARY_DIM > 0:
        out1, out2 = out1 * cos - out2 * sin, out2 * cos + out1 * sin
        if SCALE_QUERIES:
            out1, out2 = out1 * query_scale, out2 * query_scale
    if NORM_LAST:
        out1 = _norm(out1, scale, is_q, q_weight1, k_weight1, first.dtype, PLUS_ONE)
        out2 = _norm(out2, scale, is_q, q_weight2, k_weight2, first.dtype, PLUS_ONE)
    out1, out2 = out1.to(first.dtype), out2.to(first.dtype)

    q_target = q_ptr + (token * HEADS + head) * (2 * HALF) + at
    store_pairs(q_target, out1, out2, apart, is_q & in_head)
    if slot >= 0:
        nothing = tl.sum(seen1 * 0.0 + seen2 * 0.0, axis=1)[:, None].to(out1.dtype)  # NaN if a number is not finite
        key1, key2 = out1 + nothing, out2 + nothing
        # Names of their own: FP8's come in another type, which a branch may not change.
        kept1, kept2 = finite(value1), finite(value2)
        if IN_FP8:
            k_scale, v_scale = tl.load(kv_scales_ptr), tl.load(kv_scales_ptr + 1)
            key1, key2 = in_fp8(key1, k_scale), in_fp8(key2, k_scale)
            kept1, kept2 = in_fp8(kept1, v_scale), in_fp8(kept2, v_scale)
        k_place = slot * KV_HEADS + head - HEADS
        v_place, has_value = k_place - KV_HEADS, is_v
        if PARTS == "qk":
            v_place, has_value = k_place, is_k
        number = k_cache_ptr.dtype.element_ty
        k_target, v_target = k_cache_ptr + k_place * STRIDE + at, v_cache_ptr + v_place * STRIDE + v_at
        store_pairs(k_target, key1.to(number), key2.to(number), apart, is_k & in_head)
        store_pairs(v_target, kept1.to(number), kept2.to(number), v_apart, has_value & in_value)


@triton.jit
def _norm(wide, scale, is_q, q_weight, k_weight, dtype: tl.constexpr, PLUS_ONE: tl.constexpr):
    """Normalise `wide`; round to dtype where the reference rounds, but return float32."""
    if PLUS_ONE:
        return (wide * scale * (1 + tl.where(is_q, q_weight, k_weight).to(tl.float32))).to(dtype).to(tl.float32)
    else:
        return ((wide * scale).to(dtype) * tl.where(is_q, q_weight, k_weight)).to(tl.float32)
