"""Messages between ranks inside a kernel, through the inboxes of parallel.inbox.

A sender writes a message straight into the receiver's memory, so that it crosses the wire only once. A place without a
message holds negative zeros, which no sender sends.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE_ZERO = tl.constexpr(-(2**31))  # float32's, as an int32; Triton 3.6 treats -0.0 as 0.0
LOOKS = tl.constexpr(1024)  # at the inbox, before one look at `stop`


@triton.jit
def inbox_of(inboxes_ptr, rank, dtype: tl.constexpr):
    """Return a rank's inbox as a pointer of type `dtype`. inboxes_ptr: the addresses of all ranks' inboxes"""
    return tl.multiple_of(tl.load(inboxes_ptr + rank).to(dtype), 16)


@triton.jit
def send(inboxes_ptr, rank, place, x, mask):
    """Write x to `place`, offsets in a rank's inbox; replace negative zeros by zeros."""
    inbox = inbox_of(inboxes_ptr, rank, tl.pointer_type(x.dtype))
    tl.store(inbox + place, tl.where(_is_empty(x), 0.0, x), mask=mask)


@triton.jit
def send_to_all(inboxes_ptr, place, x, mask, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write x to `place`, the same offsets in every other rank's inbox."""
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            send(inboxes_ptr, rank, place, x, mask)


@triton.jit
def receive(ptrs, mask, stop_ptr):
    """Wait until another rank's message is at ptrs; return it, and leave the place empty.

    stop_ptr: int32; not 0 means that no message will come: the wait ends, and the result is undefined
    """
    x = tl.load(ptrs, mask=mask, other=0.0, volatile=True)
    waiting = tl.max(_is_empty(x).to(tl.int32))
    looks = 1
    while waiting != 0:
        x = tl.load(ptrs, mask=mask, other=0.0, volatile=True)
        waiting = tl.max(_is_empty(x).to(tl.int32))
        looks += 1
        if looks % LOOKS == 0:
            waiting = tl.where(tl.load(stop_ptr, volatile=True) != 0, 0, waiting)
    tl.debug_barrier()  # several threads may look at one place: none may empty it before all have seen the message
    empty = tl.full(x.shape, NEGATIVE_ZERO, tl.int32).to(tl.float32, bitcast=True).to(x.dtype)
    tl.store(ptrs, empty, mask=mask)
    return x


@triton.jit
def _is_empty(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) == NEGATIVE_ZERO
