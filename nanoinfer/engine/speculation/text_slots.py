"""TextSlots: where the texts of sequences lie on the device, and which texts go on from one prompt."""

from __future__ import annotations

from collections import OrderedDict

from xxhash import xxh64_intdigest

from nanoinfer.engine.sequence import Sequence
from nanoinfer.runner.drafting.texts import MEMBERS
from nanoinfer.runner.message import DraftingMessage


class TextSlots:
    """Gives each joining sequence a slot for its text, and all sequences of one prompt a group.

    The text of a sequence that has left stays until its slot is needed: others of its prompt find it, in later calls,
    too. Texts of prompts without a row go first. Of these the ones go first whose prompt has come again since, then
    the oldest. There are at least as many slots as rows, and as many groups as slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """Forget every sequence, whatever state an interrupt left them in."""
        self._free_slots = list(range(self._num_slots))[::-1]
        self._free_groups = list(range(self._num_slots))[::-1]
        self._slots: dict[Sequence, tuple[int, _Prompt]] = {}  # of the sequences that have rows
        self._prompts: dict[int, _Prompt] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # those of _prompts that have no row
        # The slots of sequences that have left, of prompts with a row, and of those without:
        self._left: OrderedDict[int, _Prompt] = OrderedDict()
        self._old: OrderedDict[int, _Prompt] = OrderedDict()
        self._changed: dict[int, list[int]] = {}

    def join(self, seq: Sequence) -> DraftingMessage:
        """Describe a sequence that gets a row to the ranks, with its text's slot and its group."""
        prompt, slot = self._prompt_of(seq), self._take_slot()
        self._slots[seq] = slot, prompt
        prompt.num_rows += 1
        prompt.slots.append(slot)
        self._changed[prompt.group] = prompt.members
        return DraftingMessage(seq.token_ids, slot, seq.end, prompt.group)

    def _prompt_of(self, seq: Sequence) -> _Prompt:
        """Return a sequence's prompt, which gets a row. Two prompts of one hash would only guess from each other."""
        key = xxh64_intdigest(seq.content(0, seq.num_prompt_tokens))
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt(key, self._take_group())
        elif prompt.num_rows == 0:
            del self._idle[key]
            prompt.num_before = len(prompt.slots)
            for slot in prompt.slots:
                self._left[slot] = self._old.pop(slot)
        return prompt

    def leave(self, seq: Sequence) -> None:
        """Let a sequence lose its row; its text stays for a while."""
        slot, prompt = self._slots.pop(seq)
        self._left[slot] = prompt
        prompt.num_rows -= 1
        if prompt.num_rows == 0:
            self._idle[prompt.key] = None
            for place, own in enumerate(prompt.slots):
                self._old[own] = self._left.pop(own)
                if place < prompt.num_before:
                    self._old.move_to_end(own, last=False)

    def take_changed(self) -> dict[int, list[int]]:
        """Return the members' slots of each group that has changed since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        slot, prompt = (self._old or self._left).popitem(last=False)
        place = prompt.slots.index(slot)
        del prompt.slots[place]
        prompt.num_before -= place < prompt.num_before
        if self._prompts.get(prompt.key) is prompt:
            self._changed[prompt.group] = prompt.members
        return slot

    def _take_group(self) -> int:
        if self._free_groups:
            return self._free_groups.pop()
        key, _ = self._idle.popitem(last=False)
        return self._prompts.pop(key).group


class _Prompt:
    """What is known of a prompt.

    slots: of its texts, the oldest first; num_before: so many of them are from before its newest rows came
    num_rows: how many of its sequences have rows
    """

    __slots__ = ("group", "key", "num_before", "num_rows", "slots")

    def __init__(self, key: int, group: int) -> None:
        self.key, self.group = key, group
        self.slots: list[int] = []
        self.num_before = self.num_rows = 0

    @property
    def members(self) -> list[int]:
        """The slots of the texts that a drafter looks at."""
        return self.slots[-MEMBERS:]
