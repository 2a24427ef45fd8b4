"""Attention by our own Triton kernels, and from long prompts by cuDNN: any block size, nothing to build."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.attention.context import Context, GroupContext, Guesses, Scoring
from nanoinfer.kernels.attention.decode.bundles import Bundles, bundle, queries_of_a_bundle
from nanoinfer.kernels.attention.decode.decode_plan import DecodePlan, plan_decode
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_triton
from nanoinfer.kernels.attention.prefill.long_prefill import attend_from, can_attend
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_triton
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.attention.prefixes.shared_prefix import attend_to_prefixes


class TritonBackend:
    """The AttentionBackend that runs our Triton kernels."""

    prefills_latents = False

    def __init__(self, layout: CacheLayout) -> None:
        self.groups = layout.groups

    def prepare_decode(self, context: Context) -> None:
        """Divide the keys among the kernel's programs, once for each group of layers."""
        prefixes, bundles = context.prefixes, None
        for own, group in zip(context.groups, self.groups, strict=False):  # further ones are a draft model's
            caches = context.layers[group.layers[0]]
            if context.guesses is not None:
                queries = self._queries_at_once(context.guesses, _wider(caches))
                bundles = _bundle(context.context_lens, context.guesses, queries, prefixes)
                prefixes = prefixes if bundles is not None else None  # tokens that attend one by one share nothing
            own.plan = self._plan(context.context_lens, caches, group.window, prefixes, bundles)
            prefixes = None  # the first group's alone

    def _queries_at_once(self, guesses: Guesses, k_cache: Tensor) -> int:
        """Return how many queries of a row a program should serve together."""
        return queries_of_a_bundle(guesses.most, guesses.heads, k_cache)

    def _plan(
        self,
        context_lens: Tensor,
        caches: tuple[Tensor, Tensor],
        window: int | None,
        prefixes: SharedPrefixes | None,
        bundles: Bundles | None,
    ) -> DecodePlan:
        """Return the plan of a group of layers; caches: of any of them."""
        return plan_decode(context_lens, _wider(caches), window=window, prefixes=prefixes, bundles=bundles)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from packed queries."""
        packed = context.prefill
        assert packed is not None
        tables, divided = group.block_tables, packed.divided
        ends = packed.ends if scoring.whole_images else None
        attend = partial(
            paged_prefill_triton,
            q,
            k_cache,
            v_cache,
            scale=scoring.scale,
            window=scoring.window,
            softcap=scoring.softcap,
            kv_scales=scoring.kv_scales,
            sinks=scoring.sinks,
            ends=ends,
            slopes=scoring.slopes,
        )
        how = v_cache, scoring.window, scoring.softcap, scoring.slopes
        if divided is None or ends is not None or not can_attend(q, *how):
            return attend(tables, packed.cu_query_lens, context.context_lens, max(packed.query_lens))
        assert group.divided_tables is not None
        attended = [
            attend_from(stretch, q, k_cache, v_cache, tables, scoring.scale, scoring.kv_scales, scoring.sinks)
            for stretch in divided.stretches
        ]
        if divided.max_query_len == 0 and len(attended) == 1:
            return attended[0]  # the stretch is the whole step
        out = attend(group.divided_tables, divided.cu_query_lens, divided.context_lens, divided.max_query_len)
        for stretch, results in zip(divided.stretches, attended, strict=True):
            out[stretch.first : stretch.first + stretch.length] = results
        return out

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from one query per token; prefixes that several share are read once, if no window hides these."""
        plan, shared = group.plan, None
        if plan.own_starts is not None:
            assert context.prefixes is not None
            shared = attend_to_prefixes(
                q,
                k_cache,
                v_cache,
                group.block_tables,
                context.prefixes,
                scoring.scale,
                scoring.softcap,
                scoring.kv_scales,
                None if plan.bundles is None else plan.bundles.shared,
                scoring.slopes,
                context.context_lens,
            )
        return paged_decode_triton(
            q,
            k_cache,
            v_cache,
            group.block_tables,
            context.context_lens,
            scoring.scale,
            plan,
            scoring.softcap,
            scoring.kv_scales,
            shared,
            scoring.sinks,
            scoring.slopes,
        )


def _wider(caches: tuple[Tensor, Tensor]) -> Tensor:
    """Return the keys, or the values if these have more numbers."""
    return max(caches, key=lambda cache: cache.shape[3])


def _bundle(context_lens: Tensor, guesses: Guesses, queries: int, prefixes: SharedPrefixes | None) -> Bundles | None:
    """Return the bundles of a verifying step; None if its tokens attend one by one. queries: of a bundle, at most"""
    if queries == 1:
        return None
    return bundle(context_lens, guesses.first, guesses.counts, guesses.most, queries, prefixes, guesses.row_of)
