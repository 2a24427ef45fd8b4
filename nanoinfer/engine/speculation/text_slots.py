"""TextSlots: where the texts of sequences lie on the device, and which texts are those of one prompt's samples."""

from __future__ import annotations

from collections import OrderedDict

from nanoinfer.engine.sequence import Sequence
from nanoinfer.runner.drafting.texts import MEMBERS
from nanoinfer.runner.message import DraftingMessage


class TextSlots:
    """Gives each joining sequence a slot for its text, and the samples of a request a group.

    The text of a sequence that has left stays, so that the request's other samples find it, until its slot is needed.
    Requests without a running sample lose theirs first. There are as many groups and at least as many slots as rows.
    """

    def __init__(self, num_slots: int, num_groups: int) -> None:
        self._num_slots, self._num_groups = num_slots, num_groups
        self.clear()

    def clear(self) -> None:
        """Forget every sequence, whatever state an interrupt left them in."""
        self._free_slots = list(range(self._num_slots))[::-1]
        self._free_groups = list(range(self._num_groups))[::-1]
        self._slots: dict[Sequence, int] = {}  # of the sequences that have rows
        self._left: OrderedDict[int, int] = OrderedDict()  # slot -> request, of the others; the first goes first
        self._requests: dict[int, _Request] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # those of _requests that have no row
        self._changed: dict[int, list[int]] = {}

    def join(self, seq: Sequence) -> DraftingMessage:
        """Describe a sequence that gets a row to the ranks, with its text's slot and its group."""
        assert seq.ahead is not None  # it has just been scheduled
        request = self._requests.get(seq.request_id)
        if request is None:
            request = self._requests[seq.request_id] = _Request(self._take_group())
        self._idle.pop(seq.request_id, None)
        slot = self._slots[seq] = self._take_slot()
        request.num_rows += 1
        request.members = [*request.members, slot][-MEMBERS:]
        self._changed[request.group] = request.members
        own = seq.ahead
        return DraftingMessage(seq.token_ids, slot, own.end, request.group, own.most_guesses > 0)

    def leave(self, seq: Sequence) -> None:
        """Let a sequence lose its row; its text stays for a while."""
        request = self._requests[seq.request_id]
        slot = self._slots.pop(seq)
        self._left[slot] = seq.request_id
        request.num_rows -= 1
        if request.num_rows == 0:
            self._idle[seq.request_id] = None
            for own in request.members:
                if self._left.get(own) == seq.request_id:
                    self._left.move_to_end(own, last=False)

    def take_changed(self) -> dict[int, list[int]]:
        """Return the members' slots of each group that has changed since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        slot, request_id = self._left.popitem(last=False)
        if (request := self._requests.get(request_id)) is not None and slot in request.members:
            request.members = [own for own in request.members if own != slot]
            self._changed[request.group] = request.members
        return slot

    def _take_group(self) -> int:
        if self._free_groups:
            return self._free_groups.pop()
        request_id, _ = self._idle.popitem(last=False)
        return self._requests.pop(request_id).group


class _Request:
    """What is known of a request: its group, its newest texts' slots, and how many of its samples have rows."""

    __slots__ = ("group", "members", "num_rows")

    def __init__(self, group: int) -> None:
        self.group = group
        self.members: list[int] = []
        self.num_rows = 0
