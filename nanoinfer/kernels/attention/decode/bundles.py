"""Bundles: a row's last token and its guesses attend together, so that a program reads their keys once for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes, SharedQueries, share_queries
from nanoinfer.kernels.launch import cdiv, launch_options, load_complete, next_power_of_2, wait_for_predecessor

MOST_LANES = 64  # queries times heads: four warps hold their scores
MOST_RESULTS = 64 * 128  # numbers of the lanes' results, for the same reason
BLOCK = 64  # bundles per program, however few there are, because Triton compiles a kernel for each size


@dataclass(frozen=True, slots=True, eq=False)
class Bundles:
    """Queries of a step's tokens that see nearly the same keys. A bundle has neighbours of one sequence.

    tokens: [bundles, queries] int32, which of the step's tokens they are, by position; -1 behind the last
    context_lens: [bundles] int32, how many keys the last of them sees; 0 if there is none
    own_starts: [bundles] int32, the first key that they do not read with other rows; 0 if there is none
    shared: the queries by the prefixes that rows share; both are None where rows share none
    """

    tokens: Tensor
    context_lens: Tensor
    own_starts: Tensor | None = None
    shared: SharedQueries | None = None

    @property
    def queries(self) -> int:
        """How many a bundle has at most."""
        return self.tokens.shape[1]


def queries_of_a_bundle(most: int, heads: int, k_cache: Tensor) -> int:
    """Return how many queries a program should serve together, in a step whose rows have up to `most` guesses.

    heads: of a query; k_cache: [blocks, block_size, kv_heads, head_dim]. 1: the results of more would not fit
    """
    _, _, kv_heads, head_dim = k_cache.shape
    lanes = min(MOST_LANES, MOST_RESULTS // next_power_of_2(head_dim))
    return max(1, min(most + 1, lanes * kv_heads // heads))


def bundle(
    context_lens: Tensor,
    first: Tensor,
    counts: Tensor,
    most: int,
    queries: int,
    prefixes: SharedPrefixes | None = None,
    row_of: Tensor | None = None,
) -> Bundles:
    """Put the tokens of a verifying step into bundles of up to so many queries; most: guesses of a row.

    The step's tokens are the rows' last ones, then the guesses of all rows.

    context_lens: [rows or more] int32, how many keys the rows' last tokens see; 0 in an empty row, which has no bundle
    first, counts: [rows] int32, the place of a row's first guess among all guesses, and how many it has, at most `most`
    prefixes: what the rows share; None: nothing. Then row_of is given, for each of the tokens
    """
    function = bundle_triton if context_lens.is_cuda else bundle_reference
    if prefixes is None:
        return function(context_lens, first, counts, most, queries)
    assert row_of is not None
    bundles = function(context_lens, first, counts, most, queries, prefixes.own_starts)
    return replace(bundles, shared=share_queries(prefixes, context_lens, row_of, first, counts, most))


def bundle_reference(
    context_lens: Tensor, first: Tensor, counts: Tensor, most: int, queries: int, own_starts: Tensor | None = None
) -> Bundles:
    """`bundle` in torch."""
    rows, parts = len(counts), cdiv(most + 1, queries)
    query = torch.arange(parts * queries, dtype=torch.int32, device=first.device)
    ends = (counts + 1).where(context_lens[:rows] > 0, 0)[:, None]
    own = torch.arange(rows, dtype=torch.int32, device=first.device)[:, None]
    tokens = own.where(query == 0, rows + first[:, None] + query - 1).where(query < ends, -1).view(-1, queries)
    has = tokens >= 0
    lens = (context_lens[:rows, None] + query).view(-1, queries).where(has, 0).amax(dim=1)
    if own_starts is not None:
        own_starts = own_starts[:rows].repeat_interleave(parts).where(lens > 0, 0)
    return Bundles(tokens, lens, own_starts)


def bundle_triton(
    context_lens: Tensor, first: Tensor, counts: Tensor, most: int, queries: int, own_starts: Tensor | None = None
) -> Bundles:
    """`bundle` as one launch."""
    rows, parts = len(counts), cdiv(most + 1, queries)
    bundles = Bundles(
        torch.empty((rows * parts, queries), dtype=torch.int32, device=first.device),
        torch.empty(rows * parts, dtype=torch.int32, device=first.device),
        None if own_starts is None else torch.empty(rows * parts, dtype=torch.int32, device=first.device),
    )
    _bundle_kernel[(cdiv(rows * parts, BLOCK),)](
        context_lens,
        first,
        counts,
        own_starts,
        bundles.tokens,
        bundles.context_lens,
        bundles.own_starts,
        rows,
        PARTS=parts,
        QUERIES=queries,
        BLOCK=BLOCK,
        BLOCK_Q=next_power_of_2(queries),
        **launch_options(first),
    )
    return bundles


@triton.jit(do_not_specialize=["rows"])
def _bundle_kernel(
    context_lens_ptr,
    first_ptr,
    counts_ptr,
    row_starts_ptr,
    tokens_ptr,
    bundle_lens_ptr,
    own_starts_ptr,
    rows,
    PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    bundle = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, begin, i = bundle // PARTS, bundle % PARTS * QUERIES, tl.arange(0, BLOCK_Q)
    mask = row < rows
    context_len = tl.load(context_lens_ptr + row, mask=mask, other=0)
    first = tl.load(first_ptr + row, mask=mask, other=0)
    ends = tl.where(context_len > 0, tl.load(counts_ptr + row, mask=mask, other=0) + 1, 0)
    query = begin[:, None] + i[None, :]
    token = tl.where(query == 0, row[:, None], rows + first[:, None] + query - 1)
    token = tl.where(query < ends[:, None], token, -1)
    tl.store(tokens_ptr + bundle[:, None] * QUERIES + i[None, :], token, mask=mask[:, None] & (i < QUERIES)[None, :])
    end = tl.minimum(ends, begin + QUERIES)  # of the bundle; at `begin` or before, if it has no query
    tl.store(bundle_lens_ptr + bundle, tl.where(end > begin, context_len + end - 1, 0), mask=mask)
    if own_starts_ptr is not None:
        own_start = tl.load(row_starts_ptr + row, mask=mask, other=0)
        tl.store(own_starts_ptr + bundle, tl.where(end > begin, own_start, 0), mask=mask)


@triton.jit
def load_queries(
    tokens_ptr, query_lens_ptr, bundle, mask, GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Return which token the query of each lane is of, -1 where there is none, and how many keys it sees."""
    g = tl.arange(0, BLOCK_G)
    token = load_complete(tokens_ptr + bundle * QUERIES + g // GROUP, g < tl.where(mask, GROUP * QUERIES, 0), -1)
    return token, load_complete(query_lens_ptr + token, token >= 0, 0)
