"""Attention from long stretches of new tokens by cuDNN, which comes with torch."""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.fp8 import read
from nanoinfer.kernels.attention.prefill.prefill_plan import LONGEST, UNIT, Stretch
from nanoinfer.kernels.fp8 import as_bytes
from nanoinfer.kernels.launch import cdiv, next_power_of_2

MOST_KEYS = LONGEST  # are gathered at once: a longer context would take more memory
HEAD_DIMS = (64, 128)

log = logging.getLogger("nanoinfer")


@functools.cache
def is_faster(device: torch.device) -> bool:
    """Return whether cuDNN may attend there faster than our kernel: from sm_90 on; the CPU runs the reference."""
    if device.type != "cuda":
        return True
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)


def can_attend(
    q: Tensor, v_cache: Tensor, window: int | None, softcap: float | None, slopes: Tensor | None = None
) -> bool:
    """Return whether cuDNN can attend from these queries, and faster; torch passes it no window, cap or slopes.

    v_cache: [blocks, block_size, kv_heads, numbers of a value]
    """
    if any(part is not None for part in (window, softcap, slopes)) or not is_faster(q.device):
        return False
    if q.device.type != "cuda":
        return True
    (_, heads, head_dim), (kv_heads, value_dim) = q.shape, v_cache.shape[2:]
    is_known = q.dtype != torch.float32 and head_dim in HEAD_DIMS and value_dim == head_dim
    return is_known and _has_plan(q.device, q.dtype, heads, kv_heads, head_dim)


@functools.cache
def _has_plan(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether this cuDNN attends from such queries on this GPU: not every version does on every GPU."""
    q, k = (torch.zeros(UNIT, count, head_dim, dtype=dtype, device=device) for count in (heads, kv_heads))
    try:
        for is_causal in (True, False):
            attend(q, k, k, 1.0, is_causal)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.warning("long prompts attend by our own kernel, because cuDNN cannot: %s", error)
        return False
    return True


def attend_from(
    stretch: Stretch,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    scale: float,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from the queries of a stretch; returns [tokens of the stretch, heads, numbers of a value].

    q: [tokens, heads, head_dim], the packed queries; the other tensors are as for paged_prefill_reference

    The queries attend to their own tokens, and then without a mask to those before, some at a time. Sinks take their
    share at the end.
    """
    queries = q[stretch.first : stretch.first + stretch.length]
    table = block_tables[stretch.row]
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales

    def attend_to(start: int, stop: int, is_causal: bool) -> tuple[Tensor, Tensor]:
        k = read(_gather(k_cache, table, start, stop), q.dtype, k_scale)
        v = read(_gather(v_cache, table, start, stop), q.dtype, v_scale)
        return attend(queries, k, v, scale, is_causal)

    first = stretch.position
    attended, log_total = attend_to(first, first + stretch.length, is_causal=True)
    for start in range(0, first, MOST_KEYS):
        merge(attended, log_total, *attend_to(start, min(start + MOST_KEYS, first), is_causal=False))
    if sinks is not None:
        attended.mul_((log_total - sinks[:, None]).sigmoid_().T[..., None])
    return attended


def _gather(cache: Tensor, table: Tensor, start: int, stop: int) -> Tensor:
    """Return a copy of the tokens from start to stop, [tokens, kv_heads, head_dim]; table: [max blocks] int32."""
    block_size = cache.shape[1]
    skipped = start // block_size
    blocks = table[skipped : cdiv(stop, block_size)]
    gathered = as_bytes(cache).index_select(0, blocks).view(cache.dtype).flatten(0, 1)
    return gathered[start - skipped * block_size : stop - skipped * block_size]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attend, and return the result, [queries, heads, numbers of a value], and the logarithms of the weights' sums.

    q: [queries, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], values may have another size in torch
    is_causal: query i sees the tokens up to i, instead of all

    Returns the logarithms as [heads, queries] float32.
    """
    if q.device.type != "cuda":
        return attend_reference(q, k, v, scale, is_causal)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    attended, log_total, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return attended[0].transpose(0, 1), log_total.view(q.shape[1:3]).contiguous()


def attend_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """`attend` in torch."""
    (queries, heads, _), (tokens, kv_heads, _) = q.shape, k.shape
    k, v = (x.float().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float() * scale, k)
    if is_causal:
        seen = torch.ones(queries, tokens, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    log_total = scores.logsumexp(-1)
    attended = torch.einsum("hqk,khd->qhd", (scores - log_total[..., None]).exp(), v)
    return attended.to(q.dtype), log_total


def merge_reference(attended: Tensor, log_total: Tensor, other: Tensor, other_log_total: Tensor) -> None:
    """Put the results of attention to two sets of keys together, in place of the first.

    attended, other: [queries, heads, head_dim]; log_total, other_log_total: [heads, queries] float32, as of `attend`
    """
    both = torch.logaddexp(log_total, other_log_total)
    share, other_share = ((x - both).exp().T[..., None] for x in (log_total, other_log_total))
    attended.copy_(attended.float() * share + other.float() * other_share)
    log_total.copy_(both)


def merge(attended: Tensor, log_total: Tensor, other: Tensor, other_log_total: Tensor) -> None:
    """merge_reference as one launch."""
    queries, heads, head_dim = attended.shape
    block = 32
    _merge_kernel[cdiv(queries, block), heads](
        attended,
        log_total,
        other,
        other_log_total,
        queries,
        *attended.stride()[:2],
        *other.stride()[:2],
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK=block,
        enable_fp_fusion=True,
    )


@triton.jit
def _merge_kernel(
    attended_ptr,
    log_total_ptr,
    other_ptr,
    other_log_total_ptr,
    queries,
    token_stride,
    head_stride,
    other_token_stride,
    other_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.arange(0, BLOCK_D)
    is_query = token < queries
    log_totals = head.to(tl.int64) * queries + token
    first = tl.load(log_total_ptr + log_totals, mask=is_query, other=0.0)
    second = tl.load(other_log_total_ptr + log_totals, mask=is_query, other=0.0)
    top = tl.maximum(first, second)
    both = top + tl.log(tl.exp(first - top) + tl.exp(second - top))
    mask = is_query[:, None] & (d < HEAD_DIM)[None, :]
    token = token.to(tl.int64)[:, None]
    attended_ptrs = attended_ptr + token * token_stride + head * head_stride + d[None, :]
    other_ptrs = other_ptr + token * other_token_stride + head * other_head_stride + d[None, :]
    attended = tl.load(attended_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.exp(first - both)[:, None]
    attended += tl.load(other_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.exp(second - both)[:, None]
    tl.store(attended_ptrs, attended.to(attended_ptr.dtype.element_ty), mask=mask)
    tl.store(log_total_ptr + log_totals, both, mask=is_query)
