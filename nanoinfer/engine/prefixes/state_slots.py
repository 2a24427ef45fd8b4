"""StateSlots: room for the states of layers that remember the past in a fixed size, as a recurrence does."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from nanoinfer.engine.prefixes.forks import Forks
from nanoinfer.engine.prefixes.prefix_tree import NONE, Node, PrefixTree
from nanoinfer.engine.sequence import Sequence
from nanoinfer.runner.message import ChunkStates

NodeAt = Callable[[Sequence, int], Node | None]

SNAPSHOT_TOKENS = 2048  # from one snapshot of a long prompt to the next, or a little more
MOST_SNAPSHOTS = 1 / 4  # of all slots: so many snapshots a step may use, for the others must do for sequences
MOST_OTHERS = 3 / 4  # of these: so many, if it takes one where prompts are not known to part


class StateSlots:
    """Gives each sequence a slot for its states. The other slots hold snapshots, each on a node.

    A snapshot is taken where a later sequence may want to go on: where prompts part, near a prompt's end, and now and
    then in a long prompt. The least recently used one goes when a slot is needed.

    A step reads and writes slots in no order. So a slot that the planned step uses gets no new owner in that step, and
    a snapshot that it takes is read by later steps only.
    """

    def __init__(self, num_slots: int, tree: PrefixTree, prefix_size: int, grid: int) -> None:
        """prefix_size: tokens of a node; grid: snapshots are taken at multiples of so many"""
        self.num_slots = num_slots
        self._tree, self._size, self._grid = tree, prefix_size, grid
        self._interval = -(-SNAPSHOT_TOKENS // prefix_size) * prefix_size
        self._most_used = math.ceil(MOST_SNAPSHOTS * num_slots)
        self._most_others = max(1, int(MOST_OTHERS * self._most_used))
        self._waiting = Forks(self._grid)
        self._snapshots: OrderedDict[Node, None] = OrderedDict()
        self._unsaved: OrderedDict[Node, None] = OrderedDict()  # those that host memory lacks, the oldest first
        self._has_lost = False  # snapshots, for want of slots
        self._free = list(range(num_slots))
        # Where sequences that have slots take snapshots, beside the usual: where prompts part, and near their ends.
        self._stops: dict[Sequence, tuple[set[int], set[int]]] = {}
        self._sources: dict[Sequence, int] = {}  # the slots from which those go on whose first chunk is still to come
        self._in_use: set[int] = set()  # slots of snapshots that the newest step reads or writes
        self._fresh: set[Node] = set()  # nodes whose snapshots it writes
        self._busy: set[Node] = set()  # nodes whose snapshots it reads or writes
        self._late: list[int] = []  # slots to be free when no planned step uses them any more

    def begin_step(self) -> None:
        """Begin to plan a step. All steps before have been launched."""
        self._in_use.clear()
        self._fresh.clear()
        self._busy.clear()
        late, self._late = self._late, []
        for slot in late:
            self._release(slot)

    def expect(self, seq: Sequence) -> None:
        """Note a sequence that is to begin later."""
        self._waiting.add(seq)

    def clear(self) -> None:
        """Take back all slots, those of sequences and of snapshots, and expect nobody."""
        self.begin_step()
        self._sources.clear()
        self._stops.clear()
        self._waiting.clear()
        for node in list(self._snapshots):
            self._take_from(node)  # even if an interrupt has left it without a slot
        self._free, self._late = list(range(self.num_slots)), []

    @property
    def has_room(self) -> bool:
        """Whether a sequence can get a slot."""
        return bool(self._free) or any(not self._is_used(node.snapshot) for node in self._snapshots)

    def is_ready(self, node: Node) -> bool:
        """Whether the planned step may read a node's snapshot."""
        return node.snapshot != NONE and node not in self._fresh

    def delay(self, node: Node) -> None:
        """Let no sequence go on from a node before the step behind the planned one."""
        self._fresh.add(node)

    def is_delayed(self, node: Node) -> bool:
        """Whether no sequence may go on from a node before that."""
        return node in self._fresh

    def is_fresh(self, node: Node) -> bool:
        """Whether the planned step takes a node's snapshot, or fills the blocks before that."""
        return node in self._fresh and node.snapshot != NONE

    def take(self, seq: Sequence, prefix: Node, num_matched: int) -> bool:
        """Give a sequence a slot, if one can be had; returns whether.

        prefix: from whose snapshot it goes on, if that is ready; num_matched: so many of its tokens have been computed
            by others
        """
        source = self._read(prefix)
        if source != NONE and prefix not in self._busy:
            slot = self._lose(prefix)  # it gets this one, as there must be slots for others
        else:
            self._sources[seq] = source  # first: it must stay
            slot = self._find()
        if slot == NONE:
            del self._sources[seq]
            return False
        seq.slot, self._sources[seq] = slot, source
        parts = {num_matched, *self._waiting.remove(seq)}
        ends = {(len(seq) - 1) // size * size for size in (self._grid, self._size)}
        self._stops[seq] = parts, ends
        return True

    def _read(self, prefix: Node) -> int:
        """Return the slot of a snapshot; NONE: it is not ready. It is busy then, if the step may use so many."""
        if not self.is_ready(prefix):
            return NONE
        self._snapshots.move_to_end(prefix)
        if len(self._busy) < self._most_used or self._is_used(prefix.snapshot):
            self._busy.add(prefix)
        return prefix.snapshot

    def bring_back(self, seq: Sequence, node: Node | None) -> int:
        """Return the slot into which the states come back from which a sequence with a slot goes on.

        node: gets a snapshot of them, if there is a slot for one; None: they are the sequence's own
        """
        slot = NONE if node is None else self._hang(node, self._most_used)
        if slot == NONE:
            slot = seq.slot
        elif node is not None:
            self._fresh.discard(node)  # the planned step may read it
        self._sources[seq] = slot
        return slot

    def is_short(self, share: float) -> bool:
        """Whether snapshots are lost, or soon will be, as this share of the slots is taken."""
        return self._has_lost or self.num_slots - len(self._free) >= share * self.num_slots

    def unsaved(self) -> list[Node]:
        """Return the nodes of whose snapshots host memory has no copy, and which no step writes; the oldest first."""
        return [node for node in self._unsaved if node not in self._fresh]

    def note_saved(self, node: Node) -> None:
        """Note that host memory gets a node's snapshot."""
        del self._unsaved[node]

    def fork(self, other: Sequence) -> None:
        """Give a further sample of a prompt a slot for a copy of its states, which are computed by the planned step."""
        assert self.has_room
        other.slot = self._find()
        self._waiting.remove(other)

    def follow(self, other: Sequence, seq: Sequence) -> None:
        """Give a sequence a slot, to go on from where `seq` is: its next chunk reads the slot of that one."""
        other.slot = self._find()
        assert other.slot != NONE
        self._sources[other], self._stops[other] = self._sources.get(seq, seq.slot), (set(), set())

    def plan(self, seq: Sequence, start: int, end: int, node_at: NodeAt) -> ChunkStates:
        """Return where a chunk finds its states and leaves them. Its nodes have been recorded.

        A chunk takes snapshots if it begins at a multiple of `grid`.
        node_at: returns the node of a sequence's first tokens; None: there is none
        """
        source = self._sources.pop(seq, seq.slot)
        if self._is_used(seq.slot):  # those that follow it read the slot, in this step or later
            seq.slot = self._find()
            self._release(source)
        if source not in (NONE, seq.slot):
            self._in_use.add(source)
        planned = ChunkStates(source, seq.slot)
        if start % self._grid:
            return planned
        regular = range(start // self._interval * self._interval + self._interval, end + 1, self._interval)
        parts, ends = self._stops[seq]
        for positions, most in ((parts, self._most_used), (ends.union(regular) - parts, self._most_others)):
            for position in sorted(positions, reverse=True):  # the last one is wanted most
                if start < position <= end and (node := node_at(seq, position)) is not None:
                    if (slot := self._hang(node, most)) != NONE:
                        planned.snapshots[position] = slot
                    else:
                        self._tree.prune(node)
        return planned

    def give_back(self, seq: Sequence) -> None:
        """Take back a sequence's slot, if it has one, and expect it no more."""
        self._waiting.remove(seq)
        self._sources.pop(seq, None)
        self._stops.pop(seq, None)
        if seq.slot != NONE:
            slot, seq.slot = seq.slot, NONE
            self._release(slot)

    def drop(self, node: Node) -> None:
        """Let a node have no snapshot."""
        if node.snapshot != NONE:
            self._release(self._take_from(node))

    def drop_snapshots(self) -> None:
        """Let no node have a snapshot."""
        for node in list(self._snapshots):
            self.drop(node)

    def hang(self, node: Node) -> int:
        """Return a slot for a snapshot of the states behind a node that no step computes; NONE: there is none."""
        return self._hang(node, self.num_slots)

    def _hang(self, node: Node, most: int) -> int:
        """Return a slot for a snapshot of the states behind a node; NONE: it has one, or there is no slot.

        most: so many snapshots the planned step may use
        """
        if node.snapshot != NONE or not node.is_found or len(self._busy) >= most:
            return NONE
        slot = self._find()
        if slot != NONE:
            self._busy.add(node)
            self._in_use.add(slot)
            self._fresh.add(node)
            self._snapshots[node] = None
            if not node.kept:
                self._unsaved[node] = None
            node.snapshot = slot
        return slot

    def _find(self) -> int:
        return self._free.pop() if self._free else self._oldest_snapshot()

    def _oldest_snapshot(self) -> int:
        """Take the least recently used snapshot from its node, and return its slot; NONE: all are in use."""
        oldest = next((node for node in self._snapshots if not self._is_used(node.snapshot)), None)
        return NONE if oldest is None else self._lose(oldest)

    def _lose(self, node: Node) -> int:
        """Take the snapshot of a node from it, for want of slots, and return its slot."""
        self._has_lost = True
        return self._take_from(node)

    def _is_used(self, slot: int) -> bool:
        return slot in self._in_use or slot in self._sources.values()

    def _release(self, slot: int) -> None:
        (self._late if self._is_used(slot) else self._free).append(slot)

    def _take_from(self, node: Node) -> int:
        slot, node.snapshot = node.snapshot, NONE
        del self._snapshots[node]
        self._unsaved.pop(node, None)
        self._fresh.discard(node)
        self._busy.discard(node)
        self._tree.prune(node)
        return slot
