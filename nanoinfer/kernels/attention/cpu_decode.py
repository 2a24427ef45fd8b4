"""Attention of one new token a sequence on the CPU: few calls, and no key is copied.

A row's context lies in blocks of the cache. Attention goes over each block for itself, and the log-sum-exps weigh the
results of a row against each other (as in Flash-Decoding: Dao et al., 2023). So blocks of different rows that are
neighbours in the cache are one strided tensor, and one call attends to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoinfer.kernels.attention.scores import capped_scores

SPARE_KEYS = 64  # a call costs as much as these: so many masked keys may come with a block that joins a run


@dataclass(slots=True)
class Run:
    """Blocks side by side in the cache, each with the one row that reads it; or one block that several rows read.

    rows: [blocks] int64
    mask: [blocks, 1, 1, keys] bool, True where a row sees a key; None: everywhere
    """

    first: int  # block
    step: int  # to the next row's block: 1, or 0 if all read the first
    begin: int  # of the keys in each block that are read
    end: int
    rows: Tensor
    mask: Tensor | None

    def of(self, cache: Tensor) -> Tensor:
        """The keys or values of [blocks, block_size, kv_heads, head_dim]: [rows, kv_heads, keys, head_dim], a view."""
        count = len(self.rows)
        blocks = cache[self.first : self.first + self.step * (count - 1) + 1, self.begin : self.end]
        return blocks.transpose(1, 2).expand(count, -1, -1, -1)

    def split(self) -> Iterator[Run]:
        """A run of each row's own keys."""
        assert self.mask is not None
        for index, (row, seen) in enumerate(zip(self.rows.split(1), self.mask.flatten(1), strict=True)):
            keys = seen.nonzero() + self.begin
            yield Run(self.first + index * self.step, 1, int(keys[0]), int(keys[-1]) + 1, row, None)


@dataclass(slots=True)
class RunPlan:
    """Who reads what in a decode step; the same for all layers of one window.

    rows: [pieces] int64, whose each piece of attention is, in the order of the runs
    is_split: whether some row has several pieces
    """

    runs: list[Run]
    rows: Tensor
    is_split: bool


def plan_runs(block_tables: Tensor, context_lens: Tensor, block_size: int, window: int | None) -> RunPlan:
    """Lay the blocks that a decode step reads in the order of the cache, and cut them into runs.

    block_tables: [rows, max blocks] int32; context_lens: [rows] int32, at least 1
    window: how many tokens a query sees, the last of its context; None: all
    """
    tables, ends = block_tables.numpy(), context_lens.numpy()
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    skipped = begins // block_size
    counts = -(-ends // block_size) - skipped
    rows = np.repeat(np.arange(len(ends)), counts)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - skipped, counts)
    blocks = tables[rows, columns]
    order = np.argsort(blocks, kind="stable")
    rows, columns, blocks = rows[order], columns[order], blocks[order]
    begins = np.maximum(begins[rows] - columns * block_size, 0)
    ends = np.minimum(ends[rows] - columns * block_size, block_size)
    is_split = len(rows) > len(context_lens)
    return RunPlan(_cut(blocks, begins, ends, rows), torch.from_numpy(rows), is_split)


def _cut(blocks: np.ndarray, begins: np.ndarray, ends: np.ndarray, rows: np.ndarray) -> list[Run]:
    """Runs of pieces whose blocks come in their order, and of whose blocks the keys from begins to ends are seen."""
    spans = list(zip(blocks.tolist(), begins.tolist(), ends.tolist(), strict=True))
    runs = []
    start = 0
    while start < len(spans):
        first, begin, end = spans[start]
        stop, step = start + 1, 1
        for block, block_begin, block_end in spans[stop:]:
            new_step = block - spans[stop - 1][0]
            new_begin, new_end = min(begin, block_begin), max(end, block_end)
            count = stop - start
            more = (count + 1) * (new_end - new_begin) - count * (end - begin) - (block_end - block_begin)
            if new_step > 1 or (count > 1 and new_step != step) or more > SPARE_KEYS:
                break
            stop, step, begin, end = stop + 1, new_step, new_begin, new_end
        mask = _what_is_seen(begins[start:stop], ends[start:stop], begin, end)
        runs.append(Run(first, step, begin, end, torch.from_numpy(rows[start:stop]), mask))
        start = stop
    return runs


def _what_is_seen(begins: np.ndarray, ends: np.ndarray, begin: int, end: int) -> Tensor | None:
    if (begins == begin).all() and (ends == end).all():
        return None
    keys = np.arange(begin, end)
    seen = (keys >= begins[:, None]) & (keys < ends[:, None])
    return torch.from_numpy(seen)[:, None, None]


def paged_decode_cpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: RunPlan, scale: float, softcap: float | None = None
) -> Tensor:
    """Attend from each row's one query to its context, as paged_decode_reference does.

    q: [rows, heads, head_dim]; k_cache, v_cache: [blocks, block_size, kv_heads, head_dim]
    Returns [rows, heads, head_dim].
    """
    kv_heads = k_cache.shape[2]
    grouped = q.unflatten(1, (kv_heads, -1))  # the query heads of one KV head stand as its queries
    pieces = [_attend(grouped[run.rows], k_cache, v_cache, run, scale, softcap) for run in plan.runs]
    out = torch.cat([out for out, _ in pieces])
    if not plan.is_split:
        return torch.empty_like(grouped).index_copy_(0, plan.rows, out).flatten(1, 2)
    sums = torch.cat([log_sums for _, log_sums in pieces])
    index = plan.rows[:, None, None].expand_as(sums)
    most = sums.new_full(grouped.shape[:3], float("-inf")).scatter_reduce_(0, index, sums, "amax")
    weights = (sums - most[plan.rows]).exp()
    total = torch.zeros_like(most).index_add_(0, plan.rows, weights)
    weighted = out * (weights / total[plan.rows]).unsqueeze(-1).to(out.dtype)
    return torch.zeros_like(grouped).index_add_(0, plan.rows, weighted).flatten(1, 2)


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, run: Run, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """q: [rows, kv_heads, queries, head_dim]; returns the same, and the scores' log-sum-exps without the last."""
    k, v, mask = run.of(k_cache), run.of(v_cache), run.mask
    if softcap is None:
        bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    else:
        scores = capped_scores(q, k, mask, scale, softcap)
        out, sums = scores.softmax(dim=-1).to(v.dtype) @ v, scores.logsumexp(dim=-1)
    if mask is None or not out.isnan().any():
        return out, sums
    # A masked key may be what another sequence left, and no number: each row reads its own keys alone.
    alone = [
        _attend(row, k_cache, v_cache, part, scale, softcap) for row, part in zip(q.split(1), run.split(), strict=True)
    ]
    return torch.cat([out for out, _ in alone]), torch.cat([sums for _, sums in alone])
