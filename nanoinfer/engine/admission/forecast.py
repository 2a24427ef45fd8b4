"""Forecast: how many blocks the running sequences will need, step by step, until the last one ends."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from nanoinfer.engine.admission.lengths import Floats, Ints, Survival, has_known_end
from nanoinfer.engine.sequence import Sequence, SequenceStatus

MOST_TIMES = 256  # of a forecast
# Standard deviations of the needed blocks that stay free. Where outputs end at random, 1 lets 16% of all prompt tokens be
# computed again, 1.5 lets 4%, and 2 takes 1% more steps.
MARGIN = 1.5
# If all that wait need no more than this share of the blocks, all begin. The last few would otherwise often run after the
# others, alone: 900 steps for want of 3 blocks. More would let 8% of all prompt tokens be computed again.
OPTIMISM = 1.06


class Forecast:
    """Expects the blocks that are held at some times, told as steps from now.

    A sequence holds the most just before it ends. So the times are those ends, where they are known, or evenly spaced.
    """

    def __init__(
        self, room: int, block_size: int, window: int | None, survival: Survival, seqs: Collection[Sequence]
    ) -> None:
        """room: blocks that there are; seqs: all that the forecast will be asked about"""
        self._room, self._block_size, self._window, self._survival = room, block_size, window, survival
        self._times = self._choose_times(seqs)
        self._mean = np.zeros(len(self._times))
        self._variance = np.zeros(len(self._times))

    def _choose_times(self, seqs: Collection[Sequence]) -> Ints:
        left = [_steps_left(seq) for seq in seqs]
        known = [steps for seq, steps in zip(seqs, left, strict=True) if has_known_end(seq)]
        times = {0, *known}
        if len(known) < len(left):
            times.update(np.linspace(0, max(left), MOST_TIMES // 2, dtype=np.int64).tolist())
        ordered = np.array(sorted(times), dtype=np.int64)
        if len(ordered) > MOST_TIMES:
            ordered = ordered[np.linspace(0, len(ordered) - 1, MOST_TIMES, dtype=np.int64)]
        return ordered

    def add(self, seqs: Collection[Sequence], held: Collection[int]) -> None:
        """Count sequences in; held: the blocks that each holds and nobody who counts already."""
        mean, variance = self._expect(seqs, held)
        self._mean += mean.sum(axis=0)
        self._variance += variance.sum(axis=0)

    def fits(self, seq: Sequence, held: int) -> bool:
        """Whether a further sequence fits at all times; held: the blocks that it needs at once."""
        if self._mean[0] + held > self._room:
            return False
        mean, variance = self._expect([seq], [held])
        most = self._mean + mean[0] + MARGIN * np.sqrt(self._variance + variance[0])
        return bool((most <= self._room).all())

    def fit_all(self, seqs: Collection[Sequence], held: Collection[int]) -> bool:
        """Whether all these fit, more or less; held: the blocks that each needs at once."""
        room = self._room * OPTIMISM
        if self._mean[0] + sum(held) > room:
            return False
        mean, _ = self._expect(seqs, held)
        return bool((self._mean + mean.sum(axis=0) <= room).all())

    def _expect(self, seqs: Collection[Sequence], held: Collection[int]) -> tuple[Floats, Floats]:
        """Return mean and variance of the blocks that each sequence holds at each time: [sequence, time]."""
        now = np.array([_position(seq) for seq in seqs], dtype=np.int64)
        left = np.array([_steps_left(seq) for seq in seqs], dtype=np.int64)
        output = now - np.array([seq.num_prompt_tokens for seq in seqs], dtype=np.int64)
        known = np.array([has_known_end(seq) for seq in seqs], dtype=bool)
        own = np.array(held, dtype=np.int64)[:, None]
        grown = -(-(now[:, None] + self._times) // self._block_size) + (now // -self._block_size)[:, None]
        blocks = own + grown
        if self._window is not None:  # and it gives back what lies behind its window
            blocks = np.minimum(blocks, np.maximum(own, -(-self._window // self._block_size) + 2))
        alive = (self._times <= left[:, None]).astype(np.float64)
        if not known.all():
            alive[~known] *= self._survival.later(output[~known], self._times)
        mean = alive * blocks
        return mean, mean * (blocks - mean)


def _position(seq: Sequence) -> int:
    """Return how many of a sequence's tokens the KV cache holds when its prompt is computed, or now, if it is."""
    return len(seq) if seq.status is SequenceStatus.WAITING else seq.num_scheduled


def _steps_left(seq: Sequence) -> int:
    """Return for how many decode steps a sequence holds its blocks at most, from now on or when its prompt is computed.

    The host reads the last token one step late.
    """
    return max(0, seq.max_len - _position(seq))
