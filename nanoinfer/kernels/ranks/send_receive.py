"""Messages between ranks inside a kernel, through the inboxes of parallel.inbox.

A sender writes a message straight into the receiver's memory, so that it crosses the wire only once. A place without a
message holds negative zeros, which no sender sends.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

NEGATIVE_ZERO = tl.constexpr(-(2**31))  # float32's, as an int32; Triton 3.6 treats -0.0 as 0.0
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # then a program is one thread
LOOKS = tl.constexpr(1024)  # at the inbox, before one look at `stop`


class VectorLane(NamedTuple):
    """Where the ranks' parts of one vector meet. All programs of the kernel that adds them read them there.

    inboxes: [ranks] int64, the address on each rank of room for [ranks, size] of the vector's dtype
    stale: the same of the lane that the sum before has used, if this rank's part of it is still to be emptied
    stop: as for receive
    """

    inboxes: Tensor
    stale: Tensor | None
    rank: int
    stop: Tensor


@triton.jit
def inbox_of(inboxes_ptr, rank, dtype: tl.constexpr):
    """Return a rank's inbox as a pointer of type `dtype`. inboxes_ptr: the addresses of all ranks' inboxes"""
    return tl.multiple_of(tl.load(inboxes_ptr + rank).to(dtype), 16)


@triton.jit
def send(inboxes_ptr, rank, place, x, mask):
    """Write x to `place`, offsets in a rank's inbox."""
    inbox = inbox_of(inboxes_ptr, rank, tl.pointer_type(x.dtype))
    tl.store(inbox + place, as_message(x), mask=mask)


@triton.jit
def as_message(x):
    """Replace negative zeros by zeros."""
    return tl.where(_is_empty(x), 0.0, x)


@triton.jit
def send_to_all(inboxes_ptr, place, x, mask, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write x to `place`, the same offsets in every other rank's inbox."""
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            send(inboxes_ptr, rank, place, x, mask)


@triton.jit
def add_ranks(
    x,
    place,
    mask,
    size,
    program,
    inboxes_ptr,
    stale_ptr,
    stop_ptr,
    STALE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
):
    """Add every rank's x, a vector of `size` numbers, in an order that is the same on all ranks.

    Every program calls this; the first one sends. No program may empty a lane that others still read, so the next sum
    does. A lane may be used again two sums after that: to send the sum between, a rank must have emptied this lane.
    """
    own = inbox_of(inboxes_ptr, RANK, tl.pointer_type(x.dtype))
    first_only = place < tl.where(program == 0, size, 0)
    send_to_all(inboxes_ptr, RANK * size + place, x, first_only, RANK, RANKS)
    ranks = tl.arange(0, RANKS_BLOCK)[:, None]
    from_peers = (ranks < RANKS) & (ranks != RANK) & mask[None, :]
    places = ranks * size + place[None, :]
    if STALE:
        empty(inbox_of(stale_ptr, RANK, tl.pointer_type(x.dtype)) + places, from_peers & first_only[None, :])
    parts = receive(own + places, from_peers, stop_ptr, EMPTY=False)
    return tl.sum(tl.where(ranks == RANK, x[None, :], parts).to(tl.float32), axis=0).to(x.dtype)


@triton.jit
def empty(ptrs, mask):
    """Store negative zeros."""
    zeros = tl.full(ptrs.shape, NEGATIVE_ZERO, tl.int32).to(tl.float32, bitcast=True)
    tl.store(ptrs, zeros.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def receive(ptrs, mask, stop_ptr, EMPTY: tl.constexpr = True):
    """Wait until another rank's, or program's, message is at ptrs; return it, and if EMPTY leave the place empty.

    stop_ptr: int32; not 0 means that no message will come: the wait ends, and the result is undefined; None: one will
    """
    # With fewer places than threads, several threads would load one, and only one of these would say whether it waits.
    COPIES: tl.constexpr = 1 if INTERPRETED else max(tl.extra.cuda.num_threads() // ptrs.numel, 1)
    own_ptrs, own_mask = ptrs, mask
    if COPIES > 1:
        own_ptrs = tl.broadcast_to(tl.reshape(ptrs, [1, ptrs.numel]), [COPIES, ptrs.numel])
        own_mask = tl.broadcast_to(tl.reshape(mask, [1, ptrs.numel]), [COPIES, ptrs.numel])
    x = tl.load(own_ptrs, mask=own_mask, other=0.0, volatile=True)
    waiting = tl.max(_is_empty(x).to(tl.int32))
    looks = 1
    while waiting != 0:
        x = tl.load(own_ptrs, mask=own_mask, other=0.0, volatile=True)
        waiting = tl.max(_is_empty(x).to(tl.int32))
        if stop_ptr is not None:
            looks += 1
            if looks % LOOKS == 0:
                waiting = tl.where(tl.load(stop_ptr, volatile=True) != 0, 0, waiting)
    if COPIES > 1:
        x = tl.reshape(tl.max(x, axis=0).to(x.dtype), ptrs.shape)
    if EMPTY:
        tl.debug_barrier()  # several threads may look at one place: none may empty it before all have seen the message
        empty(ptrs, mask)
    return x


@triton.jit
def _is_empty(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) == NEGATIVE_ZERO
