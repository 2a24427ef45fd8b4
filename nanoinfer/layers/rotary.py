"""Rotary position embedding: what it is, and the table of its angles, which layers/attention.py applies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.attention.context import Context


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al., 2021).

    frequencies: radians a position, one a rotated pair of a head's numbers; the numbers beyond them are not rotated
    factor: cosines and sines are multiplied by it
    interleaved: a pair is two neighbours; else a number and the one half of the rotated numbers further
    long_frequencies: those of sequences of more than long_from tokens, at all of their positions
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    long_frequencies: tuple[float, ...] | None = None
    long_from: int | None = None


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position.

    cos_sin: [positions, rotated numbers] float32, the cosines in the first half; where long sequences have frequencies
        of their own, their positions follow
    """

    cos_sin: Tensor

    def __init__(self, rope: Rope, max_position: int) -> None:
        super().__init__()
        self.interleaved = rope.interleaved
        self.long_from = rope.long_from
        self.max_position = max_position
        tables = [_table(rope.frequencies, rope.factor, max_position)]
        if rope.long_frequencies is not None:
            tables.append(_table(rope.long_frequencies, rope.factor, max_position))
        self.register_buffer("cos_sin", torch.cat(tables), persistent=False)

    def rows(self, context: Context) -> Tensor:
        """The row of cos_sin for each token of a step, [tokens] int32, where long sequences have rows of their own."""
        packed = context.prefill
        assert self.long_from is not None
        if packed is None:
            is_long = context.context_lens > self.long_from
        else:
            is_long = torch.tensor(packed.is_long).repeat_interleave(torch.tensor(packed.query_lens))
        return context.positions + self.max_position * is_long.to(context.positions)


def _table(frequencies: tuple[float, ...], factor: float, max_position: int) -> Tensor:
    angles = torch.arange(max_position, dtype=torch.float32).outer(torch.tensor(frequencies, dtype=torch.float32))
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * factor


def query_scales(beta: float, length: int, max_position: int) -> Tensor:
    """1 + beta * log(1 + floor(position / length)) of every position, [max_position] float32, as in Ministral 3."""
    return 1 + beta * torch.log1p(torch.arange(max_position, dtype=torch.float32).div(length, rounding_mode="floor"))
