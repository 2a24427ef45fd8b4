"""What choices that are no experts add to a token's result: its own vector, times their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.add_pieces import BLOCK
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor


def add_identities(out: Tensor, x: Tensor, routes: Routes, count: int) -> Tensor:
    """Return out + weight * x, [tokens, size]; the weight is the sum of those of the choices from number `count` on.

    out: [tokens, size], what the experts make of x, which has that shape
    """
    return (add_identities_triton if x.is_cuda else add_identities_reference)(out, x, routes, count)


def add_identities_reference(out: Tensor, x: Tensor, routes: Routes, count: int) -> Tensor:
    """add_identities in torch."""
    weights = routes.weights.masked_fill(routes.experts < count, 0).sum(dim=1, keepdim=True)
    return torch.addcmul(out.float(), x.float(), weights).to(x.dtype)


def add_identities_triton(out: Tensor, x: Tensor, routes: Routes, count: int) -> Tensor:
    """add_identities as one launch."""
    (tokens, size), used = x.shape, routes.experts.shape[1]
    assert out.is_contiguous()
    assert x.is_contiguous()
    added = torch.empty_like(out)
    _add_identities_kernel[(tokens, cdiv(size, BLOCK))](
        out,
        x,
        *routes,
        added,
        size,
        count,
        USED=used,
        BLOCK_USED=next_power_of_2(used),
        BLOCK=BLOCK,
        **launch_options(x),
    )
    return added


@triton.jit
def _add_identities_kernel(
    out_ptr,
    x_ptr,
    experts_ptr,
    weights_ptr,
    added_ptr,
    size,
    count,
    USED: tl.constexpr,
    BLOCK_USED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_USED)
    expert = tl.load(experts_ptr + token * USED + choice, mask=choice < USED, other=0)
    weights = tl.load(weights_ptr + token * USED + choice, mask=(choice < USED) & (expert >= count), other=0.0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = token * size + i
    own = tl.load(x_ptr + place, mask=i < size, other=0.0).to(tl.float32)
    total = tl.load(out_ptr + place, mask=i < size, other=0.0).to(tl.float32) + own * tl.sum(weights)
    tl.store(added_ptr + place, total, mask=i < size)
