"""PrefixTree: which node a lookup finds, whatever the hashes, and how long a node stays."""

from __future__ import annotations

from array import array

import pytest
import xxhash
from conftest import CollidingBlockManager, CollidingTree, alike

from nanoinfer import SamplingParams
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.prefixes.prefix_tree import NONE, Block, PrefixTree
from nanoinfer.engine.sequence import Sequence

BLOCK = 4


class OneHash(PrefixTree):
    """A tree of nodes that all have the same hash."""

    _hash = staticmethod(lambda content: 7)


def encoded(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(tokens, SamplingParams(max_tokens=1000), seed=0, max_model_len=1000)


def fill(manager: BlockManager, seq: Sequence) -> int:
    """Allocate and compute the whole sequence; returns how many tokens were cached."""
    cached = manager.allocate(seq, len(seq))
    assert cached is not None
    assert manager.extend(seq, len(seq)) == len(seq)
    manager.record(seq, len(seq))
    return cached


@pytest.fixture(params=[PrefixTree, CollidingTree, OneHash])
def tree(request: pytest.FixtureRequest) -> PrefixTree:
    """A tree of nodes of two blocks each."""
    return request.param([Block() for _ in range(20)], 2)


class TestLookups:
    def test_a_node_is_its_parent_and_its_tokens(self, tree: PrefixTree) -> None:
        root = tree.root()
        first, second = tree.child(root, encoded(1, 2)), tree.child(root, encoded(3, 4))
        behind = tree.child(first, encoded(3, 4))
        assert tree.child(root, encoded(1, 2)) is first
        assert [tree.find(root, encoded(*tokens)) for tokens in ([1, 2], [3, 4], [1, 3])] == [first, second, None]
        assert tree.find(first, encoded(3, 4)) is behind
        assert tree.find(second, encoded(3, 4)) is None
        assert set(tree) == {first, second, behind}
        assert len(tree) == 3

    def test_short_and_long_sequences_have_roots_of_their_own(self, tree: PrefixTree) -> None:
        short = tree.child(tree.root(), encoded(1, 2))
        assert tree.find(tree.root(is_long=True), encoded(1, 2)) is None
        assert tree.child(tree.root(is_long=True), encoded(1, 2)) is not short

    def test_each_adapter_has_roots_of_its_own(self, tree: PrefixTree) -> None:
        node = tree.child(tree.root(), encoded(1, 2))
        for kind in [(0, False), (0, True), (1, False)]:
            assert tree.find(tree.root(*kind), encoded(1, 2)) is None
            assert tree.child(tree.root(*kind), encoded(1, 2)) is not node

    def test_a_node_is_found_by_xxh64_of_its_parents_serial_and_its_tokens(self) -> None:
        tree = PrefixTree([], 0)
        first = tree.child(tree.root(), encoded(1, 2))
        second = tree.child(first, encoded(3, 4))
        assert second.content == first.serial.to_bytes(8, "little") + encoded(3, 4)
        assert tree.by_hash[xxhash.xxh64(second.content).intdigest()] is second

    def test_nodes_of_one_hash_are_found_whichever_of_them_goes(self) -> None:
        tree = OneHash([Block() for _ in range(3)], 1)
        root = tree.root()
        nodes = [tree.child(root, encoded(token)) for token in range(3)]
        for block_id, node in enumerate(nodes):
            tree.attach(block_id, node, 0)
        assert (len(tree.by_hash), len(tree.collided)) == (1, 2)
        tree.detach(0)  # the one that the hash leads to
        assert [tree.find(root, encoded(token)) for token in range(3)] == [None, *nodes[1:]]
        again = tree.child(root, encoded(0))
        assert again.serial != nodes[0].serial
        tree.attach(0, again, 0)
        tree.detach(1)
        assert [tree.find(root, encoded(token)) for token in range(3)] == [again, None, nodes[2]]
        for block_id in (0, 2):
            tree.detach(block_id)
        assert len(tree) == 0

    @pytest.mark.parametrize("kind", [BlockManager, CollidingBlockManager])
    def test_a_block_is_known_by_the_prefix_before_it_whatever_the_hashes(self, kind: type[BlockManager]) -> None:
        first, second, tail = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]
        manager = kind(20, alike(BLOCK))
        fill(manager, sequence([*first, 0]))
        fill(manager, sequence([*second, *tail, 0]))
        assert manager.prefixes.find(sequence([*first, *tail, 0])).num_tokens == 4
        assert manager.prefixes.find(sequence([*tail, 0])).num_tokens == 0
        for block in range(10, 13):  # more contents than hashes
            fill(manager, sequence([block] * 5))
        assert manager.prefixes.find(sequence([*second, *tail, 0])).num_tokens == 8

    def test_blocks_of_one_hash_are_all_found_and_handed_out(self) -> None:
        class Manager(BlockManager):
            make_tree = OneHash

        manager = Manager(6, alike(BLOCK))
        seqs = [sequence([token] * 4) for token in range(4)]
        again = [sequence([token] * 5) for token in range(4)]
        for seq in seqs:
            fill(manager, seq)
        assert [manager.prefixes.find(seq).tables for seq in again] == [seq.block_tables for seq in seqs]
        manager.free(seqs[0])
        big = sequence([50] * 12)
        fill(manager, big)  # takes all blocks that are free, the first content's among them
        cached = [manager.prefixes.find(seq).tables for seq in again]
        assert cached == [[[]], *(seq.block_tables for seq in seqs[1:])]
        for seq in [*seqs[1:], big]:
            manager.free(seq)
        fill(manager, sequence(list(range(100, 124))))  # takes all blocks
        assert [manager.prefixes.find(seq).num_tokens for seq in again] == [0] * 4
        assert len(manager.tree) == 6


