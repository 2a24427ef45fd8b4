"""Matrix products of several tokens with a weight in FP8, by tensor cores that multiply FP8 with FP8.

The tokens' vectors are in FP8 too, and each block of them has a scale. cuBLAS multiplies many tokens at nearly twice
the speed of 16-bit numbers, on the GPUs for which it can. Few tokens take as long as the weight takes to be read: our
own kernel reads it faster. It is launched early, and cuts the inputs of a product that has few outputs into pieces. It
also multiplies whatever cuBLAS cannot. From sm_90 on, tensor-memory copies fetch the blocks that it multiplies. Their
descriptors cost the host 30 to 60 µs a launch, and so only launches in graphs have them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.kernels.fp8 import BLOCK, HAS_FP8, Fp8Tokens, Fp8Weight, capability, quantize
from nanoinfer.kernels.launch import can_launch_early, cdiv, is_recording, num_multiprocessors, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, fp8_gate_mul_triton, gate_mul
from nanoinfer.kernels.linear.operands.operand import Operand
from nanoinfer.kernels.linear.operands.weight import Weight, add_and_norm
from nanoinfer.kernels.linear.tiles import Epilogue, TileConfig, load_block, multiply_tiles, stages_that_fit
from nanoinfer.kernels.norm.norm import Norm, fp8_norm_triton

CUBLAS_SCALES_BLOCKS = (9, 0)  # the GPUs for which cuBLAS multiplies numbers whose blocks have scales
CUBLAS_VERSION = (12, 9)  # of CUDA, in which cuBLAS came to do so
CUBLAS_BLOCK = (128, 128)  # of the weight
CUBLAS_MULTIPLE = 4 * BLOCK.value  # of the inputs, so that cuBLAS can read the scales
LONG = 5120  # inputs; of longer sums, which a few programs compute, cuBLAS is the faster
LEAST_INPUTS = 1024  # of a piece; twice as many with more than 64 tokens
MAX_PIECES = 6
MAX_PIECES_OF_MANY = 4  # with more than 64 tokens: the next kernel, too, takes longer for more of them
RESIDENT = 3  # programs that share a multiprocessor, at most
MAX_STAGES = 6
WARPS = 4
MOST_ROWS = 128  # of the weight, in a tile


def can_multiply_fp8(x: torch.dtype, weight: Fp8Weight) -> bool:
    """Return whether fp8_linear and one_row can multiply tokens by the weight.

    x: the dtype of the tokens' vectors; those of float32 would lose more than the weight did
    """
    in_features, (_, width) = weight.numbers.shape[-1], weight.block
    in_blocks = in_features % BLOCK.value == width % BLOCK.value == 0
    return in_blocks and x.itemsize == 2 and capability(weight.numbers.device) >= HAS_FP8


class Fp8LinearWeight(Fp8Weight, Weight):
    """A weight such as can_multiply_fp8 says. The launch that gates or normalises several tokens rounds them, too."""

    __slots__ = ()

    def for_row(self, x: Tensor, alone: bool) -> Fp8LinearWeight:
        """Return this weight."""
        return self

    def gated(self, x: Tensor, before: Activation) -> Fp8Tokens:
        """Return act(gate) * up, rounded."""
        return fp8_gate_mul_triton(x, before)

    def normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm | None, post: Norm | None
    ) -> tuple[Tensor | Fp8Tokens, Tensor]:
        """Return the vectors, rounded if there is a norm, and the total."""
        return add_and_norm(x, residual, None, post) if norm is None else fp8_norm_triton(x, residual, norm, post)

    def product(
        self,
        x: Tensor | Fp8Tokens,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        may_split: bool = False,
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear."""
        in_fp8 = quantize(x) if isinstance(x, Tensor) else x
        out = fp8_linear(in_fp8, self, bias, may_split and activation is None)
        return gate_mul(out, activation) if activation else out


def fp8_linear(x: Fp8Tokens, weight: Fp8Weight, bias: Tensor | None = None, may_split: bool = False) -> Tensor:
    """Compute kernels.linear.dispatch.linear, in x's dtype, by whichever way is the fastest."""
    config = find_config(x, weight, may_split)
    if config is not None:
        return fp8_linear_triton(x, weight, config, bias, has_copies(x))
    out = _cublas(x, weight)
    return out if bias is None else out.add_(bias)


