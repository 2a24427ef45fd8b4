"""Attention in plain torch: the CPU's backend, and the reference that the tests hold the others to."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from nanoinfer.attention.context import Context, Scoring
from nanoinfer.kernels.attention.cpu_decode import paged_decode_cpu, plan_runs
from nanoinfer.kernels.attention.paged_decode import paged_decode_reference
from nanoinfer.kernels.attention.paged_prefill import paged_prefill_reference


class TorchBackend:
    """See AttentionBackend."""

    def __init__(self, windows: Iterable[int | None]) -> None:
        self.windows = tuple(dict.fromkeys(windows))

    def prepare_decode(self, context: Context) -> None:
        """On the CPU, find the runs of blocks, once for each of the model's windows."""
        if not context.block_tables.is_cuda:
            block_size = context.kv_cache.shape[3]
            context.decode_plans = {
                window: plan_runs(context.block_tables, context.context_lens, block_size, window)
                for window in self.windows
            }

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
            scoring.kv_scales,
        )

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from one query per sequence; on CUDA the host reads no lengths, so that a graph can hold it."""
        if not q.is_cuda:
            plan = context.decode_plans[scoring.window]
            return paged_decode_cpu(q, k_cache, v_cache, plan, scoring.scale, scoring.softcap, scoring.kv_scales)
        return paged_decode_reference(
            q,
            k_cache,
            v_cache,
            context.block_tables,
            context.context_lens,
            context.max_context_len,
            scoring.scale,
            scoring.window,
            scoring.softcap,
            scoring.kv_scales,
        )
