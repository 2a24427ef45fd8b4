"""The gate of attention's result (Qiu et al., 2025): each number of a head times the sigmoid of another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import cdiv, launch_options, load_complete, wait_for_predecessor

BLOCK = 1024


def gate_heads(heads: Tensor, gates: Tensor) -> Tensor:
    """Return heads * sigmoid(gates), [tokens, heads * head_dim], in their dtype.

    heads, gates: [tokens, heads, head_dim]; the tokens of gates may lie apart
    """
    return gate_heads_triton(heads, gates) if heads.is_cuda else gate_heads_reference(heads, gates)


def gate_heads_reference(heads: Tensor, gates: Tensor) -> Tensor:
    """gate_heads in torch."""
    return (heads * gates.sigmoid()).flatten(1)


def gate_heads_triton(heads: Tensor, gates: Tensor) -> Tensor:
    """gate_heads as one launch. The kernel before may write the heads alone: the gates are read before it ends."""
    tokens, size = heads.shape[0], heads.shape[1] * heads.shape[2]
    assert heads.is_contiguous()
    assert gates[0].is_contiguous()
    out = torch.empty((tokens, size), dtype=heads.dtype, device=heads.device)
    _gate_heads_kernel[(tokens, cdiv(size, BLOCK))](
        heads, gates, out, gates.stride(0), SIZE=size, BLOCK=BLOCK, **launch_options(heads)
    )
    return out


@triton.jit
def _gate_heads_kernel(
    heads_ptr, gates_ptr, out_ptr, gates_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    # The predecessor attends; the gates come from a product before that.
    gate = load_complete(gates_ptr + token * gates_stride + offsets, mask=mask, other=0.0)
    wait_for_predecessor(EARLY)
    head = tl.load(heads_ptr + token * SIZE + offsets, mask=mask, other=0.0)
    share = tl.sigmoid(gate.to(tl.float32)).to(gate.dtype)  # rounded, as transformers does
    tl.store(out_ptr + token * SIZE + offsets, head * share, mask=mask)
