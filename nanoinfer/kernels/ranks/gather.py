"""The ranks' shares of each token's vector, put side by side in one launch; the ranks write theirs to inboxes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, num_multiprocessors, wait_for_predecessor
from nanoinfer.kernels.norm.norm import norm_warps
from nanoinfer.kernels.ranks.send_receive import inbox_of, receive, send_to_all


def gather_features(x: Tensor, inboxes: Tensor, rank: int, stop: Tensor) -> Tensor:
    """Return every rank's x, side by side in rank order: [tokens, ranks * share].

    x: this rank's share, [tokens, share]
    inboxes: [ranks] int64, each the address of room for [ranks, tokens, share] of x's dtype, all negative zeros
    stop: as in kernels.ranks.all_reduce_norm
    """
    (tokens, share), ranks = x.shape, len(inboxes)
    assert x.is_contiguous()
    out = torch.empty((tokens, ranks * share), dtype=x.dtype, device=x.device)
    block = next_power_of_2(share)
    # A program sends all its tokens before it waits, and all programs of all ranks run at once.
    _gather_kernel[(min(tokens, num_multiprocessors(x.device)),)](
        x,
        out,
        inboxes,
        stop,
        tokens,
        share,
        RANK=rank,
        RANKS=ranks,
        BLOCK=block,
        num_warps=norm_warps(block),
        **launch_options(x),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _gather_kernel(
    x_ptr,
    out_ptr,
    inboxes_ptr,
    stop_ptr,
    tokens,
    share,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < share
    inbox = inbox_of(inboxes_ptr, RANK, x_ptr.dtype)
    matrix = tokens * share  # the numbers of one rank's share; an inbox has room for one from each rank
    wait_for_predecessor(EARLY)
    for row in range(program, tokens, programs):
        place = row * share + offsets
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
        send_to_all(inboxes_ptr, RANK * matrix + place, x, mask, RANK, RANKS)
        tl.store(out_ptr + (row * RANKS + RANK) * share + offsets, x, mask=mask)
    for row in range(program, tokens, programs):
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                x = receive(inbox + rank * matrix + row * share + offsets, mask, stop_ptr)
                tl.store(out_ptr + (row * RANKS + rank) * share + offsets, x, mask=mask)
