"""What layers with states keep of sequences, and the rows of a decode step that goes on with it.

A recurrence keeps a matrix for each head, S [key dim, value dim], as it was at a boundary, a position that is a
multiple of CHUNK from where the sequence began or went on. Of each token since, a ring keeps a key, an update and a
decay: behind token t, S is

    exp(g_t) * S at the boundary + sum over tokens s since, up to t, of exp(g_t - g_s) * key_s update_s^T

So a step reads S, and writes it only when CHUNK tokens stand beside it: then S takes them in, and the boundary moves
on. A token that turns out to be no part of the sequence is one that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK


class Recurrence(NamedTuple):
    """What a layer has of its sequences. The token at position p has entry p % ring of a slot.

    matrices: [slots, heads, key dim, value dim], float32 or bfloat16, at the boundaries
    keys: [slots, ring, key heads, key dim]; head h has key head h // (heads / key heads)
    updates: [slots, ring, heads, value dim], in the keys' dtype
    decays: [slots, ring, heads] float32, g: the sum of the decays' logarithms since the boundary. It begins anew at the
        CHUNKth token, as the boundary will be there once that is no guess
    """

    matrices: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor

    @property
    def ring(self) -> int:
        """How many tokens a ring holds."""
        return self.keys.shape[1]

    @property
    def key_heads(self) -> int:
        """How many heads keys have."""
        return self.keys.shape[2]


class TokenRings(NamedTuple):
    """What a recurrence has of its sequences. The token at position p has entry p % ring of a slot.

    A matrix takes in a chunk in the step in which all its tokens are known to be the sequence's.

    matrices: [slots, heads, key dim, value dim], float32 or bfloat16, at the boundaries, which are multiples of CHUNK
    tokens: [slots, ring, channels], convolved
    gates: [slots, ring, numbers], of all heads: what decides decays, and strengths if the rule has some
    """

    matrices: Tensor
    tokens: Tensor
    gates: Tensor

    @property
    def ring(self) -> int:
        """How many tokens a ring holds."""
        return self.tokens.shape[1]


class LayerStates(NamedTuple):
    """What a layer remembers of its sequences.

    inputs: [slots, length, channels], of the convolution. That of the token at position p is at p % length
    recurrence: None: the layer is a convolution alone, or has `rings`
    rings: in place of a recurrence, if sums have one order
    """

    inputs: Tensor
    recurrence: Recurrence | None = None
    rings: TokenRings | None = None


class StateRows(NamedTuple):
    """The rows of a decode step, whose last tokens come first among its tokens. All are int32.

    slots: [rows], of their states; -1: an empty row
    positions: [tokens], of which the rows' own come first
    boundaries: [rows], where the matrices stand as the step begins
    first: [rows], the place of a row's first guess among those behind all rows; None: the step verifies none
    counts: [rows], how many guesses a row has, which have the positions behind its last token's; None: likewise
    most: a row has so many at most
    """

    slots: Tensor
    positions: Tensor
    boundaries: Tensor
    first: Tensor | None = None
    counts: Tensor | None = None
    most: int = 0

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows, and the places of their tokens, both int64: of all last tokens, then of first guesses, and so on.

        Empty rows have none.
        """
        rows, guess = (self.slots >= 0).nonzero()[:, 0], 0
        places = rows
        while len(rows):
            yield rows, places
            if self.first is None or self.counts is None:
                return
            rows = rows[self.counts[rows] > guess]
            places, guess = len(self.slots) + self.first[rows].long() + guess, guess + 1


def ring_length(guesses: int) -> int:
    """Return how many tokens a ring holds, if steps verify so many guesses of a row at most.

    A step reads CHUNK entries, and those of guesses that have held since, and writes those of its own tokens.
    """
    return CHUNK + 1 + 2 * guesses


def ring_in_order(guesses: int) -> int:
    """Return how many tokens a ring of TokenRings holds, whole chunks, if steps verify so many guesses at most.

    With guesses, a row's tokens may lie in two chunks, until those of the first one are known.
    """
    return 2 * CHUNK if guesses else CHUNK


def inputs_length(width: int, guesses: int) -> int:
    """Return how many inputs a convolution keeps, so that those of guesses displace none that other tokens need."""
    return width + guesses


def in_ring(slots: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the index of entries: slots, [n], and positions, [n, ...], of which negative ones have any entry."""
    slots = slots.long().view(-1, *[1] * (positions.dim() - 1))
    return slots.expand_as(positions), torch.remainder(positions, length).long()
