"""Lengths: how long outputs get, as far as the ends of others tell."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from nanoinfer.engine.sequence import Sequence

RECENT_REQUESTS = 1024  # whose samples' ends count
OTHERS = 8  # samples whose ends count in a request as all requests' did
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

    Samples of one prompt are alike. So a request whose samples have ended has an estimate of its own. What is known of
    all requests counts in it as if a few more of its samples had ended like that.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, bool]] = deque(maxlen=RECENT)  # a length, and whether the text ended there
        self._of_request: OrderedDict[int, list[tuple[int, bool]]] = OrderedDict()  # likewise, if it has samples

    def note(self, seq: Sequence) -> None:
        """Learn from a sequence that has ended."""
        if has_known_end(seq) or seq.finish_reason not in ("stop", "length"):
            return
        end = seq.num_output_tokens, seq.finish_reason == "stop"
        self._seen.append(end)
        if seq.params.n > 1:
            self._of_request.setdefault(seq.request_id, []).append(end)
            self._of_request.move_to_end(seq.request_id)
            if len(self._of_request) > RECENT_REQUESTS:
                self._of_request.popitem(last=False)

    def outlook(self, running: Iterable[Sequence], most: int) -> Outlook:
        """Return what is known now. most: what the longest output may come to"""
        going_on: dict[int, list[int]] = {}
        for seq in running:
            if not has_known_end(seq):
                going_on.setdefault(seq.request_id, []).append(seq.num_output_tokens)
        whole = self._survival(list(chain.from_iterable(going_on.values())), most)
        own = {
            request_id: _of_request(self._of_request[request_id], lengths, whole)
            for request_id, lengths in going_on.items()
            if request_id in self._of_request
        }
        return Outlook(whole, own)

    def _survival(self, running: list[int], most: int) -> Survival:
        """Return what is known of all requests. running: the lengths of the outputs that have not ended"""
        ends = [length for length, is_end in self._seen if is_end]
        ends += np.linspace(1, min(most, SUPPOSED_MOST), SUPPOSED, dtype=np.int64).tolist()
        lengths, counts = np.unique(np.array(ends, dtype=np.int64), return_counts=True)
        reached = [*ends, *(length for length, is_end in self._seen if not is_end), *running]
        return _estimate(lengths, counts, reached)


@dataclass(frozen=True)
class Outlook:
    """What is known of ends at one time. whole: of all requests; own: of some, by their numbers"""

    whole: Survival
    own: dict[int, Survival]

    def later(self, seqs: list[Sequence], now: Ints, steps: Ints) -> Floats:
        """Return Survival.later of each sequence, whose output has now[i] tokens: [i, j]."""
        shares = self.whole.later(now, steps)
        rows: dict[int, list[int]] = {}
        for row, seq in enumerate(seqs):
            if seq.request_id in self.own:
                rows.setdefault(seq.request_id, []).append(row)
        for request_id, of_request in rows.items():
            shares[of_request] = self.own[request_id].later(now[of_request], steps)
        return shares


def _of_request(seen: list[tuple[int, bool]], running: list[int], whole: Survival) -> Survival:
    """Return what is known of a request's samples.

    seen: the lengths of those that ended, and whether the text ended there; running: of the others
    """
    ends = np.array([length for length, is_end in seen if is_end], dtype=np.int64)
    lengths = np.union1d(whole.lengths, ends)
    left = np.concatenate(([1.0], whole.beyond(lengths)))
    expected = np.divide(left[:-1] - left[1:], left[:-1], out=np.zeros(len(lengths)), where=left[:-1] > 0)
    counts = np.bincount(np.searchsorted(lengths, ends), minlength=len(lengths)) + OTHERS * expected
    return _estimate(lengths, counts, [*(length for length, _ in seen), *running], OTHERS)


def _estimate(lengths: Ints, counts: npt.NDArray[Any], reached: list[int], others: int = 0) -> Survival:
    """Return Kaplan's and Meier's estimate.

    counts: of the ends at each length; reached: how far each output got; others: outputs that got as far as any length
    """
    at_risk = others + len(reached) - np.searchsorted(np.sort(reached), lengths, side="left")
    return Survival(lengths, np.concatenate(([1.0], np.cumprod(1 - counts / at_risk))))
