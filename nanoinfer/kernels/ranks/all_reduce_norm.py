"""The sum over the ranks, the residual and a norm in one launch; the ranks write their parts to inboxes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, num_multiprocessors, wait_for_predecessor
from nanoinfer.kernels.norm.norm import Norm, load_norm, norm_block, norm_warps
from nanoinfer.kernels.ranks.send_receive import empty, inbox_of, receive, send, send_to_all


def all_reduce_add_norm(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm,
    inboxes: Tensor,
    rank: int,
    stop: Tensor,
    one_owner: bool = False,
    stale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add up every rank's x, in float32 and rounded once; then compute kernels.norm.norm.add_norm of the sum.

    x: this rank's part, [tokens, size]; residual: [tokens, size], or None: nothing is added
    inboxes: [ranks] int64, each the address of room for [ranks, tokens, size] of x's dtype, all negative zeros
    stop: [1] int32; the host may set it to 1, and then kernels end with wrong results instead of waiting forever
    one_owner: one rank alone adds and normalises a token's vector, and sends the result to the others. With many ranks
        this is less traffic, but one more trip over the wire. Each rank then has x + residual for its own tokens only,
        and undefined numbers for the others. In the next such call with as many tokens, it owns the same ones.
    stale: as in VectorLane; with it, x must be one vector
    Returns (normalize(total), total) for total = the sum + residual, both [tokens, size].
    """
    tokens, size = x.shape
    assert norm.stream_scale is None
    assert stale is None or tokens == 1
    ranks = len(inboxes)
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = next_power_of_2(size)
    # A program sends all its tokens before it waits. One rank owns them all: programs is a multiple of ranks.
    programs = num_multiprocessors(x.device) // ranks * ranks
    _all_reduce_norm_kernel[(min(tokens, programs),)](
        x,
        residual,
        norm.weight,
        norm.bias,
        out,
        total,
        inboxes,
        stale,
        stop,
        tokens,
        size,
        norm.eps,
        RANK=rank,
        RANKS=ranks,
        ADD=residual is not None,
        NORM=norm.form,
        ONE_OWNER=one_owner,
        STALE=stale is not None,
        BLOCK=block,
        RANKS_BLOCK=next_power_of_2(ranks),
        num_warps=norm_warps(block),
        **launch_options(x),
    )
    return out, total


@triton.jit(do_not_specialize=["tokens"])
def _all_reduce_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    inboxes_ptr,
    stale_ptr,
    stop_ptr,
    tokens,
    size,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    ONE_OWNER: tl.constexpr,
    STALE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    weight, bias = load_norm(weight_ptr, bias_ptr, offsets, mask)
    inbox = inbox_of(inboxes_ptr, RANK, x_ptr.dtype)
    matrix = tokens * size  # the numbers of one rank's part; an inbox has room for one from each rank
    wait_for_predecessor(EARLY)

    if STALE:
        peers = tl.arange(0, RANKS_BLOCK)[:, None]
        stale = inbox_of(stale_ptr, RANK, x_ptr.dtype) + peers * size + offsets[None, :]
        empty(stale, (peers < RANKS) & (peers != RANK) & mask[None, :])
    owner = program % RANKS if ONE_OWNER else RANK
    for row in range(program, tokens, programs):
        place = row * size + offsets
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
        if not ONE_OWNER:
            send_to_all(inboxes_ptr, RANK * matrix + place, x, mask, RANK, RANKS)
        elif owner != RANK:
            send(inboxes_ptr, owner, RANK * matrix + place, x, mask)
    for row in range(program, tokens, programs):
        place = row * size + offsets
        if owner == RANK:
            if ADD:
                residual = tl.load(residual_ptr + place, mask=mask, other=0.0)
            total = _sum(x_ptr + place, inbox + place, matrix, mask, stop_ptr, RANK, RANKS, RANKS_BLOCK)
            if ADD:
                total += residual
            out = norm_block(total, weight, bias, size, eps, NORM)
            tl.store(total_ptr + place, total, mask=mask)
            tl.store(out_ptr + place, out, mask=mask)
            if ONE_OWNER:
                send_to_all(inboxes_ptr, RANK * matrix + place, out, mask, RANK, RANKS)
        else:
            out = receive(inbox + owner * matrix + place, mask, stop_ptr)
            tl.store(out_ptr + place, out, mask=mask)


@triton.jit
def _sum(
    x_ptrs,
    inbox_ptrs,
    matrix,
    mask,
    stop_ptr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
):
    """Wait for the ranks' parts, all at once, and add them in an order that is the same on all ranks."""
    ranks = tl.arange(0, RANKS_BLOCK)[:, None]
    from_peers = (ranks < RANKS) & (ranks != RANK) & mask[None, :]
    parts = receive(inbox_ptrs[None, :] + ranks * matrix, from_peers, stop_ptr)
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    return tl.sum(tl.where(ranks == RANK, x[None, :], parts).to(tl.float32), axis=0).to(x.dtype)
