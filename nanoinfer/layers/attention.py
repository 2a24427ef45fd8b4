"""Attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.utils.context import Context


class Attention(nn.Module):
    """One layer's attention: writes the new keys and values to the cache and attends through the backend."""

    def __init__(self, layer: int, head_dim: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.layer = layer
        self.scale = head_dim**-0.5
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim]; returns q's shape."""
        k_cache, v_cache = context.kv_cache[:, self.layer]
        self.backend.write(k, v, k_cache, v_cache, context.slot_mapping)
        attend = self.backend.decode if context.prefill is None else self.backend.prefill
        return attend(q, k_cache, v_cache, context, self.scale)
