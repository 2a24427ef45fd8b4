"""Walk: how the programs of a decode step divide the matrices of a key head, which they go through part after part.

Inside kernels: what a program reads before its parts, and of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from nanoinfer.kernels.launch import cdiv, load_complete, next_power_of_2, num_multiprocessors
from nanoinfer.kernels.states.fold import fold_parts
from nanoinfer.kernels.states.memory import Recurrence, StateRows

NUMBERS = 4096  # of a matrix, in a part
EACH = 8  # parts of a program, at most
AT_ONCE = 2  # programs of a multiprocessor


@dataclass(frozen=True)
class Walk:
    """How many programs have a key head of a row. What they add up, and in which order, depends on no number of rows.

    grid: of these programs, key heads, and rows
    keys, values: of a part, powers of two; each: a program has so many parts; stages: in shared memory at a time
    """

    grid: tuple[int, int, int]
    keys: int
    values: int
    each: int
    stages: int
    warps: int

    @classmethod
    def of(cls, recurrence: Recurrence, rows: StateRows) -> Walk:
        """Return the walk of a step's rows."""
        count, heads = len(rows.slots), recurrence.key_heads
        of_key_head, key_dim, value_dim = recurrence.matrices.shape[1] // heads, *recurrence.matrices.shape[2:]
        keys = max(16, next_power_of_2(key_dim))
        values = max(16, min(NUMBERS // keys, next_power_of_2(value_dim)))
        parts = of_key_head * cdiv(value_dim, values)
        most = AT_ONCE * num_multiprocessors(recurrence.matrices.device)  # of programs that run at once
        if rows.first is None:
            each, stages, warps = (EACH, 3, 2) if count * heads * cdiv(parts, EACH) >= most else (1, 1, 2)
        else:  # each program computes anew what its tokens and the keys have in common
            fitting = (each for each in (1, 2, 4) if count * heads * cdiv(parts, each) <= most)
            each = next(fitting, EACH)
            stages, warps = min(each, 2), 4
        return cls((cdiv(parts, each), heads, count), keys, values, each, stages, warps)


@triton.jit
def begin_walk(
    at_row,
    memory,
    key_head,
    k,
    parts,
    sizes: tl.constexpr,
    RING: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Fold what is due in a program's parts of a row, before the wait; returns what stands beside them.

    at_row: the row, and the pointers of StateRows' slots, positions and boundaries; memory, parts, sizes: as for
        fold_parts; k: [keys] of a key
    Returns the slot, int64, the last token's position, how many tokens stand beside the matrices, their entries among
    those of all rings, [TOKENS], which of these there are, and their keys, [TOKENS, keys].
    """
    row, slots_ptr, positions_ptr, boundaries_ptr = at_row
    KEY_HEADS: tl.constexpr = sizes[0]
    KEY_DIM: tl.constexpr = sizes[2]
    slot = load_complete(slots_ptr + row).to(tl.int64)
    position, boundary = load_complete(positions_ptr + row), load_complete(boundaries_ptr + row)
    boundary = fold_parts(memory, slot, position, boundary, key_head, parts, sizes, RING, TOKENS, BLOCK_V)
    t = tl.arange(0, TOKENS)
    count = tl.where(slot >= 0, position - boundary, 0)
    entry = slot * RING + (boundary + t) % RING
    known = t < count
    keys_ptrs = memory[1] + (entry[:, None] * KEY_HEADS + key_head) * KEY_DIM + k
    keys = load_complete(keys_ptrs, known[:, None] & (k < KEY_DIM), 0.0)
    return slot, position, count, entry, known, keys


@triton.jit
def read_part(memory, beside, head, k, v, has_v, sizes: tl.constexpr):
    """Return some values of a head's matrix, and of the updates of the tokens beside it.

    beside: what begin_walk returns, but for the keys; k: [keys]; v, has_v: [values], and which of them there are
    """
    matrices_ptr, _, updates_ptr, _ = memory
    slot, _, _, entry, known = beside
    HEADS: tl.constexpr = sizes[1]
    KEY_DIM: tl.constexpr = sizes[2]
    VALUE_DIM: tl.constexpr = sizes[3]
    matrix_ptrs = matrices_ptr + ((slot * HEADS + head) * KEY_DIM + k[:, None]) * VALUE_DIM + v
    matrix = tl.load(matrix_ptrs, mask=(k < KEY_DIM)[:, None] & has_v, other=0.0).to(tl.float32)
    updates_ptrs = updates_ptr + (entry[:, None] * HEADS + head) * VALUE_DIM + v
    return matrix, tl.load(updates_ptrs, mask=known[:, None] & has_v, other=0.0)


@triton.jit
def read_decays(memory, beside, head, sizes: tl.constexpr, RING: tl.constexpr):
    """Return the logarithms of a head's decays up to each of the tokens beside a matrix, and up to the last of them.

    beside: as for read_part
    """
    slot, position, count, entry, known = beside
    HEADS: tl.constexpr = sizes[1]
    so_far = tl.load(memory[3] + entry * HEADS + head, mask=known, other=0.0)
    last_ptr = memory[3] + (slot * RING + (position + RING - 1) % RING) * HEADS + head
    return so_far, tl.load(last_ptr, mask=count > 0, other=0.0)
