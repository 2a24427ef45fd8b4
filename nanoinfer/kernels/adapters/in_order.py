"""Adapters whose sums have one order, whatever the number of rows.

The kernels add terms up in the order of the inputs, in tiles of either size. No GPU promises that. So we compare bits
at the start.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from nanoinfer.kernels.adapters.pairs import FEW_ROWS, AdapterRows, Pairs
from nanoinfer.kernels.adapters.products import expand_triton, shrink_triton
from nanoinfer.kernels.launch import launch_in_between

ROWS = FEW_ROWS + 88  # which fill large tiles
AT_ONCE = (8, 100, FEW_ROWS)  # of them: small ones, whose inputs few or many programs divide
SLOTS = 2


@cache
def check_order(in_features: int, parts: tuple[int, ...], rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError if the kernels give a row other bits among other numbers of rows.

    in_features, parts, rank, dtype: of Pairs
    """
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    half = in_features // 2
    x, a = numbers(ROWS, in_features), numbers(SLOTS, len(parts) * rank, in_features)
    # Each product's second half undoes its first, so that the result is what was rounded away.
    x[:, half : 2 * half] = x[:, :half]
    a[..., half : 2 * half] = -a[..., :half]
    a[..., 2 * half :] = 0
    pairs = Pairs(a, numbers(SLOTS, sum(parts), rank), parts)
    slots = torch.arange(ROWS, dtype=torch.int32, device=device) % SLOTS

    def added(at_once: int) -> Tensor:
        sorted_rows = [AdapterRows.of(some, SLOTS) for some in slots.split(at_once)]
        launch_in_between(device)
        each = zip(x.split(at_once), sorted_rows, strict=True)
        return torch.cat([expand_triton(shrink_triton(some, pairs, rows), pairs, rows) for some, rows in each])

    expected = added(ROWS)
    if not all(torch.equal(added(at_once), expected) for at_once in AT_ONCE):
        raise ValueError(
            "deterministic=True: this GPU adds up the products with adapters in other orders for other numbers of"
            " tokens: set max_adapters=0, or device='cpu'"
        )
