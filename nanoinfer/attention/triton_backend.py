"""Attention by our own Triton kernels, and from long prompts by cuDNN: any block size, nothing to build."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from nanoinfer.attention.context import Context, Scoring
from nanoinfer.kernels.attention.decode_plan import plan_decode
from nanoinfer.kernels.attention.long_prefill import attend_from, can_attend
from nanoinfer.kernels.attention.paged_decode import paged_decode_triton
from nanoinfer.kernels.attention.paged_prefill import paged_prefill_triton
from nanoinfer.kernels.attention.shared_prefix import attend_to_prefixes


class TritonBackend:
    """The AttentionBackend that runs our Triton kernels. windows: each layer's window, as in Scoring"""

    def __init__(self, windows: Iterable[int | None]) -> None:
        self.windows = tuple(dict.fromkeys(windows))

    def prepare_decode(self, context: Context) -> None:
        """Divide the keys among the kernel's programs, once for each of the model's windows."""
        lens, k_cache, prefixes = context.context_lens, context.kv_cache[0, 0], context.prefixes
        context.decode_plans = {
            window: plan_decode(lens, k_cache, window=window, prefixes=prefixes if window is None else None)
            for window in self.windows
        }

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from packed queries."""
        packed = context.prefill
        assert packed is not None
        tables, how = context.block_tables, (scoring.scale, scoring.window, scoring.softcap, scoring.kv_scales)
        divided = packed.divided
        if divided is None or not can_attend(q, k_cache.shape[2], scoring.window, scoring.softcap):
            pieces = tables, packed.cu_query_lens, context.context_lens, max(packed.query_lens)
            return paged_prefill_triton(q, k_cache, v_cache, *pieces, *how)
        attended = [
            attend_from(stretch, q, k_cache, v_cache, tables, scoring.scale, scoring.kv_scales)
            for stretch in divided.stretches
        ]
        if divided.max_query_len == 0 and len(attended) == 1:
            return attended[0]  # the stretch is the whole step
        pieces = divided.block_tables, divided.cu_query_lens, divided.context_lens, divided.max_query_len
        out = paged_prefill_triton(q, k_cache, v_cache, *pieces, *how)
        for stretch, results in zip(divided.stretches, attended, strict=True):
            out[stretch.first : stretch.first + stretch.length] = results
        return out

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from one query per sequence; prefixes that several share are read once, if no window hides these."""
        plan, shared = context.decode_plans[scoring.window], None
        if plan.own_starts is not None:
            assert context.prefixes is not None
            shared = attend_to_prefixes(
                q,
                k_cache,
                v_cache,
                context.block_tables,
                context.prefixes,
                scoring.scale,
                scoring.softcap,
                scoring.kv_scales,
            )
        return paged_decode_triton(
            q,
            k_cache,
            v_cache,
            context.block_tables,
            context.context_lens,
            scoring.scale,
            plan,
            scoring.softcap,
            scoring.kv_scales,
            shared,
        )
