"""Launches of the kernels of latent attention, in the shapes of published models."""

from __future__ import annotations

import torch
from torch import Tensor, empty

from nanoinfer.kernels.attention.decode.bundles import bundle
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_triton
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.latent.decode import meet_latents as meet
from nanoinfer.kernels.latent.decode import plan_latents, queries_at_once
from nanoinfer.kernels.latent.shared_prefix import attend_to_shared_latents
from nanoinfer.kernels.latent.store import rotate_and_store
from nanoinfer.kernels.norm.norm import Norm

V3, MINICPM3 = (512, 64), (256, 32)  # numbers of a latent, and of a rotated key
V3_HEAD, GLM_HEAD = (192, 128), (256, 256)  # numbers of a head's key, and of its value


def meet_latents(
    heads: int, rows: int, sizes: tuple[int, int], dtype: torch.dtype, cached: torch.dtype | None = None
) -> None:
    """Attend from rows of a decode step. cached: the cache's dtype; None: the queries'"""
    cache = empty(64, 256, 1, sum(sizes), dtype=cached or dtype)
    lens, tables = step(rows)
    plan = plan_latents(lens, cache, heads, sizes[0])
    q = empty(rows, heads, sum(sizes), dtype=dtype)
    meet(q, cache, sizes[0], tables, lens, 1.0, plan, empty(2))


def share_latents(
    heads: int, queries: int, sizes: tuple[int, int], dtype: torch.dtype, cached: torch.dtype | None = None
) -> None:
    """Attend from rows that share latents; queries: of a row."""
    cache, lens, tables = empty(64, 256, 1, sum(sizes), dtype=cached or dtype), *step(60 * queries)
    prefixes, bundles = SharedPrefixes(60, heads, cache, has_latents=True), None
    if queries > 1:
        counts = empty(60, dtype=torch.int32)
        most = queries_at_once(queries - 1, heads, cache)
        bundles = bundle(lens, counts, counts, queries - 1, most, prefixes, empty(60 * queries, dtype=torch.int32))
    plan = plan_latents(lens, cache, heads, sizes[0], bundles=bundles, prefixes=prefixes)
    latents = empty(60 * queries, heads, sum(sizes), dtype=dtype), cache, sizes[0], tables
    shared = attend_to_shared_latents(*latents, prefixes, 1.0, empty(2), bundles and bundles.shared)
    meet(*latents, lens, 1.0, plan, empty(2), shared)


def step(rows: int) -> tuple[Tensor, Tensor]:
    """Return the lengths of rows, and block tables."""
    return empty(rows, dtype=torch.int32), empty(rows, 16, dtype=torch.int32)


def meet_keys(heads: int, length: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Attend from prompts, to keys and values that are made of latents."""
    keys, values = (empty(64, 256, heads, size, dtype=dtype) for size in sizes)
    q, counts = empty(8 * length, heads, sizes[0], dtype=dtype), empty(9, dtype=torch.int32)
    tables = empty(8, 16, dtype=torch.int32)
    paged_prefill_triton(q, keys, values, tables, counts, empty(8, dtype=torch.int32), length, 1.0)


def store_latents(
    heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    interleaved: bool,
    cached: torch.dtype | None = None,
    factor: float = 1.0,
) -> None:
    """Rotate queries and keys, and write latents to the cache."""
    latent, turning = sizes
    q, kv = empty(64, heads, 128 + turning, dtype=dtype), empty(64, latent + turning, dtype=dtype)
    norm, cache = Norm(empty(latent, dtype=dtype), 1e-6), empty(64, 256, 1, latent + turning, dtype=cached or dtype)
    numbers = empty(64, dtype=torch.int32)
    rotate_and_store(
        q, q[..., 128:], kv, norm, empty(4096, turning), interleaved, None, numbers, cache, numbers, empty(2), factor
    )
