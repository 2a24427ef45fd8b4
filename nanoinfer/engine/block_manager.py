"""BlockManager: which sequences hold which KV-cache blocks, and which free blocks hold content worth reusing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import chain

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.engine.free_blocks import FreeBlocks
from nanoinfer.engine.prefixes.host_tier import HostTier
from nanoinfer.engine.prefixes.kept_states import KeptStates
from nanoinfer.engine.prefixes.prefix_cache import CachedPrefix, PrefixCache
from nanoinfer.engine.prefixes.prefix_tree import NONE, Block, Node, PrefixTree
from nanoinfer.engine.prefixes.state_slots import StateSlots
from nanoinfer.engine.sequence import Sequence
from nanoinfer.runner.memory.transfers import Transfers
from nanoinfer.runner.message import ChunkStates

MakeTier = Callable[[PrefixTree, list[Block], StateSlots | None], HostTier]


class BlockManager:
    """Hands blocks to sequences, shares those of equal prefixes, and takes them back.

    A block that no sequence holds any more is free, but keeps its content until it is handed out again. A later
    sequence with the same prefix can take it back. The least recently freed block is handed out first.

    A sequence has a block table for each group of layers. All blocks that a group needs of a prompt are handed out at
    once, if its queries see all tokens; else those that the next chunk needs. Such a group gives back what is behind
    its window. Its table keeps the numbers of these blocks, which no later step reads.
    """

    make_tree = PrefixTree

    def __init__(
        self,
        num_blocks: int,
        layout: CacheLayout,
        num_slots: int = 0,
        tier: MakeTier | None = None,
        num_eager: int | None = None,
    ) -> None:
        """num_slots: for states, if the model's layers have some; tier: makes what keeps content in host memory.

        num_eager: as for FreeBlocks
        """
        self.layout, self.groups, self.prefix_size = layout, layout.groups, layout.prefix_size
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free_blocks = FreeBlocks(num_blocks, num_eager)
        self._sizes = [group.block_size for group in self.groups]
        self._has_windows = any(group.window for group in self.groups)
        self.tree = self.make_tree(self.blocks, sum(layout.counts))
        sizes = layout.prefix_size, layout.snapshot_grid
        self.states = StateSlots(num_slots, self.tree, *sizes) if num_slots else None
        self.tier = None if tier is None else tier(self.tree, self.blocks, self.states)
        self.prefixes = PrefixCache(layout, self.tree, self.states, self.tier)
        self.kept: KeptStates | None = None
        if self.states is not None and self.tier is not None:
            self.kept = KeptStates(layout, self.prefixes, self.states, self.tier)
        self._planned: list[int] = []  # blocks that became a node's with the newest prefill step
        self._passed: list[Sequence] = []  # those of the newest prefill step
        self._copies: list[tuple[int, int]] = []  # of tails, which the next prefill step makes
        self._copied: list[int] = []  # blocks that are copied then, or were in the step before

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, whether or not they hold old content."""
        return len(self.free_blocks)

    @property
    def share_used(self) -> float:
        """The share of all blocks that some sequence holds, 0 to 1."""
        return 1 - self.num_free / len(self.blocks) if self.blocks else 0.0

    @property
    def is_restoring(self) -> bool:
        """Whether the step that is planned next copies content back from host memory."""
        return self.tier is not None and self.tier.is_restoring

    def next_end(self, position: int) -> int:
        """Return where the first block ends that does so behind a position, in any group."""
        return min([(position // size + 1) * size for size in self._sizes])

    def begin_step(self) -> bool:
        """Begin to plan a step; returns whether blocks come back. All steps before have been launched.

        What the windows of a prefill step have left behind may only go now: its own chunks must not write there.
        """
        self._planned.clear()
        if not self._copies:
            self._take_back(self._copied)
            self._copied = []
        if self.tier is not None:
            self.tier.begin_step()
        if self.states is not None:
            self.states.begin_step()
        if not self._passed:
            return False
        released = [self.release(seq, seq.num_scheduled) for seq in self._passed if seq.block_tables]
        self._passed.clear()
        return any(released)

    def expect(self, seq: Sequence) -> None:
        """Note a sequence that is to begin later."""
        if self.states is not None:
            self.states.expect(seq)

    def should_wait(self, seq: Sequence) -> bool:
        """Whether a sequence had better begin with a later step: the planned one computes more of its prefix."""
        return self.states is not None and self.prefixes.find(seq).is_awaited

    def allocate(self, seq: Sequence, most_tokens: int) -> int | None:
        """Give a sequence that holds no blocks what it needs to begin, cached prefix first; `extend` gives the rest.

        most_tokens: of its first chunk
        Returns how many leading tokens have their keys and values in the cache already. These all precede the first
        position whose logits are needed. With too few free blocks, returns None and changes nothing.
        """
        assert not seq.block_tables
        if not self.groups:
            return 0
        cached = self.prefixes.find(seq)
        has_room = self._has_room(seq, cached, most_tokens)
        if not has_room and any(cached.rest):
            cached = self.prefixes.find(seq, with_tails=False)
            has_room = self._has_room(seq, cached, most_tokens)
        if not has_room:
            return None
        start, holder = cached.num_tokens, cached.holder
        prefix = holder if isinstance(holder, Node) else cached.node
        lacks_states = self.states is not None and not (prefix is holder and self.states.is_ready(prefix))
        if self.states is not None and not self.states.take(seq, prefix, cached.num_matched):
            return None
        for block_id in chain(*cached.tables, *cached.rest):
            if block_id != NONE:
                self._acquire(block_id)
        self._copied += chain(*cached.rest)
        if self.tier is not None and holder is not seq:
            self.tier.lose(seq)
        seq.block_tables = [[0] * first + table for first, table in zip(cached.starts, cached.tables, strict=True)]
        if cached.lost:
            self._restore(cached, seq.block_tables)
        seq.num_released = cached.starts
        seq.node, seq.num_nodes = cached.node, start // self.prefix_size
        for group, table, theirs in zip(self.groups, seq.block_tables, cached.rest, strict=True):
            if group.window is None:
                num_shared = len(table)
                self._extend(table, -(-len(seq) // group.block_size))
                self._copies += zip(theirs, table[num_shared:], strict=False)
        if start and self.kept is not None:
            self._planned += self.kept.bring_back(seq, cached, lacks_states)
        return start

    def _has_room(self, seq: Sequence, cached: CachedPrefix, most_tokens: int) -> bool:
        """Whether there are blocks for a sequence that begins with what is cached; most_tokens: as for allocate."""
        start, needed = cached.num_tokens, len(cached.lost)
        for group, first, table in zip(self.groups, cached.starts, cached.tables, strict=True):
            end = len(seq) if group.window is None else min(len(seq), start + most_tokens)
            new = -(-end // group.block_size) - first - len(table)
            needed += new if group.most_blocks is None else min(new, group.most_blocks - len(table))
        own = [block_id for block_id in chain(*cached.tables, *cached.rest) if block_id != NONE]
        return needed + sum(block_id in self.free_blocks for block_id in own) <= self.num_free

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the blocks that the planned prefill step copies before it runs, as (block, its copy)."""
        copies, self._copies = self._copies, []
        return copies

    def _restore(self, cached: CachedPrefix, tables: list[list[int]]) -> None:
        """Let what only host memory holds of a prefix come back, into blocks for these tables."""
        assert self.tier is not None
        lost = iter(cached.lost)
        for table in tables:
            for column, block_id in enumerate(table):
                if block_id == NONE:
                    table[column] = self._hand_out()
                    self._planned.append(table[column])
                    self.tier.restore(*next(lost), table[column])

    def extend(self, seq: Sequence, end: int) -> int:
        """Give a sequence the blocks of its next chunk, which is to end at `end`; returns where it can end.

        No group takes blocks for tokens for which another group finds none. If layers have states, it ends where their
        kernels can go on, or with the sequence's tokens.
        """
        pairs = list(zip(self.groups, seq.block_tables, strict=True))

        def num_lacking(end: int) -> int:
            return sum(max(0, -(-end // group.block_size) - len(table)) for group, table in pairs)

        if num_lacking(end) > self.num_free:
            end = bisect_right(range(end + 1), self.num_free, key=num_lacking) - 1
        if end < len(seq):
            end -= end % self.layout.grid
        for group, table in pairs:
            self._extend(table, -(-end // group.block_size))
        return end

    def can_fork(self, seq: Sequence) -> bool:
        """Whether `fork` finds what it needs: the blocks of its copies, and a slot for states."""
        return self.num_free >= sum(self.num_copied(seq)) and (self.states is None or self.states.has_room)

    def num_copied(self, seq: Sequence) -> list[int]:
        """Return how many blocks of each group a fork of a sequence gets for itself."""
        return [int(len(seq) % group.block_size > 0) for group in self.groups]

    def fork(self, seq: Sequence, other: Sequence, follows: bool = False) -> list[tuple[int, int]]:
        """Let another sequence of the same tokens share the full blocks of `seq` that `seq` has not released.

        follows: all tokens have been computed; else the planned step does it, and leaves `other` a copy of the states
        `other` gets a block of its own for a copy of each last block that is not full.
        Returns these, as (block to copy, its copy).
        """
        assert not other.block_tables
        copies = []
        other.num_released = seq.num_released.copy()
        other.num_nodes, other.node = seq.num_nodes, seq.node
        for group, table, released in zip(self.groups, seq.block_tables, seq.num_released, strict=True):
            num_full = len(seq) // group.block_size
            for block_id in table[released:num_full]:
                self._acquire(block_id)
            own = table[:num_full]
            other.block_tables.append(own)
            if num_full < len(table):
                self._extend(own, len(table))
                copies.append((table[num_full], own[num_full]))
        if self._has_windows:
            self._passed.append(other)
        if self.states is not None and follows:
            self.states.follow(other, seq)
        elif self.states is not None:
            self.states.fork(other)
        return copies

    def num_needed(self, seq: Sequence, count: int = 1) -> int:
        """Return how many blocks the next `count` tokens to be scheduled need."""
        end, needed = seq.num_scheduled + count, 0
        for size, table in zip(self._sizes, seq.block_tables, strict=True):
            if end > len(table) * size:
                needed += -(-end // size) - len(table)
        return needed

    def append(self, seq: Sequence, count: int = 1) -> list[tuple[int, int]]:
        """Give a sequence the blocks that its next `count` tokens need, which must be free.

        Returns their places: the number of a group, and the column of its block table.
        """
        end, grown = seq.num_scheduled + count, []
        for index, (size, table) in enumerate(zip(self._sizes, seq.block_tables, strict=True)):
            length = -(-end // size)
            grown += [(index, column) for column in range(len(table), length)]
            self._extend(table, length)
        return grown

    def take_transfers(self, num_tokens: int) -> Transfers | None:
        """Return what is to be copied from and to host memory beside the planned step, of so many tokens."""
        if self.tier is None:
            return None
        self.tier.save(num_tokens)
        return self.tier.take()

    def plan(self, seq: Sequence, start: int, end: int) -> ChunkStates | None:
        """Record what a sequence's tokens up to `end` fill once the planned prefill step has run.

        Other sequences of the same step may share these blocks: each layer writes all keys before it attends.
        Returns where the step finds and leaves the states of the chunk, if layers have some.
        """
        self.prefixes.record(seq, end, self._planned)
        if self._has_windows:
            self._passed.append(seq)
        return None if self.states is None else self.states.plan(seq, start, end, self.prefixes.node_at)

    def record(self, seq: Sequence, num_tokens: int) -> None:
        """Let later sequences find what the first `num_tokens` tokens fill, which has been computed."""
        self.prefixes.record(seq, num_tokens, [])

    def release(self, seq: Sequence, position: int) -> bool:
        """Take back the blocks that no query from this position on sees; returns whether there are some."""
        has_released = False
        if not self._has_windows:
            return has_released
        for index, (group, table) in enumerate(zip(self.groups, seq.block_tables, strict=True)):
            if group.window is not None:
                behind = min(group.first_seen(position) // group.block_size, len(table))
                if behind > seq.num_released[index]:
                    self._take_back(table[seq.num_released[index] : behind])
                    seq.num_released[index], has_released = behind, True
        return has_released

    def keep(self, seq: Sequence) -> None:
        """Let host memory keep what a sequence needs to go on, which is about to be preempted: see KeptStates."""
        if self.kept is not None:
            self.record(seq, len(seq) - 1)
            self.kept.keep(seq)

    def free(self, seq: Sequence) -> None:
        """Take back all that a sequence holds, or what host memory keeps of one that holds nothing."""
        if self.tier is not None and not seq.block_tables:
            self.tier.lose(seq)
        for table in self.held(seq):
            if self._copies:  # it has not run yet
                self._copies = [pair for pair in self._copies if pair[1] not in table]
            self._take_back(table)
        seq.block_tables, seq.num_released = [], []
        seq.node, seq.num_nodes = None, 0
        if self.states is not None:
            self.states.give_back(seq)

    def free_all(self) -> None:
        """Take back everything, whatever state an interrupt left it in; a node's block keeps its content.

        The newest prefill step may not have been launched: what it was to fill is no node's.
        """
        for block_id in self._planned:
            self.tree.detach(block_id)
        self._planned.clear()
        if self.tier is not None:
            self.tier.drop_newest()
        self._passed.clear()
        self._copies, self._copied = [], []
        for block_id, block in enumerate(self.blocks):
            block.ref_count = 0
            self.tree.detach_tails(block_id)  # what the newest step was to fill may be theirs, too
        if self.states is not None:
            self.states.clear()
        self.free_blocks.add_all(kept=(i for i, block in enumerate(self.blocks) if block.is_known))

    def forget_adapter(self, adapter: int, seqs: Iterable[Sequence]) -> None:
        """Let no later sequence share what has been computed so far with the adapter in a slot.

        seqs: as for PrefixCache.forget_adapter
        """
        for block_id in self.prefixes.forget_adapter(adapter, seqs):
            self.free_blocks.empty(block_id)

    def held(self, seq: Sequence) -> list[list[int]]:
        """Return the blocks that a sequence holds of each group."""
        return [table[released:] for table, released in zip(seq.block_tables, seq.num_released, strict=True)]

    def num_own(self, seq: Sequence) -> list[int]:
        """Return how many blocks of each group a sequence holds that no other one does."""
        return [sum(self.blocks[block_id].ref_count == 1 for block_id in table) for table in self.held(seq)]

    def num_shared(self, seq: Sequence) -> list[int]:
        """Return how many blocks of each group a sequence would share with others that hold them now."""
        tables = self.prefixes.find(seq).tables
        return [sum(block_id != NONE and block_id not in self.free_blocks for block_id in table) for table in tables]

    def _take_back(self, block_ids: list[int]) -> None:
        """Take back blocks of one sequence, the last first, so that a cached prefix outlives the blocks behind it."""
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks.add(block_id, is_kept=block.is_known)

    def _acquire(self, block_id: int) -> None:
        if self.blocks[block_id].ref_count == 0:
            self.free_blocks.remove(block_id)
        self.blocks[block_id].ref_count += 1

    def _extend(self, table: list[int], length: int) -> None:
        """Let a block table have so many blocks."""
        while len(table) < length:
            table.append(self._hand_out())

    def _hand_out(self) -> int:
        block_id = self.free_blocks.hand_out()
        if self.tier is not None:
            self.tier.note_handed_out(block_id)
        self.tree.detach(block_id)
        self.blocks[block_id].ref_count = 1
        return block_id
