"""Attention in plain torch: the CPU's backend, and the reference that the others are held to."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.attention.context import Context, Scoring
from nanoinfer.kernels.attention.paged_decode import paged_decode_reference
from nanoinfer.kernels.attention.paged_prefill import paged_prefill_reference


class TorchBackend:
    """See AttentionBackend."""

    def prepare_decode(self, context: Context) -> None:
        """Nothing."""

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from packed queries, one sequence after another."""
        packed = context.prefill
        assert packed is not None
        return paged_prefill_reference(
            q,
            k_cache,
            v_cache,
            context.block_tables,
            packed.query_lens,
            packed.context_lens,
            scoring.scale,
            scoring.window,
            scoring.softcap,
        )

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from one query a sequence: on CUDA without a look at the lengths, so that a graph can hold it."""
        how = scoring.scale, scoring.window, scoring.softcap
        if not q.is_cuda:
            lens = context.context_lens.tolist()
            return paged_prefill_reference(q, k_cache, v_cache, context.block_tables, [1] * len(lens), lens, *how)
        return paged_decode_reference(
            q, k_cache, v_cache, context.block_tables, context.context_lens, context.max_context_len, *how
        )
