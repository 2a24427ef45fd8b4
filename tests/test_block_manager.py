"""BlockManager: sharing, reuse and giving back, by example and by random operations."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
import xxhash
from conftest import CollidingBlockManager
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanoinfer import SamplingParams
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.block_names import BlockNames
from nanoinfer.engine.sequence import Sequence

BLOCK = 4


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(tokens, SamplingParams(max_tokens=1000), seed=0, max_model_len=1000)


def fill(manager: BlockManager, seq: Sequence) -> None:
    """Allocate and compute the whole sequence."""
    cached = manager.allocate(seq)
    assert cached is not None
    manager.record(seq, len(seq))


def test_a_full_block_is_shared_between_equal_prefixes() -> None:
    manager = BlockManager(8, BLOCK)
    first, second = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 9])
    fill(manager, first)
    assert manager.allocate(second) == 4
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]
    assert manager.num_free == 5


def test_a_block_that_has_not_been_computed_is_not_shared() -> None:
    manager = BlockManager(8, BLOCK)
    assert manager.allocate(sequence([1, 2, 3, 4, 5])) == 0
    assert manager.allocate(sequence([1, 2, 3, 4, 5])) == 0


def test_equal_tokens_after_different_prefixes_are_not_shared() -> None:
    manager = BlockManager(8, BLOCK)
    fill(manager, sequence([1, 1, 1, 1, 5, 6, 7, 8]))
    assert manager.allocate(sequence([2, 2, 2, 2, 5, 6, 7, 8, 9])) == 0


def test_the_last_token_is_always_computed() -> None:
    manager = BlockManager(8, BLOCK)
    fill(manager, sequence([1, 2, 3, 4, 5, 6, 7, 8]))
    assert manager.allocate(sequence([1, 2, 3, 4, 5, 6, 7, 8])) == 4
    assert manager.allocate(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8


def test_a_freed_block_keeps_its_content_until_it_is_handed_out_least_recently_freed_first() -> None:
    manager = BlockManager(4, BLOCK)
    old, new = sequence([1, 2, 3, 4, 5]), sequence([6, 7, 8, 9, 10])
    for seq in (old, new):
        fill(manager, seq)
    manager.free(old)
    manager.free(new)
    assert manager.num_free == 4
    other = sequence(list(range(20, 29)))  # takes the two blocks that are not full, then `old`'s full one
    assert manager.allocate(other) == 0
    assert len(manager.names.by_hash) == 1
    manager.free(other)
    assert manager.allocate(sequence([1, 2, 3, 4, 11])) == 0
    assert manager.allocate(sequence([6, 7, 8, 9, 11])) == 4


def test_a_prefix_outlives_what_follows_it() -> None:
    manager = BlockManager(3, BLOCK)
    seq = sequence(list(range(12)))
    fill(manager, seq)
    manager.free(seq)
    assert manager.allocate(sequence([50])) == 0  # takes the last block of the three
    again = sequence(list(range(12)))
    assert manager.allocate(again) is None  # needs three blocks, of which two are cached and one is taken
    assert manager.allocate(sequence(list(range(8)))) == 4


def test_blocks_without_content_are_handed_out_before_those_with() -> None:
    manager = BlockManager(4, BLOCK)
    prefix = sequence([1, 2, 3, 4, 5])
    fill(manager, prefix)
    manager.free(prefix)
    for token in range(10, 20):
        short = sequence([token])
        fill(manager, short)
        manager.free(short)
    assert manager.allocate(sequence([1, 2, 3, 4, 6])) == 4


def test_too_few_free_blocks_change_nothing() -> None:
    manager = BlockManager(2, BLOCK)
    seq = sequence(list(range(9)))
    assert manager.allocate(seq) is None
    assert seq.block_table == []
    assert manager.num_free == 2


@pytest.mark.parametrize("kind", [BlockManager, CollidingBlockManager])
def test_a_block_is_known_by_the_block_before_it_whatever_the_hashes(kind: type[BlockManager]) -> None:
    first, second, tail = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]
    manager = kind(20, BLOCK)
    fill(manager, sequence([*first, 0]))
    fill(manager, sequence([*second, *tail, 0]))
    assert manager.allocate(sequence([*first, *tail, 0])) == 4
    assert manager.allocate(sequence([*tail, 0])) == 0
    for block in range(10, 13):  # more contents than hashes
        fill(manager, sequence([block] * 5))
    assert manager.allocate(sequence([*second, *tail, 0])) == 8


def test_contents_of_one_hash_are_all_found_and_forgotten() -> None:
    class OneHash(BlockNames):
        _hash = staticmethod(lambda content: 7)

    manager = BlockManager(6, BLOCK)
    manager.names = OneHash(manager.blocks)
    seqs = [sequence([token] * 4) for token in range(4)]
    again = [sequence([token] * 5) for token in range(4)]
    for seq in seqs:
        fill(manager, seq)
    assert [manager.cached_prefix(seq) for seq in again] == [seq.block_table for seq in seqs]
    manager.free(seqs[0])
    big = sequence([50] * 12)
    fill(manager, big)  # takes all blocks that are free, the first content's among them
    assert [manager.cached_prefix(seq) for seq in again] == [[], *(seq.block_table for seq in seqs[1:])]
    for seq in [*seqs[1:], big]:
        manager.free(seq)
    fill(manager, sequence(list(range(100, 124))))  # takes all blocks
    assert [manager.cached_prefix(seq) for seq in again] == [[]] * 4
    assert len(manager.names.by_hash) + len(manager.names.collided) == 6


def test_a_block_is_named_by_xxh64_of_the_serial_before_and_its_tokens() -> None:
    manager = BlockManager(4, BLOCK)
    seq = sequence(list(range(8)))
    fill(manager, seq)
    first, second = (manager.blocks[block] for block in seq.block_table)
    tokens = array("i", [4, 5, 6, 7]).tobytes()
    assert second.content == first.serial.to_bytes(8, "little") + tokens
    assert manager.names.by_hash[xxhash.xxh64(second.content).intdigest()] == seq.block_table[1]


def test_what_follows_either_of_two_copies_is_found() -> None:
    manager = BlockManager(9, BLOCK)
    one, other = sequence([1, 1, 1, 1, 2]), sequence([1, 1, 1, 1, 3, 3, 3, 3, 4])
    for seq in (one, other):
        assert manager.allocate(seq) == 0
    for seq in (one, other):
        manager.record(seq, len(seq))
    again = sequence([1, 1, 1, 1, 3, 3, 3, 3, 5])
    assert manager.allocate(again) == 8
    assert again.block_table[:2] == [one.block_table[0], other.block_table[1]]


def test_what_followed_a_block_that_was_handed_out_is_found_once_it_is_computed_again() -> None:
    manager = BlockManager(6, BLOCK)
    seq, other, again = sequence(list(range(9))), sequence([50] * 13), sequence(list(range(9)))
    fill(manager, seq)
    manager.release(seq, 4)
    fill(manager, other)  # takes the three that were never used, and the one that was released
    for done in (other, seq):
        manager.free(done)
    assert manager.allocate(again) == 0
    manager.record(again, 9)
    manager.free(again)
    assert manager.allocate(sequence(list(range(9)))) == 8


def test_what_a_window_has_left_behind_is_free_and_still_cached() -> None:
    manager = BlockManager(4, BLOCK)
    seq, short, long = sequence(list(range(13))), sequence(list(range(5))), sequence(list(range(10)))
    fill(manager, seq)
    manager.release(seq, 7)
    assert (seq.num_released, manager.num_free) == (1, 1)
    manager.release(seq, 7)
    assert manager.num_free == 1
    assert manager.allocate(short) is None  # the first block is cached, but none is free for the fifth token
    manager.release(seq, 8)
    assert manager.allocate(short) == 4
    assert short.block_table == seq.block_table[:2]  # a cached block, and one that was handed out again
    assert manager.allocate(long) is None
    manager.free(seq)
    assert (seq.num_released, manager.num_free) == (0, 2)
    assert manager.allocate(sequence(list(range(12)))) == 4  # the chain is broken after the first block


def test_a_fork_does_not_get_what_its_source_has_released() -> None:
    manager = BlockManager(5, BLOCK)
    source, other = sequence(list(range(14))), sequence(list(range(14)))
    fill(manager, source)
    manager.release(source, 4)
    assert manager.fork(source, other) == (3, 4)
    assert other.num_released == 1
    newcomer = sequence([50])
    assert manager.allocate(newcomer) == 0
    manager.record(other, 14)  # the newcomer's block gets no name
    assert manager.blocks[newcomer.block_table[0]].content is None
    for seq in (source, other, newcomer):
        manager.free(seq)
    assert manager.num_free == 5


def test_long_and_short_sequences_share_nothing() -> None:
    manager = BlockManager(8, BLOCK)
    short, long, again = (sequence(list(range(9))) for _ in range(3))
    fill(manager, short)
    long.is_long = again.is_long = True
    assert manager.allocate(long) == 0
    manager.record(long, 9)
    assert manager.allocate(again) == 8
    assert again.block_table[:2] == long.block_table[:2]


def test_what_a_sequence_fills_after_all_names_were_taken_is_not_shared() -> None:
    """Its keys and values depend on those of the blocks before."""
    manager = BlockManager(8, BLOCK)
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    manager.allocate(seq)
    manager.record(seq, 4)
    manager.forget_all([seq])
    manager.record(seq, 8)
    manager.free(seq)
    other = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.allocate(other) == 0
    manager.record(other, 9)
    assert manager.allocate(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8


def test_blocks_of_one_sequence_lose_their_names() -> None:
    """Also those that others hold, and those that follow."""
    manager = BlockManager(8, BLOCK)
    seq, sharer = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]), sequence([1, 2, 3, 4, 5])
    manager.allocate(seq)
    manager.record(seq, 9)
    assert manager.allocate(sharer) == 4
    manager.forget(seq)
    manager.free(seq)
    other = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.allocate(other) == 0
    manager.record(other, 9)
    assert other.block_table[0] != sharer.block_table[0]
    assert manager.allocate(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8


class RandomOperations(RuleBasedStateMachine):
    """Random sequences of two token ids, so that many prefixes are equal, in a cache that is always too small."""

    kind = BlockManager

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.kind(12, BLOCK)
        self.live: list[Sequence] = []
        # For each block, the prefix whose keys and values it would hold, and whether they are those of a long sequence.
        self.content: dict[int, tuple[bool, tuple[int, ...]]] = {}
        self.prefixes: dict[int, tuple[bool, tuple[int, ...]]] = {}  # by Block.serial, never deleted
        self.old_seqs: set[Sequence] = set()  # those that had blocks when all names were taken, and their forks
        self.old_blocks: set[int] = set()  # what they have computed then and since

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30), is_long=st.booleans())
    def add(self, tokens: list[int], is_long: bool) -> None:
        seq = sequence(tokens)
        seq.is_long = is_long
        free = self.manager.num_free
        cached = self.manager.allocate(seq)
        if cached is None:
            assert self.manager.num_free == free
            return
        assert cached < len(tokens)
        assert len(seq.block_table) == -(-len(tokens) // BLOCK)
        for index in range(cached // BLOCK):  # a hit must hold this very prefix
            assert self.content[seq.block_table[index]] == (is_long, tuple(tokens[: (index + 1) * BLOCK]))
        assert not self.old_blocks.intersection(seq.block_table[: cached // BLOCK])
        seq.num_scheduled = cached
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), count=st.integers(1, 8))
    def compute(self, which: int, count: int) -> None:
        seq = self.live[which % len(self.live)]
        end = min(seq.num_scheduled + count, len(seq))
        for index in range(seq.num_scheduled // BLOCK, end // BLOCK):
            self.content[seq.block_table[index]] = (seq.is_long, tuple(seq.token_ids[: (index + 1) * BLOCK]))
            (self.old_blocks.add if seq in self.old_seqs else self.old_blocks.discard)(seq.block_table[index])
        self.manager.record(seq, end)
        seq.num_scheduled = end

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), token=st.integers(0, 1))
    def grow(self, which: int, token: int) -> None:
        seq = self.live[which % len(self.live)]
        if seq.num_scheduled < len(seq):
            return
        if self.manager.needs_block(seq):
            if not self.manager.num_free:
                return
            self.manager.append(seq)
        seq.token_ids.append(token)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), count=st.integers(0, 30))
    def release(self, which: int, count: int) -> None:
        seq = self.live[which % len(self.live)]
        self.manager.release(seq, min(count, seq.num_scheduled))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def fork(self, which: int) -> None:
        seq = self.live[which % len(self.live)]
        if seq.num_scheduled < len(seq) or not self.manager.can_fork(seq):
            return
        other = sequence(seq.token_ids.tolist())
        other.is_long = seq.is_long
        self.manager.fork(seq, other)
        self.manager.record(other, len(seq))
        other.num_scheduled = len(seq)
        self.live.append(other)
        if seq in self.old_seqs:
            self.old_seqs.add(other)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def free(self, which: int) -> None:
        self.manager.free(self.live.pop(which % len(self.live)))

    @rule()
    def forget_all(self) -> None:
        self.manager.forget_all(self.live)
        assert not self.manager.names.by_hash
        assert not self.manager.names.collided
        self.old_seqs.update(self.live)
        self.old_blocks.update(range(len(self.manager.blocks)))

    @invariant()
    def no_block_is_both_free_and_used_and_counts_equal_the_tables(self) -> None:
        used = Counter(block for seq in self.live for block in seq.block_table[seq.num_released :])
        for block_id, block in enumerate(self.manager.blocks):
            assert block.ref_count == used[block_id]
            assert (block_id in self.manager.free_blocks) == (block.ref_count == 0)

    @invariant()
    def what_a_sequence_holds_is_what_it_has_computed(self) -> None:
        for seq in self.live:
            for index in range(seq.num_released, seq.num_scheduled // BLOCK):
                assert self.content[seq.block_table[index]] == (
                    seq.is_long,
                    tuple(seq.token_ids[: (index + 1) * BLOCK]),
                )

    @invariant()
    def what_is_cached_is_where_it_is_said_to_be(self) -> None:
        for name, block_id in self.manager.names.by_hash.items():
            block = self.manager.blocks[block_id]
            assert block.digest == name == self.manager.names._hash(block.content)
        for content, block_id in self.manager.names.collided.items():
            assert self.manager.blocks[block_id].content == content
            assert block_id not in self.manager.names.by_hash.values()

    @invariant()
    def a_serial_stands_for_one_prefix(self) -> None:
        for block_id, block in enumerate(self.manager.blocks):
            if block.content is not None:
                prefix = self.content[block_id]
                assert self.prefixes.setdefault(block.serial, prefix) == prefix


class CollidingRandomOperations(RandomOperations):
    """RandomOperations where most hashes are equal."""

    kind = CollidingBlockManager


TestRandomOperations = RandomOperations.TestCase
TestCollidingRandomOperations = CollidingRandomOperations.TestCase
TestRandomOperations.settings = TestCollidingRandomOperations.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None
)
