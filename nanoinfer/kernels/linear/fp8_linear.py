"""Matrix products of several tokens with a weight in FP8, by tensor cores that multiply FP8 with FP8.

The tokens' vectors are in FP8 too, and each block of them has a scale. cuBLAS multiplies many tokens at nearly twice
the speed of 16-bit numbers, on the GPUs for which it can. Few tokens take as long as the weight takes to be read: our
own kernel reads it faster. It is launched early, applies the activation, and cuts the inputs of a product that has few
outputs into pieces. It also multiplies whatever cuBLAS cannot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import BLOCK, Fp8Tokens, Fp8Weight
from nanoinfer.kernels.launch import early_launch, num_multiprocessors, shared_memory, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gate_mul, gate_mul_block, gated_row

HAS_FP8 = (8, 9)  # the first GPUs whose tensor cores multiply FP8
CUBLAS_SCALES_BLOCKS = (9, 0)  # the GPUs for which cuBLAS multiplies numbers whose blocks have scales
CUBLAS_VERSION = (12, 9)  # of CUDA, in which cuBLAS came to do so
CUBLAS_BLOCK = (128, 128)  # of the weight
CUBLAS_MULTIPLE = 4 * BLOCK.value  # of the inputs, so that cuBLAS can read the scales
LONG = 3072  # inputs; of longer sums, which a few programs compute, cuBLAS is the faster
LEAST_INPUTS = 1024  # of a piece
MANY_TOKENS = 4096  # about here 16-bit cuBLAS overtakes our kernel: reckoned from rates at 8,192 tokens, not measured
MAX_PIECES = 8
BLOCK_N = 64  # rows of the weight in a tile
WARPS = 4


@dataclass(frozen=True)
class Cut:
    """How a product is cut: into tiles of tokens by rows of the weight, and each tile into pieces by its inputs."""

    block_m: int  # tokens in a tile
    pieces: int
    stages: int  # of the loop over the blocks of inputs: several programs are to share a multiprocessor


def can_multiply_fp8(x: torch.dtype, weight: Fp8Weight, tokens: int = 1) -> bool:
    """Return whether fp8_linear and one_row can multiply so many tokens by the weight, and well.

    x: the dtype of the tokens' vectors; those of float32 would lose more than the weight did
    """
    in_features, (_, width) = weight.numbers.shape[-1], weight.block
    in_blocks = in_features % BLOCK.value == width % BLOCK.value == 0
    if not in_blocks or x.itemsize != 2 or _capability(weight.numbers.device) < HAS_FP8:
        return False
    return tokens < MANY_TOKENS or _cublas_can(weight, x)


def fp8_linear(
    x: Fp8Tokens,
    weight: Fp8Weight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    may_split: bool = False,
) -> Tensor:
    """Compute kernels.linear.dispatch.linear, in `dtype`, by whichever way is the fastest."""
    cut = find_cut(x, weight, dtype, activation is not None, may_split)
    if cut is not None:
        return fp8_linear_triton(x, weight, dtype, cut, bias, activation)
    out = _cublas(x, weight, dtype)
    if bias is not None:
        out += bias
    return gate_mul(out, activation) if activation else out


def find_cut(x: Fp8Tokens, weight: Fp8Weight, dtype: torch.dtype, gated: bool, may_split: bool) -> Cut | None:
    """Return the cut for our own kernel; None if cuBLAS can multiply these, and is faster (measured on an H200).

    gated: whether fp8_linear has an activation; the others are as there
    """
    tokens, (weight_rows, in_features) = x.tokens, weight.numbers.shape
    multiprocessors = num_multiprocessors(x.numbers.device)
    may_split = may_split and not gated  # the activation needs the whole sum
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    tiles = triton.cdiv(tokens, block_m) * triton.cdiv(weight_rows, BLOCK_N)
    resident = (3 if tokens <= 64 else 2) * multiprocessors  # programs that run at the same time
    least_inputs = LEAST_INPUTS * (2 if tokens <= 32 else 1)  # fewer tokens take less time to multiply than to add up
    pieces = _pieces(in_features, resident // tiles, least_inputs) if may_split else 1
    # Our kernel is the faster one if its programs fill the device, or are done soon.
    is_full = tokens <= 64 and tiles * pieces > resident // 2
    is_short = tiles <= resident and in_features // pieces <= (LONG if tokens <= 128 else LEAST_INPUTS)
    if tokens > 32 and not is_full and not is_short and _cublas_can(weight, dtype):
        return None
    return Cut(block_m, pieces, stages=6 if tokens <= 32 else 4 if tokens <= 64 else 3)


def _pieces(in_features: int, most: int, least_inputs: int) -> int:
    """Return the largest number of equal pieces of whole blocks, up to `most`, each of at least `least_inputs`."""
    most = min(most, MAX_PIECES, in_features // least_inputs)
    return max((p for p in range(1, most + 1) if in_features % (p * BLOCK.value) == 0), default=1)


def _cublas_can(weight: Fp8Weight, dtype: torch.dtype) -> bool:
    in_features, device = weight.numbers.shape[1], weight.numbers.device
    if weight.block != CUBLAS_BLOCK or in_features % CUBLAS_MULTIPLE or dtype != torch.bfloat16:
        return False
    return _capability(device) == CUBLAS_SCALES_BLOCKS and _torch_can()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; that of the CPU, which multiplies no FP8, is 0.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _torch_can() -> bool:
    """Return whether this torch and its cuBLAS can multiply numbers whose blocks have scales."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return hasattr(F, "scaled_mm") and version >= CUBLAS_VERSION


