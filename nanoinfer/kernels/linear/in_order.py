"""Matrix products that add up an output's terms in the order of the inputs, whatever the number of tokens.

Our kernel does so for tiles of any size: tensor cores add the same terms to an output one after the other, however many
outputs there are beside it. cuBLAS, which is faster for many tokens, does so wherever it does not divide the inputs.
Neither is promised anywhere. So we compare bits at the start, of products that are all rounding error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import early_launch, fetch_rows, num_multiprocessors, shared_memory, wait_for_predecessor
from nanoinfer.kernels.linear.activation import Activation, gate_mul, gate_mul_block
from nanoinfer.kernels.linear.one_wave import add_product
from nanoinfer.kernels.linear.weight import OwnProduct

FEW_TOKENS = 16  # up to here our kernel, which is launched early, is as fast as cuBLAS (measured on an H200)
NEIGHBOURS = 8  # tiles of tokens that are computed side by side, with the same rows of the weight


class InOrderWeight(OwnProduct):
    """A weight whose products add up in the order of the inputs."""

    def __init__(self, weight: Tensor, has_bias: bool, sizes: Iterable[int]) -> None:
        """Find out for which of these numbers of tokens cuBLAS has the same bits. Raises ValueError as find_sizes does.

        weight: [out_features, in_features]
        """
        self._weight = weight
        self._for_cublas = find_sizes(*weight.shape, weight.dtype, has_bias, weight.device, tuple(sizes))

    @property
    def dtype(self) -> torch.dtype:
        """That of the weight."""
        return self._weight.dtype

    def product(
        self, x: Tensor, bias: Tensor | None = None, activation: Activation | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Compute kernels.linear.dispatch.linear, without an activation into `out` if given."""
        if len(x) in self._for_cublas:
            out = _cublas(x, self._weight, bias, out)
        elif len(x) > FEW_TOKENS:
            out = in_order_triton(x, self._weight, bias, out)
        else:  # a launch more would take as long as the activation
            return in_order_triton(x, self._weight, bias, out, activation)
        return out if activation is None else gate_mul(out, activation)