def find_config(x: Fp8Tokens, weight: Fp8Weight, may_split: bool) -> TileConfig | None:
    """Return how our kernel cuts a product; None if cuBLAS can multiply these, and is faster (measured on an H200)."""
    tokens, in_features = x.tokens, weight.numbers.shape[1]
    multiprocessors = num_multiprocessors(x.numbers.device)
    tiles = _tiles(x, weight)
    most = RESIDENT * multiprocessors
    pieces = _pieces(in_features, most // tiles, tokens) if may_split else 1
    # cuBLAS is the faster for long sums, and where our programs cannot run all at once, or are many and not cut.
    is_short = in_features // pieces <= LONG
    fits = tiles * pieces <= (multiprocessors if tokens > 64 and pieces == 1 else most)
    if tokens > 32 and not (is_short and fits) and _cublas_can(weight, x.dtype):
        return None
    return own_config(x, weight, pieces)


def own_config(x: Fp8Tokens, weight: Fp8Weight, pieces: int = 1) -> TileConfig:
    """Return the configuration for our own kernel, into so many pieces."""
    device, (block_m, block_n) = x.numbers.device, _tile(x.tokens)
    programs = _tiles(x, weight) * pieces
    together = min(cdiv(programs, num_multiprocessors(device)), RESIDENT)  # on a multiprocessor
    stages = stages_that_fit(MAX_STAGES, (block_m + block_n) * BLOCK.value, device, together)
    stages = max(stages, 2)  # with one, nothing would be on its way meanwhile
    return TileConfig(block_m, block_n, BLOCK.value, pieces, WARPS, stages)


def _tile(tokens: int) -> tuple[int, int]:
    """Return how many tokens, and how many rows of the weight, a tile has."""
    return (16, 64) if tokens <= 16 else (32, 64) if tokens <= 32 else (64, MOST_ROWS)


def _tiles(x: Fp8Tokens, weight: Fp8Weight) -> int:
    block_m, block_n = _tile(x.tokens)
    return cdiv(x.tokens, block_m) * cdiv(len(weight.numbers), block_n)


def has_copies(x: Fp8Tokens) -> bool:
    """Return whether tensor-memory copies are to fetch the blocks of a launch."""
    return is_recording() and can_launch_early(x.numbers.device)  # sm_90 brought these copies, too


def _pieces(in_features: int, most: int, tokens: int) -> int:
    """Return the largest number of equal pieces of whole blocks, up to `most`, of which none is too short."""
    limit, least = (MAX_PIECES, LEAST_INPUTS) if tokens <= 64 else (MAX_PIECES_OF_MANY, 2 * LEAST_INPUTS)
    most = min(most, limit, in_features // least)
    return max((p for p in range(1, most + 1) if in_features % (p * BLOCK.value) == 0), default=1)


def _cublas_can(weight: Fp8Weight, dtype: torch.dtype) -> bool:
    in_features, device = weight.numbers.shape[1], weight.numbers.device
    if weight.block != CUBLAS_BLOCK or in_features % CUBLAS_MULTIPLE or dtype != torch.bfloat16:
        return False
    return capability(device) == CUBLAS_SCALES_BLOCKS and _torch_can()


@functools.cache
def _torch_can() -> bool:
    """Return whether this torch and its cuBLAS can multiply numbers whose blocks have scales."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return hasattr(F, "scaled_mm") and version >= CUBLAS_VERSION


def _cublas(x: Fp8Tokens, weight: Fp8Weight) -> Tensor:
    """Multiply by cuBLAS; [tokens, out_features]."""
    out = F.scaled_mm(
        x.numbers,
        weight.numbers.T,
        scale_a=x.scales.T,
        scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=weight.scales.T,
        scale_recipe_b=F.ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )
    return out[: x.tokens]


def fp8_linear_triton(
    x: Fp8Tokens,
    weight: Fp8Weight,
    config: TileConfig,
    bias: Tensor | None = None,
    copies: bool = False,
    in_order: bool = False,
) -> Tensor:
    """Compute the product in one launch, cut as `config` says.

    Several pieces are [pieces, tokens, out_features] float32; the first has the bias.
    copies: tensor-memory copies fetch the numbers
    in_order: all tiles add up alike, one rounded product after the other
    """
    out_dtype = x.dtype if config.pieces == 1 else torch.float32
    out = torch.empty((config.pieces, x.tokens, len(weight.numbers)), dtype=out_dtype, device=x.numbers.device)
    operand, vectors = fp8_operand(weight, MOST_ROWS if in_order else config.block_n, copies), x.numbers
    if copies:
        vectors = TensorDescriptor.from_tensor(vectors, [config.block_m, BLOCK.value])
        operand = operand._replace(numbers=TensorDescriptor.from_tensor(weight.numbers, [config.block_n, BLOCK.value]))
    return multiply_tiles(vectors, operand, config, out, Epilogue(bias=bias), x_scales=x.scales, fused=not in_order)


@dataclass(frozen=True)
class Fp8Form:
    """What the kernel is compiled for.

    height, width: of the blocks
    one_scale: a tile's rows have one in common; copies: x and the numbers are tensor descriptors
    """

    height: int
    width: int
    one_scale: bool
    copies: bool


def fp8_operand(weight: Fp8Weight, rows: int | None = None, copies: bool = False) -> Operand:
    """Return the operand of a weight, or of experts'.

    rows: so many are a tile's; None: these share no scale; copies: descriptors are to take the numbers' place
    """
    assert weight.numbers.is_contiguous()
    height, width = weight.block
    one_scale = rows is not None and height % rows == 0
    form = Fp8Form(height, width, one_scale, copies)
    numbers, (*_, rows, in_features) = weight.numbers, weight.numbers.shape
    return Operand(numbers, weight.scales, form, _add_products, rows, in_features, apart=True)


@triton.jit
def _add_products(x_source, numbers, product, tile, room, HOW: tl.constexpr, EARLY: tl.constexpr):
    """Return the products of a tile: see linear.plain.add_products."""
    GATED: tl.constexpr = HOW.activation is not None
    M: tl.constexpr = HOW.block_m
    N: tl.constexpr = HOW.block_n
    FORM: tl.constexpr = HOW.form
    scales_ptr, in_features = product.parts, product.in_features
    rows, across = tile.rows.to(tl.int32), in_features // FORM.width
    scale_ptr = scales_ptr + tile.first_row // FORM.height * across
    scale_ptrs = scales_ptr + rows // FORM.height * across
    up_scale_ptrs = scales_ptr + (rows + product.rows) // FORM.height * across
    wait_for_predecessor(EARLY)

    # Tensor cores need at least 64 rows in the left matrix: with fewer tokens, the weight is the left one.
    TOKENS_LEFT: tl.constexpr = HOW.block_m >= 64
    acc = tl.zeros([M, N] if TOKENS_LEFT else [N, M], tl.float32)
    up_acc = tl.zeros([M, N] if TOKENS_LEFT else [N, M], tl.float32)
    k = tl.arange(0, BLOCK)[None, :]
    for start in range(tile.begin, tile.stop, BLOCK):
        if FORM.copies:
            x = x_source.load([tile.first, start])
            weight = numbers.load([tile.first_row, start])
        else:
            x_ptrs = x_source + tile.sources.to(tl.int64)[:, None] * in_features + (start + k)
            x = tl.load(x_ptrs, mask=tile.exists[:, None], other=0.0)
            ptrs = numbers + tile.rows[:, None] * in_features + (start + k)
            weight = load_block(ptrs, tile.has_row, None, HOW.full, True)
        x_scale = tl.load(product.x_scales + start // BLOCK * room + tile.sources, mask=tile.exists, other=0.0)
        if FORM.one_scale:
            x_scale *= tl.load(scale_ptr + start // FORM.width)
            acc += _multiply_block(x, x_scale, weight, None, TOKENS_LEFT)
        else:
            scale = tl.load(scale_ptrs + start // FORM.width, mask=tile.has_row, other=0.0)
            acc += _multiply_block(x, x_scale, weight, scale, TOKENS_LEFT)
        if GATED:
            up_ptrs = ptrs + tl.full([], product.rows, tl.int64) * in_features
            ups = load_block(up_ptrs, tile.has_row, None, HOW.full, True)
            scale = tl.load(up_scale_ptrs + start // FORM.width, mask=tile.has_row, other=0.0)
            up_acc += _multiply_block(x, x_scale, ups, scale, TOKENS_LEFT)
    return acc, up_acc


@triton.jit
def _multiply_block(x, x_scale, weight, scale, TOKENS_LEFT: tl.constexpr):
    """Return x @ weight.T, or if not TOKENS_LEFT, weight @ x.T, of one block of inputs, times the scales.

    scale: that of each row of the weight; None: x_scale includes it
    The caller adds up the blocks in float32: the tensor cores' own sums of FP8 products keep fewer bits.
    """
    if TOKENS_LEFT:
        out = tl.dot(x, tl.trans(weight)) * x_scale[:, None]
        return out if scale is None else out * scale[None, :]
    else:
        out = tl.dot(weight, tl.trans(x)) * x_scale[None, :]
        return out if scale is None else out * scale[:, None]
