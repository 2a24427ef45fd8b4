"""The results of rows that several workers share, put together."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, load_complete, next_power_of_2, wait_for_predecessor

# Up to so many rows, a program puts one lane's results together. Where many rows are, few of them are divided.
FEW_ROWS, MANY_ROWS = 64, 512


class Partials(NamedTuple):
    """What workers found, each of its share of the latents, of rows that others share.

    results: [parts, workers, 2, lanes, latent] float32; a worker that begins a row leaves place 1, others place 0
    lse: [parts, workers, 2, lanes] float32: log2 of the sums of exponentials by which the results were divided
    share_tiles: see DecodePlan; tile: latents of a tile
    """

    results: Tensor
    lse: Tensor
    share_tiles: Tensor
    tile: int


def combine(
    partials: Partials,
    context_lens: Tensor,
    tokens: Tensor | None,
    own_starts: Tensor | None,
    heads: int,
    out: Tensor,
    out_lse: Tensor | None,
) -> None:
    """Weigh the results of each divided row by their sums of exponentials, in one launch.

    context_lens, tokens, own_starts: of the plan's rows, or bundles
    heads: of a query
    out: [tokens, heads, latent], and out_lse: [tokens, heads] float32, in which divided rows are written
    """
    parts, workers, _, lanes, latent = partials.results.shape
    rows, queries = len(context_lens), 1 if tokens is None else tokens.shape[1]
    few = rows <= FEW_ROWS
    lanes_at_once = 1 if few else 4
    _combine_kernel[(rows, parts * cdiv(lanes, lanes_at_once))](
        partials.results,
        partials.lse,
        context_lens,
        tokens,
        own_starts,
        partials.share_tiles,
        out,
        out_lse,
        rows,
        workers,
        HEADS=heads,
        LANES=lanes,
        QUERIES=queries,
        LATENT=latent,
        TILE=partials.tile,
        BLOCK_R=FEW_ROWS if few else max(MANY_ROWS, next_power_of_2(rows)),
        BLOCK_D=next_power_of_2(latent),
        AT_ONCE=8 if few else 4,
        LANES_AT_ONCE=lanes_at_once,
        num_warps=4,
        **launch_options(out),
    )


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    tokens_ptr,
    own_starts_ptr,
    share_tiles_ptr,
    out_ptr,
    out_lse_ptr,
    rows,
    workers,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    QUERIES: tl.constexpr,
    LATENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES_AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    GROUPS: tl.constexpr = (LANES + LANES_AT_ONCE - 1) // LANES_AT_ONCE
    row, part = tl.program_id(0), tl.program_id(1) // GROUPS
    lane = tl.program_id(1) % GROUPS * LANES_AT_ONCE + tl.arange(0, LANES_AT_ONCE)
    r, d, i = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D), tl.arange(0, AT_ONCE)
    tiles = tl.cdiv(load_complete(context_lens_ptr + r, r < rows, 0), TILE)
    if own_starts_ptr is not None:
        tiles -= load_complete(own_starts_ptr + r, r < rows, 0) // TILE
    begin = tl.sum(tl.where(r < row, tiles, 0), axis=0)
    end = begin + tl.sum(tl.where(r == row, tiles, 0), axis=0)
    share = load_complete(share_tiles_ptr)
    first, last = begin // share, (end - 1) // share
    is_lane = lane < LANES
    head, token = part * LANES + lane, row
    if QUERIES > 1:
        head = lane % HEADS
        token = load_complete(tokens_ptr + row * QUERIES + lane // HEADS, is_lane, -1)
        is_lane = token >= 0
    wait_for_predecessor(EARLY)
    if last > first:
        top, total = tl.full([LANES_AT_ONCE], -1e30, tl.float32), tl.zeros([LANES_AT_ONCE], tl.float32)
        acc = tl.zeros([LANES_AT_ONCE, BLOCK_D], tl.float32)
        for start in range(first, last + 1, AT_ONCE):
            other = start + i[:, None]
            place = ((part * workers + other) * 2 + (other == first)) * LANES + lane[None, :]
            mask = (other <= last) & is_lane[None, :]
            lse = tl.load(lse_ptr + place, mask=mask, other=-1e30)
            numbers = partial_ptr + place[:, :, None] * LATENT + d[None, None, :]
            partial = tl.load(numbers, mask=mask[:, :, None] & (d < LATENT)[None, None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(lse, axis=0))
            rescale, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top[None, :])
            total = total * rescale + tl.sum(weight, axis=0)
            acc = acc * rescale[:, None] + tl.sum(partial * weight[:, :, None], axis=0)
            top = new_top
        place = token * HEADS + head
        target = out_ptr + place[:, None] * LATENT + d[None, :]
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(target, result, mask=is_lane[:, None] & (d < LATENT)[None, :])
        if out_lse_ptr is not None:
            tl.store(out_lse_ptr + place, top + tl.log2(total), mask=is_lane)
