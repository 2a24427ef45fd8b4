"""Attention whose every sum has one order: a token's result has the same bits, prompt or generated, in any company.

A sequence's keys are cut into chunks, which begin at multiples of CHUNK from its first token. A query attends to each
chunk alone, a tile of keys after the other. The chunks' results are put together in their order. Which program does
which chunk does not matter, nor how many queries it has at hand. Keys that a query does not see add exact zeros.

The compiler must not round a product and a sum once together (enable_fp_fusion): it might do so in one kernel only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.scores import bias_in_log2, load_sinks, scores_in_log2
from nanoinfer.kernels.launch import next_power_of_2

CHUNK = 256  # keys
TILE_BYTES = 16 << 10  # of keys, and as many of values
MAX_TILE = 64  # keys
UNSEEN = tl.constexpr(-1e30)  # the score of a key that a query does not see


def tile_of(k_cache: Tensor) -> int:
    """Return how many keys are multiplied at a time; k_cache: [blocks, block_size, kv_heads, head_dim]."""
    row_bytes = max(16, next_power_of_2(k_cache.shape[3])) * k_cache.itemsize
    return max(16, min(MAX_TILE, TILE_BYTES // row_bytes))


@triton.jit
def attend_to_chunk(
    q,
    position,
    begin,
    end,
    context_len,
    first_key,
    table,
    k_cache_ptr,
    v_cache_ptr,
    kv_head,
    factor,
    slopes,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend from queries, [BLOCK_M, BLOCK_D], to the keys from `begin`, where a tile begins, up to `end`.

    position: [BLOCK_M], of the queries in their sequence
    context_len, first_key: keys at `context_len` or beyond, and those before `first_key`, are not loaded
    slopes: [BLOCK_M], from load_slopes; None: there are none
    Returns the weighted sum of the values, [BLOCK_M, BLOCK_V], the largest score, and the sum of the weights.
    """
    n, d, v_d = tl.arange(0, TILE), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    top = tl.full([BLOCK_M], UNSEEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(begin, end, TILE):
        key = start + n
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE + n
        else:
            block = tl.load(table + key // BLOCK_SIZE, mask=key < context_len, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        first = (slot * KV_HEADS + kv_head)[:, None] * STRIDE
        is_loaded = ((key >= first_key) & (key < context_len))[:, None]
        k = tl.load(k_cache_ptr + (first + d[None, :]), mask=is_loaded & (d < HEAD_DIM)[None, :], other=0.0).to(q.dtype)
        scores = scores_in_log2(tl.dot(q, tl.trans(k), input_precision="ieee"), factor, CAP)
        if slopes is not None:
            scores += bias_in_log2(slopes[:, None], key[None, :], position[:, None])
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        # Where a query sees no key of a tile, each gets the weight 1; the first one seen makes `rescale` 0.
        scores = tl.where(seen, scores, UNSEEN)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        v_mask = is_loaded & (v_d < VALUE_DIM)[None, :]
        v = tl.load(v_cache_ptr + (first + v_d[None, :]), mask=v_mask, other=0.0).to(q.dtype)
        # The order of tl.sum depends on how threads hold the weights, that of a product does not.
        ones = tl.full([TILE, 16], 1.0, q.dtype)
        sums = tl.max(tl.dot(weights.to(q.dtype), ones, input_precision="ieee"), axis=1)
        total = total * rescale + sums
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def before_keys(sinks_ptr, head, mask, SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the largest score and the sum of the weights before the first chunk: [BLOCK_M] each, those of the sinks.

    head, mask: as load_sinks takes them, of each query or of all
    """
    zeros = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        return zeros + load_sinks(sinks_ptr, head, mask), zeros + 1.0
    else:
        return zeros + UNSEEN, zeros


@triton.jit
def join(acc, top, total, next_acc, next_top, next_total):
    """Put the result of the next chunk to that of the chunks before."""
    new_top = tl.maximum(top, next_top)
    own, other = tl.exp2(top - new_top), tl.exp2(next_top - new_top)
    return acc * own[:, None] + next_acc * other[:, None], new_top, total * own + next_total * other


@triton.jit
def result(acc, total):
    """Return the attention of a query that has attended to all chunks."""
    return acc / tl.maximum(total, 1e-30)[:, None]
