"""Attention by the flash-attn package."""

from __future__ import annotations

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from nanoinfer.attention.context import Context, GroupContext, Scoring


class FlashAttnBackend:
    """The AttentionBackend that calls the flash-attn package."""

    prefills_latents = False

    def prepare_decode(self, context: Context) -> None:
        """Do nothing: flash-attn makes no plan ahead."""

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from packed queries."""
        packed = context.prefill
        assert packed is not None
        return flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=packed.cu_query_lens,
            cu_seqlens_k=packed.cu_context_lens,
            max_seqlen_q=max(packed.query_lens),
            max_seqlen_k=context.max_context_len,
            softmax_scale=scoring.scale,
            causal=True,
            window_size=_window_size(scoring),
            softcap=scoring.softcap or 0.0,
            block_table=group.block_tables,
        )

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from one query per sequence."""
        out = flash_attn_with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=context.context_lens,
            block_table=group.block_tables,
            softmax_scale=scoring.scale,
            causal=True,
            window_size=_window_size(scoring),
            softcap=scoring.softcap or 0.0,
        )
        return out.squeeze(1)


def _window_size(scoring: Scoring) -> tuple[int, int]:
    """Return how many keys a query sees before and after its own, as flash-attn counts them; -1: all."""
    return (-1, -1) if scoring.window is None else (scoring.window - 1, 0)
