"""The tokens since a boundary, as rows of a decode step read them and write their own, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.states.memory import Recurrence, in_ring


class Since(NamedTuple):
    """What a token of each row meets. All are float32, and have the heads that updates have.

    matrices: [rows, heads, key dim, value dim], at the boundary
    keys: [rows, heads, tokens, key dim]; updates: [rows, heads, tokens, value dim]; 0 where no token is
    decays: [rows, heads, tokens], the logarithms from the boundary on to behind a token
    before: [rows, heads], the last one's
    """

    matrices: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    before: Tensor

    def answer(self, keys: Tensor, total: Tensor) -> Tensor:
        """Return what the tokens so far answer a token, [rows, heads, value dim].

        keys: [rows, heads, key dim], or queries; total: [rows, heads], the logarithm of decays up to that token
        """
        keys = keys.unsqueeze(-1)
        scores = (self.keys @ keys).squeeze(-1) * (total.unsqueeze(-1) - self.decays).exp()
        of_matrices = (self.matrices.mT @ keys).squeeze(-1) * total.exp().unsqueeze(-1)
        return of_matrices + (self.updates.mT @ scores.unsqueeze(-1)).squeeze(-1)


def read(recurrence: Recurrence, slots: Tensor, boundaries: Tensor, positions: Tensor) -> Since:
    """Return what stands in slots before tokens at these positions; all [rows], none is empty."""
    matrices, keys, updates, decays = recurrence
    heads = matrices.shape[1]
    counts = (positions - boundaries).unsqueeze(1)
    offsets = torch.arange(max(1, int(counts.max())), device=slots.device)
    known = offsets < counts
    at = in_ring(slots, boundaries.unsqueeze(1) + offsets, recurrence.ring)
    shown = known[:, :, None, None]
    repeated = keys[at].float().where(shown, 0).repeat_interleave(heads // recurrence.key_heads, dim=2)
    sums = decays[at].where(known.unsqueeze(2), 0)
    sums[:, CHUNK:] += sums[:, CHUNK - 1 : CHUNK]
    last = (counts - 1).clamp(min=0).long().unsqueeze(2).expand(-1, -1, heads)
    return Since(
        matrices[slots.long()].float(),
        repeated.transpose(1, 2),
        updates[at].float().where(shown, 0).transpose(1, 2),
        sums.transpose(1, 2),
        sums.gather(1, last).squeeze(1),
    )


def write(
    recurrence: Recurrence, slots: Tensor, boundaries: Tensor, positions: Tensor, terms: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Let tokens stand in slots.

    terms: keys, [rows, key heads, key dim], updates, [rows, heads, value dim], and decays: [rows, heads], the
        logarithms from the boundary on to behind the token
    """
    _, *ring = recurrence
    keys, updates, total = terms
    last = recurrence.decays[in_ring(slots, boundaries + CHUNK - 1, recurrence.ring)]
    sums = torch.where((positions - boundaries >= CHUNK).unsqueeze(1), total - last, total)
    at = in_ring(slots, positions, recurrence.ring)
    for kept, new in zip(ring, (keys, updates, sums), strict=True):
        kept[at] = new.to(kept.dtype)
