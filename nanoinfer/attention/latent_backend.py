"""Attention to latents by our own Triton kernels; prompts attend to keys and values as those of other models do."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.attention.context import Context, GroupContext, Guesses, Scoring
from nanoinfer.attention.triton_backend import TritonBackend
from nanoinfer.kernels.attention.decode.bundles import Bundles
from nanoinfer.kernels.attention.decode.decode_plan import DecodePlan
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.latent.decode import meet_latents, plan_latents, queries_at_once
from nanoinfer.kernels.latent.shared_prefix import attend_to_shared_latents


class LatentBackend(TritonBackend):
    """The AttentionBackend of models with latents; a step's first plan is that of all its layers."""

    def __init__(self, layout: CacheLayout, heads: int) -> None:
        """heads: query heads of this rank, which see one latent"""
        super().__init__(layout)
        self.heads = heads

    def _queries_at_once(self, guesses: Guesses, k_cache: Tensor) -> int:
        return queries_at_once(guesses.most, self.heads, k_cache)

    def _plan(
        self,
        context_lens: Tensor,
        caches: tuple[Tensor, Tensor],
        window: int | None,
        prefixes: SharedPrefixes | None,
        bundles: Bundles | None,
    ) -> DecodePlan:
        assert window is None
        cache, values = caches
        return plan_latents(context_lens, cache, self.heads, values.shape[3], bundles=bundles, prefixes=prefixes)

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from one query per token; latents that several rows share are read once."""
        plan, shared = group.plan, None
        how = q, k_cache, v_cache.shape[3], group.block_tables
        if plan.own_starts is not None:
            assert context.prefixes is not None
            queries = None if plan.bundles is None else plan.bundles.shared
            shared = attend_to_shared_latents(*how, context.prefixes, scoring.scale, scoring.kv_scales, queries)
        return meet_latents(*how, context.context_lens, scoring.scale, plan, scoring.kv_scales, shared)
