"""Steering: adds vectors of their own to the residual stream of some tokens (Turner et al., 2023)."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import launch_options, next_power_of_2, wait_for_predecessor


class SteeringVectors(NamedTuple):
    """The vectors of all steerings, by the numbers of hidden states (nanoinfer.hidden_layers) and by slots.

    vectors: [layers, slots, hidden_size]; are_set: [layers, slots] int32, whether there is one, otherwise 0
    """

    vectors: Tensor
    are_set: Tensor


class SteeredTokens(NamedTuple):
    """Which steering each token of a step has.

    slots: [tokens] int32, -1: none; strengths: [tokens] float32, by which its vectors are multiplied
    """

    table: SteeringVectors
    slots: Tensor
    strengths: Tensor

    def add(self, stream: Tensor, layer: int, divisor: float = 1.0, scale: Tensor | None = None) -> None:
        """Add each token's vector of a layer to the stream, [tokens, hidden_size], in place.

        divisor, scale: the stream is multiplied by these later, so that the vectors are divided by them; scale: [1]
        """
        function = steer_triton if stream.is_cuda else steer_reference
        vectors, are_set = self.table
        function(stream, vectors[layer], are_set[layer], self.slots, self.strengths, divisor, scale)


def steer_reference(
    stream: Tensor,
    vectors: Tensor,
    are_set: Tensor,
    slots: Tensor,
    strengths: Tensor,
    divisor: float,
    scale: Tensor | None,
) -> None:
    """Add vectors in torch, in float32 and rounded once."""
    own = slots.clamp(min=0)
    takes = (slots >= 0) & (are_set[own] != 0)
    factors = strengths.where(takes, 0) / divisor
    if scale is not None:
        factors = factors / scale.float()
    added = stream.float() + factors.unsqueeze(1) * vectors[own].float()
    stream.copy_(added.to(stream.dtype).where(takes.unsqueeze(1), stream))


def steer_triton(
    stream: Tensor,
    vectors: Tensor,
    are_set: Tensor,
    slots: Tensor,
    strengths: Tensor,
    divisor: float,
    scale: Tensor | None,
) -> None:
    """Add vectors as one launch, whose programs end at once for tokens that have none."""
    tokens, size = stream.shape
    how = {"BLOCK": next_power_of_2(size), **launch_options(stream)}
    where = stream, stream.stride(0), vectors, are_set, slots, strengths, scale
    _steer_kernel[(tokens,)](*where, 1 / divisor, size, **how)


@triton.jit(do_not_specialize=["stride", "factor"])
def _steer_kernel(
    stream_ptr,
    stride,
    vectors_ptr,
    are_set_ptr,
    slots_ptr,
    strengths_ptr,
    scale_ptr,
    factor,
    size,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_predecessor(EARLY)
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    if tl.load(are_set_ptr + slot, mask=slot >= 0, other=0) != 0:
        factor = factor * tl.load(strengths_ptr + token)
        if scale_ptr is not None:
            factor = factor / tl.load(scale_ptr).to(tl.float32)
        offsets = tl.arange(0, BLOCK)
        mask = offsets < size
        place = stream_ptr + token.to(tl.int64) * stride + offsets
        vector = tl.load(vectors_ptr + slot * size + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(place, mask=mask, other=0.0)
        tl.store(place, (x.to(tl.float32) + factor * vector).to(x.dtype), mask=mask)
