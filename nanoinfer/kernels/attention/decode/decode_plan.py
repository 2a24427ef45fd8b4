"""Who reads what in decode attention: a plan that gives programs such shares of the keys that all end together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.decode.bundles import Bundles
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import (
    RESERVED_BYTES,
    cdiv,
    launch_options,
    next_power_of_2,
    num_multiprocessors,
    shared_memory,
    wait_for_predecessor,
)

MAX_TILE = 128  # keys
TILE_BYTES = 32 << 10  # of keys in shared memory, and as many of values
FEW_ROWS = 64  # up to here, half tiles, loaded one whole tile further ahead, are faster (measured on an H200)
MANY_ROWS = 512
# What a row's workers leave to the last of them grows with the queries of a bundle (calculated for an H100).
LEAST_WORKERS, PROGRAMS_OF_A_BUNDLE = 8, 64


class Programs(NamedTuple):
    """How the programs of a decode step run.

    tile: keys; stages: of the loop over the tiles: read the block table, load the keys, use them
    warps: of a program; per_multiprocessor: programs
    registers: of a thread, at most, so that so many programs fit; None: as many as the compiler likes
    make_way: the next kernel starts while they attend, because they leave the memory idle
    """

    tile: int
    stages: int
    warps: int
    per_multiprocessor: int
    registers: int | None = None
    make_way: bool = False


@dataclass(slots=True)
class DecodePlan:
    """The keys that each worker reads in a decode step. Every KV head, and every layer with this window, uses one plan.

    A worker is a program of the kernel. plan_decode cuts the rows' contexts into tiles, lays them end to end, and gives
    each worker an equal share. So all workers end together, whatever the lengths. A row's tiles begin with the first
    that the window reaches, or the first of the row's own. If several workers share a row's tiles, the last of them to
    finish combines their results ("stream-K", Osama et al., 2023).

    Programs that attend to shared prefixes hold the places of some workers, which start late. Late workers get smaller
    shares.

    shares: [workers, 4] int32: first row, last row, first tile in the first row, number of tiles
    share_tiles: [3] int32, how many tiles a full share has, how many that of a late worker has, and the first of these
    arrivals: [rows * kv_heads] int32, how many of a divided row's workers have finished; zero between layers
    own_starts: those of the prefixes that plan_decode got, or of the bundles
    programs: how the workers run
    bundles: given if each row of the plan is a bundle
    """

    shares: Tensor
    share_tiles: Tensor
    arrivals: Tensor
    own_starts: Tensor | None
    window: int | None
    programs: Programs
    bundles: Bundles | None = None


def plan_decode(
    context_lens: Tensor,
    k_cache: Tensor,
    workers: int | None = None,
    window: int | None = None,
    prefixes: SharedPrefixes | None = None,
    programs: Programs | None = None,
    bundles: Bundles | None = None,
) -> DecodePlan:
    """Divide the contexts of a decode step among workers, in one launch.

    context_lens: [rows] int32; k_cache: [blocks, block_size, kv_heads, head_dim], any layer's, or its values if larger
    workers: programs for each KV head; None: enough to fill the device
    window: how many tokens a query sees, the last of its context; None: all
    prefixes: what the rows read together, if there is no window; None: nothing
    programs: None: choose_programs' own
    bundles: of the step's tokens, whose contexts are divided in place of the tokens' own; made with the same prefixes
    """
    assert window is None or prefixes is None
    queries, own_starts = 1, None if prefixes is None else prefixes.own_starts
    if bundles is not None:
        context_lens, queries, own_starts = bundles.context_lens, bundles.queries, bundles.own_starts
        assert (own_starts is None) == (prefixes is None)
    rows, device = len(context_lens), context_lens.device
    kv_heads = k_cache.shape[2]
    programs = programs or choose_programs(rows, k_cache, bundles is not None, prefixes is not None)
    if workers is None:
        workers = max(1, programs.per_multiprocessor * num_multiprocessors(device) // kv_heads)
        if bundles is not None:
            workers = min(workers, rows * max(LEAST_WORKERS, PROGRAMS_OF_A_BUNDLE // kv_heads))
    plan = DecodePlan(
        torch.empty((workers, 4), dtype=torch.int32, device=device),
        torch.empty(3, dtype=torch.int32, device=device),
        torch.empty(rows * kv_heads, dtype=torch.int32, device=device),
        own_starts,
        window,
        programs,
        bundles,
    )
    # One or two sizes for all numbers of rows, because Triton compiles the kernel for each size.
    block_r, block_w = FEW_ROWS if rows <= FEW_ROWS else max(MANY_ROWS, next_power_of_2(rows)), 8
    planners = cdiv(workers, block_w)
    _plan_kernel[(planners,)](
        context_lens,
        plan.own_starts,
        None if prefixes is None else prefixes.num_tiles,
        None if prefixes is None else prefixes.head_start,
        plan.shares,
        plan.share_tiles,
        plan.arrivals,
        rows,
        workers,
        plan.arrivals.numel(),
        SHARES=prefixes is not None,
        WINDOW=window + queries - 1 if window else 0,  # that of the last query begins later than that of the first
        TILE=programs.tile,
        BLOCK_R=block_r,
        BLOCK_W=block_w,
        BLOCK_A=next_power_of_2(cdiv(block_r * kv_heads, planners)),
        **launch_options(context_lens),
    )
    return plan


def choose_programs(rows: int, k_cache: Tensor, are_bundles: bool = False, share: bool = False) -> Programs:
    """Return the programs that are the fastest on an H200; k_cache: as for plan_decode.

    are_bundles: the rows are bundles, whose scores would lack registers in larger tiles
    share: programs that attend to prefixes take up room beside these
    """
    _, block_size, kv_heads, head_dim = k_cache.shape
    block_d, few = next_power_of_2(head_dim), rows <= FEW_ROWS or are_bundles
    if k_cache.dtype == FP8 and block_d <= 128 and not are_bundles:
        # Other programs compute while one converts numbers. But where more than two share a row's keys, combining their
        # results costs more.
        many = Programs(math.gcd(block_size, 64), stages=5, warps=4, per_multiprocessor=3, registers=160)
        if many.per_multiprocessor * num_multiprocessors(k_cache.device) <= 2 * rows * kv_heads:
            return many
    token_bytes = block_d * (
        max(2, k_cache.itemsize) if are_bundles else k_cache.itemsize
    )  # of keys; values have no more
    if block_d > 256:  # four warps would lack registers for the results
        large = math.gcd(block_size, 64)
        if 2 * large * token_bytes + RESERVED_BYTES <= shared_memory(k_cache.device):
            return Programs(large, stages=3, warps=8, per_multiprocessor=1)
        return Programs(math.gcd(block_size, 16), stages=3, warps=8, per_multiprocessor=1)
    if block_d <= 64 and k_cache.itemsize == 2 and rows > 32 and not (are_bundles or share):
        # A tile is so small that a row's few tiles end soon. Other programs load while one waits for its next row.
        return Programs(math.gcd(block_size, 64), stages=5, warps=4, per_multiprocessor=4)
    tile = min(MAX_TILE, TILE_BYTES // token_bytes)
    tile = math.gcd(block_size, tile // 2 if few else tile)  # so that a tile lies in one block
    if rows == 1 and not are_bundles:
        # The product behind them loads its weight meanwhile. So a loop gets few stages, and little shared memory: see
        # launch.py. Three programs in place of two then read 30,000 keys as fast as with five stages.
        return Programs(tile, stages=4, warps=4, per_multiprocessor=3, make_way=True)
    return Programs(tile, stages=5 if few else 3, warps=4, per_multiprocessor=2)


@triton.jit(do_not_specialize=["rows", "num_arrivals"])
def _plan_kernel(
    context_lens_ptr,
    own_starts_ptr,
    num_prefix_tiles_ptr,
    head_start_ptr,
    shares_ptr,
    share_tiles_ptr,
    arrivals_ptr,
    rows,
    workers,
    num_arrivals,
    SHARES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_A: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    r = tl.arange(0, BLOCK_R)
    context_lens = tl.load(context_lens_ptr + r, mask=r < rows, other=0)
    tiles = tl.cdiv(context_lens, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(context_lens - WINDOW, 0) // TILE
    if SHARES:
        tiles -= tl.load(own_starts_ptr + r, mask=r < rows, other=0) // TILE
    ends = tl.cumsum(tiles, axis=0)
    total = tl.sum(tiles, axis=0)
    late, head_start = 0, 0
    if SHARES:
        # A multiprocessor has room for two programs: one that attends to a prefix holds one worker's place.
        late = tl.minimum(tl.load(num_prefix_tiles_ptr), workers // 2)
        head_start = tl.minimum(tl.load(head_start_ptr) // TILE, total // (2 * workers))  # or late ones would get none
    share = tl.maximum(tl.cdiv(total + late * head_start, workers), 1)
    late_share, first_late = share - head_start, workers - late

    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    first = tl.minimum(begin_of(w, share, late_share, first_late, SHARES), total)
    end = tl.minimum(begin_of(w + 1, share, late_share, first_late, SHARES), total)
    last = end - 1  # below `first` if no tile is left for this worker
    before_first = (ends[None, :] <= first[:, None]) & (r < rows)[None, :]
    before_last = (ends[None, :] <= last[:, None]) & (r < rows)[None, :]
    first_row = tl.sum(before_first.to(tl.int32), axis=1)
    last_row = tl.where(last < first, first_row - 1, tl.sum(before_last.to(tl.int32), axis=1))
    first_tile = first - tl.sum(tl.where(before_first, tiles[None, :], 0), axis=1)
    mask = w < workers
    tl.store(shares_ptr + w * 4, first_row, mask=mask)
    tl.store(shares_ptr + w * 4 + 1, last_row, mask=mask)
    tl.store(shares_ptr + w * 4 + 2, first_tile, mask=mask)
    tl.store(shares_ptr + w * 4 + 3, last + 1 - first, mask=mask)
    tl.store(share_tiles_ptr, share)
    tl.store(share_tiles_ptr + 1, late_share)
    tl.store(share_tiles_ptr + 2, first_late)
    a = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    tl.store(arrivals_ptr + a, 0, mask=a < num_arrivals)


@triton.jit
def begin_of(worker, share, late_share, first_late, SHARES: tl.constexpr):
    """Return the tile with which a worker's share begins."""
    begin = worker * share
    if SHARES:
        begin -= tl.maximum(worker - first_late, 0) * (share - late_share)
    return begin


@triton.jit
def worker_of(tile, share, late_share, first_late, SHARES: tl.constexpr):
    """Return the worker in whose share a tile is."""
    worker = tile // share
    if SHARES:
        worker = tl.where(worker < first_late, worker, first_late + (tile - first_late * share) // late_share)
    return worker
