"""BlockManager: sharing, reuse and giving back, by example. test_random_blocks.py has random operations."""

from __future__ import annotations

from collections import deque

import pytest
from conftest import alike, layout_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import SamplingParams
from nanoinfer.attention.cache_layout import CacheLayout, Pages, State, lay_out
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.free_blocks import FreeBlocks
from nanoinfer.engine.prefixes.prefix_tree import NONE
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.step import Step
from nanoinfer.runner.message import ChunkStates

BLOCK = 4
MIXED = layout_of((8, None), (2, 5))  # blocks of 8 tokens of layers that see all, and of 2 where a query sees 5


def sequence(tokens: list[int], max_tokens: int = 1000) -> Sequence:
    return Sequence(tokens, SamplingParams(max_tokens=max_tokens), seed=0, max_model_len=1000)


def numbered(length: int) -> Sequence:
    return sequence(list(range(length)))


def begin(manager: BlockManager, seq: Sequence) -> int | None:
    """Allocate, and get the blocks of the whole sequence; returns how many tokens were cached."""
    cached = manager.allocate(seq, len(seq))
    if cached is not None:
        assert manager.extend(seq, len(seq)) == len(seq)
    return cached


def fill(manager: BlockManager, seq: Sequence) -> None:
    """Allocate and compute the whole sequence."""
    assert begin(manager, seq) is not None
    manager.record(seq, len(seq))
    seq.num_scheduled = len(seq)


