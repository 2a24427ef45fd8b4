"""RMSNorm and LayerNorm, alone or after the addition of a residual."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.fp8 import BLOCK as FP8_BLOCK
from nanoinfer.kernels.fp8 import Fp8Tokens, quantize_blocks
from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor

Form = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]


class Norm(NamedTuple):
    """The parameters of an RMSNorm, or of a LayerNorm (Ba et al., 2016), which takes off the mean first.

    weight: [size]
    plus_one: the weight is stored less one, as Gemma's and Nemotron's checkpoints have it
    stream_scale: [1], multiplies the sum with a residual, whose norm this is, as in Gemma 4; None: nothing does
    centred: it is a LayerNorm
    bias: [size], of a LayerNorm that has one
    """

    weight: Tensor
    eps: float
    plus_one: bool = False
    stream_scale: Tensor | None = None
    centred: bool = False
    bias: Tensor | None = None

    @property
    def form(self) -> Form:
        """What the kernels are compiled for."""
        if self.centred:
            return "layer_plus_one" if self.plus_one else "layer"
        return "rms_plus_one" if self.plus_one else "rms"


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang and Sennrich, 2019).

    If the norm is centred, x - mean(x) takes the place of x, and the bias is added.
    x: [tokens, size], or [pieces, tokens, size] that add up to it, in float32
    Returns [tokens, size] in x's dtype; the sum of pieces takes the weight's.
    """
    if x.is_cuda:
        return normalize_triton(x, norm)
    return normalize_reference(_add_pieces(x, norm.weight.dtype), norm)


