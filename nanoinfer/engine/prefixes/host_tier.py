"""HostTier: which blocks' content host memory holds, which is to be copied there, and which is to come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from nanoinfer.engine.prefixes.prefix_tree import NONE, Block, Node, PrefixTree
from nanoinfer.runner.memory.offload import Offload
from nanoinfer.runner.message import Transfers

SHORT = 3 / 4  # of all blocks: if nodes have so many, their content is soon to be lost


class SlotMemory(Protocol):
    """The memory of the slots."""

    @property
    def is_whole(self) -> bool:
        """Whether there will be no more slots than there are."""
        ...

    def num_ready(self) -> int:
        """Return how many slots there are by now. They never get fewer."""
        ...


class HostTier:
    """A second place for what nodes know: slots of host memory, each for the content of a block.

    A full block's content changes no more. So it is copied beside some later step, long before the block is handed out.
    A sequence that needs the content gets a block, into which it is copied back. The copy in host memory stays. The
    least recently used one goes when a slot is needed.
    """

    def __init__(self, tree: PrefixTree, blocks: list[Block], offload: Offload, room: SlotMemory) -> None:
        self._tree, self._blocks, self._offload, self._room = tree, blocks, offload, room
        self._used: OrderedDict[int, tuple[Node, int]] = OrderedDict()  # what slots hold: a node, and the place in it
        self._free: list[int] = []
        self._num_slots = 0  # that have been in use, or are free
        self._fresh: OrderedDict[int, None] = OrderedDict()  # blocks that are full when the newest step has run
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # blocks that were full before, the first of them first
        self._is_short = False  # content has been lost
        self._planned = Transfers()
        self._newest: list[int] = []  # slots that get their content with the newest step

    @property
    def is_restoring(self) -> bool:
        """Whether content is to come back with the next step."""
        return bool(self._planned.restored)

    def begin_step(self) -> None:
        """Begin to plan a step. All steps before have been launched."""
        self._newest.clear()
        self._unsaved.update(self._fresh)
        self._fresh.clear()

    def restore(self, node: Node, place: int, block_id: int) -> None:
        """Let the content of a node's block come back into another block, which becomes the node's."""
        slot = node.copies[place]
        self._used.move_to_end(slot)
        self._tree.attach(block_id, node, place)
        self._planned.restored.append((slot, block_id))

    def note_filled(self, block_ids: Iterable[int]) -> None:
        """Note blocks that have become nodes', which steps fill that have been planned so far."""
        self._fresh.update(dict.fromkeys(block_ids))

    def note_handed_out(self, block_id: int) -> None:
        """Note that a block is to get other content."""
        self._is_short = self._is_short or self._blocks[block_id].node is not None
        self._fresh.pop(block_id, None)
        self._unsaved.pop(block_id, None)

    def save(self, num_tokens: int) -> None:
        """If blocks are short, plan copies of those that have been full for longest, which no step writes to any more.

        num_tokens: of the step that has just been planned
        """
        if not self._is_short and self._tree.num_attached < SHORT * len(self._blocks):
            return
        for _ in range(min(self._offload.most(num_tokens), len(self._unsaved))):
            block_id = next(iter(self._unsaved))
            block = self._blocks[block_id]
            if block.node is None or block.node.copies[block.place] != NONE:
                del self._unsaved[block_id]
                continue
            slot = self._find()
            if slot == NONE:
                return
            del self._unsaved[block_id]
            self._newest.append(slot)  # first, as an interrupt may come
            self._used[slot] = block.node, block.place
            block.node.copies[block.place] = slot
            self._planned.saved.append((block_id, slot))

    def take(self) -> Transfers | None:
        """Return what is planned, for the message of the step; None: nothing is."""
        planned = self._planned
        if not (planned.saved or planned.restored):
            return None
        self._planned = Transfers()
        return planned

    def drop_newest(self) -> None:
        """Forget what is planned, and what the newest step was to copy: it may not have been launched."""
        unknown = {*self._newest, *(slot for _, slot in self._planned.saved)}
        self._planned = Transfers()
        for slot in unknown.intersection(self._used):
            self._free.append(self._drop(slot))
        self._newest.clear()
        self._fresh.clear()

    def drop(self, node: Node) -> None:
        """Forget a node's content, except what comes back with the next step."""
        restored = {slot for slot, _ in self._planned.restored}
        for slot in node.copies:
            if slot != NONE and slot not in restored:
                self._free.append(self._drop(slot))

    def clear(self) -> None:
        """Forget all content."""
        for slot in list(self._used):
            self._free.append(self._drop(slot))
        self._planned = Transfers()
        for blocks in (self._newest, self._fresh, self._unsaved):
            blocks.clear()

    def _find(self) -> int:
        """Return a slot for new content; NONE: there is none now. None is emptied as long as more are to come."""
        if self._free:
            return self._free.pop()
        if self._num_slots < self._room.num_ready():
            self._num_slots += 1
            return self._num_slots - 1
        if not self._room.is_whole:
            return NONE
        taken = {*self._newest, *(slot for slot, _ in self._planned.restored)}  # by the planned step
        oldest = next((slot for slot in self._used if slot not in taken), NONE)
        return oldest if oldest == NONE else self._drop(oldest)

    def _drop(self, slot: int) -> int:
        node, place = self._used.pop(slot)
        node.copies[place] = NONE
        self._tree.prune(node)
        return slot
