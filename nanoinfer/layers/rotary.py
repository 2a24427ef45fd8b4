"""Rotary position embedding: its settings, and the cosines and sines that layers/attention.py rotates by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.attention.context import Context


@dataclass(frozen=True)
class Rope:
    """The settings of a rotary embedding (Su et al., 2021).

    frequencies: radians per position, one for each rotated pair of a head's numbers; the numbers after these pairs stay
        as they are
    factor: multiplies all cosines and sines
    interleaved: pairs are (0, 1), (2, 3) and so on; otherwise i and i + n / 2 are a pair, of n rotated numbers
    sections: for each rotated pair, which of a token's three positions (Context.rotary_rows) turns it; None: it has one
    long_frequencies: replace `frequencies`, at all positions of a sequence that has more than long_from tokens
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    sections: tuple[int, ...] | None = None
    long_frequencies: tuple[float, ...] | None = None
    long_from: int | None = None


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position.

    cos_sin: [max_position, rotated numbers] float32, the cosines in the first half. With long_frequencies, as many rows
        follow for long sequences
    sections: Rope.sections, [rotated numbers / 2] int32
    """

    cos_sin: Tensor
    sections: Tensor | None

    def __init__(self, rope: Rope, max_position: int) -> None:
        super().__init__()
        self.interleaved = rope.interleaved
        self.long_from = rope.long_from
        self.max_position = max_position
        tables = [_table(rope.frequencies, rope.factor, max_position)]
        if rope.long_frequencies is not None:
            tables.append(_table(rope.long_frequencies, rope.factor, max_position))
        self.register_buffer("cos_sin", torch.cat(tables), persistent=False)
        sections = None if rope.sections is None else torch.tensor(rope.sections, dtype=torch.int32)
        self.register_buffer("sections", sections, persistent=False)

    def rows(self, context: Context) -> Tensor:
        """Return the row of cos_sin for each token of a step, [tokens] int32; only for a rope with long_frequencies."""
        packed = context.prefill
        assert self.long_from is not None
        if packed is None:
            is_long = context.context_lens > self.long_from
        else:
            is_long = torch.tensor(packed.is_long).repeat_interleave(torch.tensor(packed.query_lens))
        return context.positions + self.max_position * is_long.to(context.positions)


def _table(frequencies: tuple[float, ...], factor: float, max_position: int) -> Tensor:
    angles = torch.arange(max_position, dtype=torch.float32).outer(torch.tensor(frequencies, dtype=torch.float32))
    # On the CPU, MKL finds the processor's type in a process's first call. A thread that calls at the same time may see
    # another type, and get cosines, sines or logarithms that are off by up to 1.5e-4 (MKL 2024.2 on Intel).
    angles[:1, :1].cos()
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * factor


def query_scales(beta: float, length: int, max_position: int) -> Tensor:
    """Return 1 + beta * log(1 + floor(position / length)) for every position, [max_position] float32 (Ministral 3)."""
    return 1 + beta * torch.log1p(torch.arange(max_position, dtype=torch.float32).div(length, rounding_mode="floor"))
