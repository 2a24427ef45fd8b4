"""Messages between ranks inside a kernel, through the inboxes of parallel.inbox.

A sender writes a message where the receiver waits for it, in the receiver's own memory: it costs one way over the wire.
A place without a message holds negative zeros, which are never sent.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE_ZERO = tl.constexpr(-(2**31))  # float32's, as an int32; Triton 3.6 takes -0.0 for 0.0
LOOKS = tl.constexpr(1024)  # at the inbox, before one at the host's word that it is in vain


@triton.jit
def inbox_of(inboxes_ptr, rank, dtype: tl.constexpr):
    """A rank's inbox, given the addresses of all; dtype: of the pointer."""
    return tl.multiple_of(tl.load(inboxes_ptr + rank).to(dtype), 16)


@triton.jit
def send(inboxes_ptr, rank, place, x, mask):
    """Write x to the places of a rank's inbox."""
    inbox = inbox_of(inboxes_ptr, rank, tl.pointer_type(x.dtype))
    tl.store(inbox + place, tl.where(_is_empty(x), 0.0, x), mask=mask)


@triton.jit
def send_to_all(inboxes_ptr, place, x, mask, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write x to the same places of every other rank's inbox."""
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            send(inboxes_ptr, rank, place, x, mask)


@triton.jit
def receive(ptrs, mask, stop_ptr):
    """Wait for what another rank sends to ptrs, take it, and leave the place empty.

    stop_ptr: int32, not 0 once nothing more will come; what is returned then is undefined
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
