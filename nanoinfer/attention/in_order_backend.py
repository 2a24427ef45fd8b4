"""Attention by our Triton kernels whose sums have one order, for LLM(..., deterministic=True) on CUDA."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nanoinfer.attention.context import Context, Scoring
from nanoinfer.kernels.attention.decode_plan import plan_decode
from nanoinfer.kernels.attention.in_order.chunk import CHUNK
from nanoinfer.kernels.attention.in_order.decode import DECODE_PROGRAMS, decode_in_order
from nanoinfer.kernels.attention.in_order.prefill import prefill_in_order
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.launch import launch_in_between

CHECKED_KEYS = 4 * CHUNK  # of the longest row: so it has several chunks of keys


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

    def check(self, q: Tensor, kv_cache: Tensor, softcap: float | None) -> None:
        """Raise ValueError if this GPU gives a generated token other bits than it gives a prompt's.

        q: [tokens, heads, head_dim], of a prompt's last tokens
        kv_cache: [2, blocks, block_size, kv_heads, head_dim], whose first block is read
        """
        (tokens, _, head_dim), (k_cache, v_cache) = q.shape, kv_cache
        blocks = -(-CHECKED_KEYS // k_cache.shape[1])
        tables = torch.zeros(tokens, blocks, dtype=torch.int32, device=q.device)
        longest = blocks * k_cache.shape[1]
        lens = torch.arange(longest - tokens, longest, dtype=torch.int32, device=q.device) + 1
        context = Context(kv_cache[:, None], lens - 1, lens, tables, lens, longest)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=q.device)
        scales = torch.ones(2, device=q.device)
        self.prepare_decode(context)
        launch_in_between(q.device)  # in a step, other kernels stand between the plan and attention, too
        for window in self.windows:
            scoring = Scoring(head_dim**-0.5, window, softcap, scales)
            decoded = self.decode(q, k_cache, v_cache, context, scoring)
            how = tokens, scoring.scale, window, softcap, scales
            if not torch.equal(decoded, prefill_in_order(q, k_cache, v_cache, tables[:1], ends, lens[-1:], *how)):
                raise ValueError(
                    "deterministic=True: on this GPU, attention adds up in other orders for prompts than for generated"
                    " tokens; device='cpu' does not"
                )

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
        """Attend from one query per sequence.

        For a cache in FP8, the compiler orders the numbers of our decode kernel's products otherwise. So there the
        kernel for prompts attends, as from chunks of one token.
        """
        if k_cache.dtype == FP8:
            ends = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            how = scoring.scale, scoring.window, scoring.softcap, scoring.kv_scales
            return prefill_in_order(q, k_cache, v_cache, context.block_tables, ends, context.context_lens, 1, *how)
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
