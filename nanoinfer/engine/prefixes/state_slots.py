"""StateSlots: room for the states of layers that remember the past in a fixed size, as a recurrence does."""

from __future__ import annotations

from collections import OrderedDict

from nanoinfer.engine.prefix_tree import NONE, Node, PrefixTree
from nanoinfer.engine.sequence import Sequence


class StateSlots:
    """Gives each sequence a slot for its states. The other slots hold snapshots, each on a node.

    A sequence goes on from the snapshot of its prefix. The least recently used snapshot goes when no slot is
    free.
    """

    def __init__(self, num_slots: int, tree: PrefixTree) -> None:
        self.num_slots = num_slots
        self._tree = tree
        self._snapshots: OrderedDict[Node, None] = OrderedDict()
        self._free = list(range(num_slots))

    def clear(self) -> None:
        """Take back all slots, those of sequences and of snapshots."""
        self.drop_snapshots()
        self._free = list(range(self.num_slots))

    def take(self, seq: Sequence, prefix: Node) -> bool:
        """Give a sequence a slot, if one can be had; returns whether. prefix: its snapshot stays"""
        if prefix.snapshot != NONE:
            self._snapshots.move_to_end(prefix)
        slot = self._find(prefix)
        if slot != NONE:
            seq.slot = slot
        return slot != NONE

    def give_back(self, seq: Sequence) -> None:
        """Take back a sequence's slot."""
        self._free.append(seq.slot)
        seq.slot = NONE

    def hang(self, node: Node) -> int:
        """Return a slot for a snapshot of the states behind a node; NONE: it has one, or there is no slot."""
        if node.snapshot != NONE or not node.is_found:
            return NONE
        node.snapshot = self._find(node)
        if node.snapshot != NONE:
            self._snapshots[node] = None
        return node.snapshot

    def drop(self, node: Node) -> None:
        """Let a node have no snapshot."""
        if node.snapshot != NONE:
            self._free.append(self._take_from(node))

    def drop_snapshots(self) -> None:
        """Let no node have a snapshot."""
        for node in list(self._snapshots):
            self.drop(node)

    def _find(self, prefix: Node) -> int:
        if self._free:
            return self._free.pop()
        oldest = next((node for node in self._snapshots if node is not prefix), None)
        return NONE if oldest is None else self._take_from(oldest)

    def _take_from(self, node: Node) -> int:
        slot, node.snapshot = node.snapshot, NONE
        del self._snapshots[node]
        self._tree.prune(node)
        return slot
