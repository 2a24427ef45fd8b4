"""BlockManager: which sequences hold which KV-cache blocks, and which free blocks hold content worth reusing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

from nanoinfer.engine.block_names import Block, BlockNames
from nanoinfer.engine.sequence import Sequence


class BlockManager:
    """Hands blocks to sequences, shares full ones between equal prefixes, and takes them back.

    A full block that no sequence holds any more is free, but keeps its content until it is handed out again. A later
    sequence with the same prefix can take it back. The least recently freed block is handed out first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.names = BlockNames(self.blocks)
        self._serials = count(2)  # 0 and 1 stand before the first block of short and long sequences
        self._planned: list[int] = []  # blocks that got their names from the newest prefill step

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, whether or not they hold old content."""
        return len(self.free_blocks)

    @property
    def share_used(self) -> float:
        """The share of all blocks that some sequence holds, 0 to 1."""
        return 1 - self.num_free / len(self.blocks)

    def allocate(self, seq: Sequence) -> int | None:
        """Give a sequence that holds no blocks all that its tokens need, cached prefix first.

        Returns how many leading tokens have their keys and values in the cache already. These all precede the first
        position whose logits are needed. With too few free blocks, returns None and changes nothing.
        """
        assert not seq.block_table
        cached = self.cached_prefix(seq)
        needed = -(-len(seq) // self.block_size) - len(cached)
        if needed + sum(block in self.free_blocks for block in cached) > self.num_free:
            return None
        for block_id in cached:
            self._acquire(block_id)
        seq.block_table = cached.copy()
        seq.num_named = len(cached)
        seq.last_serial = self.blocks[cached[-1]].serial if cached else int(seq.is_long)
        for _ in range(needed):
            self._extend(seq)
        return len(cached) * self.block_size

    def can_fork(self, seq: Sequence) -> bool:
        """Whether `fork` finds the block that it needs: one for a copy of the last block, or none if that is full."""
        return self.num_free > 0 or len(seq) % self.block_size == 0

    def fork(self, seq: Sequence, other: Sequence) -> tuple[int, int] | None:
        """Let another sequence of the same tokens share the full blocks of `seq` that `seq` has not released.

        If the last block is not full, `other` gets a block of its own for a copy.
        Returns (block to copy, its copy), or None if the last block is full.
        """
        assert not other.block_table
        num_full = len(seq) // self.block_size
        for block_id in seq.block_table[seq.num_released : num_full]:
            self._acquire(block_id)
        other.block_table = seq.block_table[:num_full]
        other.num_released = seq.num_released
        other.num_named, other.last_serial = seq.num_named, seq.last_serial
        if num_full == len(seq.block_table):
            return None
        self._extend(other)
        return seq.block_table[num_full], other.block_table[num_full]

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the next token to be scheduled falls beyond the sequence's last block."""
        return seq.num_scheduled >= len(seq.block_table) * self.block_size

    def append(self, seq: Sequence) -> None:
        """Give the sequence one more block; there must be a free one."""
        self._extend(seq)

    def begin_prefill(self) -> None:
        """Begin to plan a prefill step. All steps before have been launched, so that their blocks keep their names."""
        self._planned.clear()

    def plan(self, seq: Sequence, num_tokens: int) -> None:
        """Name the blocks of the first `num_tokens` tokens that are full once the planned step has run.

        Other sequences of the same step may share these blocks: each layer writes all keys before it attends.
        """
        self._planned += seq.block_table[seq.num_named : num_tokens // self.block_size]
        self.record(seq, num_tokens)

    def record(self, seq: Sequence, num_tokens: int) -> None:
        """Name the blocks that the first `num_tokens` tokens fill."""
        for index in range(seq.num_named, num_tokens // self.block_size):
            block_id = seq.block_table[index]
            block = self.blocks[block_id]
            if block.content is None:  # otherwise another sequence that shares the block has named it
                self.names.add(block_id, self._content(seq, index, seq.last_serial))
            seq.num_named, seq.last_serial = index + 1, block.serial

    def release(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the blocks that the first `num_tokens` tokens of a running sequence fill; all have names.

        The block table keeps their numbers, which no later step reads.
        """
        num_released = num_tokens // self.block_size
        if num_released > seq.num_released:
            self._take_back(seq.block_table[seq.num_released : num_released])
            seq.num_released = num_released

    def free(self, seq: Sequence) -> None:
        """Take back all blocks of a sequence."""
        self._take_back(seq.block_table[seq.num_released :])
        seq.block_table = []
        seq.num_released = seq.num_named = 0

    def free_all(self) -> None:
        """Take back every block, whatever state an interrupt left it in; a block with a name keeps its content.

        The newest prefill step may not have been launched: its blocks lose their names.
        """
        for block_id in self._planned:
            self.names.remove(block_id)
        for block in self.blocks:
            block.ref_count = 0
        held = [block_id for block_id in range(len(self.blocks)) if block_id not in self.free_blocks]
        free = sorted([*self.free_blocks, *held], key=lambda block_id: self.blocks[block_id].content is not None)
        self.free_blocks = OrderedDict.fromkeys(free)

    def forget_all(self, seqs: Iterable[Sequence]) -> None:
        """Remove the names of all blocks, so that no later sequence shares one.

        seqs: all sequences that hold blocks. The blocks that they fill from now on follow blocks without a name, so no
        other sequence finds them
        """
        self.names.clear()
        for seq in seqs:
            seq.last_serial = next(self._serials)

    def forget(self, seq: Sequence) -> None:
        """Remove the names of a sequence's blocks. No later sequence shares one, but those that hold them go on."""
        for block_id in seq.block_table[seq.num_released :]:
            self.names.remove(block_id)

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """Return the blocks that hold a sequence's first tokens already, whether or not they are free."""
        found: list[int] = []
        serial = int(seq.is_long)
        for index in range(seq.num_reusable // self.block_size):
            block_id = self.names.find(self._content(seq, index, serial))
            if block_id is None:
                break
            found.append(block_id)
            serial = self.blocks[block_id].serial
        return found

    def _content(self, seq: Sequence, index: int, serial: int) -> bytes:
        """Return the content of block `index` of a sequence; serial: that of the block before."""
        start = index * self.block_size
        return serial.to_bytes(8, "little") + seq.token_ids[start : start + self.block_size]

    def _take_back(self, block_ids: list[int]) -> None:
        """Take back blocks of one sequence, the last first, so that a cached prefix outlives the blocks behind it."""
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks[block_id] = None
                if block.content is None:  # it holds nothing to keep, and is handed out next
                    self.free_blocks.move_to_end(block_id, last=False)

    def _acquire(self, block_id: int) -> None:
        self.free_blocks.pop(block_id, None)
        self.blocks[block_id].ref_count += 1

    def _extend(self, seq: Sequence) -> None:
        block_id, _ = self.free_blocks.popitem(last=False)
        self.names.remove(block_id)
        block = self.blocks[block_id]
        block.serial, block.ref_count = next(self._serials), 1
        seq.block_table.append(block_id)
