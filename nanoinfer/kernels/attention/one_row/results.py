"""How programs that share a row's keys put their results together: the last to start waits for the others' messages.

A message takes half the time of a counter that says how many have stored theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.ranks.send_receive import as_message, empty, is_empty


@triton.jit
def send_result(
    room_ptr,
    kv_head,
    programs,
    program,
    top,
    acc,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Tell the first program what a program's keys make.

    acc: [heads, numbers], the keys' weighted mean; top: [heads], the sum of their weights, as its log2
    """
    g, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])[None, :]
    head = (kv_head * (programs + 1) + program) * GROUP + g
    tops_ptr = room_ptr + KV_HEADS * (programs + 1) * GROUP * HEAD_DIM
    tl.store(room_ptr + head[:, None] * HEAD_DIM + d, as_message(acc), mask=(g < GROUP)[:, None] & (d < HEAD_DIM))
    tl.store(tops_ptr + head, as_message(top), mask=g < GROUP)


@triton.jit
def gather_results(
    room_ptr,
    kv_head,
    programs,
    busy,
    out_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Wait for the results of the first `busy` programs and of the new key's, and store their weighted mean.

    It leaves the room empty. Each thread loads the tops of its own numbers: so one look says whether both have come.
    """
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    g, d = tl.arange(0, BLOCK_G)[None, :, None], tl.arange(0, BLOCK_D)[None, None, :]
    is_number = (g < GROUP) & (d < HEAD_DIM)
    tops_ptr = room_ptr + KV_HEADS * (programs + 1) * GROUP * HEAD_DIM
    top = tl.full([1, BLOCK_G, BLOCK_D], -1e30, tl.float32)
    total = tl.zeros([1, BLOCK_G, BLOCK_D], tl.float32)
    acc = tl.zeros([1, BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, busy + 1, AT_ONCE):
        program = start + tl.arange(0, AT_ONCE)[:, None, None]
        mask = is_number & (program <= busy)
        head = (kv_head * (programs + 1) + tl.where(program == busy, programs, program)) * GROUP + g
        result_ptrs = room_ptr + head * HEAD_DIM + d
        top_ptrs = tl.broadcast_to(tops_ptr + head, result_ptrs.shape)
        results = tl.load(result_ptrs, mask, 0.0, volatile=True)
        tops = tl.load(top_ptrs, mask, 0.0, volatile=True)
        while tl.max((is_empty(results) | is_empty(tops)).to(tl.int32)) != 0:
            results = tl.load(result_ptrs, mask, 0.0, volatile=True)
            tops = tl.load(top_ptrs, mask, 0.0, volatile=True)
        tl.debug_barrier()  # no thread empties what others still look at
        empty(result_ptrs, mask)
        empty(top_ptrs, mask & (d == 0))
        tops = tl.where(mask, tops, -1e30)
        new_top = tl.maximum(top, tl.max(tops, axis=0, keep_dims=True))
        rescale, weights = tl.exp2(top - new_top), tl.exp2(tops - new_top)
        total = total * rescale + tl.sum(weights, axis=0, keep_dims=True)
        acc = acc * rescale + tl.sum(results * weights, axis=0, keep_dims=True)
        top = new_top
    out_ptrs = out_ptr + (kv_head * GROUP + g) * HEAD_DIM + d
    tl.store(out_ptrs, (acc / total).to(out_ptr.dtype.element_ty), mask=is_number)
