"""Walk: how the programs of a decode step divide the matrices of a key head, which they go through part after part."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.kernels.launch import cdiv, next_power_of_2, num_multiprocessors
from nanoinfer.kernels.states.memory import Recurrence, StateRows

NUMBERS = 4096  # of a matrix, in a part
EACH = 8  # parts of a program, if that leaves enough programs
LEAST_PROGRAMS = 2  # of a multiprocessor, for that


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
        count = len(rows.slots)
        heads, key_dim, value_dim = recurrence.matrices.shape[1:]
        keys = max(16, next_power_of_2(key_dim))
        values = max(16, min(NUMBERS // keys, next_power_of_2(value_dim)))
        parts = heads // recurrence.key_heads * cdiv(value_dim, values)
        programs = count * recurrence.key_heads * cdiv(parts, EACH)
        has_many = programs >= LEAST_PROGRAMS * num_multiprocessors(recurrence.matrices.device)
        each, stages = (EACH, 3) if has_many else (1, 1)
        return cls(
            (cdiv(parts, each), recurrence.key_heads, count), keys, values, each, stages, 2 if rows.first is None else 4
        )
