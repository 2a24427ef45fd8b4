"""A single row's adapter, beside kernels.linear.one_row.

The product's kernel adds b h itself. What is launched before it computes h, and lets it start at once: both read what
no kernel of the step writes, while the kernel before them still runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.adapters.pairs import Pairs, part_of
from nanoinfer.kernels.launch import early_launch, load_complete, start_successor, wait_for_predecessor
from nanoinfer.kernels.linear.activation import gated_row
from nanoinfer.kernels.norm.rms_norm import Norm, norm_block, norm_warps


class RowAdapter(NamedTuple):
    """The adapter of a single row. slot: [1] int32, -1 for none; complete three launches before the product's"""

    pairs: Pairs
    slot: Tensor


def shrink_row(
    x: Tensor, of_row: RowAdapter, residual: Tensor | None = None, norm: Norm | None = None, post: Norm | None = None
) -> Tensor:
    """Compute h = a[slot] @ rms_norm(total, norm) in one launch, [parts * rank] float32; any numbers without a slot.

    x, residual, norm, post: as for kernels.linear.dispatch.norm_linear, which explains total; x: [1, in_features]
    """
    a = of_row.pairs.a
    assert a.is_contiguous()
    columns, in_features = a.shape[1:]
    h = torch.empty(columns, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(in_features)
    _shrink_row_kernel[(columns,)](
        x,
        post.weight if post else None,
        residual,
        norm.weight if norm else None,
        norm.stream_scale if norm else None,
        a,
        of_row.slot,
        h,
        in_features,
        post.eps if post else None,
        norm.eps if norm else None,
        POST_PLUS_ONE=post is not None and post.plus_one,
        PLUS_ONE=norm is not None and norm.plus_one,
        BLOCK=block,
        num_warps=norm_warps(block),
        **early_launch(x),
    )
    return h


@triton.jit
def _shrink_row_kernel(
    x_ptr,
    post_weight_ptr,
    residual_ptr,
    norm_weight_ptr,
    stream_scale_ptr,
    a_ptr,
    slot_ptr,
    h_ptr,
    in_features,
    post_eps,
    eps,
    POST_PLUS_ONE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    column, columns = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, BLOCK)
    inside = k < in_features
    start_successor(EARLY)
    slot = load_complete(slot_ptr)
    row = tl.maximum(slot, 0).to(tl.int64) * columns + column
    a = tl.load(a_ptr + row * in_features + k, mask=k < tl.where(slot >= 0, in_features, 0), other=0.0)
    wait_for_predecessor(EARLY, START_SUCCESSOR=False)
    if slot >= 0:
        x = tl.load(x_ptr + k, mask=inside, other=0.0)
        if post_weight_ptr is not None:
            x = norm_block(x, tl.load(post_weight_ptr + k, mask=inside), in_features, post_eps, POST_PLUS_ONE)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + k, mask=inside, other=0.0)
            if stream_scale_ptr is not None:
                x *= tl.load(stream_scale_ptr)
        if norm_weight_ptr is not None:
            x = norm_block(x, tl.load(norm_weight_ptr + k, mask=inside, other=0.0), in_features, eps, PLUS_ONE)
        tl.store(h_ptr + column, tl.sum(x.to(tl.float32) * a.to(tl.float32)))


@triton.jit
def load_b(b_ptr, slot, tile, weight_rows, BLOCK_N: tl.constexpr, RANK: tl.constexpr, GATED: tl.constexpr):
    """Load b[slot] for the rows that linear.one_row.load_tile loads, [BLOCK_N, next power of 2 of RANK]."""
    n, r = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, triton.next_power_of_2(RANK))
    mask = ((n < tl.where(slot >= 0, weight_rows, 0))[:, None]) & (r < RANK)[None, :]
    if GATED:
        n = gated_row(n, weight_rows)
    row = slot.to(tl.int64) * weight_rows + n
    return tl.load(b_ptr + row[:, None] * RANK + r[None, :], mask=mask, other=0.0)


@triton.jit
def multiply_b(
    b,
    h_ptr,
    slot,
    tile,
    weight_rows,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Return load_b's rows times shrink_row's h, [BLOCK_N] float32."""
    n, r = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, triton.next_power_of_2(RANK))
    if GATED:
        n = gated_row(n, weight_rows)
    places = h_ptr + part_of(n, PARTS)[:, None] * RANK + r[None, :]
    h = tl.load(places, mask=(r < tl.where(slot >= 0, RANK, 0))[None, :], other=0.0)
    return tl.sum(b.to(tl.float32) * h.to(b.dtype).to(tl.float32), axis=1)
