"""Attention by our own Triton kernels: any block size, nothing to build."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.attention.context import Context
from nanoinfer.kernels.attention.paged_decode import paged_decode_triton, plan_decode
from nanoinfer.kernels.attention.paged_prefill import paged_prefill_triton


class TritonBackend:
    """See AttentionBackend."""

    def prepare_decode(self, context: Context) -> None:
        """Deal out the keys."""
        context.decode_plan = plan_decode(context.context_lens, context.kv_cache[0, 0])

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        """Attend from packed queries."""
        packed = context.prefill
        assert packed is not None
        return paged_prefill_triton(
            q,
            k_cache,
            v_cache,
            context.block_tables,
            packed.cu_query_lens,
            context.context_lens,
            max(packed.query_lens),
            scale,
        )

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scale: float) -> Tensor:
        """Attend from one query a sequence."""
        return paged_decode_triton(
            q, k_cache, v_cache, context.block_tables, context.context_lens, scale, context.decode_plan
        )
