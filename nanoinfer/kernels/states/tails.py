"""Tails: the tokens of a prefill step behind a sequence's last whole chunk, which stand beside its matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.states.memory import Recurrence


def write_tail(recurrence: Recurrence, slot: int, end: int, terms: tuple[Tensor, Tensor, Tensor]) -> None:
    """Let some tokens before a position stand in a slot, if it is one.

    terms: keys, [tokens, key heads, key dim], updates, [tokens, heads, value dim], and decays, [tokens, heads]
    """
    if slot >= 0:
        _, *ring = recurrence
        count = len(terms[0])
        entries = torch.arange(end - count, end, device=terms[0].device) % recurrence.ring
        for kept, new in zip(ring, terms, strict=True):
            kept[slot, entries] = new.to(kept.dtype)


@triton.jit
def store_tail(memory, slot, position, is_token, tail, heads, numbers, counts, RING: tl.constexpr):
    """write_tail inside a kernel, for a head: some of its values, and if `is_first`, its key head's keys.

    memory: the pointers of a Recurrence; slot: int64, one; position, is_token: [tokens], whether one is there
    tail: keys, [tokens, keys], updates, [tokens, values], and decays: [tokens]; heads: the key head, and the head
    numbers: is_first, of the programs that share a key head; keys; values
    counts: of key heads, of heads, and of keys and values of a head
    """
    _, keys_ptr, updates_ptr, decays_ptr = memory
    keys, updates, decays = tail
    key_head, head = heads
    is_first, k, v = numbers
    key_heads, num_heads, key_dim, value_dim = counts
    entry = slot * RING + position % RING
    updates_ptrs = updates_ptr + (entry[:, None] * num_heads + head) * value_dim + v
    tl.store(updates_ptrs, updates.to(updates_ptr.dtype.element_ty), mask=is_token[:, None] & (v < value_dim))
    tl.store(decays_ptr + entry * num_heads + head, decays, mask=is_token)
    keys_ptrs = keys_ptr + (entry[:, None] * key_heads + key_head) * key_dim + k
    mask = (is_token & is_first)[:, None] & (k < key_dim)
    tl.store(keys_ptrs, keys.to(keys_ptr.dtype.element_ty), mask=mask)