def _cublas(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


@functools.cache
def find_sizes(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    has_bias: bool,
    device: torch.device,
    sizes: tuple[int, ...],
) -> frozenset[int]:
    """Return for how many tokens cuBLAS is to multiply by a weight of this shape: it has the bits of our kernel.

    sizes: the numbers of tokens to try
    Raises ValueError if our kernel has not the same bits for all of them. It computes those that cuBLAS does not.
    """
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    half = in_features // 2
    bias = numbers(out_features) * 1e-6 if has_bias else None
    x, weight = numbers(max(sizes), in_features), numbers(out_features, in_features)
    # Each product's second half undoes its first, so that the result is what was rounded away.
    x[:, half : 2 * half] = x[:, :half]
    weight[:, half : 2 * half] = -weight[:, :half]
    weight[:, 2 * half :] = 0
    expected = in_order_triton(x, weight, bias)

    def has_these_bits(multiply: Callable[..., Tensor], size: int) -> bool:
        return torch.equal(multiply(x[:size], weight, bias), expected[:size])

    # A switch of torch may let cuBLAS round float32 at any later time.
    many = [size for size in sizes if size > FEW_TOKENS and dtype != torch.float32]
    for_cublas = frozenset(size for size in many if has_these_bits(_cublas, size))
    if not all(has_these_bits(in_order_triton, size) for size in sizes if size not in for_cublas):
        raise ValueError(
            "deterministic=True: this GPU adds up in other orders for other numbers of tokens; device='cpu' does not"
        )
    return for_cublas


class Tiles(NamedTuple):
    """The tile of a program, and how it computes it.

    inputs: so many are multiplied at a time
    stages: so many of these are on their way at once, if the shared memory holds them
    time: of an output, relative to that in the largest tile, measured on an H200
    used: so many of the outputs are computed, and the others are another program's; None: all
    """

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 5
    time: float = 1.0
    used: int | None = None


TILES = (
    Tiles(128, 256, 64, 8, time=1.0),
    Tiles(128, 128, 64, 8, time=1.1),
    Tiles(64, 128, 64, 4, time=1.4),
    Tiles(64, 64, 128, 4, time=1.6),
    Tiles(64, 32, 128, 4, time=2.2),
)
SOME = Tiles(32, 64, 128, 4)  # for more than few tokens, and at most its own number
FEW = Tiles(16, 64, 128, 4, stages=9)
NARROW = Tiles(16, 16, 256, 4, stages=9)  # for few tokens and few outputs
WIDE = Tiles(16, 128, 128, 4, stages=9)  # for few tokens and many outputs of many inputs
MIN_BUSY = 1 / 4  # of the multiprocessors, so many have a tile, or narrow ones are faster
MANY_INPUTS = 4096  # from here on, more programs cost less than multiprocessors that have more outputs than others
MIN_STAGES = 3  # of wide tiles, or they are slow
FETCHED = tl.constexpr(256)  # inputs, of the weights for few tokens, that are fetched before the wait
MOST_IN_FLOAT32 = 64 * 128  # outputs of a tile, so that a thread's registers hold its share


def choose_tiles(x: Tensor, out_features: int) -> Tiles:
    """Return the tiles with which the multiprocessors would be done first, if each computed one at a time."""
    tokens, multiprocessors = len(x), num_multiprocessors(x.device)
    if tokens <= FEW_TOKENS:
        return _choose_for_few(x, out_features, multiprocessors)
    if tokens <= SOME.tokens:
        return SOME

    def seconds(tiles: Tiles) -> float:
        count = triton.cdiv(tokens, tiles.tokens) * triton.cdiv(out_features, tiles.outputs)
        return triton.cdiv(count, multiprocessors) * tiles.tokens * tiles.outputs * tiles.time

    return min((tiles for tiles in TILES if x.itemsize == 2 or fits_float32(tiles)), key=seconds)


def _choose_for_few(x: Tensor, out_features: int, multiprocessors: int) -> Tiles:
    """Return the tiles for up to FEW_TOKENS tokens: reading the weight takes longest, so all should read evenly."""
    if out_features < FEW.outputs * multiprocessors * MIN_BUSY:
        return NARROW
    share = triton.cdiv(out_features, multiprocessors * 16) * 16
    if x.shape[1] < MANY_INPUTS or share > WIDE.outputs:
        return FEW
    if share <= FEW.outputs:
        return FEW._replace(used=share)
    return WIDE._replace(used=share) if _stages(WIDE, x, gated=True) >= MIN_STAGES else FEW


def _stages(tiles: Tiles, x: Tensor, gated: bool) -> int:
    """Return how many blocks of inputs of the tokens' vectors and of the weight are on their way at once."""
    bytes_at_once = (tiles.tokens + tiles.outputs * (2 if gated else 1)) * tiles.inputs * 2
    return max(1, min(tiles.stages, shared_memory(x.device) // bytes_at_once))


def fits_float32(tiles: Tiles) -> bool:
    """Return whether a program can have such a tile of float32 numbers."""
    return tiles.tokens * tiles.outputs <= MOST_IN_FLOAT32


def in_order_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    activation: Activation | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Compute InOrderWeight.product in one launch. tiles: None: choose_tiles' own"""
    gated = activation is not None
    (tokens, in_features), out_features = x.shape, weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    if out is None:
        out = torch.empty((tokens, out_features), dtype=x.dtype, device=x.device)
    tiles = tiles or choose_tiles(x, out_features)
    inputs, used = tiles.inputs * 2 // x.itemsize, tiles.used or tiles.outputs
    _in_order_kernel[(triton.cdiv(tokens, tiles.tokens) * triton.cdiv(out_features, used),)](
        x,
        weight,
        bias,
        out,
        tokens,
        out_features,
        in_features,
        BIAS=bias is not None,
        ACTIVATION=activation,
        WHOLE=in_features % inputs == 0,
        NEIGHBOURS=NEIGHBOURS,
        BLOCK_M=tiles.tokens,
        BLOCK_N=tiles.outputs,
        BLOCK_K=inputs,
        USED=used,
        num_warps=tiles.warps,
        num_stages=_stages(tiles, x, gated),
        **early_launch(x),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _in_order_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    out_features,
    in_features,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WHOLE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USED: tl.constexpr,
    EARLY: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    # Programs that run side by side share what they read.
    program, token_tiles = tl.program_id(0), tl.cdiv(tokens, BLOCK_M)
    per_group = NEIGHBOURS * tl.cdiv(out_features, USED)
    first_tile = program // per_group * NEIGHBOURS
    group_tiles = tl.minimum(token_tiles - first_tile, NEIGHBOURS)
    m = (first_tile + program % per_group % group_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = program % per_group // group_tiles * USED
    n, end, k = first + tl.arange(0, BLOCK_N), tl.minimum(first + USED, out_features), tl.arange(0, BLOCK_K)
    has_token, has_output = (m < tokens)[:, None], (n < end)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < end, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + out_features + n, mask=n < end, other=0.0).to(tl.float32)
    if BLOCK_M == 16:
        fetch_rows(weight_ptr, n, end, in_features, 0, FETCHED, EARLY)
        if GATED:
            up_weight_ptr = weight_ptr + out_features.to(tl.int64) * in_features
            fetch_rows(up_weight_ptr, n, end, in_features, 0, FETCHED, EARLY)
    wait_for_predecessor(EARLY)

    # Tensor cores need at least 64 rows in the left matrix: with fewer tokens, the weight is the left one.
    TOKENS_LEFT: tl.constexpr = BLOCK_M >= 64
    acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N] if TOKENS_LEFT else [BLOCK_N, BLOCK_M], tl.float32)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * in_features + k[None, :]
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * in_features + k[None, :]
    for start in range(0, in_features, BLOCK_K):
        x_mask, weight_mask = has_token, has_output
        if not WHOLE:
            is_input = (start + k < in_features)[None, :]
            x_mask, weight_mask = has_token & is_input, has_output & is_input
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0.0)
        acc = add_product(acc, x, weight, TOKENS_LEFT)
        if GATED:
            up_ptrs = weight_ptrs + start + out_features.to(tl.int64) * in_features
            up_weight = tl.load(up_ptrs, mask=weight_mask, other=0.0)
            up_acc = add_product(up_acc, x, up_weight, TOKENS_LEFT)
    if BIAS:
        acc += bias[None, :] if TOKENS_LEFT else bias[:, None]
    out = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        if BIAS:
            up_acc += up_bias[None, :] if TOKENS_LEFT else up_bias[:, None]
        out = gate_mul_block(out, up_acc.to(out.dtype), ACTIVATION)
    if not TOKENS_LEFT:
        out = tl.trans(out)
    targets = out_ptr + m.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(targets, out, mask=has_token & (n < end)[None, :])
