"""One token's attention in one launch: from the q/k/v projection to what its heads attend to.

A launch for the norm and the rotation of one token takes longer than they do. And the keys of one row are read sooner
than one load after another brings the first of them. So each program loads its first keys and values while the
projection still ends. Then it normalises and rotates the queries for itself. A program of its own does so with the new
key, and stores it: no other program reads it from the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.one_row.results import gather_results, send_result
from nanoinfer.kernels.attention.qkv import (
    load_pairs,
    norm_heads,
    places_of_pairs,
    rotate_pairs,
    scale_of_heads,
    store_pairs,
)
from nanoinfer.kernels.attention.scores import in_log2, scores_in_log2, weigh_keys
from nanoinfer.kernels.launch import (
    early_launch,
    load_complete,
    num_multiprocessors,
    start_successor,
    wait_for_predecessor,
)
from nanoinfer.kernels.norm.rms_norm import Norm

MAX_HEAD_DIM, MAX_GROUP = 256, 16
MAX_TILE = 128  # keys
TILE_NUMBERS = 16384  # of keys in a program's registers, and as many of values
RECEIVED_AT_ONCE = 4096  # numbers of messages, at most


class Division(NamedTuple):
    """Who attends for a KV head. tile: keys that a program takes at once; programs: all, but for the new key's."""

    tile: int
    programs: int

    @classmethod
    def of(cls, k_cache: Tensor, block_tables: Tensor) -> Division:
        """Return them for a cache, [blocks, block_size, kv_heads, head_dim], and tables of one row."""
        _, block_size, kv_heads, head_dim = k_cache.shape
        # Products of float32 take registers, too.
        numbers = TILE_NUMBERS if k_cache.itemsize == 2 else TILE_NUMBERS // 4
        tile = min(MAX_TILE, numbers // triton.next_power_of_2(head_dim))
        tile = math.gcd(block_size, tile)  # so that a tile lies in one block
        most = block_tables.shape[1] * block_size // tile
        # All programs run at once, a multiprocessor's each.
        return cls(tile, max(1, min(most, num_multiprocessors(k_cache.device) // kv_heads - 1)))


def room_of_one_row(k_cache: Tensor, block_tables: Tensor) -> Tensor | None:
    """Make what attend_to_one_row needs for layers with such a cache, in one launch; None: it has no such cache."""
    head_dim, division = k_cache.shape[3], Division.of(k_cache, block_tables)
    if k_cache.itemsize < 2 or head_dim > MAX_HEAD_DIM or division.tile < 16:
        return None
    numbers = k_cache.shape[2] * (division.programs + 1) * MAX_GROUP * (head_dim + 1)
    return torch.full((numbers,), -0.0, dtype=torch.float32, device=k_cache.device)


def is_one_row(qkv: Tensor, k_cache: Tensor) -> bool:
    """Return whether attend_to_one_row can attend from such a qkv, given room for such a cache."""
    heads, kv_heads = qkv.shape[1] - 2 * k_cache.shape[2], k_cache.shape[2]
    return len(qkv) == 1 and heads <= MAX_GROUP * kv_heads and qkv.dtype == k_cache.dtype


def attend_to_one_row(
    qkv: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    cos_sin: Tensor | None,
    interleaved: bool,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    room: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute qkv.norm_rotate_store of one token and then paged_decode.paged_decode_reference, in one launch.

    qkv: [1, heads + 2 * kv_heads, head_dim], with at most MAX_GROUP heads a KV head; its launch is the one just before
    room: of room_of_one_row, for all layers of a kind, one after another
    The other arguments are those of the two functions; the token is the last of its context.
    Returns [1, heads, head_dim].
    """
    (_, all_heads, head_dim), (_, block_size, kv_heads, _) = qkv.shape, k_cache.shape
    heads = all_heads - 2 * kv_heads
    group, division = heads // kv_heads, Division.of(k_cache, block_tables)
    assert is_one_row(qkv, k_cache)
    assert qkv[0].is_contiguous()
    factor, cap = in_log2(scale, softcap)
    out = torch.empty((1, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_d = max(32, triton.next_power_of_2(head_dim))
    _one_row_attention_kernel[(kv_heads, division.programs + 1)](
        qkv,
        q_norm.weight if q_norm else None,
        k_norm.weight if k_norm else None,
        q_norm.eps if q_norm else 0.0,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        block_tables,
        context_lens,
        room,
        out,
        factor,
        block_tables.shape[1],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PLUS_ONE=q_norm is not None and q_norm.plus_one,
        ROTARY_DIM=0 if cos_sin is None else cos_sin.shape[1],
        INTERLEAVED=interleaved and cos_sin is not None,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAP=cap,
        TILE=division.tile,
        AT_ONCE=max(1, min(8, RECEIVED_AT_ONCE // (triton.next_power_of_2(group) * block_d))),
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_HALF=block_d // 2,
        num_warps=8,
        num_stages=5,
        **early_launch(qkv),
    )
    return out


@triton.jit
def _one_row_attention_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    table_ptr,
    context_len_ptr,
    room_ptr,
    out_ptr,
    factor,
    table_blocks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    NORM: tl.constexpr = q_weight_ptr is not None
    # The first program gathers the others' results. It starts last, so that whom it waits for has started.
    kv_head, programs = tl.program_id(0), tl.num_programs(1) - 1
    program = programs - tl.program_id(1)
    has_new = program == programs
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, 2 * BLOCK_HALF)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    in_half, turns = i < HALF, i < ROTARY_DIM // 2
    at, apart = places_of_pairs(i, turns, HALF, ROTARY_DIM, INTERLEAVED)

    # The predecessor writes queries, and the new key and value. All else is older.
    new = load_complete(context_len_ptr) - 1
    slot = load_complete(slot_ptr).to(tl.int64)  # a cache may have more than 2^31 elements
    position = load_complete(positions_ptr)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(new + 1 - WINDOW, 0)
    skipped = first_key // TILE
    end = tl.maximum(tl.cdiv(new, TILE), skipped + 1)  # the new key is in no tile
    tile = tl.where(has_new, end, skipped + program)
    k1, k2, v = _load_keys(
        k_cache_ptr,
        v_cache_ptr,
        table_ptr,
        skipped + program,
        table_blocks,
        first_key,
        tl.where(has_new, 0, new),
        kv_head,
        at,
        apart,
        in_half,
        d,
        KV_HEADS,
        HEAD_DIM,
        INTERLEAVED,
        BLOCK_SIZE,
        TILE,
    )
    cos, sin = 1.0, 0.0
    if ROTARY_DIM > 0:
        angle = cos_sin_ptr + tl.maximum(position, 0) * ROTARY_DIM + i
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + ROTARY_DIM // 2, mask=turns, other=0.0)
    q_weight1, q_weight2, k_weight1, k_weight2 = 1.0, 1.0, 1.0, 1.0
    if NORM:
        q_weight1, q_weight2 = load_pairs(q_weight_ptr + at, apart, in_half)
        k_weight1, k_weight2 = load_pairs(k_weight_ptr + at, apart, in_half)
    wait_for_predecessor(EARLY, START_SUCCESSOR=False)

    if (tile < end) | has_new:
        k1, k2, v = _from_now(k1, EARLY), _from_now(k2, EARLY), _from_now(v, EARLY)
        q1, q2 = load_pairs(
            qkv_ptr + (kv_head * GROUP + g[:, None]) * HEAD_DIM + at, apart, (g < GROUP)[:, None] & in_half
        )
        # Every query has the new key beside it, so that their product moves nothing between threads' layouts.
        new_ptr = qkv_ptr + (KV_HEADS * GROUP + kv_head + g[:, None] * 0) * HEAD_DIM
        new_dim = tl.where(has_new, HEAD_DIM, 0)
        new1, new2 = load_pairs(new_ptr + at, apart, i < new_dim // 2)
        value = tl.load(new_ptr + KV_HEADS * HEAD_DIM + d[None, :], mask=d[None, :] < new_dim, other=0.0)
        q1, q2 = _norm_rotate(q1, q2, q_weight1, q_weight2, cos, sin, eps, HALF, NORM, PLUS_ONE, ROTARY_DIM)
        start_successor(EARLY)  # its loads of weights would delay those above
        if has_new:
            new1, new2 = _norm_rotate(new1, new2, k_weight1, k_weight2, cos, sin, eps, HALF, NORM, PLUS_ONE, ROTARY_DIM)
            kept = (slot * KV_HEADS + kv_head) * HEAD_DIM
            is_kept = (g < tl.where(slot >= 0, 1, 0))[:, None]
            store_pairs(k_cache_ptr + kept + g[:, None] * 0 + at, new1, new2, apart, is_kept & in_half)
            tl.store(v_cache_ptr + kept + g[:, None] * 0 + d[None, :], value, mask=is_kept & (d < HEAD_DIM)[None, :])
            products = q1.to(tl.float32) * new1.to(tl.float32) + q2.to(tl.float32) * new2.to(tl.float32)
            top = scores_in_log2(tl.sum(products, axis=1), factor, CAP)
            send_result(room_ptr, kv_head, programs, programs, top, value.to(tl.float32), KV_HEADS, GROUP, HEAD_DIM)
        else:
            top = tl.full([BLOCK_G], -1e30, tl.float32)
            total = tl.zeros([BLOCK_G], tl.float32)
            acc = tl.zeros([BLOCK_G, 2 * BLOCK_HALF], tl.float32)
            top, total, acc = _attend(q1, q2, k1, k2, v, tile, first_key, new, top, total, acc, factor, CAP)
            if tile + programs < end:  # a branch, because what makes a loop's loads early takes time without turns, too
                for other in range(tile + programs, end, programs):
                    k1, k2, v = _load_keys(
                        k_cache_ptr,
                        v_cache_ptr,
                        table_ptr,
                        other,
                        table_blocks,
                        first_key,
                        new,
                        kv_head,
                        at,
                        apart,
                        in_half,
                        d,
                        KV_HEADS,
                        HEAD_DIM,
                        INTERLEAVED,
                        BLOCK_SIZE,
                        TILE,
                    )
                    top, total, acc = _attend(q1, q2, k1, k2, v, other, first_key, new, top, total, acc, factor, CAP)
            total = tl.maximum(total, 1e-30)
            top += tl.log2(total)
            send_result(room_ptr, kv_head, programs, program, top, acc / total[:, None], KV_HEADS, GROUP, HEAD_DIM)
            if program == 0:
                busy = tl.minimum(end - skipped, programs)
                gather_results(
                    room_ptr, kv_head, programs, busy, out_ptr, KV_HEADS, GROUP, HEAD_DIM, 2 * BLOCK_HALF, AT_ONCE
                )


@triton.jit
def _load_keys(
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    tile,
    table_blocks,
    first_key,
    end_key,
    kv_head,
    at,
    apart,
    in_half,
    d,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Load a tile's keys, as pairs, and its values; zeros for those before first_key, and from end_key on.

    The tile may lie behind the table's blocks.
    """
    place = tile // (BLOCK_SIZE // TILE)
    block = load_complete(table_ptr + place, place < table_blocks, 0).to(tl.int64)
    key = tile * TILE + tl.arange(0, TILE)
    seen = ((key >= first_key) & (key < end_key))[:, None]
    first = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM
    in_head = seen & (d < HEAD_DIM)[None, :]
    if INTERLEAVED:  # pairs are neighbours, which are loaded together
        k = load_complete(k_cache_ptr + first + d[None, :], in_head, 0.0)
        k1, k2 = tl.split(tl.reshape(k, [TILE, d.shape[0] // 2, 2]))
    else:
        k1 = load_complete(k_cache_ptr + first + at, seen & in_half, 0.0)
        k2 = load_complete(k_cache_ptr + first + at + apart, seen & in_half, 0.0)
    return k1, k2, load_complete(v_cache_ptr + first + d[None, :], in_head, 0.0)


@triton.jit
def _from_now(x, EARLY: tl.constexpr):
    """Return x as it is. The compiler would wait for it as soon as it is loaded, to bring it where products want it."""
    if EARLY:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    else:
        return x


@triton.jit
def _norm_rotate(
    first,
    second,
    weight1,
    weight2,
    cos,
    sin,
    eps,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """Normalise and rotate heads of queries or of keys, as norm_rotate_store does."""
    out1, out2 = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = scale_of_heads(out1, out2, eps, HALF)
        out1 = norm_heads(out1, scale, weight1, first.dtype, PLUS_ONE)
        out2 = norm_heads(out2, scale, weight2, first.dtype, PLUS_ONE)
    if ROTARY_DIM > 0:
        out1, out2 = rotate_pairs(out1, out2, cos, sin)
    return out1.to(first.dtype), out2.to(first.dtype)


@triton.jit
def _attend(q1, q2, k1, k2, v, tile, first_key, end_key, top, total, acc, factor, CAP: tl.constexpr):
    """Take in a tile's keys."""
    key = tile * k1.shape[0] + tl.arange(0, k1.shape[0])
    products = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    products = tl.dot(q2, tl.trans(k2), acc=products, input_precision="ieee")
    seen = (key >= first_key) & (key < end_key)
    scores = tl.where(seen[None, :], scores_in_log2(products, factor, CAP), -1e30)
    weights, rescale, top, total = weigh_keys(scores, top, total)
    return top, total, acc * rescale + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
