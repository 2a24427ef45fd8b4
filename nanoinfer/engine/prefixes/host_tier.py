"""HostTier: which blocks' and snapshots' content is to be copied to host memory, and which is to come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from nanoinfer.engine.prefixes.host_slots import HostSlots, SlotMemory
from nanoinfer.engine.prefixes.prefix_tree import NONE, Block, Node, PrefixTree
from nanoinfer.engine.prefixes.state_slots import StateSlots
from nanoinfer.engine.sequence import Sequence
from nanoinfer.runner.memory.offload import Offload
from nanoinfer.runner.memory.transfers import Transfers

SHORT = 3 / 4  # of all blocks, or all slots for states: if so many have content, that is soon to be lost


class HostTier:
    """A second place for what nodes know: slots of host memory, each for the content of a block.

    A full block's content changes no more, nor does a snapshot, which takes several slots. So it is copied beside some
    later step, long before the block is handed out. A sequence that needs the content gets a block, into which it is
    copied back. The copy in host memory stays. The least recently used one goes when a slot is needed.

    Others get the blocks and the states of a sequence that is preempted with the very next step. So that step waits
    until they are copied.
    """

    def __init__(
        self, tree: PrefixTree, blocks: list[Block], states: StateSlots | None, offload: Offload, room: SlotMemory
    ) -> None:
        self._tree, self._blocks, self._states, self._offload = tree, blocks, states, offload
        self._slots = HostSlots(tree, room)
        self._fresh: OrderedDict[int, None] = OrderedDict()  # blocks that are full when the newest step has run
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # blocks that were full before, the first of them first
        self._is_short = False  # content has been lost
        self._planned = Transfers()

    @property
    def is_restoring(self) -> bool:
        """Whether content is to come back with the next step."""
        return self._planned.num_restored > 0

    def begin_step(self) -> None:
        """Begin to plan a step. All steps before have been launched."""
        self._slots.begin_step()
        self._unsaved.update(self._fresh)
        self._fresh.clear()

    def restore(self, node: Node, place: int, block_id: int) -> None:
        """Let the content of a node's block come back into another block, which becomes the node's."""
        (slot,) = self._slots.use(node, place)
        self._tree.attach(block_id, node, place)
        self._planned.restored.append((slot, block_id))

    def restore_kept(self, holder: Node | Sequence, block_ids: list[int], state: int) -> None:
        """Let come back what is kept of a holder.

        block_ids: get what its last blocks held, which fill no node; none: nobody needs that
        state: the slot that gets the states; NONE: nobody needs them
        """
        slots = self._slots.use(holder, NONE)
        self._planned.restored += zip(slots, block_ids, strict=False)
        if state != NONE:
            self._planned.restored_states.append((slots[-self._offload.slots_of_states :], state))

    def note_filled(self, block_ids: Iterable[int]) -> None:
        """Note blocks that have become nodes', which steps fill that have been planned so far."""
        self._fresh.update(dict.fromkeys(block_ids))

    def note_handed_out(self, block_id: int) -> None:
        """Note that a block is to get other content."""
        self._is_short = self._is_short or self._blocks[block_id].node is not None
        self._fresh.pop(block_id, None)
        self._unsaved.pop(block_id, None)

    def keep(self, seq: Sequence, node: Node, last_blocks: list[int], others: Iterable[int], state: int) -> None:
        """Keep what a sequence has left, before the planned step runs, so that it can go on from there.

        node: of the longest prefix that fills nodes; last_blocks: have the tokens behind it; others: those before
        state: the slot of its states
        """
        transfers = self._planned.first or Transfers()
        if not self._save_states(seq, last_blocks, state, transfers):
            return
        self._planned.first, seq.kept_behind = transfers, node
        for block_id in others:
            if self._is_unsaved(block_id) and not self._save_block(block_id, transfers):
                return

    def lose(self, seq: Sequence) -> None:
        """Keep nothing of a sequence any longer."""
        self._slots.drop(seq, NONE)

    def save(self, num_tokens: int) -> None:
        """If blocks or snapshots are short, plan copies of those to which no step writes any more.

        num_tokens: of the step that has just been planned
        """
        most, num_filled = self._offload.most(num_tokens), 0
        are_blocks_short = self._is_short or self._tree.num_attached >= SHORT * len(self._blocks)
        if self._states is not None and (are_blocks_short or self._states.is_short(SHORT)):
            num_filled = self._save_snapshots(self._states, most)
        if are_blocks_short:
            self._save_blocks(max(most - num_filled, -(-most // 2)))  # neither waits for the other

    def _save_blocks(self, most: int) -> None:
        """Plan copies of the blocks that have been full for longest."""
        for _ in range(min(most, len(self._unsaved))):
            block_id = next(iter(self._unsaved))
            if self._is_unsaved(block_id) and not self._save_block(block_id, self._planned):
                return
            del self._unsaved[block_id]

    def _is_unsaved(self, block_id: int) -> bool:
        block = self._blocks[block_id]
        return block.node is not None and block.node.copies[block.place] == NONE

    def _save_block(self, block_id: int, transfers: Transfers) -> bool:
        """Plan a copy of a node's block; returns whether there is a slot for it."""
        block = self._blocks[block_id]
        assert block.node is not None
        slots = self._slots.hold(block.node, block.place, 1)
        transfers.saved += [(block_id, slot) for slot in slots]
        return bool(slots)

    def _save_snapshots(self, states: StateSlots, most: int) -> int:
        """Plan copies of the oldest snapshots; returns how many slots they fill, `most` or a little more.

        What a tail needs of its blocks is copied, too. Others may get their last tokens meanwhile.
        """
        num_filled = 0
        for node in states.unsaved():
            if num_filled >= most:
                break
            blocks = [block_id for block_id in node.blocks if node.is_tail and block_id != NONE]
            if node.is_tail and not blocks:
                continue
            count = self._save_states(node, blocks, node.snapshot, self._planned)
            if not count:
                break
            num_filled += count
            states.note_saved(node)
        return num_filled

    def _save_states(self, holder: Node | Sequence, block_ids: list[int], state: int, transfers: Transfers) -> int:
        """Plan copies of states, and of the blocks before them; returns how many slots they fill, 0 if too few do."""
        slots = self._slots.hold(holder, NONE, len(block_ids) + self._offload.slots_of_states)
        if slots:
            transfers.saved += zip(block_ids, slots, strict=False)
            transfers.saved_states.append((state, slots[len(block_ids) :]))
        return len(slots)

    def take(self) -> Transfers | None:
        """Return what is planned, for the message of the step; None: nothing is."""
        planned = self._planned
        if not (planned.num_saved or planned.num_restored):
            return None
        self._planned = Transfers()
        self._slots.launch()
        return planned

    def drop_newest(self) -> None:
        """Forget what is planned, what the newest step was to copy, which may not have run, and all sequences."""
        self._planned = Transfers()
        self._slots.drop_unknown()
        self._slots.drop_sequences()
        self._fresh.clear()

    def drop(self, node: Node) -> None:
        """Forget a node's content, except what comes back with the next step."""
        for place in (*range(len(node.copies)), NONE):
            self._slots.drop(node, place)

    def drop_sequences(self, adapter: int) -> None:
        """Keep nothing any longer of sequences with the adapter in a slot."""
        self._slots.drop_sequences(adapter)

    def clear(self) -> None:
        """Forget all content."""
        self._planned = Transfers()
        self._slots.clear()
        self._fresh.clear()
        self._unsaved.clear()
