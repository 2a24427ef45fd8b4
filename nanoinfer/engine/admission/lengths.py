"""Lengths: how long outputs get, as far as the ends of others tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoinfer.engine.sequence import Sequence

RECENT = 1024  # ends that count: a stream of requests may change, and a forecast sorts them
# Ends that count before any has been seen, spread evenly up to the greatest length, or up to SUPPOSED_MOST. Without
# them too few begin at first: 256 requests with a short KV cache take 10% more steps. If ends were spread up to a limit
# of 32,768 tokens where outputs have 300, steps would more than triple.
SUPPOSED = 32
SUPPOSED_MOST = 1024

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def has_known_end(seq: Sequence) -> bool:
    """Whether only its greatest length can end a sequence, unless somebody aborts it."""
    return not (seq.stop_ids or seq.params.stop or seq.params.is_guided)


@dataclass(frozen=True)
class Survival:
    """The share of outputs that get longer than a length.

    lengths: those at which outputs ended, ascending; shares: what is left before the first of them, and behind each
    """

    lengths: Ints
    shares: Floats

    def beyond(self, lengths: Ints) -> Floats:
        """Return the share of all outputs that get longer than each length."""
        return self.shares[np.searchsorted(self.lengths, lengths, side="right")]

    def later(self, now: Ints, steps: Ints) -> Floats:
        """Return the share of outputs of length now[i] that run on after steps[j] more tokens: [i, j].

        If no output is known that got longer than now[i], the share is 1.
        """
        alive = self.beyond(now)[:, None]
        return np.divide(self.beyond(now[:, None] + steps), alive, out=np.ones((len(now), len(steps))), where=alive > 0)


class Lengths:
    """The lengths of outputs that ended.

    The first to end are the short ones. So those that still run count too, by Kaplan's and Meier's estimate: of all
    outputs that got as far as a length, a share ended there.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, bool]] = deque(maxlen=RECENT)  # a length, and whether the text ended there

    def note(self, seq: Sequence) -> None:
        """Learn from a sequence that has ended."""
        if not has_known_end(seq) and seq.finish_reason in ("stop", "length"):
            self._seen.append((seq.num_output_tokens, seq.finish_reason == "stop"))

    def survival(self, running: Iterable[int], most: int) -> Survival:
        """Return what is known now.

        running: the lengths of the outputs that have not ended; most: what the longest output may come to
        """
        ends = [length for length, is_end in self._seen if is_end]
        ends += np.linspace(1, min(most, SUPPOSED_MOST), SUPPOSED, dtype=np.int64).tolist()
        lengths, counts = np.unique(np.array(ends, dtype=np.int64), return_counts=True)
        reached = np.sort([*ends, *(length for length, is_end in self._seen if not is_end), *running])
        at_risk = len(reached) - np.searchsorted(reached, lengths, side="left")
        return Survival(lengths, np.concatenate(([1.0], np.cumprod(1 - counts / at_risk))))
