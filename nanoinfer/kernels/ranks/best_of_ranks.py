"""The last step of sampling over a vocabulary that is split over the ranks: choose the best of their candidates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor
from nanoinfer.kernels.ranks.send_receive import inbox_of, receive, send_to_all


def best_of_ranks(scores: Tensor, ids: Tensor, inboxes: Tensor, rank: int, stop: Tensor) -> Tensor:
    """Return each row's id with the highest score over all ranks, [rows] int32; among equals, the lowest rank's.

    It is -1 where that score is not finite: see kernels.sampling.draw.

    scores, ids: [rows] float32 and int32, this rank's; ids must be below 2^24, so that float32 holds them exactly
    inboxes: [ranks] int64, each the address of room for [ranks, 2, rows] float32, all negative zeros
    stop: as in kernels.ranks.all_reduce_norm
    """
    rows = len(scores)
    out = torch.empty_like(ids)
    _best_of_ranks_kernel[(1,)](
        scores,
        ids,
        out,
        inboxes,
        stop,
        rows,
        RANK=rank,
        RANKS=len(inboxes),
        BLOCK=next_power_of_2(rows),
        **launch_options(scores),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _best_of_ranks_kernel(
    scores_ptr,
    ids_ptr,
    out_ptr,
    inboxes_ptr,
    stop_ptr,
    rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    mask = row < rows
    inbox = inbox_of(inboxes_ptr, RANK, scores_ptr.dtype)
    wait_for_predecessor(EARLY)
    our_score = tl.load(scores_ptr + row, mask=mask, other=0.0)
    our_id = tl.load(ids_ptr + row, mask=mask, other=0).to(tl.float32)
    send_to_all(inboxes_ptr, 2 * RANK * rows + row, our_score, mask, RANK, RANKS)
    send_to_all(inboxes_ptr, (2 * RANK + 1) * rows + row, our_id, mask, RANK, RANKS)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            score, id = our_score, our_id
        else:
            score = receive(inbox + 2 * rank * rows + row, mask, stop_ptr)
            id = receive(inbox + (2 * rank + 1) * rows + row, mask, stop_ptr)
        if rank == 0:
            best, winner = score, id
        else:
            winner = tl.where(score > best, id, winner)
            best = tl.maximum(score, best)
    winner = tl.where(tl.abs(best) < float("inf"), winner, -1.0)
    tl.store(out_ptr + row, winner.to(tl.int32), mask=mask)