class TestLifetimes:
    def test_a_node_goes_with_its_last_block(self, tree: PrefixTree) -> None:
        node = tree.child(tree.root(), encoded(1))
        tree.attach(5, node, 0)
        tree.attach(6, node, 1)
        tree.detach(5)
        assert node.blocks == [NONE, 6]
        assert tree.find(tree.root(), encoded(1)) is node
        tree.detach(6)
        assert not node.is_found
        assert tree.find(tree.root(), encoded(1)) is None
        tree.detach(6)  # it is no node's any more

    def test_a_block_is_one_nodes_and_a_node_has_one_block_at_a_place(self, tree: PrefixTree) -> None:
        node, other = (tree.child(tree.root(), encoded(token)) for token in range(2))
        tree.attach(5, node, 0)
        assert not tree.can_attach(6, node, 0)
        assert not tree.can_attach(5, other, 0)
        assert tree.can_attach(6, node, 1)

    def test_a_node_stays_as_long_as_it_has_a_snapshot(self, tree: PrefixTree) -> None:
        node = tree.child(tree.root(), encoded(1))
        node.snapshot = 3
        tree.prune(node)
        assert node.is_found
        node.snapshot = NONE
        tree.prune(node)
        assert not node.is_found

    def test_an_empty_node_stays_as_long_as_it_leads_to_another(self, tree: PrefixTree) -> None:
        first = tree.child(tree.root(), encoded(1))
        second = tree.child(first, encoded(2))
        third = tree.child(second, encoded(3))
        tree.attach(0, first, 0)
        tree.attach(1, third, 0)
        tree.detach(0)
        assert first.is_empty is False
        assert set(tree) == {first, second, third}
        tree.detach(1)  # and now all go
        assert len(tree) == 0
        assert tree.root().num_children == 0

    def test_a_pruned_path_ends_where_another_branches_off(self, tree: PrefixTree) -> None:
        trunk = tree.child(tree.root(), encoded(1))
        one, other = (tree.child(trunk, encoded(token)) for token in (2, 3))
        for block_id, node in enumerate((one, other)):
            tree.attach(block_id, node, 0)
        tree.detach(0)
        assert set(tree) == {trunk, other}
        assert trunk.num_children == 1

    def test_what_is_behind_a_node_that_was_cut_is_not_found_however_often_it_is_made_again(
        self, tree: PrefixTree
    ) -> None:
        root = tree.root()
        first = tree.child(root, encoded(1))
        second = tree.child(first, encoded(2))
        tree.attach(0, first, 0)
        tree.attach(1, second, 0)
        tree.cut(first)
        tree.cut(first)
        assert tree.can_attach(0, tree.child(root, encoded(5)), 0)  # the block is no node's
        again = tree.child(root, encoded(1))
        assert again is not first
        assert tree.find(again, encoded(2)) is None
        assert second in set(tree)
        tree.detach(1)
        assert not second.is_found

    def test_a_cut_takes_along_the_empty_nodes_that_lead_to_it(self, tree: PrefixTree) -> None:
        first = tree.child(tree.root(), encoded(1))
        second = tree.child(first, encoded(2))
        tree.attach(0, second, 1)
        tree.cut(second)
        assert len(tree) == 0
        tree.cut(tree.root())  # does nothing

    def test_nothing_is_left_when_all_is_cleared(self, tree: PrefixTree) -> None:
        first = tree.child(tree.root(), encoded(1))
        second = tree.child(first, encoded(2))
        other = tree.child(tree.root(is_long=True), encoded(2))
        for block_id, node in enumerate((first, second, other)):
            tree.attach(block_id, node, 0)
        tree.clear()
        assert len(tree) == 0
        assert not any(node.is_found for node in (first, second, other))
        assert tree.roots == {}
        again = tree.child(tree.root(), encoded(1))
        assert again is not first
        assert tree.can_attach(0, again, 0)
        tree.detach(1)  # does nothing to the nodes before
        assert set(tree) == {again}

    def test_what_an_adapter_has_computed_goes_with_its_roots_and_nothing_else_does(self, tree: PrefixTree) -> None:
        kinds = [(NONE, False), (0, False), (1, False), (1, True)]
        first = [tree.child(tree.root(*kind), encoded(1)) for kind in kinds]
        second = [tree.child(node, encoded(2)) for node in first]
        for block_id, node in enumerate(second):
            tree.attach(block_id, node, 0)
        behind = tree.uproot(1)
        assert behind == [*first[2:], *second[2:]]  # parents first
        for node in behind:
            tree.cut(node)
        assert set(tree) == {*first[:2], *second[:2]}
        assert list(tree.roots) == kinds[:2]
        assert tree.can_attach(2, first[0], 1)  # the block is no node's
        assert tree.find(tree.root(1), encoded(1)) is None
        assert tree.uproot(5) == []  # it never had one
