"""Hadamard: the rotation that spreads large numbers among their neighbours, before they are rounded."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor, block: int) -> Tensor:
    """Multiply each `block` neighbouring features by Sylvester's matrix over sqrt(block) (Sylvester, 1867).

    x: [tokens, features]; block: a power of two that divides the features
    The matrix is symmetric, and its own inverse. Its entry i, j is -1 to the number of bits that i and j share. Sums
    are made in float32, in pairs, so that a token has the same bits among any others.
    """
    y = x.float()
    half = 1
    while half < block:
        first, second = y.unflatten(1, (-1, 2, half)).unbind(2)
        y = torch.stack((first + second, first - second), 2).flatten(1)
        half *= 2
    return (y * block**-0.5).to(x.dtype)


def signs(rows: range, block: int, device: torch.device) -> Tensor:
    """Return these rows of Sylvester's matrix, which has `block`: [rows, block] of 1 and -1, float32."""
    numbers = torch.arange(rows.start, rows.stop, device=device)[:, None]
    shared = numbers & torch.arange(block, device=device)
    for shift in (16, 8, 4, 2, 1):  # folds the bits into the lowest, which is their sum's
        shared = shared ^ shared >> shift
    return 1.0 - 2.0 * (shared & 1)
