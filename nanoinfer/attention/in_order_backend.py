"""Attention by our Triton kernels whose sums have one order, for LLM(..., deterministic=True) on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.attention.context import Context, GroupContext, Scoring
from nanoinfer.kernels.attention.decode.decode_plan import DecodePlan, plan_decode
from nanoinfer.kernels.attention.in_order.chunk import CHUNK
from nanoinfer.kernels.attention.in_order.decode import decode_in_order, decode_programs
from nanoinfer.kernels.attention.in_order.prefill import prefill_in_order
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import launch_in_between

CHECKED_KEYS = 4 * CHUNK  # of the longest row: so it has several chunks of keys


class InOrderBackend:
    """The AttentionBackend that gives a token the same bits in any company."""

    prefills_latents = False

    def __init__(self, layout: CacheLayout) -> None:
        self.groups = layout.groups

    def prepare_decode(self, context: Context) -> None:
        """Divide the keys among the kernel's programs, once for each group of layers."""
        for own, group in zip(context.groups, self.groups, strict=False):  # further ones are a draft model's
            k_cache, _ = context.layers[group.layers[0]]
            own.plan = _plan(context, k_cache, group.window)

    def check(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> None:
        """Raise ValueError if this GPU gives a generated token other bits than it gives a prompt's.

        q: [tokens, heads, head_dim], of a prompt's last tokens
        caches: keys and values, as for prefill_in_order; their first block is read, by layers of this window
        sinks, slopes: [heads] float32, of such a layer; None: it has none
        """
        (tokens, _, head_dim), (k_cache, v_cache) = q.shape, caches
        blocks = -(-CHECKED_KEYS // k_cache.shape[1])
        tables = torch.zeros(tokens, blocks, dtype=torch.int32, device=q.device)
        longest = blocks * k_cache.shape[1]
        lens = torch.arange(longest - tokens, longest, dtype=torch.int32, device=q.device) + 1
        group = GroupContext(lens, tables)
        context = Context({0: (k_cache, v_cache)}, [group], lens - 1, lens, longest)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=q.device)
        scales = torch.ones(2, device=q.device)
        group.plan = _plan(context, k_cache, window)
        launch_in_between(q.device)  # in a step, other kernels stand between the plan and attention, too
        scoring = Scoring(head_dim**-0.5, window, softcap, scales, sinks, slopes)
        decoded = self.decode(q, k_cache, v_cache, context, group, scoring)
        how = tokens, scoring.scale, window, softcap, scales, sinks, slopes
        if not torch.equal(decoded, prefill_in_order(q, k_cache, v_cache, tables[:1], ends, lens[-1:], *how)):
            raise ValueError(
                "deterministic=True: on this GPU, attention adds up in other orders for prompts than for generated"
                " tokens; device='cpu' does not"
            )

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from packed queries."""
        packed = context.prefill
        assert packed is not None
        return prefill_in_order(
            q,
            k_cache,
            v_cache,
            group.block_tables,
            packed.cu_query_lens,
            context.context_lens,
            max(packed.query_lens),
            scoring.scale,
            scoring.window,
            scoring.softcap,
            scoring.kv_scales,
            scoring.sinks,
            scoring.slopes,
        )

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from one query per sequence.

        For a cache in FP8, the compiler orders the numbers of our decode kernel's products otherwise. So there the
        kernel for prompts attends, as from chunks of one token.
        """
        if k_cache.dtype == FP8:
            ends = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            how = scoring.scale, scoring.window, scoring.softcap, scoring.kv_scales, scoring.sinks, scoring.slopes
            return prefill_in_order(q, k_cache, v_cache, group.block_tables, ends, context.context_lens, 1, *how)
        return decode_in_order(
            q,
            k_cache,
            v_cache,
            group.block_tables,
            context.context_lens,
            context.max_context_len,
            scoring.scale,
            group.plan,
            scoring.softcap,
            scoring.kv_scales,
            scoring.sinks,
            scoring.slopes,
        )


def _plan(context: Context, k_cache: Tensor, window: int | None) -> DecodePlan:
    return plan_decode(context.context_lens, k_cache, window=window, programs=decode_programs(k_cache.shape[3]))
