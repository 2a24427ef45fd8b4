"""Admission: whether a waiting sequence fits, now and at the fullest moment of the future."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from nanoinfer.engine.admission.forecast import MOST_TIMES, Forecast
from nanoinfer.engine.admission.lengths import Lengths, has_known_end
from nanoinfer.engine.admission.waiting import Waiting
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.sequence import Sequence


class Admission:
    """Chooses who begins next, by what is known of the ends of those that run.

    It knows lengths and ends alone, never the time: ranks that plan each for itself choose alike.

    is_shut: nobody fits, until a sequence comes or gives back blocks
    """

    def __init__(self, waiting: Waiting, block_manager: BlockManager, window: int | None) -> None:
        """window: as for Scheduler"""
        self._waiting = waiting
        self._block_manager = block_manager
        self._window = window
        self._lengths = Lengths()
        self._most = 0  # blocks of all unfinished sequences at their greatest lengths, if they shared none
        self._forecast: Forecast | None = None  # of the prefill step that is being planned
        self._all_fit = False  # by that forecast
        self._refused: set[Sequence] = set()  # by that forecast, which grows fuller
        self.is_shut = False

    def _most_blocks(self, seq: Sequence) -> int:
        return -(-seq.max_len // self._block_manager.block_size)

    @property
    def is_roomy(self) -> bool:
        """Whether all that wait and run fit at once, however long they get."""
        return self._most <= len(self._block_manager.blocks)

    def note_added(self, seq: Sequence) -> None:
        """Count a new sequence in."""
        self._most += self._most_blocks(seq)
        self.is_shut = False

    def note_ended(self, seq: Sequence) -> None:
        """Count an ended sequence out, and learn from its length."""
        self._most -= self._most_blocks(seq)
        self._lengths.note(seq)
        self.is_shut = False

    def clear(self) -> None:
        """Forget all sequences."""
        self._most, self.is_shut = 0, False

    def begin(self) -> None:
        """Begin to plan a prefill step."""
        self._forecast, self._all_fit = None, False
        self._refused.clear()

    def choose(self, running: Collection[Sequence]) -> Sequence | None:
        """Return the sequence that is to begin next, and put it first; None: nobody fits.

        running: those whose prompts are planned whole. If there are none, the first always fits
        """
        first = self._waiting.first
        if first.block_table or self.is_roomy or not running:
            return first
        if self._forecast is None:
            self._forecast = self._look_ahead(running)
            if len(self._waiting) <= MOST_TIMES:
                self._all_fit = self._forecast.fit_all(list(self._waiting), list(map(self._needed, self._waiting)))
        for seq in list(self._waiting.candidates()):
            if seq not in self._refused:
                if self.fits(seq):
                    self._waiting.let_pass(seq)
                    return seq
                self._refused.add(seq)
        self.is_shut = True
        return None

    def fits(self, seq: Sequence, num_shared: int | None = None) -> bool:
        """Whether a sequence fits beside those that run; num_shared: blocks that it shares with them, if known."""
        if self._forecast is None or self._all_fit:
            return True
        needed = self._needed(seq)
        if num_shared is not None:
            return self._forecast.fits(seq, needed - num_shared)
        return self._forecast.fits(seq, needed) or (
            (shared := self._block_manager.num_shared(seq)) > 0 and self._forecast.fits(seq, needed - shared)
        )

    def _needed(self, seq: Sequence) -> int:
        return -(-len(seq) // self._block_manager.block_size)

    def note_begun(self, seq: Sequence) -> None:
        """Count in a sequence that has got its blocks."""
        if self._forecast is not None:
            self._forecast.add([seq], [self._block_manager.num_own(seq)])

    def _look_ahead(self, running: Collection[Sequence]) -> Forecast:
        outputs = [seq.num_output_tokens for seq in running if not has_known_end(seq)]
        asked = [*running, *islice(self._waiting, MOST_TIMES)]
        most = max(seq.max_len - seq.num_prompt_tokens for seq in asked)
        manager = self._block_manager
        forecast = Forecast(
            len(manager.blocks),
            manager.block_size,
            self._window,
            self._lengths.survival(outputs, most),
            asked,
        )
        # Blocks that several share count for the one that may run longest.
        ordered = sorted(running, key=lambda seq: seq.num_scheduled - seq.max_len)
        seen: set[int] = set()
        held: list[int] = []
        for seq in ordered:
            before = len(seen)
            seen.update(seq.block_table[seq.num_released :])
            held.append(len(seen) - before)
        forecast.add(ordered, held)
        return forecast
