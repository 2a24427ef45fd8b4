"""Who reads what of the prefixes that several rows share in decode attention."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import (
    can_launch_early,
    launch_options,
    next_power_of_2,
    num_multiprocessors,
    wait_for_predecessor,
)

TILE_QUERIES = 64  # of a tile of work; tensor cores multiply so many at once
TILE_FIELDS = 5
MIN_ROWS = 4  # that share a prefix: fewer would gain too little
MOST_QUERIES = 256  # of a step that verifies guesses, whatever it has: the kernel compiles once
LEAST_TOKENS = 512  # of a tile of work: more results take a row longer to put together
TOKENS_TOGETHER = 128  # the parts of a run, except its last, have a multiple of so many tokens
PROGRAMS_PER_MULTIPROCESSOR = 2
HEAD_START = 3 / 4  # tokens that a program reads while another attends to a shared one (measured on an H200)
# Partial results of a row: those of all rows together take memory, and few rows need many programs.
MANY_RESULTS, MOST_PARTS_OF_MANY_ROWS, LEAST_PARTS = 4096, 8, 2
FEW_RESULTS, LEAST_ROWS = 512, 16

Run = tuple[int, int, int, int]  # the first place in the order, the rows, the first block, the block behind the last


class SharedPrefixes:
    """The shared prefixes of a decode step, cut into tiles of work; on the device, at addresses that stay.

    A tile of work is some neighbouring tokens, and up to TILE_QUERIES queries of the rows that share them. Each tile
    gives its rows a partial result. A row reads the other keys of its context by itself.

    workers: programs for each KV head that compute the tiles
    leaves_room: programs that read the rows' own keys run beside them
    order: [rows] int32, the rows; those that share tokens are neighbours
    own_starts: [rows] int32, for each row, the first token that it reads by itself, a multiple of the block size
    num_parts: [rows] int32, how many partial results each row has
    head_start: [1] int32, how many tokens a program that reads own keys meanwhile has read when the tiles are computed
    tiles: [most, TILE_FIELDS] int32: first place in the order, number of rows, first token, token behind the last, and
        the number of the partial result
    num_tiles: [1] int32
    """

    def __init__(self, max_rows: int, heads: int, k_cache: Tensor, has_latents: bool = False) -> None:
        """heads: of the queries; k_cache: [blocks, block_size, kv_heads, head_dim], any layer's

        has_latents: the programs that read the rows' own keys take all room, and begin when these end
        """
        _, self.block_size, kv_heads, _ = k_cache.shape
        self.tile_rows = rows_of_a_tile(heads // kv_heads)
        # Where it can, decode attention starts meanwhile, and has the other program's place. But while one program
        # converts numbers in FP8, another is to multiply.
        self.leaves_room = can_launch_early(k_cache.device) and k_cache.dtype != FP8 and not has_latents
        per_multiprocessor = 1 if self.leaves_room or has_latents else PROGRAMS_PER_MULTIPROCESSOR
        programs = per_multiprocessor * num_multiprocessors(k_cache.device)
        self.workers = max(1, programs // kv_heads)
        self.max_tiles = max(MANY_RESULTS, LEAST_PARTS * max_rows)
        sizes = [max_rows, max_rows, max_rows, 1, 1, self.max_tiles * TILE_FIELDS]
        self._packed = torch.zeros(sum(sizes), dtype=torch.int32, device=k_cache.device)
        fields = self._packed.split(sizes)
        self.order, self.own_starts, self.num_parts, self.head_start, self.num_tiles, tiles = fields
        self.tiles = tiles.view(-1, TILE_FIELDS)

    def pack(self, order: Sequence[int], runs: Sequence[Run]) -> array[int]:
        """Cut runs into tiles of work; returns what `fill` takes.

        runs: blocks that rows share; a row's follow one another from its first block on
        """
        max_rows, most_parts = len(self.order), max_parts(len(order))
        own_starts, num_parts = array("i", bytes(4 * max_rows)), array("i", bytes(4 * max_rows))
        tiles, longest = array("i"), 0
        share, alone = self._shares(runs)
        goes_on = set(_parents(order, runs))
        for first, rows, start_block, end_block in runs:
            start, end = start_block * self.block_size, end_block * self.block_size
            members = order[first : first + rows]
            before = num_parts[members[0]]
            most = most_parts - before
            if (first, start_block) in goes_on:
                most = -(-most // 2)  # the runs behind need some
            if own_starts[members[0]] != start or most == 0:
                continue
            parts = list(_cut(start, end, share, most))
            if parts[0][1] - start > alone:
                continue  # few programs would read for long: the rows read it, and what follows, by themselves
            longest = max(longest, parts[0][1] - start)
            for part, (part_start, part_end) in enumerate(parts, before):
                for place in range(first, first + rows, self.tile_rows):
                    tiles.extend((place, min(self.tile_rows, first + rows - place), part_start, part_end, part))
            for row in members:
                own_starts[row], num_parts[row] = end, before + len(parts)
        num_tiles = len(tiles) // TILE_FIELDS
        assert num_tiles <= self.max_tiles
        padded = array("i", order) + array("i", bytes(4 * (max_rows - len(order))))
        head_start = int(-(-num_tiles // self.workers) * longest * HEAD_START) if self.leaves_room else 0
        return padded + own_starts + num_parts + array("i", [head_start, num_tiles]) + tiles

    def _shares(self, runs: Sequence[Run]) -> tuple[int, int]:
        """Return how many tokens a tile of work should have, so that programs get equally many; and how many tokens a
        program reads where nothing is shared.
        """
        in_tiles = sum(-(-rows // self.tile_rows) * (end - start) for _, rows, start, end in runs)
        in_rows = sum(rows * (end - start) for _, rows, start, end in runs)
        share, alone = (-(-blocks * self.block_size // self.workers) for blocks in (in_tiles, in_rows))
        return max(share, LEAST_TOKENS), max(alone, LEAST_TOKENS)

    def fill(self, packed: Tensor) -> None:
        """Write what `pack` has returned; packed: on the same device."""
        self._packed[: len(packed)] = packed


class SharedQueries(NamedTuple):
    """The queries of a step that verifies guesses, as the tiles of its SharedPrefixes find them.

    order: [tokens] int32, the step's tokens, row after row, in the order that SharedPrefixes has for rows
    starts: [rows + 1] int32, where the tokens of each of these rows begin, and where those of the last end
    num_parts: [tokens] int32, how many partial results each has; 0 without a token
    """

    order: Tensor
    starts: Tensor
    num_parts: Tensor


def share_queries(
    prefixes: SharedPrefixes, context_lens: Tensor, row_of: Tensor, first: Tensor, counts: Tensor, most: int
) -> SharedQueries:
    """Find the queries that share each prefix; most: guesses of a row.

    context_lens, row_of: [tokens] int32, how many keys a token sees, 0 without a token; and whose it is. The rows' last
        tokens come first
    first, counts: [rows] int32, as for bundles.bundle
    """
    function = share_queries_triton if row_of.is_cuda else share_queries_reference
    return function(prefixes, context_lens, row_of, first, counts, most)


def share_queries_reference(
    prefixes: SharedPrefixes, context_lens: Tensor, row_of: Tensor, first: Tensor, counts: Tensor, most: int
) -> SharedQueries:
    """share_queries in torch."""
    rows, query = len(counts), torch.arange(most + 1, dtype=torch.int32, device=counts.device)
    order = prefixes.order[:rows]
    ends = (counts + 1).where(context_lens[:rows] > 0, 0)[order]
    tokens = order[:, None].where(query == 0, rows + first[order][:, None] + query - 1)[query < ends[:, None]]
    padded = torch.cat([tokens, tokens.new_zeros(len(row_of))])[: len(row_of)]
    starts = torch.cat([ends.new_zeros(1), ends.cumsum(0, dtype=torch.int32)])
    return SharedQueries(padded, starts, prefixes.num_parts[row_of].where(context_lens > 0, 0))


def share_queries_triton(
    prefixes: SharedPrefixes, context_lens: Tensor, row_of: Tensor, first: Tensor, counts: Tensor, most: int
) -> SharedQueries:
    """share_queries as one launch, of one program."""
    rows, tokens = len(counts), len(row_of)
    order, num_parts = torch.empty_like(row_of), torch.empty_like(row_of)
    shared = SharedQueries(order, torch.empty(rows + 1, dtype=torch.int32, device=row_of.device), num_parts)
    assert tokens <= MOST_QUERIES, tokens
    _share_kernel[(1,)](
        prefixes.order,
        prefixes.num_parts,
        context_lens,
        row_of,
        first,
        counts,
        *shared,
        rows,
        tokens,
        MOST=most,
        BLOCK=MOST_QUERIES,
        **launch_options(row_of),
    )
    return shared


@triton.jit(do_not_specialize=["rows", "tokens"])
def _share_kernel(
    row_order_ptr,
    row_parts_ptr,
    context_lens_ptr,
    row_of_ptr,
    first_ptr,
    counts_ptr,
    order_ptr,
    starts_ptr,
    num_parts_ptr,
    rows,
    tokens,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    i = tl.arange(0, BLOCK)
    row = tl.load(row_order_ptr + i, mask=i < rows, other=0)
    has_token = tl.load(context_lens_ptr + row, mask=i < rows, other=0) > 0
    count = tl.where(has_token, tl.load(counts_ptr + row, mask=i < rows, other=0) + 1, 0)
    end = tl.cumsum(count, 0)
    begin = end - count
    tl.store(starts_ptr + i, begin, mask=i <= rows)
    behind = rows + tl.load(first_ptr + row, mask=i < rows, other=0) - 1
    for query in tl.static_range(MOST + 1):
        token = row if query == 0 else behind + query
        tl.store(order_ptr + begin + query, token, mask=(query < count) & (begin + query < tokens))
    token_len = tl.load(context_lens_ptr + i, mask=i < tokens, other=0)
    parts = tl.load(row_parts_ptr + tl.load(row_of_ptr + i, mask=i < tokens, other=0))
    tl.store(num_parts_ptr + i, tl.where(token_len > 0, parts, 0), mask=i < tokens)


def rows_of_a_tile(group: int) -> int:
    """Return how many rows share a tile of work; group: query heads that share a KV head."""
    return max(1, TILE_QUERIES // group)


def max_parts(rows: int) -> int:
    """Return the most partial results that a row may have, in a step of so many rows.

    It is the same for all numbers of rows up to the next power of two: a captured step may have more rows.
    """
    rows = max(LEAST_ROWS, next_power_of_2(rows))
    return max(FEW_RESULTS // rows, min(MOST_PARTS_OF_MANY_ROWS, MANY_RESULTS // rows), LEAST_PARTS)


def _parents(order: Sequence[int], runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """Yield the first place and the first block of each run that others go on behind."""
    newest: dict[int, Run] = {}  # by row
    for run in runs:
        first, rows, start, _ = run
        if start > 0:
            yield newest[order[first]][0], newest[order[first]][2]
        newest.update(dict.fromkeys(order[first : first + rows], run))


def _cut(start: int, end: int, share: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut tokens into as many parts as have `share` tokens, and at most so many; no part is longer than the first."""
    parts = min(max(1, (end - start) // share), most)
    size = -(-(end - start) // (parts * TOKENS_TOGETHER)) * TOKENS_TOGETHER
    for first in range(start, end, size):
        yield first, min(first + size, end)
