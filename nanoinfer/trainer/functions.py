"""What a deterministic engine computes, as functions that torch can differentiate.

Forward, they run the engine's kernels. Backward, they differentiate the same formulas in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanoinfer.kernels.attention.in_order.prefill import prefill_in_order
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_reference
from nanoinfer.kernels.attention.projected.qkv import norm_rotate_reference, norm_rotate_store
from nanoinfer.kernels.linear import activation as gates
from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight
from nanoinfer.kernels.norm import norm as norms
from nanoinfer.kernels.norm.norm import Norm
from nanoinfer.kernels.sampling.token_logprobs import token_logprobs

TOKENS_AT_ONCE = 4096  # that a weight multiplies
LOGITS_AT_ONCE = 1024  # rows of the whole vocabulary
BLOCK_SIZE = 256  # tokens in a block of keys and values

Tensors = tuple[Tensor, ...]


class PackedSequences(NamedTuple):
    """Whole sequences, packed one after another, and where their keys and values stand in a paged cache.

    lengths: of the sequences, in tokens
    positions, slots: [tokens] int32; block_tables: [sequences, most blocks] int32
    cu_lens: [sequences + 1] int32, where each sequence begins, and the last one's end; lens: [sequences] int32
    """

    lengths: list[int]
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    cu_lens: Tensor
    lens: Tensor

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> PackedSequences:
        """Pack sequences of these lengths. Each begins a block of its own."""
        lens = torch.tensor(lengths)
        ends, blocks = lens.cumsum(0), -(-lens // BLOCK_SIZE)
        first_blocks = blocks.cumsum(0) - blocks
        positions = torch.arange(int(ends[-1])) - (ends - lens).repeat_interleave(lens)
        slots = positions + (first_blocks * BLOCK_SIZE).repeat_interleave(lens)
        tables = first_blocks[:, None] + torch.arange(int(blocks.max()))
        cu_lens = F.pad(ends, (1, 0))
        return cls(lengths, *(x.int().to(device) for x in (positions, slots, tables, cu_lens, lens)))

    @property
    def num_blocks(self) -> int:
        """How many blocks the sequences' keys take."""
        return sum(-(-length // BLOCK_SIZE) for length in self.lengths)


class Heads(NamedTuple):
    """How a layer turns projections into attention.

    num, num_kv: of queries, and of keys
    eps: of the norms of queries and keys, if the model has them
    interleaved: as for norm_rotate_store; window: as for paged_prefill_reference
    """

    num: int
    num_kv: int
    eps: float
    interleaved: bool
    scale: float
    window: int | None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias: [tokens, in_features] to [tokens, out_features]."""
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute kernels.norm.norm.normalize."""
    out: Tensor = _Differentiable.apply(
        lambda x, weight: norms.normalize(x, Norm(weight, eps)),
        lambda x, weight: norms.normalize_reference(x, Norm(weight, eps)),
        x,
        weight,
    )
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute kernels.norm.norm.add_norm."""
    out: tuple[Tensor, Tensor] = _Differentiable.apply(
        lambda x, residual, weight: norms.add_norm(x, residual, Norm(weight, eps)),
        lambda x, residual, weight: norms.add_norm_reference(x, residual, Norm(weight, eps)),
        x,
        residual,
        weight,
    )
    return out


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute kernels.linear.activation.gate_mul."""
    out: Tensor = _Differentiable.apply(
        lambda x: gates.gate_mul(x, activation), lambda x: gates.gate_mul_reference(x, activation), gate_up
    )
    return out


def attend(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos_sin: Tensor | None,
    heads: Heads,
    packing: PackedSequences,
) -> Tensor:
    """Normalise and rotate queries and keys, and let each token attend to itself and those before it in its sequence.

    qkv: [tokens, heads + 2 * kv_heads, head_dim]; q_norm, k_norm: the norms' weights, [head_dim], if there are norms
    cos_sin: as for norm_rotate_store
    Returns [tokens, heads, head_dim].
    """

    def both_norms(q_norm: Tensor | None, k_norm: Tensor | None) -> tuple[Norm | None, Norm | None]:
        if q_norm is None or k_norm is None:
            return None, None
        return Norm(q_norm, heads.eps), Norm(k_norm, heads.eps)

    def compute(qkv: Tensor, *weights: Tensor | None) -> Tensor:
        k_cache, v_cache = qkv.new_zeros(2, packing.num_blocks, BLOCK_SIZE, heads.num_kv, qkv.shape[-1])
        q_norm, k_norm = both_norms(*weights)
        at = packing.positions
        q = norm_rotate_store(
            qkv, q_norm, k_norm, None, cos_sin, heads.interleaved, None, at, k_cache, v_cache, packing.slots
        )
        tables, lengths = packing.block_tables, packing.lengths
        if not q.is_cuda:
            return paged_prefill_reference(q, k_cache, v_cache, tables, lengths, lengths, heads.scale, heads.window)
        return prefill_in_order(
            q, k_cache, v_cache, tables, packing.cu_lens, packing.lens, max(lengths), heads.scale, heads.window
        )

    def formula(qkv: Tensor, *weights: Tensor | None) -> Tensor:
        q_norm, k_norm = both_norms(*weights)
        parts = norm_rotate_reference(
            qkv, heads.num, q_norm, k_norm, None, cos_sin, heads.interleaved, None, packing.positions
        )
        sequences = zip(*(part.transpose(0, 1).split(packing.lengths, dim=1) for part in parts), strict=True)
        return torch.cat([_attend_causally(q, k, v, heads) for q, k, v in sequences], dim=1).transpose(0, 1)

    out: Tensor = _Differentiable.apply(compute, formula, qkv, q_norm, k_norm)
    return out


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Attend within one sequence: q, [heads, tokens, head_dim], to k and v, [kv_heads, tokens, head_dim]."""
    tokens, mask = q.shape[1], None
    if heads.window is not None and heads.window < tokens:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril().triu(1 - heads.window)
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], mask, is_causal=mask is None, scale=heads.scale, enable_gqa=True
    )[0]


def token_logprobs_of(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probability of each token, [tokens] float32, by the output projection of a hidden state.

    hidden: [tokens, hidden_size]; weight: [vocabulary, hidden_size]; token_ids: [tokens]
    """
    out: Tensor = _TokenLogProbs.apply(hidden, weight, token_ids)
    return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, at_once: int) -> Tensor:
    """Multiply so many tokens at once."""
    if not x.is_cuda:
        return F.linear(x, weight, bias)
    in_order = InOrderWeight(weight, weight.dtype, bias is not None, [at_once])
    out = x.new_empty(len(x), len(weight))
    for some, target in zip(x.split(at_once), out.split(at_once), strict=True):
        in_order.product(some, bias, out=target)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias, TOKENS_AT_ONCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            gradient @ weight if wants_x else None,
            gradient.t() @ x if wants_weight else None,
            gradient.sum(dim=0) if wants_bias else None,
        )


