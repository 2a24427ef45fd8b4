"""BlockManager by random operations, for many layouts: what it hands out, and what it takes for cached.

A model beside it knows what each block would hold: which tokens of which group's layers, and what they depend on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from conftest import CollidingBlockManager, alike, amid_blocks, layout_of, whole_only
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from nanoinfer import SamplingParams
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.prefixes.prefix_tree import NONE, Node
from nanoinfer.engine.sequence import Sequence
from nanoinfer.runner.message import ChunkStates

PATTERNS = [[0] * 40, [1] * 40, [0, 1] * 20, [0, 1, 1, 1] * 10]  # prompts begin like these: many prefixes are equal
MOST_TOKENS = 80
MOST_LIVE = 4  # so that a sequence is often alone

FULL = alike(4)
WINDOW = alike(4, window=6)
MIXED = layout_of((8, None), (2, 5))
THREE = layout_of((8, None), (2, 3), (4, 12))
ONLY_WINDOWS = layout_of((4, 7), (2, 4))
WINDOW_OF_ONE = layout_of((4, None), (2, 1))
AMID_BLOCKS = amid_blocks(layout_of((8, None), (4, None)))

which_seq = st.integers(0, MOST_LIVE - 1)
prompts = st.builds(
    lambda pattern, length, tail: pattern[:length] + tail,
    st.sampled_from(PATTERNS),
    st.integers(1, 40),
    st.lists(st.integers(0, 1), max_size=9),
)
seldom = st.sampled_from([False] * 9 + [True])
adapters = st.sampled_from([NONE] * 6 + [0, 1])


Kind = tuple[int, bool]  # of a sequence: its adapter, and whether it is long


def kind_of(seq: Sequence) -> Kind:
    return seq.adapter, seq.is_long


@dataclass(frozen=True)
class Written:
    """What a block or a slot holds.

    prefix: all tokens up to the last that was written, from the first of the sequence on
    writes: this write and all that it depends on, by number
    """

    group: int  # NONE: states
    kind: Kind
    prefix: tuple[int, ...]
    writes: frozenset[int]


class RandomOperations(RuleBasedStateMachine):
    """Random sequences in a cache that is too small for all.

    The steps of a scheduler are kept to: chunks and forks of one step, then what comes between steps.
    """

    kind, layout, num_blocks, num_slots = BlockManager, FULL, 14, 0

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.kind(self.num_blocks, self.layout, self.num_slots)
        self.tree, self.states = self.manager.tree, self.manager.states
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []  # those that were preempted
        self.blocks: dict[int, Written | None] = {}  # None: nobody knows
        self.settled: dict[int, Written | None] = {}  # those before the planned step
        self.slots: dict[int, Written] = {}
        self.read_slots: set[int] = set()  # slots that this step reads before it writes
        self.written_slots: set[int] = set()  # slots that it writes
        self.writes: dict[Sequence, frozenset[int]] = {}  # that all it computes depends on
        self.forgotten: set[int] = set()  # writes
        self.numbers = count()
        self.numbers_of: dict[int, list[int]] = {}  # by adapter, of writes
        self.is_planning = False
        self.chunked: set[Sequence] = set()  # those that have had their chunk of this step
        self.touched: set[int] = set()  # blocks that this step reads or writes
        self.planned: set[int] = set()  # blocks that this step writes
        self.serials: dict[int, tuple[int, bytes]] = {}  # of nodes, never deleted: the roots' and the prefixes

    # What a scheduler does

    def choose(self, which: int) -> Sequence:
        return self.live[which % len(self.live)]

    def begin_step(self) -> None:
        self.settled = dict(self.blocks)
        before = {seq: self.manager.held(seq) for seq in self.live}
        came_back = self.manager.begin_step()
        assert came_back == (before != {seq: self.manager.held(seq) for seq in self.live})
        for seq in self.chunked.intersection(self.live):
            self.check_windows(seq)
        self.chunked.clear()
        self.touched.clear()
        self.planned.clear()
        self.read_slots.clear()
        self.written_slots.clear()

    def plan_step(self) -> None:
        """Begin to plan a prefill step, if none is being planned."""
        if not self.is_planning:
            self.begin_step()
            self.is_planning = True

    def check_windows(self, seq: Sequence) -> None:
        """Check that a sequence has given back all that no later query sees, and nothing else."""
        for group, released in zip(self.layout.groups, seq.num_released, strict=True):
            seen_from = 0 if group.window is None else max(0, seq.num_scheduled - group.window + 1)
            assert released == seen_from // group.block_size

    def columns(self, seq: Sequence) -> Iterator[tuple[int, int, int]]:
        """Yield the group's number, the column and the block of all that a sequence holds."""
        for group, (table, released) in enumerate(zip(seq.block_tables, seq.num_released, strict=True)):
            for column in range(released, len(table)):
                yield group, column, table[column]

    def next_number(self, seq: Sequence) -> int:
        """Return the number of a sequence's next write."""
        self.numbers_of.setdefault(seq.adapter, []).append(next(self.numbers))
        return self.numbers_of[seq.adapter][-1]

    def write(self, seq: Sequence, start: int, end: int) -> set[int]:
        """Compute tokens of a sequence; returns the blocks that got them."""
        self.writes[seq] |= {self.next_number(seq)}
        written = set()
        for group, column, block_id in self.columns(seq):
            first = column * self.layout.groups[group].block_size
            last = min(end, first + self.layout.groups[group].block_size)
            if last > max(first, start):
                written.add(block_id)
                self.blocks[block_id] = Written(group, kind_of(seq), tuple(seq.token_ids[:last]), self.writes[seq])
        return written

    def chunk(self, seq: Sequence, most_tokens: int) -> int:
        """Plan the next chunk of a prompt; returns its tokens."""
        start, most_tokens = seq.num_scheduled, max(most_tokens, self.layout.grid)
        held = {block_id for _, _, block_id in self.columns(seq)}
        end = min(len(seq), start + most_tokens)
        end = self.manager.extend(seq, end)
        assert start <= end <= start + most_tokens
        assert not {block_id for _, _, block_id in self.columns(seq)} - held & self.touched
        assert all(
            len(table) >= -(-end // group.block_size)
            for group, table in zip(self.layout.groups, seq.block_tables, strict=True)
        )
        if end > start:
            self.chunked.add(seq)
            seq.num_scheduled = end
            self.planned |= self.write(seq, start, end)
            self.touched.update(block_id for _, _, block_id in self.columns(seq))
            planned = self.manager.plan(seq, start, end)
            assert (planned is None) == (self.states is None)
            if planned is not None:
                self.compute_states(seq, start, end, planned)
        return end - start

    def compute_states(self, seq: Sequence, start: int, end: int, planned: ChunkStates) -> None:
        """Go on from the states before a chunk, which no other one of the step writes; keep those behind it."""
        assert planned.slot == seq.slot
        assert planned.source not in self.written_slots
        assert (planned.source == NONE) == (start == 0)
        if start:
            self.check_states(seq, planned.source, start)
            self.read_slots.add(planned.source)
        writes = {end: seq.slot}
        kept = {position: slot for position, slot in planned.snapshots.items() if position != end}
        for position, slot in [*kept.items(), *writes.items(), (end, planned.snapshots.get(end, seq.slot))]:
            assert start < position <= end
            assert slot == seq.slot or slot not in self.read_slots | self.written_slots
            self.slots[slot] = Written(NONE, kind_of(seq), tuple(seq.token_ids[:position]), self.writes[seq])
            self.written_slots.add(slot)

    def check_states(self, seq: Sequence, slot: int, num_tokens: int) -> None:
        written = self.slots[slot]
        assert (written.kind, written.prefix) == (kind_of(seq), tuple(seq.token_ids[:num_tokens]))

    def make(self, prompt: list[int], adapter: int) -> Sequence:
        return Sequence(prompt, SamplingParams(max_tokens=1000), seed=0, max_model_len=1000, adapter=adapter)

    @rule(prompt=prompts, adapter=adapters)
    def expect(self, prompt: list[int], adapter: int) -> None:
        """Queue a sequence."""
        if len(self.waiting) < MOST_LIVE:
            self.waiting.append(self.make(prompt, adapter))
            self.manager.expect(self.waiting[-1])

    @rule(
        prompt=prompts,
        most_tokens=st.integers(1, 50),
        is_long=seldom,
        comes_again=st.booleans(),
        num_forks=st.integers(0, 2),
        adapter=adapters,
    )
    def allocate(
        self,
        prompt: list[int],
        most_tokens: int,
        is_long: bool,
        comes_again: bool,
        num_forks: int,
        adapter: int = NONE,
    ) -> None:
        if len(self.live) == MOST_LIVE:
            return
        seq = self.make(prompt, adapter)
        seq.is_long = is_long
        if comes_again and self.waiting:
            seq = self.waiting.pop()
        self.plan_step()
        expected, free, nodes = self.longest_cached(seq), self.manager.num_free, set(self.tree)
        if self.manager.should_wait(seq):
            assert self.chunked, "a step that computes nothing is waited for"
            assert self.longest_cached(seq, with_fresh=True) > expected
        cached = self.manager.allocate(seq, most_tokens)
        if cached is None:
            assert (self.manager.num_free, seq.block_tables, seq.node, seq.slot) == (free, [], None, NONE)
            assert set(self.tree) == nodes
            assert self.live or self.num_blocks < self.layout.blocks_of(len(seq))
            return
        has_room = cached == expected  # else there is none for a copy, nor for what is copied
        assert has_room or cached == self.longest_cached(seq, of_nodes=self.layout.prefix_size) < expected
        assert cached < len(seq)
        self.live.append(seq)
        self.copy_tail(seq, cached)
        seq.num_scheduled = cached
        self.check_windows(seq)
        self.check_hit(seq, cached)
        for group, table in zip(self.layout.groups, seq.block_tables, strict=True):
            assert len(table) == -(-(len(seq) if group.window is None else cached) // group.block_size)
        assert self.chunk(seq, most_tokens) > 0
        for _ in range(num_forks):
            self.fork(seq)

    def copy_tail(self, seq: Sequence, cached: int) -> None:
        """Copy the blocks in which the sequence goes on amid a node, as the step does first of all."""
        copies = self.manager.take_copies()
        size = self.layout.prefix_size
        assert len(copies) == self.num_copied(cached % size)
        columns = {block_id: (group, column) for group, column, block_id in self.columns(seq)}
        for block_id, copy in copies:
            group, column = columns[copy]
            written, first = self.settled[block_id], column * self.layout.groups[group].block_size
            assert written is not None
            assert cached // size * size <= first < cached
            self.blocks[copy] = written

    def num_copied(self, in_node: int) -> int:
        """Return how many blocks a sequence copies that goes on behind so many tokens of a node."""
        return sum(-(-in_node // group.block_size) for group in self.layout.groups)

    def check_hit(self, seq: Sequence, cached: int) -> None:
        """Check that a sequence goes on from this very prefix, and that none of it is forgotten."""
        self.writes[seq] = frozenset()
        hits = []
        for group, column, block_id in self.columns(seq):
            end = (column + 1) * self.layout.groups[group].block_size
            if end <= cached:
                hits.append((group, end, self.blocks[block_id]))
            elif end - self.layout.groups[group].block_size < cached:
                hits.append((group, cached, self.blocks[block_id]))  # a copy, of which only the first tokens count
        if self.states is not None and cached:
            hits.append((NONE, cached, self.slots[self.states._sources[seq]]))
        for group, end, written in hits:
            assert written is not None
            assert (written.group, written.kind) == (group, kind_of(seq))
            assert written.prefix[:end] == tuple(seq.token_ids[:end])
            assert len(written.prefix) == end or cached % self.layout.prefix_size
            assert not self.forgotten & written.writes
            self.writes[seq] |= written.writes

    def longest_cached(self, seq: Sequence, with_fresh: bool = False, of_nodes: int | None = None) -> int:
        """Return how many tokens are cached of a sequence, by trying each prefix.

        with_fresh: snapshots count that the planned step takes; of_nodes: a multiple of so many tokens
        """
        size, step = self.layout.prefix_size, of_nodes or self.layout.snapshot_grid
        path = [self.tree.root(*kind_of(seq))]
        for start in range(0, seq.num_reusable // size * size, size):
            if (node := self.tree.find(path[-1], seq.token_ids[start : start + size].tobytes())) is None:
                break
            path.append(node)
        for end in range(seq.num_reusable // step * step, 0, -step):
            depth = end // size
            nodes = path[1 : depth + 1]
            if depth >= len(path) or (nodes and not self.has_blocks(nodes)):
                continue
            if end % size == 0:
                if self.states is None or self.has_snapshot(nodes[-1], with_fresh):
                    return end
                continue
            tail = self.tree.find(path[depth], seq.token_ids[depth * size : end].tobytes())
            if tail and self.is_whole(tail, seq.token_ids[:end].tolist(), with_fresh):
                return end
        return 0

    def is_whole(self, tail: Node, tokens: list[int], with_fresh: bool) -> bool:
        """Whether a tail has states and blocks."""
        return self.has_snapshot(tail, with_fresh) and self.is_there(tail, tokens, with_fresh)

    def is_there(self, tail: Node, tokens: list[int], with_fresh: bool) -> bool:
        """Whether a tail's blocks hold these tokens of a sequence. with_fresh: or the planned step fills them"""
        begin, place = (len(tokens) - 1) // self.layout.prefix_size * self.layout.prefix_size, 0
        for group in self.layout.groups:
            for column in range(-(-(len(tokens) - begin) // group.block_size)):
                block_id, last = tail.blocks[place + column], begin + (column + 1) * group.block_size
                if block_id == NONE:
                    return False
                written, held = self.settled.get(block_id), tuple(tokens[:last])
                if not with_fresh and (written is None or written.prefix[: len(held)] != held):
                    return False
            place += self.layout.prefix_size // group.block_size
        return True

    def has_blocks(self, nodes: list[Node]) -> bool:
        """Whether a path has all blocks that the next query sees."""
        end, place = len(nodes) * self.layout.prefix_size, 0
        for group in self.layout.groups:
            of_a_node = self.layout.prefix_size // group.block_size
            blocks = [block_id for node in nodes for block_id in node.blocks[place : place + of_a_node]]
            place += of_a_node
            positions = range(0 if group.window is None else max(0, end - group.window + 1), end)
            if any(blocks[position // group.block_size] == NONE for position in positions):
                return False
        return True

    def has_snapshot(self, node: Node, with_fresh: bool) -> bool:
        return node.snapshot != NONE and (with_fresh or node.snapshot not in self.written_slots)

    @precondition(lambda self: self.live)
    @rule(which=which_seq, most_tokens=st.integers(1, 50), num_forks=st.integers(0, 2))
    def prefill(self, which: int, most_tokens: int, num_forks: int) -> None:
        seq = self.choose(which)
        if seq.num_scheduled == len(seq) or (self.is_planning and seq in self.chunked):
            return
        self.plan_step()
        num_tokens = self.chunk(seq, most_tokens)
        if len(self.live) == 1 and self.num_blocks >= self.layout.blocks_of(len(seq)):
            assert num_tokens > 0
        for _ in range(num_forks):
            self.fork(seq)

    def fork(self, seq: Sequence) -> None:
        """Start a further sample of a prompt whose last chunk has just been planned."""
        if seq.num_scheduled < len(seq) or len(self.live) == MOST_LIVE:
            return
        needed = sum(len(seq) % group.block_size > 0 for group in self.layout.groups)
        if self.states is None:
            assert self.manager.can_fork(seq) == (self.manager.num_free >= needed)
        if not self.manager.can_fork(seq):
            return
        other = Sequence(seq.token_ids.tolist(), seq.params, seed=0, max_model_len=1000)
        other.is_long, other.adapter = seq.is_long, seq.adapter
        copies = self.manager.fork(seq, other)
        assert len(copies) == needed
        assert not self.touched.intersection(copy for _, copy in copies)
        for block_id, copy in copies:
            self.blocks[copy] = self.blocks[block_id]
        self.planned.update(copy for _, copy in copies)
        self.touched.update(copy for _, copy in copies)
        other.num_scheduled = len(seq)
        self.writes[other] = self.writes[seq]
        if self.states is not None:
            assert other.slot not in self.read_slots | self.written_slots
            self.slots[other.slot] = self.slots[seq.slot]
            self.written_slots.add(other.slot)
        self.chunked.add(other)
        self.live.append(other)

    @precondition(lambda self: self.live)
    @rule(which=which_seq, token=st.integers(0, 1), num_tokens=st.integers(1, 9), records=st.booleans())
    def decode(self, which: int, token: int, num_tokens: int, records: bool) -> None:
        """Append tokens, each in a step of its own. What windows leave behind goes back where a block ends."""
        seq = self.choose(which)
        for _ in range(num_tokens):
            if seq.num_scheduled < len(seq) or len(seq) == MOST_TOKENS:
                return
            self.is_planning = False
            self.begin_step()
            if self.manager.num_needed(seq) > self.manager.num_free:
                return
            grown = self.manager.append(seq)
            assert grown == [
                (index, len(seq) // group.block_size)
                for index, group in enumerate(self.layout.groups)
                if len(seq) % group.block_size == 0
            ]
            seq.token_ids.append(token)
            seq.num_scheduled = len(seq)
            self.write(seq, len(seq) - 1, len(seq))
            if self.states is not None:
                self.check_states(seq, seq.slot, len(seq) - 1)
                self.slots[seq.slot] = Written(NONE, kind_of(seq), tuple(seq.token_ids), self.writes[seq])
            if records and self.manager.next_end(len(seq) - 1) == len(seq):
                self.manager.record(seq, len(seq))
                self.manager.release(seq, len(seq))
                self.check_windows(seq)

    # What comes between two steps

    @precondition(lambda self: self.live)
    @rule(which=which_seq, before=st.integers(0, 10))
    def record(self, which: int, before: int) -> None:
        seq = self.choose(which)
        self.is_planning = False
        self.manager.record(seq, max(0, seq.num_scheduled - before))

    @precondition(lambda self: self.live)
    @rule(which=which_seq, before=st.integers(0, 10))
    def release(self, which: int, before: int) -> None:
        seq = self.choose(which)
        self.is_planning = False
        free = self.manager.num_free
        if not self.manager.release(seq, max(0, seq.num_scheduled - before)):
            assert self.manager.num_free == free

    @precondition(lambda self: self.live)
    @rule(which=which_seq, comes_again=st.booleans())
    def free(self, which: int, comes_again: bool) -> None:
        seq = self.choose(which)
        self.is_planning = False
        self.live.remove(seq)
        self.manager.free(seq)
        assert (seq.block_tables, seq.num_released, seq.node, seq.num_nodes, seq.slot) == ([], [], None, 0, NONE)
        if comes_again and len(self.waiting) < MOST_LIVE:
            seq.num_scheduled = 0
            self.waiting.append(seq)

    @precondition(lambda self: self.live)
    @rule(which=which_seq, does=seldom)
    def forget(self, which: int, does: bool) -> None:
        if not does:
            return
        seq = self.choose(which)
        self.is_planning = False
        for _, _, block_id in self.columns(seq):
            if self.manager.blocks[block_id].is_known:
                self.forgotten.add(max(self.blocks[block_id].writes))
        self.writes[seq] |= {self.next_number(seq)}
        self.forgotten.add(max(self.writes[seq]))  # what it computes from now on
        self.manager.prefixes.forget(seq)

    @rule(does=seldom)
    def forget_all(self, does: bool) -> None:
        if not does:
            return
        self.is_planning = False
        self.manager.prefixes.forget_all(self.live)
        assert len(self.tree) == 0
        self.forgotten.update(range(next(self.numbers)))

    @rule(adapter=adapters)
    def forget_adapter(self, adapter: int) -> None:
        """Another one comes into its slot."""
        if adapter == NONE:
            return
        self.is_planning = False
        others = {node for node in self.tree if self.root_of(node) not in self.roots_of(adapter)}
        self.manager.forget_adapter(adapter, [seq for seq in self.live if seq.adapter == adapter])
        assert others <= set(self.tree)
        assert not self.roots_of(adapter)
        self.forgotten.update(self.numbers_of.get(adapter, []))

    def roots_of(self, adapter: int) -> list[Node]:
        return [node for kind, node in self.tree.roots.items() if kind[0] == adapter]

    def root_of(self, node: Node) -> Node:
        while node.parent is not None:
            node = node.parent
        return node

    @rule(does=seldom)
    def fail(self, does: bool) -> None:
        """The newest prefill step has not been launched, or not to its end."""
        if not does:
            return
        self.is_planning = False
        self.manager.free_all()
        for block_id in self.planned:
            self.blocks[block_id] = None
        self.live.clear()
        self.waiting.clear()
        self.chunked.clear()
        assert self.manager.num_free == self.num_blocks

    # What always holds

    @invariant()
    def no_block_is_both_free_and_used_and_counts_equal_the_tables(self) -> None:
        used = Counter(block_id for seq in self.live for _, _, block_id in self.columns(seq))
        used.update(self.manager._copied)  # until the step has run that copies them
        for block_id, block in enumerate(self.manager.blocks):
            assert block.ref_count == used[block_id]
            assert (block_id in self.manager.free_blocks) == (block.ref_count == 0)
        assert self.manager.num_free == self.num_blocks - len(used)

    @invariant()
    def no_block_is_at_two_places(self) -> None:
        places = {(block_id, group, column) for seq in self.live for group, column, block_id in self.columns(seq)}
        assert len(places) == len({block_id for block_id, _, _ in places})

    @invariant()
    def what_a_sequence_holds_is_what_it_has_computed(self) -> None:
        for seq in self.live:
            for group, column, block_id in self.columns(seq):
                size = self.layout.groups[group].block_size
                end = min((column + 1) * size, seq.num_scheduled)
                if end > column * size:
                    written = self.blocks[block_id]
                    assert (written.group, written.kind, written.prefix) == (
                        group,
                        kind_of(seq),
                        tuple(seq.token_ids[:end]),
                    )

    @invariant()
    def nodes_and_blocks_know_each_other(self) -> None:
        nodes = set(self.tree)
        for block_id, block in enumerate(self.manager.blocks):
            if block.node is not None:
                assert block.node in nodes
                assert block.node.blocks[block.place] == block_id
            assert all(tail in nodes and tail.is_tail and block_id in tail.blocks for tail in block.tails)
        for node in nodes:
            for place, block_id in enumerate(node.blocks):
                if block_id != NONE:
                    block = self.manager.blocks[block_id]
                    assert (block.node, block.place) == (node, place) or node in block.tails

    @invariant()
    def a_nodes_blocks_hold_its_tokens(self) -> None:
        for node in self.tree:
            prefix, end = self.prefix_of(node), 0
            place = 0
            for number, group in enumerate(self.layout.groups):
                for column in range(self.layout.prefix_size // group.block_size):
                    if node.blocks[place] != NONE:
                        written = self.blocks[node.blocks[place]]
                        begin = (len(prefix) - 1) // self.layout.prefix_size * self.layout.prefix_size
                        end = min(begin + (column + 1) * group.block_size, len(prefix))
                        assert (written.group, written.prefix[:end]) == (number, prefix[:end])
                        assert node.is_tail or len(written.prefix) == end
                    place += 1

    def prefix_of(self, node: Node) -> tuple[int, ...]:
        content: list[bytes] = []
        while node.parent is not None:
            content.insert(0, node.content[8:])
            node = node.parent
        return tuple(memoryview(b"".join(content)).cast("i"))

    @invariant()
    def a_lookup_finds_each_node(self) -> None:
        for node in self.tree:
            assert node.is_found
            assert node.digest == self.tree._hash(node.content)
            assert self.tree.find(node.parent, node.content[8:]) is node
        for digest, node in self.tree.by_hash.items():
            assert node.digest == digest
        for content, node in self.tree.collided.items():
            assert node.content == content
            assert self.tree.by_hash.get(node.digest) is not node

    @invariant()
    def no_node_is_empty_and_parents_count_their_children(self) -> None:
        children = Counter(node.parent for node in self.tree)
        for node in [*self.tree, *self.tree.roots.values()]:
            assert node.num_children == children[node]
        for node in self.tree:
            assert children[node] or node.snapshot != NONE or any(block_id != NONE for block_id in node.blocks)
        most_ends = self.num_blocks + self.num_slots
        assert len(self.tree) <= most_ends * (MOST_TOKENS // self.layout.prefix_size) + self.num_slots

    @invariant()
    def a_serial_stands_for_one_prefix(self) -> None:
        for node in self.tree:
            prefix = self.root_of(node).serial, node.content
            assert self.serials.setdefault(node.serial, prefix) == prefix

    @invariant()
    def each_slot_is_a_sequences_or_a_snapshots_or_free(self) -> None:
        if self.states is None:
            assert all(seq.slot == NONE for seq in self.live)
            return
        snapshots = [node.snapshot for node in self.states._snapshots]
        slots = [*self.states._free, *self.states._late, *snapshots, *(seq.slot for seq in self.live)]
        assert sorted(slots) == list(range(self.num_slots))
        assert {node for node in self.tree if node.snapshot != NONE} == set(self.states._snapshots)
        for node in self.states._snapshots:
            assert self.slots[node.snapshot].prefix == self.prefix_of(node)


MACHINES = {
    "full": {"layout": FULL},
    "window": {"layout": WINDOW},
    "mixed": {"layout": MIXED, "num_blocks": 24},
    "window of one": {"layout": WINDOW_OF_ONE, "num_blocks": 24},
    "three": {"layout": THREE, "num_blocks": 30},
    "only windows": {"layout": ONLY_WINDOWS, "num_blocks": 16},
    "few states": {"layout": FULL, "num_slots": 4},
    "states": {"layout": FULL, "num_blocks": 40, "num_slots": 24},
    "mixed, states": {"layout": MIXED, "num_blocks": 24, "num_slots": 16},
    "states amid blocks": {"layout": AMID_BLOCKS, "num_blocks": 48, "num_slots": 24},
    "few states amid blocks": {"layout": AMID_BLOCKS, "num_blocks": 30, "num_slots": 6},
    "colliding": {"layout": FULL, "kind": CollidingBlockManager},
    "mixed, colliding": {"layout": MIXED, "num_blocks": 24, "num_slots": 16, "kind": CollidingBlockManager},
}


def operate(operations: type[RandomOperations], examples: int, **options: object) -> None:
    """Try so many sequences of operations with other options."""
    kind = type("Operations", (operations,), options)
    run_state_machine_as_test(kind, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None))


@pytest.mark.parametrize("examples", [33, *whole_only([67])])
@pytest.mark.parametrize("name", MACHINES)
def test_random_operations(name: str, examples: int) -> None:
    operate(RandomOperations, examples, **MACHINES[name])
