"""Attention by our Triton kernels whose sums have one order, for LLM(..., deterministic=True) on CUDA."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from nanoinfer.attention.context import Context, Scoring
from nanoinfer.kernels.attention.decode_plan import plan_decode
from nanoinfer.kernels.attention.in_order.decode import DECODE_PROGRAMS, decode_in_order
from nanoinfer.kernels.attention.in_order.prefill import prefill_in_order


class InOrderBackend:
    """The AttentionBackend that gives a token the same bits in any company. windows: each layer's, as in Scoring"""

    def __init__(self, windows: Iterable[int | None]) -> None:
        self.windows = tuple(dict.fromkeys(windows))

    def prepare_decode(self, context: Context) -> None:
        """Divide the keys among the kernel's programs, once for each of the model's windows."""
        lens, k_cache = context.context_lens, context.kv_cache[0, 0]
        context.decode_plans = {
            window: plan_decode(lens, k_cache, window=window, programs=DECODE_PROGRAMS) for window in self.windows
        }

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from packed queries."""
        packed = context.prefill
        assert packed is not None
        return prefill_in_order(
            q,
            k_cache,
            v_cache,
            context.block_tables,
            packed.cu_query_lens,
            context.context_lens,
            max(packed.query_lens),
            scoring.scale,
            scoring.window,
            scoring.softcap,
            scoring.kv_scales,
        )

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from one query per sequence."""
        return decode_in_order(
            q,
            k_cache,
            v_cache,
            context.block_tables,
            context.context_lens,
            context.max_context_len,
            scoring.scale,
            context.decode_plans[scoring.window],
            scoring.softcap,
            scoring.kv_scales,
        )
