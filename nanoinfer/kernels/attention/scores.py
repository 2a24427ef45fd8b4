"""Turns a query's products with keys into scores: by the scale, and the soft cap of Gemma 2 (Gemma Team, 2024).

A sink is a score that each query of a head has beside those of the keys, for no value (gpt-oss: OpenAI, 2025). ALiBi
(Press et al., 2021) adds a head's slope times the key's position less the query's to a score. What decode attends to in
parts of the keys is weighed by their sums of exponentials.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
COMBINED_AT_ONCE = tl.constexpr(4)  # partial results of a row that a program loads at once


class Bias(NamedTuple):
    """ALiBi's bias of scores: slope * distance.

    slopes: [heads] float32, or [..., queries]
    distances: [..., queries, keys] float32, each key's position less the query's
    """

    slopes: Tensor
    distances: Tensor

    @classmethod
    def of(cls, slopes: Tensor, queries: Tensor, keys: Tensor) -> Bias:
        """Return the bias between positions. queries: [..., queries]; keys: [..., keys]"""
        return cls(slopes, (keys[..., None, :] - queries[..., None]).float())

    def add_to(self, scores: Tensor) -> None:
        """Add the bias to scores, of a shape to which slopes.unsqueeze(-1) and distances broadcast."""
        scores.addcmul_(self.slopes.unsqueeze(-1), self.distances)


def scores_of(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """scale * product, or softcap * tanh(scale * product / softcap), in float32: [..., queries, keys].

    q: [..., queries, head_dim]; k: [..., keys, head_dim]
    """
    products = q.float() @ k.float().transpose(-1, -2)
    return products.mul_(scale) if softcap is None else products.mul_(scale / softcap).tanh_().mul_(softcap)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """Attend with capped scores, with sinks or with ALiBi's bias, which torch's own attention cannot do, or slowly.

    q: [..., queries, head_dim]; k, v: [..., keys, head_dim]
    mask: True where a query sees a key, of a shape that broadcasts to [..., queries, keys]; None: everywhere
    sinks: float32, of a shape that broadcasts to [..., queries]; None: there are none
    bias: of shapes that broadcast so; None: there is none
    Returns q's shape. The scores and their softmax are float32.
    """
    scores = scores_of(q, k, scale, softcap)
    if bias is not None:
        bias.add_to(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax_with_sinks(scores, None if sinks is None else sinks.unsqueeze(-1), dim=-1).to(v.dtype) @ v


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None, dim: int) -> Tensor:
    """Return exp(score) / (sum of exp(scores) + exp(sink)), with the sum over a dimension.

    sinks: of a shape that broadcasts to that of the scores, but for 1 in this dimension; None: there are none
    """
    if sinks is None:
        return scores.softmax(dim)
    return (scores - torch.logaddexp(scores.logsumexp(dim, keepdim=True), sinks)).exp_()


def in_log2(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor and CAP that scores_in_log2 takes."""
    if softcap is None:
        return scale * LOG2_E.value, 0.0
    return 2 * LOG2_E.value * scale / softcap, softcap * LOG2_E.value


