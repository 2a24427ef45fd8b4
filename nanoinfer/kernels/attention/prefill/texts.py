"""Attention of whole texts, packed one after another: each token sees those before it and behind it, in no cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.scores import LOG2_E
from nanoinfer.kernels.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor

SHORT = 32  # tokens: on the CPU, longer texts are faster one by one, without copies of their keys
AT_ONCE = 4096  # tokens of a batch


def attend_to_texts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens: list[int],
    cu_lens: Tensor,
    scale: float,
    window: int | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T + bias) v within each text.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]
    lens: the tokens of each text; cu_lens: [texts + 1] int32, where each begins, and the last one ends
    window: a token sees those less than so many places away; None: all
    biases: [heads, 2 * most - 1] float32, of a key that is d places behind its query in column most - 1 + d, of texts
        of at most `most` tokens; None: there are none
    Returns [tokens, heads, head_dim].
    """
    if q.is_cuda:
        return attend_to_texts_triton(q, k, v, lens, cu_lens, scale, window, biases)
    return attend_to_texts_reference(q, k, v, lens, scale, window, biases)


def attend_to_texts_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens: list[int],
    scale: float,
    window: int | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """attend_to_texts in torch."""
    out, is_grouped = torch.empty_like(q), q.shape[1] != k.shape[1]
    for begins, length in _batches(lens):
        rows: Tensor | slice = slice(begins[0], begins[0] + length)
        if len(begins) > 1:
            rows = torch.tensor(begins, device=q.device).unsqueeze(1) + torch.arange(length, device=q.device)
        queries, keys, values = (part[rows].view(-1, length, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
        mask = _mask(length, window, biases, q)
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=is_grouped)
        out[rows] = attended.transpose(1, 2)
    return out


def _batches(lens: list[int]) -> Iterator[tuple[list[int], int]]:
    """Yield where some texts of the same length begin, and that length. A text that is not short is alone."""
    begins, by_length = [*accumulate(lens, initial=0)], dict[int, list[int]]()
    for begin, length in zip(begins, lens, strict=False):
        by_length.setdefault(length, []).append(begin)
    for length, found in by_length.items():
        most = AT_ONCE // length if length <= SHORT else 1
        yield from ((found[first : first + most], length) for first in range(0, len(found), most))


def _mask(length: int, window: int | None, biases: Tensor | None, q: Tensor) -> Tensor | None:
    """Return what torch adds to the scores of a text, or the keys that queries see; None: they see all. q: for dtype"""
    if biases is None and (window is None or length <= window):
        return None
    places = torch.arange(length, device=q.device)
    distances = places - places.unsqueeze(1)
    is_near = None if window is None else distances.abs() < window
    if biases is None:
        return is_near
    added = biases[:, distances + biases.shape[1] // 2].to(q.dtype).unsqueeze(0)
    return added if is_near is None else added.masked_fill(~is_near, float("-inf"))


def attend_to_texts_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens: list[int],
    cu_lens: Tensor,
    scale: float,
    window: int | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """attend_to_texts as one launch."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads, head_dim = q.shape[1:]
    block_m, block_n, stages = _tile(head_dim, q.itemsize, biases is not None)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert k.stride() == v.stride()
    _text_kernel[(cdiv(max(lens), block_m), len(lens), heads)](
        q,
        k,
        v,
        out,
        cu_lens,
        biases,
        scale * LOG2_E.value,
        q.stride(0),
        k.stride(0),
        0 if biases is None else biases.shape[1] // 2,
        HEADS=heads,
        GROUP=heads // k.shape[1],
        HEAD_DIM=head_dim,
        WINDOW=window,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        num_warps=4,
        num_stages=stages,
        **launch_options(q),
    )
    return out


def _tile(head_dim: int, itemsize: int, has_biases: bool) -> tuple[int, int, int]:
    """Return the queries of a program, the keys at a time, and how many of these are on their way at once."""
    head_bytes = head_dim * itemsize
    if itemsize == 2 and head_bytes <= 128:
        return 64, 64, 2 if has_biases else 3  # biases take registers, too
    if itemsize == 2 and head_bytes <= 256:
        return (64, 64, 2) if has_biases else (128, 32, 3)
    if head_bytes <= 256:  # float32 is multiplied in registers
        return 32, 32, 2
    return (32, 32, 2) if head_bytes <= 512 else (16, 32, 1)


@triton.jit(do_not_specialize=["most"])
def _text_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cu_lens_ptr,
    biases_ptr,
    scale,
    q_stride,
    kv_stride,
    most,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    first, text, head = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_lens_ptr + text), tl.load(cu_lens_ptr + text + 1)
    length = end - begin
    if first >= length:
        return
    m, d = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    rows = (begin + m).to(tl.int64)
    q_mask = (m < length)[:, None] & in_head[None, :]
    q = tl.load(q_ptr + rows[:, None] * q_stride + head * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)
    kv_head = head // GROUP
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total = tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    factor = scale if biases_ptr is None else 1.0  # of scores without a bias: one instruction takes it and the exponent
    low, high = 0, length
    if WINDOW is not None:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(length, first + BLOCK_M + WINDOW - 1)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        places = (begin + n).to(tl.int64)[:, None] * kv_stride + kv_head * HEAD_DIM + d[None, :]
        kv_mask = (n < length)[:, None] & in_head[None, :]
        k = tl.load(k_ptr + places, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + places, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        distance = n[None, :] - m[:, None]
        is_seen = (n < length)[None, :]
        if biases_ptr is not None:
            column = head * (2 * most + 1) + most + distance
            bias = tl.load(biases_ptr + column, mask=is_seen & (m < length)[:, None], other=0.0)
            scores = scores * scale + bias * LOG2_E
        if WINDOW is not None:
            is_seen = is_seen & (distance < WINDOW) & (distance > -WINDOW)
        scores = tl.where(is_seen, scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
        # Where a tile holds no key that a query sees, its weights are wrong, and the first key seen shrinks them to 0.
        weights = tl.exp2(scores * factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    out = acc / total[:, None]
    out_places = rows[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + d[None, :]
    tl.store(out_ptr + out_places, out.to(out_ptr.dtype.element_ty), mask=q_mask)
