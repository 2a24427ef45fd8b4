"""HostSlots: which slots of host memory hold what; the least recently used content goes when slots are needed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from nanoinfer.engine.prefixes.prefix_tree import NONE, Node, PrefixTree
from nanoinfer.engine.sequence import Sequence

# What is copied at once: a block of a node, by its place. NONE in place of that: the states behind a node or behind a
# sequence's last computed token, with what blocks hold of the tokens before, if these fill no node.
Content = tuple[Node | Sequence, int]


class SlotMemory(Protocol):
    """The memory of the slots."""

    @property
    def is_whole(self) -> bool:
        """Whether there will be no more slots than there are."""
        ...

    def num_ready(self) -> int:
        """Return how many slots there are by now. They never get fewer."""
        ...


class HostSlots:
    """Knows the slots of each content that host memory holds. Holders know them, too, as their `copies` and `kept`."""

    def __init__(self, tree: PrefixTree, room: SlotMemory) -> None:
        self._tree, self._room = tree, room
        self._used: OrderedDict[Content, list[int]] = OrderedDict()
        self._free: list[int] = []
        self._num_slots = 0  # that have been in use, or are free
        self._planned: dict[Content, None] = {}  # that gets its slots filled with the planned step
        self._newest: dict[Content, None] = {}  # that gets them filled with the newest step
        self._restored: dict[Content, None] = {}  # that the planned step copies back

    def begin_step(self) -> None:
        """Begin to plan a step. All steps before have been launched."""
        self._newest.clear()

    def launch(self) -> None:
        """Let what is planned go with a step. What a sequence needs back is its own, and is not held any longer."""
        self._newest.update(self._planned)
        restored = [content for content in self._restored if isinstance(content[0], Sequence)]
        self._planned.clear()
        self._restored.clear()
        for holder, place in restored:
            self.drop(holder, place)

    def hold(self, holder: Node | Sequence, place: int, count: int) -> list[int]:
        """Return so many slots for content that is to be copied there; none if there are too few now.

        place: of a block; NONE: it is of states
        """
        slots = self._find(count)
        if slots:
            content = holder, place
            self._planned[content] = None  # first, as an interrupt may come
            self._used[content] = slots
            if place == NONE:
                holder.kept = slots
            elif isinstance(holder, Node):
                holder.copies[place] = slots[0]
        return slots

    def use(self, holder: Node | Sequence, place: int) -> list[int]:
        """Return the slots of what the planned step copies back."""
        content = holder, place
        self._restored[content] = None
        self._used.move_to_end(content)
        return self._used[content]

    def drop(self, holder: Node | Sequence, place: int) -> None:
        """Let nothing be held there any longer, except what the planned step copies back."""
        content = holder, place
        if content not in self._used or content in self._restored:
            return
        if place == NONE:
            holder.kept = []
        elif isinstance(holder, Node):
            holder.copies[place] = NONE
        self._free += self._used.pop(content)  # last, as an interrupt may come
        if isinstance(holder, Node):
            self._tree.prune(holder)

    def drop_unknown(self) -> None:
        """Forget what is planned, and what the newest step was to fill: it may not have been launched."""
        self._restored.clear()
        for content in [*self._planned, *self._newest]:
            self.drop(*content)
        self._planned.clear()
        self._newest.clear()

    def drop_sequences(self, adapter: int | None = None) -> None:
        """Hold nothing of sequences any longer; adapter: of those with the one in this slot alone."""
        for holder, place in list(self._used):
            if isinstance(holder, Sequence) and adapter in (None, holder.adapter):
                self.drop(holder, place)

    def clear(self) -> None:
        """Hold nothing."""
        self._restored.clear()
        for content in list(self._used):
            self.drop(*content)
        self._planned.clear()
        self._newest.clear()

    def _find(self, count: int) -> list[int]:
        """Return free slots; none if there are too few now. Nothing goes for them as long as more are to come."""
        while len(self._free) < count and self._num_slots < self._room.num_ready():
            self._free.append(self._num_slots)
            self._num_slots += 1
        if len(self._free) < count and (not self._room.is_whole or self._num_slots < count):
            return []
        staying = self._planned.keys() | self._newest.keys() | self._restored.keys()
        while len(self._free) < count:
            oldest = next((content for content in self._used if content not in staying), None)
            if oldest is None:
                return []
            self.drop(*oldest)
        return [self._free.pop() for _ in range(count)]