@triton.jit
def scores_in_log2(products, factor, CAP: tl.constexpr):
    """Return the scores times log2(e), so that exp2 of them is exp of the scores; CAP: 0 if there is no soft cap."""
    scores = products * factor
    if CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) goes to -1 and 1 where exp leaves float32's range.
        scores = CAP * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def first_numbers(table, start, n, kv_head, KV_HEADS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return where the keys start + n of a row begin in the cache, for a KV head, int64; they lie in one block.

    STRIDE: numbers from one head of the cache to the next, which is the next token's behind a token's last
    """
    block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    return (block * BLOCK_SIZE + start % BLOCK_SIZE + n) * (KV_HEADS * STRIDE) + kv_head * STRIDE


@triton.jit
def attend_to_tile(q, k_ptrs, k_mask, v_ptrs, v_mask, seen, bias, factor, CAP: tl.constexpr, acc, total, top):
    """Go on with the softmax of some queries over a tile of keys (Milakov and Gimelshein, 2018).

    seen: [queries, keys], what each query sees; None: all
    bias: [queries, keys], what is added to the scores times log2(e); None: nothing
    acc, total, top: the weighted sum of the values, [queries, numbers], the sum of the weights, and the largest score
    Returns these with the tile's. A query that sees no key of a tile gives each the weight 1; its first seen key makes
    `rescale` 0.
    """
    k = tl.load(k_ptrs, mask=k_mask, other=0.0).to(q.dtype)
    scores = scores_in_log2(tl.dot(q, tl.trans(k), input_precision="ieee"), factor, CAP)
    if bias is not None:
        scores += bias
    if seen is not None:
        scores = tl.where(seen, scores, -1e30)
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    rescale = tl.exp2(top - new_top)
    total = total * rescale + tl.sum(weights, axis=1)
    v = tl.load(v_ptrs, mask=v_mask, other=0.0).to(q.dtype)
    acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, total, new_top


@triton.jit
def load_sinks(sinks_ptr, head, mask):
    """Load heads' sinks times log2(e), as float32; where the mask is False, the score of a key that nobody sees."""
    return tl.maximum(tl.load(sinks_ptr + head, mask=mask, other=-1e30) * LOG2_E, -1e30)


@triton.jit
def load_slopes(slopes_ptr, head, mask):
    """Load heads' slopes times log2(e), as float32; 0 where the mask is False."""
    return tl.load(slopes_ptr + head, mask=mask, other=0.0) * LOG2_E


@triton.jit
def bias_in_log2(slopes, key, query):
    """Return ALiBi's bias times log2(e). slopes: from load_slopes; key, query: positions; all broadcast to the result

    As float32, which holds each position, so that a GPU need not convert a tile of differences.
    """
    return slopes * (key.to(tl.float32) - query.to(tl.float32))


@triton.jit
def combine_partials(
    partial_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    first_head,
    first_worker,
    num_partials,
    token,
    SHARES: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Weigh a row's partial results by their sums of exponentials: place 1 of the first worker, 0 of the others."""
    BLOCK_G: tl.constexpr = token.shape[0] if QUERIES > 1 else triton.next_power_of_2(GROUP)
    AT_ONCE: tl.constexpr = COMBINED_AT_ONCE if BLOCK_G * VALUE_DIM <= 4096 or QUERIES == 1 else 2
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    has_d = (d < VALUE_DIM)[None, :]
    top = tl.full([BLOCK_G], -1e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, triton.next_power_of_2(VALUE_DIM)], tl.float32)
    for start in range(0, num_partials, AT_ONCE):
        for offset in tl.static_range(AT_ONCE):
            i = start + offset
            is_head = g < tl.where(i < num_partials, GROUP, 0)
            if QUERIES > 1:
                is_head = tl.where(i < num_partials, token, -1) >= 0
            place = ((first_worker + i) * 2 + (i == 0).to(tl.int32)) * (QUERIES * GROUP) + g
            # ".cg" reads past the L1 cache, which may hold an earlier layer's numbers.
            lse = tl.load(lse_ptr + place, mask=is_head, other=-1e30, cache_modifier=".cg")
            numbers = partial_ptr + place[:, None] * VALUE_DIM + d[None, :]
            partial = tl.load(numbers, mask=is_head[:, None] & has_d, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, lse)
            rescale, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
            total = total * rescale + weight
            acc = acc * rescale[:, None] + partial * weight[:, None]
            top = new_top
    is_query = token >= 0 if QUERIES > 1 else g < GROUP
    target = out_ptr + (first_head + g)[:, None] * VALUE_DIM + d[None, :]
    tl.store(target, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query[:, None] & has_d)
    if SHARES:
        tl.store(out_lse_ptr + first_head + g, top + tl.log2(total), mask=is_query)
