"""The gate of a gated MLP, act(gate) * up (Shazeer, 2020): SwiGLU, GeGLU, and a SwiGLU of clamped gates and ups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import BLOCK as FP8_BLOCK
from nanoinfer.kernels.fp8 import Fp8Tokens, quantize_blocks
from nanoinfer.kernels.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 1024
# Numbers of a token, in 16 bits, from which on the next product starts when this kernel has ended. Started earlier, it
# divides its multiprocessors' memory otherwise (see launch.py), and took up to 12 µs longer on an H200.
WIDE = 8192


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit`, and an up from -limit to limit."""

    alpha: float
    limit: float


Activation: TypeAlias = Literal["silu", "gelu_tanh"] | ClampedSwiGLU

_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute act(gate) * up: [tokens, 2 * size], gate before up, to [tokens, size].

    activation: "silu", gate / (1 + exp(-gate)); or "gelu_tanh", the approximation of GELU by tanh (Hendrycks and
        Gimpel, 2016): gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3))); or a ClampedSwiGLU, the product
        with the up included, as in gpt-oss (OpenAI, 2025)
    """
    return gate_mul_triton(gate_up, activation) if gate_up.is_cuda else gate_mul_reference(gate_up, activation)


def gate_mul_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_mul in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiGLU):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (gate * activation.alpha).sigmoid_().mul_(gate).mul_(up + 1)
    return _FUNCTIONS[activation](gate).mul_(up)


def gate_mul_triton(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_mul as one launch."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _launch(gate_up, out, activation)
    return out


def fp8_gate_mul_triton(gate_up: Tensor, activation: Activation) -> Fp8Tokens:
    """Return gate_mul's result in FP8, as one launch; its size is a multiple of kernels.fp8.BLOCK."""
    assert gate_up.shape[1] % (2 * FP8_BLOCK.value) == 0
    out = Fp8Tokens.empty(gate_up.shape[0], gate_up.shape[1] // 2, gate_up)
    _launch(gate_up, out, activation)
    return out


def _launch(gate_up: Tensor, out: Tensor | Fp8Tokens, activation: Activation) -> None:
    assert gate_up.is_contiguous()
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    numbers, scales = (out.numbers, out.scales) if isinstance(out, Fp8Tokens) else (out, None)
    _gate_mul_kernel[(tokens, cdiv(size, BLOCK))](
        gate_up,
        numbers,
        scales,
        len(numbers),
        size,
        ACTIVATION=activation,
        IN_FP8=scales is not None,
        MAKE_WAY=scales is not None or size < WIDE,
        BLOCK=BLOCK,
        **launch_options(gate_up),
    )


@triton.jit(do_not_specialize=["room"])
def _gate_mul_kernel(
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    room,
    size,
    ACTIVATION: tl.constexpr,
    IN_FP8: tl.constexpr,
    MAKE_WAY: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY, START_SUCCESSOR=MAKE_WAY)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_up_ptr + token * 2 * size + offsets, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * size + size + offsets, mask=mask, other=0.0)
    out = gate_mul_block(gate, up, ACTIVATION)
    if IN_FP8:
        numbers, scales = quantize_blocks(tl.reshape(out.to(tl.float32), [BLOCK // FP8_BLOCK, FP8_BLOCK]))
        out = tl.reshape(numbers, [BLOCK]).to(out_ptr.dtype.element_ty)
        block = tl.program_id(1) * (BLOCK // FP8_BLOCK) + tl.arange(0, BLOCK // FP8_BLOCK)
        tl.store(scales_ptr + block * room + token, scales, mask=block < size // FP8_BLOCK)
    tl.store(out_ptr + token * size + offsets, out, mask=mask)


@triton.jit
def gated_row(n, weight_rows):
    """Return the row of a weight with all gates first that is row n where each gate precedes its up."""
    return n // 2 + n % 2 * (weight_rows // 2)


@triton.jit
def gate_mul_block(gate, up, ACTIVATION: tl.constexpr):
    """Compute gate_mul inside a kernel, of blocks in the model's dtype; round act(gate) to it, as transformers does."""
    wide = gate.to(tl.float32)
    if ACTIVATION == "silu":
        act = wide * tl.sigmoid(wide)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 * u), in which an exp that overflows gives a 0 and no NaN.
        act = wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    else:
        wide = tl.minimum(wide, ACTIVATION.limit)
        act = wide * tl.sigmoid(ACTIVATION.alpha * wide)
        up = tl.minimum(tl.maximum(up, -ACTIVATION.limit), ACTIVATION.limit) + 1.0
    return act.to(gate.dtype) * up
