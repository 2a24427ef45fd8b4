"""Rotary position embedding, applied together with the norms of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.kernels.rotary import qk_norm_rotary
from nanoinfer.layers.norm import RMSNorm


class RotaryEmbedding(nn.Module):
    """Rotates a head's halves by position * theta^(-2i / head_dim) (Su et al., 2021)."""

    cos_sin: Tensor

    def __init__(self, head_dim: int, max_position: int, theta: float) -> None:
        super().__init__()
        frequencies = 1 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.arange(max_position, dtype=torch.float32).outer(frequencies)
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def forward(self, qk: Tensor, num_q_heads: int, q_norm: RMSNorm, k_norm: RMSNorm, positions: Tensor) -> Tensor:
        """Norm and rotate qk, [tokens, q and k heads, head_dim]; returns the same shape."""
        return qk_norm_rotary(qk, num_q_heads, q_norm.weight, k_norm.weight, self.cos_sin, positions, q_norm.eps)