class _Differentiable(torch.autograd.Function):
    """Computes by one function, and differentiates another one, which computes the same by torch's own operations."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Tensor | Tensors], formula: Callable[..., Any], *inputs: Tensor | None
    ) -> Tensor | Tensors:
        ctx.formula = formula
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        # All inputs: a result of those that are not wanted must be differentiable, too.
        inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            results = ctx.formula(*inputs)
        some = [x for x, is_wanted in zip(inputs, wanted, strict=True) if x is not None and is_wanted]
        found = iter(torch.autograd.grad(results, some, gradients if isinstance(results, tuple) else gradients[0]))
        return None, None, *(next(found) if is_wanted else None for is_wanted in wanted)


class _TokenLogProbs(torch.autograd.Function):
    """Never holds the logits of all tokens: the backward pass computes them again, some at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, token_ids)
        parts = zip(hidden.split(LOGITS_AT_ONCE), token_ids.split(LOGITS_AT_ONCE), strict=True)
        return torch.cat(
            [token_logprobs(_product(some, weight, None, LOGITS_AT_ONCE), ids).values for some, ids in parts]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, token_ids = ctx.saved_tensors
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        by_hidden = torch.empty_like(hidden) if wants_hidden else None
        by_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_weight else None
        for first in range(0, len(hidden), LOGITS_AT_ONCE):
            part = slice(first, first + LOGITS_AT_ONCE)
            some, ids, gradient = hidden[part], token_ids[part], gradients[0][part]
            # The derivative of log_softmax: one at the token itself, less the probabilities.
            slope = F.linear(some, weight).float().softmax(dim=1).neg_()
            slope.scatter_add_(1, ids.long()[:, None], torch.ones_like(gradient)[:, None])
            slope = slope.mul_(gradient[:, None]).to(weight.dtype)
            if by_hidden is not None:
                torch.mm(slope, weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight += slope.t() @ some
        return by_hidden, None if by_weight is None else by_weight.to(weight.dtype), None
