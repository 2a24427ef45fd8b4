"""Attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context
from nanoinfer.kernels.attention.qkv import norm_rotate_store
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.rotary import RotaryEmbedding


class Attention(nn.Module):
    """One layer's attention: norms and rotates, writes the new keys and values to the cache, and attends."""

    def __init__(self, layer: int, rotary: RotaryEmbedding, backend: AttentionBackend) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self.backend = backend

    def forward(self, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, context: Context) -> Tensor:
        """qkv: [tokens, heads + 2 * kv_heads, head_dim]; returns [tokens, heads, head_dim]."""
        k_cache, v_cache = context.kv_cache[:, self.layer]
        q = norm_rotate_store(
            qkv,
            q_norm.weight,
            k_norm.weight,
            q_norm.eps,
            self.rotary.cos_sin,
            context.positions,
            k_cache,
            v_cache,
            context.slot_mapping,
        )
        attend = self.backend.decode if context.prefill is None else self.backend.prefill
        return attend(q, k_cache, v_cache, context, q.shape[-1] ** -0.5)
