"""The sum over the ranks, the residual and RMSNorm in one launch, the ranks' parts passing through inboxes.

A rank writes its part of a row where the others wait for it, in their own memory: what a message costs is one way over
the wire. Waiting for a message and making its place empty again are explained in utils.inbox.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import early_launch, num_multiprocessors, wait_for_predecessor
from nanoinfer.kernels.norm import norm_block, norm_warps

NEGATIVE_ZERO = tl.constexpr(-(2**31))  # float32's, as an int32; Triton 3.6 takes -0.0 for 0.0
LOOKS = tl.constexpr(1024)  # at the inbox, before one at the host's word that it is in vain


def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    inboxes: Tensor,
    rank: int,
    stop: Tensor,
    one_owner: bool = False,
) -> tuple[Tensor, Tensor]:
    """kernels.norm.add_rms_norm of the sum of every rank's x, which is added in float32 and rounded once.

    x, residual: [tokens, size]
    inboxes: [ranks] int64, the addresses of room for [ranks, tokens, size] of x's dtype, all negative zeros
    stop: [1] int32 that the host may set to 1, so that kernels end with wrong results instead of waiting forever
    one_owner: each row is added and normed by one rank only, which passes the result on. That is less traffic for many
        ranks, but one more way over the wire; of x + residual a rank then has only its own rows, which are the same in
        the next such call of as many tokens, and the others are undefined
    """
    tokens, size = x.shape
    ranks = len(inboxes)
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    # Programs that take several rows send them all before they wait; each of them has rows of one owner only.
    programs = num_multiprocessors(x.device) // ranks * ranks
    _all_reduce_norm_kernel[(min(tokens, programs),)](
        x,
        residual,
        weight,
        out,
        total,
        inboxes,
        stop,
        tokens,
        size,
        eps,
        RANK=rank,
        RANKS=ranks,
        ONE_OWNER=one_owner,
        BLOCK=block,
        num_warps=norm_warps(block),
        **early_launch(x),
    )
    return out, total


@triton.jit(do_not_specialize=["tokens"])
def _all_reduce_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    inboxes_ptr,
    stop_ptr,
    tokens,
    size,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ONE_OWNER: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    inbox = _inbox(inboxes_ptr, RANK, x_ptr.dtype)
    matrix = tokens * size  # an inbox has one from each rank
    wait_for_predecessor(EARLY)

    owner = program % RANKS if ONE_OWNER else RANK
    for row in range(program, tokens, programs):
        place = row * size + offsets
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
        if not ONE_OWNER:
            _send_to_all(inboxes_ptr, RANK * matrix + place, x, mask, RANK, RANKS)
        elif owner != RANK:
            _send(inboxes_ptr, owner, RANK * matrix + place, x, mask)
    for row in range(program, tokens, programs):
        place = row * size + offsets
        if owner == RANK:
            total = _sum(x_ptr + place, residual_ptr + place, inbox + place, matrix, mask, stop_ptr, RANK, RANKS)
            out = norm_block(total, weight, size, eps)
            tl.store(total_ptr + place, total, mask=mask)
            tl.store(out_ptr + place, out, mask=mask)
            if ONE_OWNER:
                _send_to_all(inboxes_ptr, RANK * matrix + place, out, mask, RANK, RANKS)
        else:
            out = _receive(inbox + owner * matrix + place, mask, stop_ptr)
            tl.store(out_ptr + place, out, mask=mask)


@triton.jit
def _sum(x_ptrs, residual_ptrs, inbox_ptrs, matrix, mask, stop_ptr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """The ranks' parts, in their order so that all get the same, and the residual."""
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    total = tl.zeros(x.shape, tl.float32)
    for peer in tl.static_range(RANKS):
        part = x if peer == RANK else _receive(inbox_ptrs + peer * matrix, mask, stop_ptr)
        total += part.to(tl.float32)
    return total.to(x.dtype) + residual


@triton.jit
def _send_to_all(inboxes_ptr, place, x, mask, RANK: tl.constexpr, RANKS: tl.constexpr):
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            _send(inboxes_ptr, peer, place, x, mask)


@triton.jit
def _send(inboxes_ptr, peer, place, x, mask):
    """Write a message into another rank's inbox."""
    inbox = _inbox(inboxes_ptr, peer, tl.pointer_type(x.dtype))
    tl.store(inbox + place, tl.where(_is_empty(x), 0.0, x), mask=mask)


@triton.jit
def _inbox(inboxes_ptr, rank, dtype: tl.constexpr):
    return tl.multiple_of(tl.load(inboxes_ptr + rank).to(dtype), 16)


@triton.jit
def _receive(ptrs, mask, stop_ptr):
    """Wait for a message, take it, and leave its place empty."""
    x = tl.load(ptrs, mask=mask, other=0.0, volatile=True)
    waiting = tl.max(_is_empty(x).to(tl.int32), axis=0)
    looks = 1
    while waiting != 0:
        x = tl.load(ptrs, mask=mask, other=0.0, volatile=True)
        waiting = tl.max(_is_empty(x).to(tl.int32), axis=0)
        looks += 1
        if looks % LOOKS == 0:
            waiting = tl.where(tl.load(stop_ptr, volatile=True) != 0, 0, waiting)
    empty = tl.full(x.shape, NEGATIVE_ZERO, tl.int32).to(tl.float32, bitcast=True).to(x.dtype)
    tl.store(ptrs, empty, mask=mask)
    return x


@triton.jit
def _is_empty(x):
    """Which are the negative zero."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) == NEGATIVE_ZERO
