"""Attention of one new token a sequence on the CPU: few calls, and few keys are copied.

A row's context lies in blocks of the cache. Its query attends to each block by itself, and the log-sum-exps of the
scores weigh the row's results against each other (as in Flash-Decoding: Dao et al., 2023). So neighbouring blocks of
the cache, of whatever rows, are one tensor, and one call attends to all of them. Blocks that lie apart and hold little
are copied side by side for one call: where blocks come and go, those of running rows have few neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from nanoinfer.kernels.attention.fp8 import read
from nanoinfer.kernels.attention.scores import Bias, scores_of, softmax_with_sinks
from nanoinfer.kernels.fp8 import as_bytes

SPARE_KEYS = 64  # one more call costs as much as so many masked keys: a block joins a run if it adds no more
COPIED_NUMBERS = 1 << 16  # or as much as to copy so many numbers of keys, and as many of values

# A row, where the keys of a block that it sees begin and end, and its query's place, from the block's first key on
Span = tuple[int, int, int, int]
Blocks = list[tuple[int, list[Span]]]  # of a run, each with its spans


@dataclass
class Run:
    """Neighbouring blocks of the cache, or blocks that are copied; the same number of rows reads each of them.

    copied: [blocks] int64; None: the blocks from `first` on
    group: for each block, the spans of its readers
    rows: [blocks, readers] int64, the rows that read each block
    mask: [blocks, readers, keys] bool, True where a row sees a key; None: everywhere
    """

    first: int  # block
    copied: Tensor | None
    begin: int  # of the keys in each block that are read
    end: int
    group: tuple[list[Span], ...]
    rows: Tensor
    mask: Tensor | None

    def of(self, cache: Tensor) -> Tensor:
        """Return the run's keys or values as [blocks, kv_heads, keys, head_dim]; cache: see paged_decode_cpu."""
        keys = cache[:, self.begin : self.end].transpose(1, 2)
        if self.copied is None:
            return keys[self.first : self.first + len(self.rows)]
        return as_bytes(keys).index_select(0, self.copied).view(cache.dtype)

    @cached_property
    def distances(self) -> Tensor:
        """The keys' positions less that of each reader's query, [blocks, readers, keys] float32."""
        queries = torch.tensor([[query for _, _, _, query in readers] for readers in self.group])
        return (torch.arange(self.begin, self.end) - queries[..., None]).float()


@dataclass(slots=True)
class RunPlan:
    """The runs of a decode step, and the rows of their results; all layers with one window share a plan.

    rows: [results] int64, the row of each result of attention, run after run
    results: [rows, most] int64, the other way round: the results of each row; 0 fills a row that has fewer than `most`
    places: [results] int64, where each result stands in `results`, flattened
    absent: [rows, most] bool, True where 0 fills `results`; None: nowhere
    """

    runs: list[Run]
    rows: Tensor
    results: Tensor
    places: Tensor
    absent: Tensor | None

    @property
    def is_split(self) -> bool:
        """Whether some row has several results."""
        return self.results.shape[1] > 1


def plan_runs(
    block_tables: Tensor,
    context_lens: Tensor,
    block_size: int,
    window: int | None,
    are_neighbours: bool = True,
    key_numbers: int = COPIED_NUMBERS,
) -> RunPlan:
    """Sort the blocks that a decode step reads by their place in the cache, and cut them into runs.

    block_tables: [rows, max blocks] int32; context_lens: [rows] int32, at least 1
    window: how many tokens a query sees, the last of its context; None: all
    are_neighbours: no other layer's keys are between block b and block b + 1; else no run is of neighbours
    key_numbers: in the keys of a token
    """
    spans = _spans(block_tables, context_lens.tolist(), block_size, window)
    whole, small = list[Blocks](), list[Blocks]()
    for blocks in _cut(sorted(spans.items()), lambda last, block: are_neighbours and block == last + 1):
        num_keys = sum(end - begin for _, readers in blocks for _, begin, end, _ in readers[:1])
        (small if num_keys * key_numbers <= COPIED_NUMBERS else whole).append(blocks)
    if len(small) > 1:
        by_length = sorted(chain.from_iterable(small), key=lambda block: (len(block[1]), block[1][0][1:3]))
        small = list(_cut(by_length, lambda last, block: True))
    runs = [_run(blocks) for blocks in chain(whole, small)]
    rows = [row for blocks in chain(whole, small) for _, readers in blocks for row, *_ in readers]
    return _plan(runs, rows, len(context_lens))


