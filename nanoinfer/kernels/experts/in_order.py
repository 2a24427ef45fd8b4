"""Whether the products with experts add up in one order, whatever the number of tokens: see linear.in_order.order."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from nanoinfer.kernels.experts.products import expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.linear.activation import AnyActivation, rows_per_output
from nanoinfer.kernels.linear.in_order.order import WeightShape

# An output of ordinary numbers shows another order only once in some thousand times, so many are compared.
TOKENS = 288
AT_ONCE = (8, 24, 96)  # of them, if each takes all experts: they fill tiles of every size but the largest


@cache
def check_order(
    gate_up: WeightShape,
    down: WeightShape,
    used: int,
    activation: AnyActivation,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ValueError if the kernel gives a token other bits among other numbers of tokens.

    gate_up, down: of an expert; if ranks split its outputs, this rank's part, and down has the other ranks' columns too
    used: experts that a token takes; dtype: of the tokens' vectors
    """
    generator = torch.Generator(device).manual_seed(0)
    weights = gate_up.draw_experts(used, dtype, generator), down.draw_experts(used, dtype, generator)
    x = torch.randn(TOKENS, gate_up.inputs, generator=generator, device=device, dtype=dtype)
    shares = torch.rand(TOKENS, used, generator=generator, device=device)
    experts = shares.argsort(dim=1).int()
    ranks = down.inputs // (gate_up.rows // rows_per_output(activation))

    def gather(own: Tensor) -> Tensor:  # stands in for that of several ranks
        return own.repeat(1, ranks)

    multiply = partial(expert_mlps_triton, activation=activation, in_order=True, gather=gather if ranks > 1 else None)

    def results(at_once: int) -> Tensor:
        parts = zip(*(tensor.split(at_once) for tensor in (x, experts, shares)), strict=True)
        return torch.cat([multiply(vectors, Routes(*routes), *weights) for vectors, *routes in parts])

    expected = results(TOKENS)
    if not all(torch.equal(results(at_once), expected) for at_once in AT_ONCE):
        raise ValueError(
            "deterministic=True: this GPU adds up the products with experts in other orders for other numbers of"
            " tokens; device='cpu' does not"
        )