def add_norm(x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return (normalize(total), total) for total = x + residual, times the norm's stream_scale, both [tokens, size].

    x: [tokens, size], or [pieces, tokens, size] that add up to it, in float32; residual: [tokens, size]
    """
    function = add_norm_triton if x.is_cuda else add_norm_reference
    return function(x, residual, norm)


def norm_add_norm(x: Tensor, residual: Tensor, post: Norm, pre: Norm) -> tuple[Tensor, Tensor]:
    """Return (normalize(total, pre), total) for total = normalize(x, post) + residual, times pre's stream_scale.

    Both are [tokens, size]. Models such as Gemma 2 normalise each branch's result and each branch's input.
    x, residual: as for add_norm
    """
    function = norm_add_norm_triton if x.is_cuda else norm_add_norm_reference
    return function(x, residual, post, pre)


def add_residual(x: Tensor, residual: Tensor, post: Norm | None = None) -> Tensor:
    """Return x + residual, or with `post` normalize(x, post) + residual, [tokens, size].

    Models such as OLMo 2 normalise each branch's result alone. x, residual: as for add_norm
    """
    function = add_residual_triton if x.is_cuda else add_residual_reference
    return function(x, residual, post)


def normalize_reference(x: Tensor, norm: Norm) -> Tensor:
    """normalize in torch; x: [..., size], never pieces.

    The mean is float32. As transformers does, the function rounds to x's dtype before the weight multiplies; or with
    plus_one, and if it is centred, afterwards.
    """
    if norm.centred:
        weight = norm.weight + 1 if norm.plus_one else norm.weight  # rounded, as in Nemotron
        bias = None if norm.bias is None else norm.bias.float()
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias, norm.eps).to(x.dtype)
    if x.dtype == norm.weight.dtype == torch.float32 and not norm.plus_one:  # nothing is rounded on the way
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=norm.eps)
    if norm.plus_one:
        return (normed * (1.0 + norm.weight.float())).to(x.dtype)
    return normed.to(x.dtype) * norm.weight


def add_norm_reference(x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """add_norm in torch."""
    total = _scaled(add_residual_reference(x, residual), norm)
    return normalize_reference(total, norm), total


def norm_add_norm_reference(x: Tensor, residual: Tensor, post: Norm, pre: Norm) -> tuple[Tensor, Tensor]:
    """norm_add_norm in torch."""
    total = _scaled(add_residual_reference(x, residual, post), pre)
    return normalize_reference(total, pre), total


def add_residual_reference(x: Tensor, residual: Tensor, post: Norm | None = None) -> Tensor:
    """add_residual in torch."""
    x = _add_pieces(x, residual.dtype)
    return (x if post is None else normalize_reference(x, post)) + residual


def _scaled(total: Tensor, norm: Norm) -> Tensor:
    return total if norm.stream_scale is None else total * norm.stream_scale


def _add_pieces(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.float().sum(dim=0).to(dtype) if x.dim() == 3 else x


def normalize_triton(x: Tensor, norm: Norm) -> Tensor:
    """normalize as one launch."""
    out = torch.empty(x.shape[-2:], dtype=norm.weight.dtype if x.dim() == 3 else x.dtype, device=x.device)
    _launch(x, None, out, norm=norm)
    return out


def add_norm_triton(x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """add_norm as one launch."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, residual, out, total, norm=norm)
    return out, total


def norm_add_norm_triton(x: Tensor, residual: Tensor, post: Norm, pre: Norm) -> tuple[Tensor, Tensor]:
    """norm_add_norm as one launch."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, residual, out, total, post, pre)
    return out, total


def add_residual_triton(x: Tensor, residual: Tensor, post: Norm | None = None) -> Tensor:
    """add_residual as one launch."""
    out = torch.empty_like(residual)
    _launch(x, residual, out, post=post)
    return out


def fp8_norm_triton(x: Tensor, residual: Tensor | None, norm: Norm, post: Norm | None) -> tuple[Fp8Tokens, Tensor]:
    """Return the result of the norm in FP8, and the total, as one launch.

    x, residual, post: as for norm_add_norm; without a post the total is x + residual, without a residual x
    """
    tokens, size = x.shape[-2:]
    out = Fp8Tokens.empty(tokens, size, x if residual is None else residual)
    total = x if residual is None else torch.empty_like(residual)
    _launch(x, residual, out, None if residual is None else total, post, norm)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor | Fp8Tokens,
    total: Tensor | None = None,
    post: Norm | None = None,
    norm: Norm | None = None,
) -> None:
    tokens, size = x.shape[-2:]
    block = next_power_of_2(size)
    numbers, scales = (out.numbers, out.scales) if isinstance(out, Fp8Tokens) else (out, None)
    _norm_kernel[(tokens,)](
        x,
        residual,
        post.weight if post else None,
        post.bias if post else None,
        norm.weight if norm else None,
        norm.bias if norm else None,
        norm.stream_scale if norm else None,
        numbers,
        scales,
        total,
        len(numbers),
        size,
        tokens * size,
        post.eps if post else None,
        norm.eps if norm else None,
        PIECES=len(x) if x.dim() == 3 else 1,
        POST=post.form if post else None,
        ADD=residual is not None,
        NORM=norm.form if norm else None,
        SCALED=norm is not None and norm.stream_scale is not None,
        IN_FP8=scales is not None,
        BLOCK=block,
        num_warps=norm_warps(block),
        **launch_options(x),
    )


def norm_warps(block: int) -> int:
    """Return the number of warps for a program that normalises one vector of up to `block` numbers."""
    return min(max(block // 256, 1), 16)


@triton.jit(do_not_specialize=["room"])
def _norm_kernel(
    x_ptr,
    residual_ptr,
    post_weight_ptr,
    post_bias_ptr,
    weight_ptr,
    bias_ptr,
    stream_scale_ptr,
    out_ptr,
    scales_ptr,
    total_ptr,
    room,
    size,
    piece_stride,
    post_eps,
    eps,
    PIECES: tl.constexpr,
    POST: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    IN_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * size
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    if POST is not None:
        post_weight, post_bias = load_norm(post_weight_ptr, post_bias_ptr, offsets, mask)
    if NORM is not None:
        weight, bias = load_norm(weight_ptr, bias_ptr, offsets, mask)
    wait_for_predecessor(EARLY)
    x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0)
    if PIECES > 1:
        x = x.to(tl.float32)
        for piece in tl.static_range(1, PIECES):
            place = start + piece * piece_stride.to(tl.int64) + offsets
            x += tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        x = x.to(weight_ptr.dtype.element_ty if NORM is not None else out_ptr.dtype.element_ty)
    if POST is not None:
        x = norm_block(x, post_weight, post_bias, size, post_eps, POST)
    if ADD:
        x += tl.load(residual_ptr + start + offsets, mask=mask, other=0.0)
        if SCALED:
            x *= tl.load(stream_scale_ptr)
        if NORM is not None:
            tl.store(total_ptr + start + offsets, x, mask=mask)
    if NORM is not None:
        x = norm_block(x, weight, bias, size, eps, NORM)
    if IN_FP8:
        blocks = tl.reshape(x.to(tl.float32), [BLOCK // FP8_BLOCK, FP8_BLOCK])
        numbers, scales = quantize_blocks(blocks)
        b = tl.arange(0, BLOCK // FP8_BLOCK)
        tl.store(out_ptr + start + offsets, tl.reshape(numbers, [BLOCK]).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(scales_ptr + b * room + tl.program_id(0), scales, mask=b < size // FP8_BLOCK)
    else:
        tl.store(out_ptr + start + offsets, x, mask=mask)


@triton.jit
def load_norm(weight_ptr, bias_ptr, offsets, mask):
    """Load a norm's weight and bias; one that is missing is 0."""
    weight, bias = tl.load(weight_ptr + offsets, mask=mask, other=0.0), tl.full([], 0.0, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offsets, mask=mask, other=0.0)
    return weight, bias


@triton.jit
def norm_block(x, weight, bias, size, eps, FORM: tl.constexpr):
    """Normalise inside a kernel; x: one vector of `size` numbers, and zeros up to the next power of two."""
    wide = x.to(tl.float32)
    if FORM == "layer" or FORM == "layer_plus_one":
        wide = tl.where(tl.arange(0, x.shape[0]) < size, wide - tl.sum(wide, axis=0) / size, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    if FORM == "rms":
        return normed.to(x.dtype) * weight
    elif FORM == "rms_plus_one":
        return (normed * (1.0 + weight.to(tl.float32))).to(x.dtype)
    else:
        if FORM == "layer_plus_one":
            weight = (1.0 + weight.to(tl.float32)).to(weight.dtype)  # rounded, as in Nemotron
        normed = normed * weight.to(tl.float32) + bias.to(tl.float32)
        return normed.to(x.dtype)