def _spans(block_tables: Tensor, lens: list[int], block_size: int, window: int | None) -> dict[int, list[Span]]:
    """List the spans of each block that is read."""
    tables = block_tables[:, : -(-max(lens) // block_size)].tolist()
    spans: dict[int, list[Span]] = {}
    for row, (table, end) in enumerate(zip(tables, lens, strict=True)):
        begin = 0 if window is None else max(0, end - window)
        for column in range(begin // block_size, -(-end // block_size)):
            start = column * block_size
            span = row, max(0, begin - start), min(block_size, end - start), end - 1 - start
            spans.setdefault(table[column], []).append(span)
    return spans


def _cut(blocks: Iterable[tuple[int, list[Span]]], may_follow: Callable[[int, int], bool]) -> Iterator[Blocks]:
    """Cut blocks, each with its spans, into runs; may_follow: whether a run may hold a block behind another."""
    run: Blocks = []
    begin = end = 0
    for block, readers in blocks:
        low, high = min(span[1] for span in readers), max(span[2] for span in readers)
        new_begin, new_end = min(begin, low), max(end, high)
        spare = (len(run) + 1) * (new_end - new_begin) - len(run) * (end - begin) - (high - low)
        joins = run and may_follow(run[-1][0], block) and len(readers) == len(run[0][1])
        if joins and spare * len(readers) <= SPARE_KEYS:
            run.append((block, readers))
            begin, end = new_begin, new_end
        else:
            if run:
                yield run
            run, begin, end = [(block, readers)], low, high
    yield run


def _run(blocks: Blocks) -> Run:
    numbers, group = zip(*blocks, strict=True)
    first, are_neighbours = numbers[0], numbers == tuple(range(numbers[0], numbers[0] + len(numbers)))
    copied = None if are_neighbours else torch.tensor(numbers)
    begins, ends = ({span[i] for readers in group for span in readers} for i in (1, 2))
    begin, end = min(begins), max(ends)
    rows = torch.tensor([[row for row, *_ in readers] for readers in group])
    if len(begins) == len(ends) == 1:
        return Run(first, copied, begin, end, group, rows, None)
    keys = torch.arange(begin, end)
    bounds = torch.tensor(group)
    mask = (keys >= bounds[..., 1:2]) & (keys < bounds[..., 2:3])
    return Run(first, copied, begin, end, group, rows, mask)


def _plan(runs: list[Run], rows: list[int], num_rows: int) -> RunPlan:
    """Find the results of each row; rows: the row of each result."""
    counts = [0] * num_rows
    columns = []  # of each result in `results`
    for row in rows:
        columns.append(counts[row])
        counts[row] += 1
    most = max(counts)
    row_of = torch.tensor(rows)
    places = row_of * most + torch.tensor(columns)
    results = torch.full((num_rows * most,), -1).index_copy_(0, places, torch.arange(len(rows))).view(-1, most)
    absent = None if len(rows) == results.numel() else results < 0
    return RunPlan(runs, row_of, results.clamp_(min=0), places, absent)


def paged_decode_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: RunPlan,
    scale: float,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attend from each row's one query to its context, as paged_decode_reference does.

    q: [rows, heads, head_dim]; plan: from plan_runs
    k_cache, v_cache: [blocks, block_size, kv_heads, head_dim]. In memory the keys of a head are neighbours, or torch
        copies every key. Values may be shorter
    kv_scales: [2] float32, the scale of the keys and that of the values in a cache of FP8 (see fp8.py)
    sinks, slopes: as for paged_decode_reference
    Returns [rows, heads, numbers of a value].
    """
    kv_heads = k_cache.shape[2]
    grouped = q.unflatten(1, (kv_heads, -1))  # one KV head's query heads stand as its queries
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales

    def attend(run: Run) -> tuple[Tensor, Tensor, Tensor]:
        k, v = read(run.of(k_cache), q.dtype, k_scale), read(run.of(v_cache), q.dtype, v_scale)
        bias = None if slopes is None else Bias(slopes.view(kv_heads, -1), run.distances[:, :, None, None])
        return _attend(grouped[run.rows], k, v, run, scale, softcap, bias)

    attended = list(map(attend, plan.runs))
    outs = torch.cat([out.flatten(0, 1) for out, _, _ in attended])
    if not plan.is_split and sinks is None:
        return outs.index_select(0, plan.results[:, 0]).flatten(1, 2)
    # The largest weight of a query is at least 1 / keys, so its logarithm is finite.
    lses = [(scores.amax(-1) - weights.amax(-1).log()).flatten(0, 1) for _, scores, weights in attended]
    padded = torch.cat(lses)[plan.results]
    if plan.absent is not None:
        padded.masked_fill_(plan.absent[:, :, None, None], float("-inf"))
    of_heads = None if sinks is None else sinks.view(kv_heads, -1)
    shares = softmax_with_sinks(padded, of_heads, dim=1).flatten(0, 1)[plan.places]
    weighted = outs * shares.unsqueeze(-1).to(outs.dtype)
    return outs.new_zeros(len(q), *outs.shape[1:]).index_add_(0, plan.rows, weighted).flatten(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float, softcap: float | None, bias: Bias | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q: [blocks, readers, kv_heads, group, head_dim]; k, v: [blocks, kv_heads, keys, head_dim].

    Returns a value for each query, the scores and the weights, keys last.
    """
    readers = q.shape[1]
    scores = scores_of(q.transpose(1, 2).flatten(2, 3), k, scale, softcap).unflatten(2, (readers, -1)).transpose(1, 2)
    if bias is not None:
        bias.add_to(scores)
    if run.mask is not None:
        scores.masked_fill_(~run.mask[:, :, None, None], float("-inf"))
    weights = scores.softmax(dim=-1)
    of_block = weights.to(v.dtype).transpose(1, 2).flatten(2, 3)
    out = (of_block @ v).unflatten(2, (readers, -1)).transpose(1, 2)
    if run.mask is not None and out.isnan().any():
        # Another sequence may have left NaN or an infinity in a masked place, and 0 times that is NaN.
        out = weights.to(v.dtype) @ v.unsqueeze(1).where(run.mask[:, :, None, :, None], 0)
    return out, scores, weights