class TestOneGroup:
    """Layers that see all tokens."""

    def test_a_full_block_is_shared_between_equal_prefixes(self) -> None:
        manager = BlockManager(8, alike(BLOCK))
        first, second = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 9])
        fill(manager, first)
        assert begin(manager, second) == 4
        ((shared, own),), ((other, other_own),) = second.block_tables, first.block_tables
        assert shared == other
        assert own != other_own
        assert manager.num_free == 5
        assert manager.share_used == 3 / 8

    def test_a_block_that_has_not_been_computed_is_not_shared(self) -> None:
        manager = BlockManager(8, alike(BLOCK))
        assert begin(manager, sequence([1, 2, 3, 4, 5])) == 0
        assert begin(manager, sequence([1, 2, 3, 4, 5])) == 0

    def test_equal_tokens_after_different_prefixes_are_not_shared(self) -> None:
        manager = BlockManager(8, alike(BLOCK))
        fill(manager, sequence([1, 1, 1, 1, 5, 6, 7, 8]))
        assert begin(manager, sequence([2, 2, 2, 2, 5, 6, 7, 8, 9])) == 0

    def test_the_last_token_is_always_computed(self) -> None:
        manager = BlockManager(8, alike(BLOCK))
        fill(manager, sequence([1, 2, 3, 4, 5, 6, 7, 8]))
        assert begin(manager, sequence([1, 2, 3, 4, 5, 6, 7, 8])) == 4
        assert begin(manager, sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8

    def test_a_freed_block_keeps_its_content_until_it_is_handed_out_least_recently_freed_first(self) -> None:
        manager = BlockManager(4, alike(BLOCK))
        old, new = sequence([1, 2, 3, 4, 5]), sequence([6, 7, 8, 9, 10])
        for seq in (old, new):
            fill(manager, seq)
        manager.free(old)
        manager.free(new)
        assert manager.num_free == 4
        other = sequence(list(range(20, 29)))  # takes the two blocks that are not full, then `old`'s full one
        assert begin(manager, other) == 0
        assert len(manager.tree) == 1
        manager.free(other)
        assert begin(manager, sequence([1, 2, 3, 4, 11])) == 0
        assert begin(manager, sequence([6, 7, 8, 9, 11])) == 4

    def test_a_prefix_outlives_what_follows_it(self) -> None:
        manager = BlockManager(3, alike(BLOCK))
        seq = numbered(12)
        fill(manager, seq)
        manager.free(seq)
        assert begin(manager, sequence([50])) == 0  # takes the last block of the three
        assert begin(manager, numbered(12)) is None  # needs three blocks, of which two are cached and one is taken
        assert begin(manager, numbered(8)) == 4

    def test_blocks_without_content_are_handed_out_before_those_with(self) -> None:
        manager = BlockManager(4, alike(BLOCK))
        prefix = sequence([1, 2, 3, 4, 5])
        fill(manager, prefix)
        manager.free(prefix)
        for token in range(10, 20):
            short = sequence([token])
            fill(manager, short)
            manager.free(short)
        assert begin(manager, sequence([1, 2, 3, 4, 6])) == 4

    def test_too_few_free_blocks_change_nothing(self) -> None:
        manager = BlockManager(2, alike(BLOCK))
        seq = numbered(9)
        assert begin(manager, seq) is None
        assert (seq.block_tables, seq.num_released, seq.node) == ([], [], None)
        assert manager.num_free == 2

    def test_all_blocks_come_at_once_however_short_the_first_chunk(self) -> None:
        manager = BlockManager(3, alike(BLOCK))
        seq = numbered(9)
        assert manager.allocate(seq, 1) == 0
        assert len(seq.block_tables[0]) == 3
        assert manager.extend(seq, 1) == 1
        assert manager.num_free == 0

    def test_what_follows_either_of_two_copies_is_found(self) -> None:
        manager = BlockManager(9, alike(BLOCK))
        one, other = sequence([1, 1, 1, 1, 2]), sequence([1, 1, 1, 1, 3, 3, 3, 3, 4])
        for seq in (one, other):
            assert begin(manager, seq) == 0
        for seq in (one, other):
            manager.record(seq, len(seq))
        again = sequence([1, 1, 1, 1, 3, 3, 3, 3, 5])
        assert begin(manager, again) == 8
        assert again.block_tables[0][:2] == [one.block_tables[0][0], other.block_tables[0][1]]

    def test_what_followed_a_block_that_was_handed_out_is_found_once_it_is_computed_again(self) -> None:
        manager = BlockManager(6, alike(BLOCK))
        one, other, big, again = numbered(5), numbered(9), sequence([50] * 12), numbered(9)
        for seq in (one, other):
            assert begin(manager, seq) == 0
        for seq in (one, other):
            manager.record(seq, len(seq))
        manager.free(one)
        fill(manager, big)  # takes the one that was never used, and both of `one`
        manager.free(big)
        assert begin(manager, again) == 0
        manager.record(again, 9)
        cached = manager.prefixes.find(numbered(9))
        assert cached.tables == [[again.block_tables[0][0], other.block_tables[0][1]]]

    def test_long_and_short_sequences_share_nothing(self) -> None:
        manager = BlockManager(8, alike(BLOCK))
        short, long, again = (numbered(9) for _ in range(3))
        fill(manager, short)
        long.is_long = again.is_long = True
        assert begin(manager, long) == 0
        manager.record(long, 9)
        assert begin(manager, again) == 8
        assert again.block_tables[0][:2] == long.block_tables[0][:2]

    @pytest.mark.parametrize("num_before", [3, 4])
    def test_what_a_sequence_fills_after_all_was_forgotten_is_not_shared(self, num_before: int) -> None:
        """Its keys and values depend on those before."""
        manager = BlockManager(8, alike(BLOCK))
        seq, other = numbered(8), numbered(9)
        begin(manager, seq)
        manager.record(seq, num_before)
        manager.prefixes.forget_all([seq])
        manager.record(seq, 8)
        manager.free(seq)
        assert begin(manager, other) == 0
        manager.record(other, 9)
        assert begin(manager, numbered(9)) == 8

    def test_what_one_sequence_holds_is_forgotten(self) -> None:
        """Also what others hold."""
        manager = BlockManager(8, alike(BLOCK))
        seq, sharer, other = numbered(9), numbered(5), numbered(9)
        fill(manager, seq)
        assert begin(manager, sharer) == 4
        manager.prefixes.forget(seq)
        manager.free(seq)
        assert begin(manager, other) == 0
        manager.record(other, 9)
        assert other.block_tables[0][0] != sharer.block_tables[0][0]
        assert begin(manager, numbered(9)) == 8

    def test_what_others_have_computed_behind_it_is_forgotten_too(self) -> None:
        """It is not found either when the prefix has been computed again."""
        manager = BlockManager(20, alike(BLOCK))
        seq, follower = numbered(5), numbered(9)
        fill(manager, seq)
        fill(manager, follower)
        manager.prefixes.forget(seq)
        fill(manager, numbered(5))
        assert begin(manager, numbered(9)) == 4
        follower.token_ids.extend([9, 10, 11])
        manager.append(follower)
        manager.record(follower, 12)  # what it fills now is not found either
        assert begin(manager, numbered(13)) == 4

    def test_what_a_sequence_fills_after_it_was_forgotten_is_not_shared(self) -> None:
        manager = BlockManager(8, alike(BLOCK))
        seq = numbered(8)
        begin(manager, seq)
        manager.record(seq, 3)  # fills no block
        manager.prefixes.forget(seq)
        manager.record(seq, 8)
        assert manager.prefixes.find(numbered(9)).num_tokens == 0

    def test_after_a_failed_step_all_blocks_are_free_and_what_it_was_to_fill_is_not_found(self) -> None:
        manager = BlockManager(8, alike(BLOCK))
        done, planned = numbered(5), numbered(13)
        fill(manager, done)
        manager.begin_step()
        begin(manager, planned)
        manager.plan(planned, 0, 13)
        assert manager.prefixes.find(numbered(13)).num_tokens == 12
        manager.free_all()
        assert manager.num_free == 8
        assert begin(manager, numbered(13)) == 4

    def test_a_sequence_of_the_same_step_shares_what_is_planned(self) -> None:
        manager = BlockManager(8, alike(BLOCK))
        first = numbered(9)
        manager.begin_step()
        begin(manager, first)
        manager.plan(first, 0, 9)
        assert begin(manager, numbered(9)) == 8
        manager.begin_step()
        manager.free_all()
        assert begin(manager, numbered(9)) == 8  # its step had been launched

    def test_a_fork_shares_full_blocks_and_copies_the_last(self) -> None:
        manager = BlockManager(4, alike(BLOCK))
        source, other, further = numbered(10), numbered(10), numbered(10)
        fill(manager, source)
        assert manager.num_own(source) == [3]
        assert manager.num_copied(source) == [1]
        assert manager.can_fork(source)
        assert manager.fork(source, other) == [(source.block_tables[0][2], other.block_tables[0][2])]
        assert other.block_tables[0][:2] == source.block_tables[0][:2]
        assert manager.num_own(source) == manager.num_own(other) == [1]
        assert manager.num_shared(further) == [2]
        assert not manager.can_fork(source)  # no block is free

    def test_a_fork_of_full_blocks_copies_none(self) -> None:
        manager = BlockManager(2, alike(BLOCK))
        source, other = numbered(8), numbered(8)
        fill(manager, source)
        assert manager.can_fork(source)
        assert manager.fork(source, other) == []
        assert other.block_tables == source.block_tables

    def test_a_sequence_grows_block_by_block(self) -> None:
        manager = BlockManager(4, alike(BLOCK))
        seq = numbered(4)
        fill(manager, seq)
        assert manager.num_needed(seq) == 1
        assert manager.append(seq) == [(0, 1)]
        assert manager.num_needed(seq) == 0
        assert manager.append(seq) == []
        assert [manager.next_end(position) for position in (3, 4, 7, 8)] == [4, 8, 8, 12]

    def test_several_tokens_may_need_several_blocks(self) -> None:
        manager = BlockManager(5, alike(BLOCK))
        seq = numbered(6)
        fill(manager, seq)
        assert [manager.num_needed(seq, count) for count in (2, 3, 6, 7)] == [0, 1, 1, 2]
        assert manager.append(seq, 7) == [(0, 2), (0, 3)]
        assert [manager.num_needed(seq, count) for count in (7, 11)] == [0, 1]


class TestWindow:
    """Layers that see only the newest tokens."""

    def test_what_followed_a_block_that_was_handed_out_is_found_by_those_who_do_not_see_that(self) -> None:
        manager = BlockManager(6, alike(BLOCK, window=2))
        seq, other, again = numbered(9), sequence([50] * 13), numbered(5)
        fill(manager, seq)
        manager.release(seq, 5)
        fill(manager, other)  # takes the three that were never used, and the one that was released
        for done in (other, seq):
            manager.free(done)
        assert manager.prefixes.find(numbered(9)).num_tokens == 8  # a query at 8 sees from 7 on
        assert begin(manager, again) == 0
        manager.record(again, 5)
        assert manager.prefixes.find(numbered(5)).num_tokens == 4

    def test_what_it_has_left_behind_is_free_and_still_cached(self) -> None:
        manager = BlockManager(4, alike(BLOCK, window=2))
        seq, short = numbered(13), numbered(5)
        fill(manager, seq)
        assert not manager.release(seq, 4)  # that query sees position 3
        assert manager.release(seq, 5)
        assert (seq.num_released, manager.num_free) == ([1], 1)
        assert not manager.release(seq, 5)
        assert manager.num_free == 1
        assert begin(manager, short) is None  # the first block is cached, but none is free for the fifth token
        assert manager.release(seq, 9)
        assert begin(manager, short) == 4
        assert short.block_tables[0] == seq.block_tables[0][:2]  # a cached block, and one that was handed out again
        manager.free(seq)
        assert (seq.num_released, manager.num_free) == ([], 2)

    def test_a_hit_takes_only_what_later_queries_see(self) -> None:
        manager = BlockManager(8, alike(BLOCK, window=6))
        seq, again = numbered(17), numbered(17)
        fill(manager, seq)
        manager.free(seq)
        cached = manager.prefixes.find(again)
        assert (cached.num_tokens, cached.starts) == (16, [2])
        assert begin(manager, again) == 16
        assert manager.held(again) == [again.block_tables[0][2:]]
        assert manager.num_free == 8 - 3

    def test_a_fork_does_not_get_what_its_source_has_released(self) -> None:
        manager = BlockManager(5, alike(BLOCK, window=9))
        source, other = numbered(14), numbered(14)
        fill(manager, source)
        manager.release(source, 12)
        assert manager.fork(source, other) == [(3, 4)]
        assert other.num_released == [1]
        newcomer = sequence([50])
        assert begin(manager, newcomer) == 0
        manager.record(other, 14)  # the newcomer's block is no node's
        assert manager.blocks[newcomer.block_tables[0][0]].node is None
        for seq in (source, other, newcomer):
            manager.free(seq)
        assert manager.num_free == 5

    def test_a_prompt_gets_the_blocks_of_one_chunk_after_another_and_gives_back_between(self) -> None:
        manager = BlockManager(4, alike(BLOCK, window=4))
        seq = numbered(40)
        assert manager.allocate(seq, 8) == 0
        assert seq.block_tables == [[]]
        for start in range(0, 40, 8):
            assert manager.extend(seq, start + 8) == start + 8
            seq.num_scheduled = start + 8
            manager.plan(seq, 0, start + 8)
            assert manager.begin_step()
            assert len(manager.held(seq)[0]) == 1

    def test_nothing_goes_back_before_the_next_step_is_planned(self) -> None:
        """A chunk of the same step could write there, while each layer reads it."""
        manager = BlockManager(4, alike(BLOCK, window=4))
        seq = numbered(16)
        begin(manager, seq)
        seq.num_scheduled = 16
        manager.plan(seq, 0, 16)
        assert manager.num_free == 0
        assert manager.begin_step()
        assert manager.num_free == 3
        assert not manager.begin_step()

    def test_a_chunk_is_as_long_as_the_free_blocks(self) -> None:
        manager = BlockManager(4, alike(BLOCK, window=4))
        other, seq = sequence([50]), numbered(40)
        fill(manager, other)
        assert manager.allocate(seq, 40) == 0  # three blocks are all that a sequence needs
        assert manager.extend(seq, 40) == 12
        assert manager.num_free == 0

    def test_who_is_freed_before_the_next_step_is_planned_gives_all_back_once(self) -> None:
        manager = BlockManager(4, alike(BLOCK, window=4))
        seq = numbered(16)
        begin(manager, seq)
        seq.num_scheduled = 16
        manager.plan(seq, 0, 16)
        manager.free(seq)
        assert not manager.begin_step()
        assert manager.num_free == 4


class TestSeveralGroups:
    """Groups whose blocks hold different numbers of tokens."""

    def test_each_group_has_a_table(self) -> None:
        manager = BlockManager(20, MIXED)
        seq = numbered(19)
        fill(manager, seq)
        assert [len(table) for table in seq.block_tables] == [3, 10]
        assert manager.num_free == 20 - 13
        assert [manager.next_end(position) for position in (0, 1, 2, 7)] == [2, 2, 4, 8]

    def test_a_prefix_is_shared_in_multiples_of_what_all_groups_fill(self) -> None:
        manager = BlockManager(40, MIXED)
        seq, again = numbered(15), numbered(17)
        fill(manager, seq)
        assert begin(manager, again) == 8
        assert again.num_released == [0, 2]  # a query at 8 sees from 4 on
        assert again.block_tables[0][0] == seq.block_tables[0][0]
        assert again.block_tables[1][2:4] == seq.block_tables[1][2:4]

    def test_a_hit_needs_all_of_the_group_that_sees_all_and_the_end_of_the_others(self) -> None:
        manager = BlockManager(20, MIXED)
        seq = numbered(25)
        fill(manager, seq)
        manager.release(seq, 25)  # leaves the windows of 24 and before
        assert seq.num_released == [0, 10]
        other = sequence([50] * 9)
        fill(manager, other)  # takes some blocks that the window has left, the last one first
        assert sum(block == NONE for node in manager.tree for block in node.blocks) == 4
        cached = manager.prefixes.find(numbered(25))
        assert (cached.num_tokens, cached.starts) == (24, [0, 10])

    def test_a_prefix_whose_window_is_lost_gets_it_back_from_who_computes_it_again(self) -> None:
        manager = BlockManager(16, MIXED)
        seq, again = numbered(17), numbered(17)
        fill(manager, seq)
        manager.release(seq, 17)
        manager.free(seq)
        (last, *_) = [node for node in manager.tree if node.parent is not manager.tree.root()]
        manager.tree.detach(last.blocks[-1])
        assert begin(manager, again) == 8  # the window of 16 is incomplete
        manager.record(again, 17)
        assert manager.prefixes.find(numbered(17)).num_tokens == 16

    def test_all_blocks_of_the_group_that_sees_all_come_at_once_and_the_others_with_each_chunk(self) -> None:
        manager = BlockManager(20, MIXED)
        seq = numbered(40)
        assert manager.allocate(seq, 4) == 0
        assert [len(table) for table in seq.block_tables] == [5, 0]
        assert manager.extend(seq, 4) == 4
        assert [len(table) for table in seq.block_tables] == [5, 2]

    def test_a_fork_copies_the_last_block_of_each_group_that_is_not_full(self) -> None:
        manager = BlockManager(20, MIXED)
        odd, even = numbered(11), sequence([50] * 4)
        fill(manager, odd)
        fill(manager, even)
        assert (manager.num_copied(odd), manager.num_copied(even)) == ([1, 1], [1, 0])
        other = numbered(11)
        copies = manager.fork(odd, other)
        assert copies == [
            (odd.block_tables[0][1], other.block_tables[0][1]),
            (odd.block_tables[1][5], other.block_tables[1][5]),
        ]
        assert other.block_tables[1][:5] == odd.block_tables[1][:5]

    def test_a_token_may_need_a_block_of_some_groups(self) -> None:
        manager = BlockManager(40, MIXED)
        seqs = [numbered(7), sequence([50] * 10), sequence([60] * 16)]
        for seq in seqs:
            fill(manager, seq)
        assert sum(map(manager.num_needed, seqs)) == 0 + 1 + 2
        assert [[group for group, _ in manager.append(seq)] for seq in seqs] == [[], [1], [0, 1]]

    def test_no_window_takes_the_blocks_that_another_needs_to_go_on(self) -> None:
        layout = layout_of((8, None), (2, 3), (2, 5))
        manager = BlockManager(layout.blocks_of(40), layout)
        seq = numbered(40)
        assert manager.allocate(seq, 40) == 0
        end = 0
        while end < 40:
            start, end = end, manager.extend(seq, 40)
            assert end > start
            seq.num_scheduled = end
            manager.plan(seq, 0, end)
            manager.begin_step()

    @given(
        layout=st.sampled_from(
            [
                alike(BLOCK),
                alike(BLOCK, window=1),
                alike(BLOCK, window=6),
                MIXED,
                layout_of((8, None), (2, 3), (4, 12)),
                layout_of((4, 7), (2, 4)),
            ]
        ),
        length=st.integers(1, 60),
        max_tokens=st.integers(1, 30),
        budget=st.integers(1, 70),
    )
    @settings(max_examples=100, deadline=None)
    def test_a_sequence_that_is_alone_ends_with_as_many_blocks_as_its_layout_says(
        self, layout: CacheLayout, length: int, max_tokens: int, budget: int
    ) -> None:
        seq = sequence(list(range(length)), max_tokens)
        manager = BlockManager(layout.blocks_of(seq.max_len), layout)
        scheduler = Scheduler(manager, max_num_seqs=2, max_num_batched_tokens=budget)
        scheduler.add(seq)
        in_flight: deque[Step] = deque()
        while not seq.is_finished:
            step = scheduler.schedule(in_flight=bool(in_flight))
            assert step or in_flight
            if step:
                in_flight.append(step)
            if not step or len(in_flight) > 1:  # the host is one step ahead
                oldest = in_flight.popleft()
                has_token = not hasattr(oldest, "chunks") or oldest.chunks[-1].is_last
                scheduler.postprocess(oldest, [(seq, 7)] if has_token else [])
        assert scheduler.num_preemptions == 0
        assert manager.num_free == len(manager.blocks)


def compute(manager: BlockManager, seq: Sequence, end: int | None = None) -> ChunkStates:
    """Plan a chunk in a step of its own; returns where its states are. end: None: the sequence's"""
    manager.begin_step()
    if not seq.block_tables:
        seq.num_scheduled = manager.allocate(seq, len(seq))
    start, seq.num_scheduled = seq.num_scheduled, manager.extend(seq, end or len(seq))
    return manager.plan(seq, start, seq.num_scheduled)


def cached(manager: BlockManager, seq: Sequence) -> int:
    return manager.prefixes.find(seq).num_tokens


class TestStates:
    """Layers that remember the past in a fixed size."""

    def test_each_sequence_has_a_slot_and_waits_if_there_is_none(self) -> None:
        manager = BlockManager(20, alike(BLOCK), num_slots=2)
        first, second, third = (sequence([token] * 5) for token in range(3))
        compute(manager, first)
        compute(manager, second)  # takes the slot of the first one's snapshot
        assert {first.slot, second.slot} == {0, 1}
        free = manager.num_free
        manager.begin_step()
        assert manager.allocate(third, 5) is None
        assert (manager.num_free, third.slot, third.block_tables) == (free, NONE, [])
        manager.free(first)
        assert first.slot == NONE
        compute(manager, third)
        assert third.slot == 1 - second.slot

    def test_a_prompt_leaves_a_snapshot_behind_its_last_whole_block(self) -> None:
        """One of whole blocks leaves it before the last: the same prompt must compute its last token."""
        manager = BlockManager(20, alike(BLOCK), num_slots=8)
        seq = numbered(8)
        states = compute(manager, seq)
        assert (states.source, states.slot) == (NONE, seq.slot)
        assert list(states.snapshots) == [4]
        assert seq.slot not in states.snapshots.values()
        manager.begin_step()
        assert [cached(manager, numbered(length)) for length in (4, 5, 8, 9)] == [0, 4, 4, 4]
        assert list(compute(manager, numbered(11)).snapshots) == [8]

    def test_who_goes_on_reads_the_snapshot_and_then_its_own_slot(self) -> None:
        manager = BlockManager(20, alike(BLOCK), num_slots=8)
        (slot,) = compute(manager, numbered(6)).snapshots.values()
        seq = numbered(14)
        first, second = compute(manager, seq, 8), compute(manager, seq)
        assert (first.source, first.slot) == (slot, seq.slot)
        assert (second.source, second.slot) == (seq.slot, seq.slot)
        assert list(second.snapshots) == [12]

    def test_a_chunk_that_begins_amid_the_grid_takes_none(self) -> None:
        """A kernel has states only at multiples of the grid from where the chunk begins."""
        manager = BlockManager(20, alike(BLOCK), num_slots=8)
        seq = numbered(14)
        assert [list(states.snapshots) for states in (compute(manager, seq, 9), compute(manager, seq))] == [[], []]

    def test_a_long_prompt_leaves_one_now_and_then(self) -> None:
        manager = BlockManager(60, alike(256), num_slots=40)
        assert sorted(compute(manager, numbered(7000)).snapshots) == [2048, 4096, 6144, 6912]

    def test_a_prompt_leaves_one_where_those_that_wait_part_from_it(self) -> None:
        manager = BlockManager(40, alike(BLOCK), num_slots=40)
        same = [*range(8)]
        prompts = [[*same, *range(20 + i, 29 + i)] for i in range(3)] + [[*range(4), 60, 61]]
        seqs = [sequence(prompt) for prompt in prompts]
        for seq in seqs:
            manager.expect(seq)
        states = compute(manager, seqs[0])
        assert sorted(states.snapshots) == [4, 8, 16]
        assert not manager.prefixes.find(seqs[1]).num_tokens  # the step that takes it does not read it
        assert all(map(manager.should_wait, seqs[1:]))
        second = compute(manager, seqs[1])
        assert (second.source, list(second.snapshots)) == (states.snapshots[8], [16])
        assert compute(manager, seqs[3]).source == states.snapshots[4]

    def test_where_a_prompt_parts_from_one_that_has_gone_by_it_is_computed_again_once(self) -> None:
        manager = BlockManager(40, alike(BLOCK), num_slots=40)
        first, second, third = (sequence([*range(8), 50 + i, *range(4)]) for i in range(3))
        assert list(compute(manager, first).snapshots) == [12]
        states = compute(manager, second)
        assert (states.source, sorted(states.snapshots)) == (NONE, [8, 12])
        assert compute(manager, third).source == states.snapshots[8]

    def test_the_least_recently_used_snapshot_goes_first(self) -> None:
        manager = BlockManager(40, alike(BLOCK), num_slots=6)  # of which four sequences have one each
        for token in range(2):
            compute(manager, sequence([token] * 5))
        again = sequence([0] * 7)
        compute(manager, again)
        compute(manager, sequence([2] * 5))
        manager.begin_step()
        assert [cached(manager, sequence([token] * 5)) for token in range(3)] == [4, 0, 4]

    def test_what_a_step_reads_or_writes_gets_no_new_owner_in_it(self) -> None:
        manager = BlockManager(40, alike(BLOCK), num_slots=3)
        (slot,) = compute(manager, numbered(5)).snapshots.values()
        manager.begin_step()
        seq = numbered(8)
        seq.num_scheduled = manager.allocate(seq, 8)
        manager.extend(seq, 8)
        assert manager.plan(seq, 4, 8).source == slot  # and there is no slot left
        assert manager.allocate(sequence([9] * 4), 4) is None
        manager.prefixes.forget_all([seq])
        assert manager.allocate(sequence([9] * 4), 4) is None
        manager.begin_step()
        other = sequence([9] * 4)
        assert manager.allocate(other, 4) == 0
        assert other.slot == slot

    def test_a_node_goes_with_its_snapshot_if_its_blocks_are_gone(self) -> None:
        manager = BlockManager(2, alike(BLOCK), num_slots=2)
        seq = sequence([7] * 5)
        compute(manager, seq)
        node = seq.node
        manager.free(seq)
        big = sequence([50] * 8)
        compute(manager, big)  # takes all blocks
        assert node.snapshot == NONE
        assert not node.is_found
        assert set(manager.tree) == {big.node, big.node.parent}

    def test_a_node_that_no_lookup_finds_gets_no_snapshot(self) -> None:
        manager = BlockManager(4, alike(BLOCK), num_slots=4)
        seq = numbered(9)
        compute(manager, seq, 4)
        manager.prefixes.forget(seq)
        assert compute(manager, seq).snapshots == {}

    def test_a_further_sample_has_a_slot_of_its_own(self) -> None:
        manager = BlockManager(20, alike(BLOCK), num_slots=2)
        seq, other = numbered(8), numbered(8)
        compute(manager, seq)
        assert not manager.can_fork(seq)  # the step takes a snapshot with the other slot
        manager.begin_step()
        assert manager.can_fork(seq)
        manager.fork(seq, other)
        assert {seq.slot, other.slot} == {0, 1}
        assert not manager.can_fork(seq)

    def test_a_chunk_ends_where_the_kernels_can_go_on(self) -> None:
        layout = lay_out([Pages(1, 8), State(4, 2)], 128, 128)
        manager = BlockManager(20, layout, num_slots=4)
        seq = numbered(300)
        manager.allocate(seq, 300)
        assert [manager.extend(seq, end) for end in (63, 64, 200, 299, 300)] == [0, 64, 192, 256, 300]

    @pytest.mark.parametrize("how", ["forget", "forget_all", "free_all"])
    def test_what_is_forgotten_has_no_snapshot(self, how: str) -> None:
        manager = BlockManager(20, alike(BLOCK), num_slots=4)
        seq = numbered(5)
        compute(manager, seq)
        {
            "forget": lambda: manager.prefixes.forget(seq),
            "forget_all": lambda: manager.prefixes.forget_all([seq]),
            "free_all": manager.free_all,
        }[how]()
        if how != "free_all":
            manager.free(seq)
        manager.begin_step()
        assert cached(manager, numbered(5)) == 0
        assert sorted(manager.states._free) == [0, 1, 2, 3]


class TestFreeBlocks:
    """In what order free blocks are handed out; on a CPU, where fresh ones cost memory, and elsewhere."""

    def test_empty_ones_come_first_then_fresh_ones_then_the_least_recently_freed(self) -> None:
        free = FreeBlocks(5)
        assert [free.hand_out() for _ in range(3)] == [0, 1, 2]
        for block_id, is_kept in ((2, True), (0, True), (1, False)):
            free.add(block_id, is_kept)
        assert list(free) == [1, 3, 4, 2, 0]
        assert [free.hand_out() for _ in range(5)] == [1, 3, 4, 2, 0]
        assert len(free) == 0

    def test_short_requests_touch_what_they_hold_and_as_much_again(self) -> None:
        free = FreeBlocks(100, num_eager=4)
        for held in (1, 1, 1, 1, 1, 1, 6, 6, 6, 6, 1, 2):
            blocks = [free.hand_out() for _ in range(held)]
            assert max(blocks) < 12
            for block_id in blocks:
                free.add(block_id, is_kept=True)
        assert 12 in free
        assert len(free) == 100

    def test_no_block_stays_behind_that_is_needed(self) -> None:
        free = FreeBlocks(9, num_eager=0)
        assert sorted(free.hand_out() for _ in range(9)) == list(range(9))
