"""Folds: the matrices take in tokens that stood beside them, and so move to a later boundary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks
from nanoinfer.kernels.delta.terms import decay_of
from nanoinfer.kernels.launch import cdiv, load_complete
from nanoinfer.kernels.states.memory import Recurrence, StateRows

VALUES = 32  # of a head that a program of fold_tails has
KEYS_AT_ONCE = 32  # of a matrix, for which a program takes tokens in


def fold_rows_reference(recurrence: Recurrence, rows: StateRows) -> Tensor:
    """Fold CHUNK tokens of each row that has as many; returns the boundaries behind that."""
    behind = rows.boundaries + CHUNK
    is_due = (rows.slots >= 0) & (rows.positions[: len(rows.slots)] >= behind)
    slots, first = rows.slots[is_due], rows.boundaries[is_due]
    _fold(recurrence, (slots, slots, slots), first, torch.full_like(first, CHUNK))
    return behind.where(is_due, rows.boundaries)


def fold_tails(recurrence: Recurrence, chunks: Chunks) -> None:
    """Let the matrices of a prefill step stand where its sequences begin: in their final slots, if they do not yet."""
    (fold_tails_triton if recurrence.keys.is_cuda else fold_tails_reference)(recurrence, chunks)


def fold_tails_reference(recurrence: Recurrence, chunks: Chunks) -> None:
    """fold_tails in torch."""
    counts = chunks.starts - chunks.boundaries
    sources, first = chunks.initial, chunks.boundaries
    while (has_some := counts > 0).any():
        slots = tuple(slots[has_some] for slots in (chunks.initial, sources, chunks.final))
        _fold(recurrence, slots, first[has_some], counts[has_some].clamp(max=CHUNK))
        sources, first, counts = chunks.final, first + CHUNK, counts - CHUNK


def _fold(recurrence: Recurrence, slots: tuple[Tensor, ...], first: Tensor, counts: Tensor) -> None:
    """Write the matrices of some slots to others, behind tokens of a third: 1 to CHUNK each.

    slots: of the tokens, of the matrices, and where these go; first: the positions of the first tokens; all [n]
    """
    matrices, keys, updates, decays = recurrence
    heads = matrices.shape[1]
    for ring, source, target, begin, count in zip(*map(Tensor.tolist, (*slots, first, counts)), strict=True):
        at = ring, torch.arange(begin, begin + count, device=keys.device) % recurrence.ring
        sums = decays[at].T.unsqueeze(-1)  # [heads, tokens, 1]
        last = sums[:, -1:]
        own = keys[at].float().repeat_interleave(heads // recurrence.key_heads, dim=1).transpose(0, 1)
        taken = updates[at].float().transpose(0, 1) * (last - sums).exp()
        matrices[target] = (matrices[source].float() * last.exp() + own.mT @ taken).to(matrices.dtype)


def fold_tails_triton(recurrence: Recurrence, chunks: Chunks) -> None:
    """fold_tails as one launch. A program has a sequence, a head and some of its values."""
    heads, key_dim, value_dim = recurrence.matrices.shape[1:]
    _fold_tails_kernel[(cdiv(value_dim, VALUES), heads, len(chunks.starts))](
        *recurrence,
        chunks.starts,
        chunks.boundaries,
        chunks.initial,
        chunks.final,
        KEY_HEADS=recurrence.key_heads,
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        RING=recurrence.ring,
        TOKENS=CHUNK,
        BLOCK_V=VALUES,
        num_warps=8 if recurrence.keys.itemsize == 4 else 4,
        enable_fp_fusion=True,
    )


@triton.jit
def _fold_tails_kernel(
    matrices_ptr,
    keys_ptr,
    updates_ptr,
    decays_ptr,
    starts_ptr,
    boundaries_ptr,
    initial_ptr,
    final_ptr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RING: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    part, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(boundaries_ptr + seq)
    count = tl.load(starts_ptr + seq) - first
    ring, target = tl.load(initial_ptr + seq).to(tl.int64), tl.load(final_ptr + seq).to(tl.int64)
    source = ring
    memory = matrices_ptr, keys_ptr, updates_ptr, decays_ptr
    heads, v = (head // (HEADS // KEY_HEADS), head), part * BLOCK_V + tl.arange(0, BLOCK_V)
    for begin in range(0, count, TOKENS):
        tokens = first + begin, tl.minimum(count - begin, TOKENS)
        fold(memory, (ring, source, target), tokens, heads, v, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, RING, TOKENS)
        tl.debug_barrier()  # guesses that held may be more than CHUNK tokens: the rest goes where these now are
        source = target


@triton.jit
def fold(
    memory,
    slots,
    tokens,
    heads,
    v,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RING: tl.constexpr,
    TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr = KEYS_AT_ONCE,
):
    """Write some values of a head's matrix behind tokens that stand beside it. May run before the wait.

    memory: the pointers of a Recurrence; slots: of the tokens, of the matrix, and where this goes, int64
    tokens: the position of the first one, and how many, 1 to TOKENS; heads: the key head, and the head; v: the values
    """
    matrices_ptr, keys_ptr, updates_ptr, decays_ptr = memory
    ring, source, target = slots
    first, count = tokens
    key_head, head = heads
    MATRICES: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    t, has_v = tl.arange(0, TOKENS), v < VALUE_DIM
    is_token = t < count
    entry = ring * RING + (first + t) % RING
    total = load_complete(decays_ptr + entry * HEADS + head, is_token, 0.0)
    last = load_complete(decays_ptr + (ring * RING + (first + count - 1) % RING) * HEADS + head)
    updates_ptrs = updates_ptr + (entry[:, None] * HEADS + head) * VALUE_DIM + v
    updates = load_complete(updates_ptrs, is_token[:, None] & has_v, 0.0)
    taken = (updates.to(tl.float32) * tl.exp(last - total)[:, None]).to(updates.dtype)
    for start in range(0, KEY_DIM, AT_ONCE):
        k = start + tl.arange(0, AT_ONCE)
        has_k = k < KEY_DIM
        keys_ptrs = keys_ptr + (entry[:, None] * KEY_HEADS + key_head) * KEY_DIM + k
        keys = load_complete(keys_ptrs, is_token[:, None] & has_k, 0.0)
        ptrs, mask = matrices_ptr + (head * KEY_DIM + k[:, None]) * VALUE_DIM + v, has_k[:, None] & has_v
        old = load_complete(ptrs + source * MATRICES, mask, 0.0).to(tl.float32)
        new = tl.dot(tl.trans(keys), taken, old * decay_of(last), input_precision="ieee")
        tl.store(ptrs + target * MATRICES, new.to(matrices_ptr.dtype.element_ty), mask=mask)


@triton.jit
def fold_parts(
    memory,
    slot,
    position,
    boundary,
    key_head,
    parts,
    sizes: tl.constexpr,
    RING: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Fold a row's oldest tokens in some parts of a key head's matrices if it is due; returns the boundary behind.

    memory: the pointers of a Recurrence; parts: the first one, and the end, of BLOCK_V values each
    sizes: key heads, heads, key dim and value dim
    """
    KEY_HEADS: tl.constexpr = sizes[0]
    HEADS: tl.constexpr = sizes[1]
    VALUE_DIM: tl.constexpr = sizes[3]
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    first, end = parts
    if (slot >= 0) & (position - boundary >= TOKENS):
        for i in range(first, end):
            heads = key_head, key_head * (HEADS // KEY_HEADS) + i // PARTS
            v = i % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
            fold(
                memory,
                (slot, slot, slot),
                (boundary, TOKENS),
                heads,
                v,
                KEY_HEADS,
                HEADS,
                sizes[2],
                VALUE_DIM,
                RING,
                TOKENS,
            )
        tl.debug_barrier()  # the program reads what its other threads have written
        boundary += TOKENS
    return boundary
