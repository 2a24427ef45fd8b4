"""What Mamba2 takes of each token by itself: its step, its inputs of each head, and what lets it in and out."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.delta.terms import softplus


def split_channels(xbc: Tensor, heads: int, dim: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, [tokens, heads, dim], B and C, [tokens, heads, numbers], in float32; heads of a group share B and C.

    xbc: [tokens, channels], whose channels are x | B | C
    """
    x, both = xbc.float().split([heads * dim, xbc.shape[1] - heads * dim], dim=1)
    b, c = both.unflatten(1, (2, groups, -1)).repeat_interleave(heads // groups, dim=2).unbind(1)
    return x.unflatten(1, (heads, dim)), b, c


def grouped(xbc: Tensor, inner: int, groups: int) -> Tensor:
    """Return B as it is, [tokens, groups, numbers]; inner: numbers of x"""
    return xbc[:, inner:].unflatten(1, (2, groups, -1))[:, 0]


def steps_of(dt: Tensor, log_decay: Tensor, dt_bias: Tensor, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return how far each token steps, and the logarithms of decays, both [tokens, heads] in float32.

    dt: [tokens, heads]; log_decay, dt_bias: [heads]; limits: of a step
    """
    steps = F.softplus(dt.float() + dt_bias.float()).clamp(*limits)
    return steps, -log_decay.float().exp() * steps


@triton.jit
def step_of(dt, log_decay, dt_bias, least, most):
    """steps_of inside a kernel."""
    step = softplus(dt.to(tl.float32) + dt_bias.to(tl.float32))
    step = tl.minimum(tl.maximum(step, least), most)
    return step, -tl.exp(log_decay.to(tl.float32)) * step
