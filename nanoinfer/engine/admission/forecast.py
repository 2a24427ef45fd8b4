"""Forecast: how many blocks the running sequences will need, step by step, until the last one ends."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from nanoinfer.attention.cache_layout import CacheGroup
from nanoinfer.engine.admission.lengths import Floats, Ints, Outlook, has_known_end
from nanoinfer.engine.sequence import Sequence, SequenceStatus

MOST_TIMES = 256  # of a forecast
# Standard deviations of the needed blocks that stay free. Where outputs end at random, 1 lets 16% of all prompt tokens
# be computed again, 1.5 lets 4%, and 2 takes 1% more steps.
MARGIN = 1.5
# If all that wait need no more than this share of the blocks, all begin. The last few would otherwise often run after
# the others, alone: 900 steps for want of 3 blocks. With 1.1, 8% of all prompt tokens are computed again.
OPTIMISM = 1.06


class Forecast:
    """Expects the blocks that are held at some times, told as steps from now.

    A sequence holds the most just before it ends. So the times are those ends, where they are known, or evenly spaced.
    """

    def __init__(self, room: int, groups: Collection[CacheGroup], outlook: Outlook, seqs: Collection[Sequence]) -> None:
        """room: blocks that there are; seqs: those that run, and those that may begin."""
        self._room, self._groups, self._outlook = room, groups, outlook
        self._times = self._choose_times(seqs)
        self._mean = np.zeros(len(self._times))
        self._variance = np.zeros(len(self._times))
        self._fitting: dict[Sequence, tuple[Floats, Floats]] = {}  # what is expected of those that may fit
        self.asked: set[Sequence] = set()

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

    def add(self, seqs: Collection[Sequence], held: Collection[list[int]]) -> None:
        """Count sequences in; held: the blocks of each group that each holds and nobody who counts already."""
        mean, variance = self._expect(seqs, held)
        self._mean += mean.sum(axis=0)
        self._variance += variance.sum(axis=0)

    def ask(self, seqs: list[Sequence], held: list[list[int]]) -> bool:
        """Ask about further sequences, which `fits` then tells of one by one; returns whether all fit, more or less.

        held: the blocks of each group that each needs at once
        """
        mean, variance = self._expect(seqs, held)
        self.asked.update(seqs)
        for index in np.flatnonzero(self._holds(mean, variance)):
            self._fitting[seqs[index]] = mean[index], variance[index]
        return bool((self._mean + mean.sum(axis=0) <= self._room * OPTIMISM).all())

    def fits(self, seq: Sequence) -> bool:
        """Whether one of those that were asked about fits at all times."""
        expected = self._fitting.get(seq)
        if expected is None:
            return False
        if self._holds(*expected):
            return True
        del self._fitting[seq]  # the forecast only grows fuller
        return False

    def fits_with(self, seq: Sequence, held: list[int]) -> bool:
        """Whether a sequence that needs so many blocks of each group at once fits at all times."""
        mean, variance = self._expect([seq], [held])
        return bool(self._holds(mean[0], variance[0]))

    def _holds(self, mean: Floats, variance: Floats) -> npt.NDArray[np.bool_]:
        """Return whether there are blocks for one more sequence: [...], from [..., time]."""
        most = self._mean + mean + MARGIN * np.sqrt(self._variance + variance)
        return np.asarray((most <= self._room).all(axis=-1))

    def _expect(self, seqs: Collection[Sequence], held: Collection[list[int]]) -> tuple[Floats, Floats]:
        """Return mean and variance of the blocks that each sequence holds at each time: [sequence, time]."""
        now = np.array([_position(seq) for seq in seqs], dtype=np.int64)
        left = np.array([_steps_left(seq) for seq in seqs], dtype=np.int64)
        output = now - np.array([seq.num_prompt_tokens for seq in seqs], dtype=np.int64)
        known = np.array([has_known_end(seq) for seq in seqs], dtype=bool)
        later = np.minimum(
            now[:, None] + self._times, (now + np.maximum(left - 1, 0))[:, None]
        )  # the last token is not computed
        own = np.array(held, dtype=np.int64).reshape(len(seqs), len(self._groups))
        blocks = np.zeros_like(later)
        for group, first in zip(self._groups, own.T[..., None], strict=True):
            grown = first - (-later // group.block_size) + (-now // group.block_size)[:, None]
            most = group.most_blocks
            blocks += grown if most is None else np.minimum(grown, np.maximum(first, most))
        alive = (self._times <= left[:, None]).astype(np.float64)
        if not known.all():
            unknown = [seq for seq, is_known in zip(seqs, known, strict=True) if not is_known]
            alive[~known] *= self._outlook.later(unknown, output[~known], self._times)
        mean = alive * blocks
        return mean, mean * (blocks - mean)


def _position(seq: Sequence) -> int:
    """Return how many of a sequence's tokens the KV cache holds when its prompt is computed, or now, if it is."""
    return len(seq) if seq.status is SequenceStatus.WAITING else min(seq.num_scheduled, seq.end - 1)


def _steps_left(seq: Sequence) -> int:
    """Return for how many decode steps a sequence holds its blocks at most, from now on or when its prompt is computed.

    The host reads the last token one step late.
    """
    return max(0, seq.max_len - _position(seq))
