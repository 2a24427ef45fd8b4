"""Rotary position embedding: the angles' table, which layers/attention.py applies."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Cosines and sines of position * theta^(-2i / head_dim) (Su et al., 2021).

    cos_sin: [max_position, head_dim] float32, the cosines in the first half
    """

    cos_sin: Tensor

    def __init__(self, head_dim: int, max_position: int, theta: float) -> None:
        super().__init__()
        frequencies = 1 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.arange(max_position, dtype=torch.float32).outer(frequencies)
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], dim=-1), persistent=False)
