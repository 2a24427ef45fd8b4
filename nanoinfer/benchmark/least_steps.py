"""The fewest steps that a workload needs within an engine's limits, and what those steps compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanoinfer.attention.cache_layout import CacheGroup
from nanoinfer.benchmark.workloads import Workload


@dataclass(frozen=True)
class Limits:
    """What an engine holds and does at once.

    rows: sequences of a decode step; tokens: of a prefill step
    blocks: of the KV cache; groups: of layers, which hold them
    """

    rows: int
    tokens: int
    blocks: int
    groups: tuple[CacheGroup, ...]


@dataclass(frozen=True)
class StepSum:
    """Some steps, added up.

    count: how many they are; rows: the tokens that they compute
    expert_reads: how often they read all experts, in sum: a step of r rows that use the share u reads 1 - (1 - u)^r
    """

    count: int
    rows: int
    expert_reads: float


def decode_steps(work: Workload, limits: Limits, used: float) -> list[StepSum]:
    """Return the decode steps of a workload, those with equally many rows together.

    used: the share of the experts that a row uses

    If there are rows and blocks for all sequences at once, they begin together, and each step's rows are known.
    Else the steps are one sum, which no order of the sequences falls short of. Of the reads there are two bounds. A row
    costs the fewest in a full step. And a step with all blocks in use has at least as many rows as the longest
    sequences would need to fill these. Reads grow ever slower with the rows. So a step with a share of the blocks in
    use has at least this share of those rows' reads.
    """
    rows, held, most = _begun_together(work, limits.groups)
    total, longest = int(rows.sum()), len(rows)
    shared = work.prefixes * sum(work.prefix_len // group.block_size for group in limits.groups if not group.window)
    room = limits.blocks - shared
    if not longest or (rows[0] <= limits.rows and held.max() <= room):
        counts = zip(*np.unique(rows, return_counts=True), strict=True)
        return [StepSum(int(n), int(n * r), float(n * _share_read(r, used))) for r, n in counts]
    crowded = float(held.sum() / room)  # so many steps have all blocks in use
    count = max(longest, math.ceil(total / limits.rows), math.ceil(crowded))
    return [
        StepSum(count, total, max(_least_reads(total, limits.rows, used), crowded * _share_read(room / most, used)))
    ]


def prefill_steps(work: Workload, limits: Limits, used: float) -> StepSum:
    """Return the fewest prefill steps of a workload, added up; a shared prefix is computed once.

    used: the share of the experts that a token uses
    """
    tokens = work.tokens_in - work.prefix_len * (len(work.prompts) - work.prefixes)
    return StepSum(math.ceil(tokens / limits.tokens), tokens, _least_reads(tokens, limits.tokens, used))


def _begun_together(work: Workload, groups: Sequence[CacheGroup]) -> tuple[np.ndarray, np.ndarray, int]:
    """Return each decode step's rows and held blocks, if all sequences begin at once, and the most blocks of a row.

    Blocks of a prefix that requests share are left out. Those of a prompt that samples share count once, or, where
    layers have a window and so give them back, not at all.
    """
    longest = max(0, max(work.output_lens) - 1)  # prefill gives each sequence its first token
    rows, held, most = np.zeros(longest, int), np.zeros(longest, int), 1
    for prompt, out in zip(work.prompts, work.output_lens, strict=True):
        lengths = len(prompt) + np.arange(1, out)
        own, common = np.zeros_like(lengths), 0
        for group in groups:
            size, window = group.block_size, group.window
            prefix = work.prefix_len // size
            shared = prefix if work.samples == 1 else len(prompt) // size
            left = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0) // size
            own += -(-lengths // size) - np.maximum(left, shared)
            common += 0 if window else shared - prefix
        rows[: out - 1] += work.samples
        held[: out - 1] += work.samples * own + common
        most = max(most, common + int(own.max(initial=0)))
    return rows, held, most


def _share_read(rows: float, used: float) -> float:
    """Return the share of the experts that a step reads, if each row uses this share of them, and all of them alike."""
    return 1 - (1 - used) ** rows


def _least_reads(rows: int, most: int, used: float) -> float:
    """Return how often steps of at most so many rows read all experts: full steps and one with the rest read least."""
    full, rest = divmod(rows, most)
    return full * _share_read(most, used) + _share_read(rest, used)
