"""Attention in plain torch: the CPU's backend, and the reference that the tests hold the others to."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.attention.context import Context, GroupContext, Scoring
from nanoinfer.kernels.attention.decode.cpu_decode import paged_decode_cpu, plan_runs
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_reference


class TorchBackend:
    """See AttentionBackend."""

    prefills_latents = True

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout

    def prepare_decode(self, context: Context) -> None:
        """On the CPU, find the runs of blocks, once for each group of layers."""
        if context.positions.is_cuda:
            return
        for own, group in zip(context.groups, self.layout.groups, strict=False):  # further ones are a draft model's
            are_neighbours = self.layout.pages_of_a_slice(group) == 1
            lens = context.context_lens
            key_numbers = group.pages.kv_heads * group.pages.head_dim
            sizes = group.block_size, group.window, are_neighbours, key_numbers
            own.plan = plan_runs(own.block_tables, lens, *sizes)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from packed queries, one sequence after another."""
        packed = context.prefill
        assert packed is not None
        return paged_prefill_reference(
            q,
            k_cache,
            v_cache,
            group.block_tables,
            packed.query_lens,
            packed.context_lens,
            scoring.scale,
            scoring.window,
            scoring.softcap,
            scoring.kv_scales,
            scoring.sinks,
            packed.ends if scoring.whole_images else None,
            scoring.slopes,
        )

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from one query per sequence; on CUDA the host reads no lengths, so that a graph can hold it."""
        if not q.is_cuda:
            how = scoring.scale, scoring.softcap, scoring.kv_scales, scoring.sinks, scoring.slopes
            return paged_decode_cpu(q, k_cache, v_cache, group.plan, *how)
        return paged_decode_reference(
            q,
            k_cache,
            v_cache,
            group.block_tables,
            context.context_lens,
            context.max_context_len,
            scoring.scale,
            scoring.window,
            scoring.softcap,
            scoring.kv_scales,
            scoring.sinks,
            scoring.slopes,
        )
