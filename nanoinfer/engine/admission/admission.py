"""Admission: whether a waiting sequence fits, now and at the fullest moment of the future."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from nanoinfer.engine.admission.forecast import MOST_TIMES, Forecast
from nanoinfer.engine.admission.lengths import Lengths
from nanoinfer.engine.admission.waiting import Waiting
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.sequence import Sequence

MOST_LOOKED_UP = 16  # of those that wait, in the prefix cache: that takes longer than a forecast


class Admission:
    """Chooses who begins next, by what is known of the ends of those that run.

    It knows lengths and ends alone, never the time: ranks that plan each for itself choose alike.

    waiting: those that have not begun, or must begin again; a half-done prompt is the first
    is_shut: nobody fits, until a sequence comes or gives back blocks
    """

    def __init__(self, block_manager: BlockManager) -> None:
        self.waiting = Waiting()
        self._block_manager = block_manager
        self._lengths = Lengths()
        self._most = 0  # blocks of all unfinished sequences at their greatest lengths, if they shared none
        self._forecast: Forecast | None = None  # of the prefill step that is being planned
        self._all_fit = False  # by that forecast
        self.is_shut = False

    @property
    def is_roomy(self) -> bool:
        """Whether all that wait and run fit at once, however long they get."""
        return self._most <= len(self._block_manager.blocks)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind the others."""
        self.waiting.add(seq)
        self._most += self._block_manager.layout.blocks_of(seq.max_len)
        self.is_shut = False

    def note_ended(self, seq: Sequence) -> None:
        """Count an ended sequence out, and learn from its length."""
        self._most -= self._block_manager.layout.blocks_of(seq.max_len)
        self._lengths.note(seq)
        self.is_shut = False

    def clear(self) -> None:
        """Let all that wait leave, and count none."""
        self.waiting.clear()
        self._most, self.is_shut = 0, False

    def begin(self) -> None:
        """Begin to plan a prefill step."""
        self._forecast, self._all_fit = None, False

    def choose(self, running: Collection[Sequence]) -> Sequence | None:
        """Return the sequence that is to begin or go on next, and put it first; None: nobody waits, or nobody fits.

        running: those whose prompts are planned whole. If there are none, the first always fits
        """
        if not self.waiting:
            return None
        first = self.waiting.first
        if first.block_tables or self.is_roomy or self._all_fit or not running:
            return first
        if self._forecast is None:
            self._forecast = self._look_ahead(running)
        chosen = self._first_that_fits(self._forecast)
        if chosen is None:
            self.is_shut = True
        elif not self._all_fit:
            self.waiting.let_pass(chosen)
        return chosen

    def _first_that_fits(self, forecast: Forecast) -> Sequence | None:
        """Ask the forecast about those that may begin; it is asked again when others have moved up."""
        candidates = list(self.waiting.candidates())
        for _ in range(2):
            for seq in candidates:
                if forecast.fits(seq):
                    return seq
            new = [seq for seq in candidates if seq not in forecast.asked]
            if not new:
                break
            is_all = len(candidates) == len(self.waiting) and not forecast.asked
            if forecast.ask(new, self._needed(new)) and is_all:
                self._all_fit = True
                return candidates[0]
        return None

    def fits_beside(self, source: Sequence, seq: Sequence) -> bool:
        """Whether a further sample of a prompt fits, which shares the full blocks of `source`."""
        if self._forecast is None or self._all_fit:
            return True
        return self._forecast.fits_with(seq, self._block_manager.num_copied(source))

    def _needed(self, seqs: list[Sequence]) -> list[list[int]]:
        """Return how many blocks each needs at once of each group; of the first ones, without what others hold."""
        manager = self._block_manager
        needed = [[group.blocks_of(len(seq)) for group in manager.groups] for seq in seqs]
        for seq, counts in zip(seqs[:MOST_LOOKED_UP], needed, strict=False):
            for index, shared in enumerate(manager.num_shared(seq)):
                counts[index] -= shared
        return needed

    def note_begun(self, seq: Sequence) -> None:
        """Count in a sequence that begins. Its chunks are still to get the blocks of groups with a window."""
        if self._forecast is None:
            return
        manager = self._block_manager
        held = []
        for group, table, own in zip(manager.groups, manager.held(seq), manager.num_own(seq), strict=True):
            num_shared = len(table) - own
            held.append(max(own, group.blocks_of(len(seq)) - num_shared))
        self._forecast.add([seq], [held])

    def _look_ahead(self, running: Collection[Sequence]) -> Forecast:
        """Return the forecast of those that run."""
        asked = [*running, *islice(self.waiting, MOST_TIMES)]
        most = max(seq.max_len - seq.num_prompt_tokens for seq in asked)
        manager = self._block_manager
        forecast = Forecast(
            len(manager.blocks),
            manager.groups,
            self._lengths.outlook(running, most),
            asked,
        )
        # Blocks that several share count for the one that may run longest.
        ordered = sorted(running, key=lambda seq: seq.num_scheduled - seq.max_len)
        seen: set[int] = set()
        held: list[list[int]] = []
        for seq in ordered:
            tables = manager.held(seq)
            held.append([len(set(table) - seen) for table in tables])
            seen.update(*tables)
        forecast.add(ordered, held)
        return forecast

    def cheapest(self, running: Collection[Sequence]) -> Sequence:
        """Return the running sequence that loses the fewest tokens with its blocks, of equal ones the newest.

        running: in the order in which they began. The first stays, if there are others, so that one always ends
        """
        manager = self._block_manager

        def cost(seq: Sequence) -> int:
            num_others = len(seq.block_tables[0]) - manager.num_own(seq)[0]
            return seq.num_scheduled - num_others * manager.groups[0].block_size

        oldest, *others = running
        return min(reversed(others), key=cost, default=oldest)