def _cublas(x: Fp8Tokens, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Multiply by cuBLAS; [tokens, out_features]."""
    out = F.scaled_mm(
        x.numbers,
        weight.numbers.T,
        scale_a=x.scales.T,
        scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=weight.scales.T,
        scale_recipe_b=F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return out[: x.tokens]


def fp8_linear_triton(
    x: Fp8Tokens,
    weight: Fp8Weight,
    dtype: torch.dtype,
    cut: Cut,
    bias: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Compute the product in one launch, cut as `cut` says; several pieces are [pieces, tokens, out_features] float32.

    The first piece has the bias.
    """
    gated = activation is not None
    assert cut.pieces == 1 or not gated
    tokens, (weight_rows, in_features) = x.tokens, weight.numbers.shape
    assert in_features % (cut.pieces * BLOCK.value) == 0
    out_features = weight_rows // 2 if gated else weight_rows
    (height, width), device = weight.block, x.numbers.device
    out_dtype = dtype if cut.pieces == 1 else torch.float32
    out = torch.empty((cut.pieces, tokens, out_features), dtype=out_dtype, device=device)
    tiles = triton.cdiv(tokens, cut.block_m) * triton.cdiv(weight_rows, BLOCK_N)
    stage = (cut.block_m + BLOCK_N) * BLOCK.value
    _fp8_linear_kernel[(tiles, cut.pieces)](
        x.numbers,
        x.scales,
        *weight,
        bias,
        out,
        tokens,
        len(x.numbers),
        weight_rows,
        in_features,
        in_features // cut.pieces,
        HEIGHT=height,
        WIDTH=width,
        BIAS=bias is not None,
        ACTIVATION=activation,
        BLOCK_M=cut.block_m,
        BLOCK_N=BLOCK_N,
        num_warps=WARPS,
        num_stages=max(1, min(cut.stages, shared_memory(device) // stage)),
        **early_launch(x.numbers),
    )
    return out if cut.pieces > 1 else out[0]


@triton.jit(do_not_specialize=["tokens", "room"])
def _fp8_linear_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    room,
    weight_rows,
    in_features,
    share,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    # Programs that run at the same time share the rows of a weight, if these are many.
    token_tiles = tl.cdiv(tokens, BLOCK_M)
    m = tl.program_id(0) % token_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first_row = tl.program_id(0) // token_tiles * BLOCK_N
    n = first_row + tl.arange(0, BLOCK_N)
    has_token, has_row = m < tokens, n < weight_rows
    if GATED:
        n = gated_row(n, weight_rows)
    if BIAS:
        biased = tl.where(tl.program_id(1) == 0, weight_rows, 0)  # only the first piece has the bias
        bias = tl.load(bias_ptr + n, mask=n < biased, other=0.0).to(tl.float32)
    begin = tl.program_id(1) * share
    k = begin + tl.arange(0, BLOCK)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * in_features + k[None, :]
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * in_features + k[None, :]
    scale_ptrs = scales_ptr + n // HEIGHT * (in_features // WIDTH)
    wait_for_predecessor(EARLY)

    # Tensor cores need at least 64 rows in the left matrix: with fewer tokens, the weight is the left one.
    TOKENS_LEFT: tl.constexpr = BLOCK_M >= 64
    acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, share, BLOCK):
        x = tl.load(x_ptrs + start, mask=has_token[:, None], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=has_row[:, None], other=0.0)
        x_scale = tl.load(x_scales_ptr + (begin + start) // BLOCK * room + m, mask=has_token, other=0.0)
        scale = tl.load(scale_ptrs + (begin + start) // WIDTH, mask=has_row, other=0.0)
        acc += multiply_block(x, x_scale, weight, scale, TOKENS_LEFT)

    if not TOKENS_LEFT:
        acc = tl.trans(acc)
    if BIAS:
        acc += bias[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    WIDE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    out_features = weight_rows
    if GATED:
        gate, up = tl.split(tl.reshape(out, [BLOCK_M, BLOCK_N // 2, 2]))
        out = gate_mul_block(gate, up, ACTIVATION)
        first_row, out_features = first_row // 2, weight_rows // 2
    outputs = first_row + tl.arange(0, WIDE)
    targets = out_ptr + (tl.program_id(1) * tokens + m).to(tl.int64)[:, None] * out_features + outputs[None, :]
    tl.store(targets, out, mask=has_token[:, None] & (outputs < out_features)[None, :])


@triton.jit
def multiply_block(x, x_scale, weight, scale, TOKENS_LEFT: tl.constexpr):
    """Return x @ weight.T, or if not TOKENS_LEFT, weight @ x.T, of one block of inputs, times the scales.

    The caller adds up the blocks in float32: the tensor cores' own sums of FP8 products keep fewer bits.
    """
    if TOKENS_LEFT:
        return tl.dot(x, tl.trans(weight)) * x_scale[:, None] * scale[None, :]
    else:
        return tl.dot(weight, tl.trans(x)) * scale[:, None] * x_scale[None, :]
