"""SiLU(gate) * up, the gate of a SwiGLU MLP (Shazeer, 2020)."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import early_launch, wait_for_predecessor

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2 * size], gate before up, to [tokens, size]: gate / (1 + exp(-gate)) * up."""
    return silu_mul_triton(gate_up) if gate_up.is_cuda else silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """silu_mul in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """silu_mul as one launch."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    _silu_mul_kernel[(tokens, triton.cdiv(size, BLOCK))](gate_up, out, size, BLOCK=BLOCK, **early_launch(gate_up))
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_predecessor(EARLY)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_up_ptr + token * 2 * size + offsets, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * size + size + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + token * size + offsets, silu_mul_block(gate, up), mask=mask)


@triton.jit
def silu_mul_block(gate, up):
    """silu_mul inside a kernel, of blocks in the model's dtype; SiLU is rounded to it, as transformers does."""
    wide = gate.to(tl.float32)
    return (wide * tl.sigmoid(wide)).to(gate.dtype) * up
