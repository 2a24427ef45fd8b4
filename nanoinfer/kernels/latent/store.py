"""From the projections of latent attention to the cache in one pass: the norm of the latents, and the rotation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.fp8 import put
from nanoinfer.kernels.attention.projected.rotary import finite, in_fp8, load_pairs, rotated, store_pairs
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import cdiv, launch_options, load_complete, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.norm.norm import Norm, normalize_reference

HEADS_PER_PROGRAM = 8


def rotate_and_store(
    q: Tensor,
    turned: Tensor,
    kv: Tensor,
    norm: Norm,
    cos_sin: Tensor,
    interleaved: bool,
    query_scales: Tensor | None,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """RMSNorm the latents, rotate keys and queries by their token's angles, and write latents and keys to the cache.

    q: [tokens, heads, head_dim], of which the last numbers, as many as the angles rotate, are rotated
    turned: [tokens, heads, rotated], where these go: to these numbers themselves, or elsewhere
    kv: [tokens, latent + rotated], a token's latent and the part of the key that all heads share; it stays as it is
    norm: of the latents, with weights of [latent]; factor: of the latents behind it
    cos_sin, interleaved, positions, slot_mapping: as for norm_rotate_store
    query_scales: [positions] float32, factors of all numbers of the queries; None: no factors
    cache: [blocks, block_size, 1, latent + rotated]
    kv_scales: [2] float32, of which the first is the scale of all that a cache of FP8 has (see fp8.py)

    Of a latent with an infinite number or NaN, 0 is written for these, and NaN for its key. So a query that sees it
    gets NaN, and one that does not gets nothing of it, though a product may count it, with the weight 0.
    """
    function = rotate_and_store_triton if q.is_cuda else rotate_and_store_reference
    where = positions, cache, slot_mapping, kv_scales
    function(q, turned, kv, norm, cos_sin, interleaved, query_scales, *where, factor)


def rotate_and_store_reference(
    q: Tensor,
    turned: Tensor,
    kv: Tensor,
    norm: Norm,
    cos_sin: Tensor,
    interleaved: bool,
    query_scales: Tensor | None,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """rotate_and_store in torch."""
    latent, turning = len(norm.weight), cos_sin.shape[1]
    at = positions.clamp(min=0)
    angles = cos_sin.index_select(0, at)
    turned.copy_(rotated(q[..., -turning:], angles, interleaved))
    if query_scales is not None:
        factors = query_scales[at, None, None]
        turned *= factors
        q[..., :-turning] *= factors
    normed = normalize_reference(kv[:, :latent], norm) * factor
    key = rotated(kv[:, None, latent:], angles, interleaved)[:, 0].to(kv.dtype)
    key = key + (normed * 0).sum(dim=-1, keepdim=True)  # of what is not finite, a product with 0 is NaN
    both = torch.cat([normed.nan_to_num(0, 0, 0), key], dim=1)[:, None]
    if int(slot_mapping.min()) < 0:  # padding tokens
        written = slot_mapping >= 0
        slot_mapping, both = slot_mapping[written], both[written]
    slots = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
    put(cache, slots, both, None if kv_scales is None else kv_scales[0])


def rotate_and_store_triton(
    q: Tensor,
    turned: Tensor,
    kv: Tensor,
    norm: Norm,
    cos_sin: Tensor,
    interleaved: bool,
    query_scales: Tensor | None,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """rotate_and_store as one launch."""
    (tokens, heads, head_dim), latent, turning = q.shape, len(norm.weight), cos_sin.shape[1]
    assert q[0].is_contiguous()
    assert kv[0].is_contiguous()
    assert cache[0].is_contiguous()
    _rotate_and_store_kernel[(tokens, 1 + cdiv(heads, HEADS_PER_PROGRAM))](
        q,
        turned,
        kv,
        norm.weight,
        norm.eps,
        cos_sin,
        query_scales,
        positions,
        cache,
        slot_mapping,
        kv_scales,
        q.stride(0),
        *turned.stride()[:2],
        kv.stride(0),
        HEADS=heads,
        PLAIN=head_dim - turning,
        LATENT=latent,
        TURNING=turning,
        FACTOR=factor,
        INTERLEAVED=interleaved,
        IN_FP8=cache.dtype == FP8,
        BLOCK_PLAIN=next_power_of_2(head_dim - turning),
        BLOCK_LATENT=next_power_of_2(latent),
        BLOCK_HALF=next_power_of_2(turning // 2),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        num_warps=4,
        **launch_options(q),
    )


@triton.jit
def _rotate_and_store_kernel(
    q_ptr,
    turned_ptr,
    kv_ptr,
    weight_ptr,
    eps,
    cos_sin_ptr,
    query_scales_ptr,
    positions_ptr,
    cache_ptr,
    slot_mapping_ptr,
    kv_scales_ptr,
    q_stride,
    turned_stride,
    turned_head_stride,
    kv_stride,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    LATENT: tl.constexpr,
    TURNING: tl.constexpr,
    FACTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_FP8: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    turns = i < TURNING // 2
    if INTERLEAVED:
        at, apart = 2 * i, 1
    else:
        at, apart = i, TURNING // 2
    # The predecessors, products, write queries and latents alone.
    slot = load_complete(slot_mapping_ptr + token).to(tl.int64)  # a cache may have more than 2^31 elements
    position = tl.maximum(load_complete(positions_ptr + token), 0)
    angle = cos_sin_ptr + position * TURNING + i
    cos = tl.load(angle, mask=turns, other=1.0)
    sin = tl.load(angle + TURNING // 2, mask=turns, other=0.0)
    wait_for_predecessor(EARLY)
    if part == 0:
        if slot >= 0:
            n = tl.arange(0, BLOCK_LATENT)
            source, target = kv_ptr + token * kv_stride, cache_ptr + slot * (LATENT + TURNING)
            numbers = tl.load(source + n, mask=n < LATENT, other=0.0)
            wide = numbers.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide) / LATENT + eps)
            weight = tl.load(weight_ptr + n, mask=n < LATENT, other=0.0)
            normed = (wide * scale).to(numbers.dtype) * weight
            if FACTOR != 1:
                normed = (normed.to(tl.float32) * FACTOR).to(numbers.dtype)
            first, second = load_pairs(source + LATENT + at, apart, turns)
            first, second = first.to(tl.float32), second.to(tl.float32)
            key1, key2 = first * cos - second * sin, second * cos + first * sin
            nothing = tl.sum(normed * 0.0)  # NaN if a number is not finite
            key1, key2 = key1.to(numbers.dtype) + nothing, key2.to(numbers.dtype) + nothing
            kept = finite(normed)
            if IN_FP8:
                unit = tl.load(kv_scales_ptr)
                kept, key1, key2 = in_fp8(kept, unit), in_fp8(key1, unit), in_fp8(key2, unit)
            number = cache_ptr.dtype.element_ty
            tl.store(target + n, kept.to(number), mask=n < LATENT)
            store_pairs(target + LATENT + at, key1.to(number), key2.to(number), apart, turns)
    else:
        head = ((part - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        own, mask = q_ptr + token * q_stride + head * (PLAIN + TURNING), head < HEADS
        factor = 1.0
        if query_scales_ptr is not None:
            factor = tl.load(query_scales_ptr + position)
            d = tl.arange(0, BLOCK_PLAIN)[None, :]
            plain = tl.load(own + d, mask=mask & (d < PLAIN), other=0.0)
            tl.store(own + d, (plain.to(tl.float32) * factor).to(plain.dtype), mask=mask & (d < PLAIN))
        target = turned_ptr + token * turned_stride + head * turned_head_stride + at[None, :]
        first, second = load_pairs(own + PLAIN + at[None, :], apart, mask & turns[None, :])
        dtype = first.dtype
        first, second = first.to(tl.float32), second.to(tl.float32)
        out1, out2 = (first * cos - second * sin) * factor, (second * cos + first * sin) * factor
        store_pairs(target, out1.to(dtype), out2.to(dtype), apart, mask & turns[None, :])
