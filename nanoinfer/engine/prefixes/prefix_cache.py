"""PrefixCache: finds what the KV cache holds of a sequence's first tokens, records what sequences fill, and forgets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, takewhile

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.engine.prefixes.host_tier import HostTier
from nanoinfer.engine.prefixes.prefix_tree import NONE, Node, PrefixTree
from nanoinfer.engine.prefixes.state_slots import StateSlots
from nanoinfer.engine.sequence import Sequence


@dataclass(frozen=True)
class CachedPrefix:
    """What the cache holds of a sequence's first tokens.

    node: that of the prefix, or of the most of it that fills a node; num_tokens: of the prefix
    holder: has the states behind it: that node, a tail behind that, or the sequence itself, which was preempted
    rest: for each group, the blocks whose first tokens are the last ones, which fill no node: they have to be copied;
        none, if there are no such tokens, or their content has to come back from host memory
    tables: for each group, the blocks that queries behind the node see, from column starts[group] on; NONE where only
        host memory has the content
    lost: for each of these, in order: the node and the place in it
    num_matched: tokens of the longest prefix that others have computed; what they left of it may not be enough
    is_awaited: with the snapshot that the planned step takes, a longer prefix could be shared
    """

    node: Node
    holder: Node | Sequence
    num_tokens: int
    rest: list[list[int]]
    tables: list[list[int]]
    starts: list[int]
    lost: list[tuple[Node, int]]
    num_matched: int
    is_awaited: bool


class PrefixCache:
    """The tree of prefixes, as sequences meet it: with their tokens and block tables."""

    def __init__(
        self, layout: CacheLayout, tree: PrefixTree, states: StateSlots | None = None, tier: HostTier | None = None
    ) -> None:
        """states: given if a sequence needs a snapshot of states to go on; tier: if host memory keeps content, too."""
        self._groups, self._size = layout.groups, layout.prefix_size
        self._grid = layout.snapshot_grid
        self._states, self._tier = states, tier
        self._counts = layout.counts
        self._places = [sum(self._counts[:index]) for index in range(len(self._counts))]
        self.tree = tree

    def find(self, seq: Sequence, with_tails: bool = True) -> CachedPrefix:
        """Find the longest prefix of a sequence of which each group has all blocks that later queries see.

        with_tails: of which the last ones may have to be copied
        """
        size = self._size
        path: list[Node] = [self.tree.root(seq.adapter, seq.is_long)]
        runs = [0] * len(self._groups)  # how many neighbouring blocks each group has before the end of the path
        whole, is_awaited = 0, False
        for start in range(0, seq.num_reusable // size * size, size):
            node = self.tree.find(path[-1], seq.content(start, start + size))
            if node is None or not self._follow(node, runs, start + size):
                break
            path.append(node)
            if not self._has_windows_whole(runs, start + size):
                continue
            if self._states is None or self._states.is_ready(node) or node.kept:
                whole, is_awaited = len(path) - 1, False
            elif self._states.is_fresh(node):
                is_awaited = True
        holder: Node | Sequence = path[whole]
        num_tokens, num_matched = whole * size, (len(path) - 1) * size
        rest = none = [list[int]() for _ in self._groups]
        if self._states is not None and self._grid < size:
            num_matched += self._num_begun(seq, path[-1], num_matched)
            if with_tails:
                whole, tail, num_tokens, is_awaited = self._find_tail(self._states, seq, path, whole, is_awaited)
                holder = tail or path[whole]
                rest = none if tail is None else self._copied_blocks(self._states, tail, num_tokens - whole * size)
        if seq.kept and seq.kept_behind is path[-1] and seq.num_reusable == len(seq) - 1:
            whole, holder, num_tokens, rest, is_awaited = len(path) - 1, seq, seq.num_reusable, none, False
        tables = self._tables(path[1 : whole + 1])
        return CachedPrefix(path[whole], holder, num_tokens, rest, *tables, num_matched, is_awaited)

    def _tables(self, nodes: list[Node]) -> tuple[list[list[int]], list[int], list[tuple[Node, int]]]:
        """Return CachedPrefix.tables, starts and lost of a prefix of these nodes."""
        tables, starts, lost = [], [], []
        end = len(nodes) * self._size
        for group, count, place in zip(self._groups, self._counts, self._places, strict=True):
            first = 0 if group.window is None else max(0, end - group.window + 1) // group.block_size
            places = [(nodes[column // count], place + column % count) for column in range(first, len(nodes) * count)]
            tables.append([node.blocks[at] for node, at in places])
            starts.append(first)
            lost += [(node, at) for node, at in places if node.blocks[at] == NONE]
        return tables, starts, lost

    def _find_tail(
        self, states: StateSlots, seq: Sequence, path: list[Node], whole: int, is_awaited: bool
    ) -> tuple[int, Node | None, int, bool]:
        """Return the longest prefix that ends with a tail, if it is longer than one of `whole` nodes.

        path: the nodes whose blocks there are
        Returns how many nodes it has, the tail or None, the prefix's tokens, and CachedPrefix.is_awaited.
        """
        for depth in range(len(path) - 1, whole - 1, -1):
            begin = depth * self._size
            last = min(begin + self._size - self._grid, seq.num_reusable // self._grid * self._grid)
            for end in range(last, begin, -self._grid):
                tail = self.tree.find(path[depth], seq.content(begin, end))
                if tail is None:
                    continue
                has_blocks = NONE not in chain(*self._tail_blocks(tail, end - begin))
                if tail.kept or (has_blocks and states.is_ready(tail)):
                    return depth, tail, end, is_awaited
                is_awaited = is_awaited or (has_blocks and states.is_fresh(tail))
        return whole, None, whole * self._size, is_awaited

    def _num_begun(self, seq: Sequence, node: Node, begin: int) -> int:
        """Return how many tokens behind a node, a multiple of the grid, other prefixes have, too; they fill no node."""
        ends = range(begin + self._grid, min(begin + self._size, seq.num_reusable + 1), self._grid)
        begun = takewhile(lambda end: self.tree.has_begun(node, seq.content(begin, end)), ends)
        return self._grid * sum(1 for _ in begun)

    def _child(self, node: Node, seq: Sequence, begin: int, end: int) -> Node:
        """Return the node of some tokens of a sequence behind a node; fewer than fill a node are a tail."""
        is_tail = end - begin < self._size
        child = self.tree.child(node, seq.content(begin, end), is_tail)
        if self._states is not None and not child.beginnings:
            ends = range(begin + self._grid, end + is_tail, self._grid)
            self.tree.note_beginnings(child, [seq.content(begin, own) for own in ends])
        return child

    def _copied_blocks(self, states: StateSlots, tail: Node, num_tokens: int) -> list[list[int]]:
        """Return CachedPrefix.rest for a prefix that ends with a tail. num_tokens: of the tail"""
        blocks = self._tail_blocks(tail, num_tokens)
        if states.is_delayed(tail) or NONE in chain(*blocks):
            return [[] for _ in self._groups]
        return blocks

    def _tail_blocks(self, tail: Node, num_tokens: int) -> list[list[int]]:
        """Return, for each group, the blocks that hold a tail's tokens. num_tokens: of the tail"""
        return [
            tail.blocks[place : place + -(-num_tokens // group.block_size)]
            for group, place in zip(self._groups, self._places, strict=True)
        ]

    def node_at(self, seq: Sequence, position: int) -> Node | None:
        """Return the node of a sequence's first tokens, which it has been recorded for; a tail is made if it needs one.

        None: no lookup finds what it fills
        """
        node, size = seq.node, self._size
        if seq.num_nodes < position // size:
            return None
        for _ in range(seq.num_nodes - position // size):
            node = None if node is None else node.parent
        if node is None or not node.is_found or position % size == 0:
            return node
        begin = position // size * size
        tail = self._child(node, seq, begin, position)
        if tail.snapshot == NONE or NONE in chain(*self._tail_blocks(tail, position - begin)):
            assert self._states is not None
            self._states.delay(tail)  # first: the planned step fills these blocks
            self.attach_tail(tail, seq, position)
        return tail

    def attach_tail(self, tail: Node, seq: Sequence, position: int) -> None:
        """Let a sequence's blocks be those of the tail of its tokens up to a position."""
        blocks = [NONE] * len(tail.blocks)
        for place, own in zip(self._places, self.last_blocks(seq, position), strict=True):
            blocks[place : place + len(own)] = own
        self.tree.attach_tail(tail, blocks)

    def last_blocks(self, seq: Sequence, position: int) -> list[list[int]]:
        """Return, for each group, a sequence's blocks of those of its tokens up to a position that fill no node."""
        begin = position // self._size * self._size
        return [
            table[begin // group.block_size : -(-position // group.block_size)]
            for group, table in zip(self._groups, seq.block_tables, strict=True)
        ]

    def _follow(self, node: Node, runs: list[int], end: int) -> bool:
        """Count in a node's blocks, and host memory's; returns whether a prefix from this node on may be whole."""
        for index, (group, count, place) in enumerate(zip(self._groups, self._counts, self._places, strict=True)):
            for at in range(place, place + count):
                is_lost = node.blocks[at] == NONE and node.copies[at] == NONE
                runs[index] = 0 if is_lost else runs[index] + 1
            if group.window is None and runs[index] * group.block_size < end:
                return False
        return True

    def _has_windows_whole(self, runs: list[int], end: int) -> bool:
        """Whether each group with a window has the blocks that queries from `end` on see."""
        return all(
            group.window is None or run * group.block_size >= min(end, group.window - 1)
            for group, run in zip(self._groups, runs, strict=True)
        )

    def record(self, seq: Sequence, num_tokens: int, attached: list[int]) -> None:
        """Let later sequences find what the first `num_tokens` tokens fill. attached: gets the blocks that are new

        A prefix that another sequence has recorded keeps its blocks, and gets those that it lacks.
        """
        size, node, tree, num_known = self._size, seq.node, self.tree, len(attached)
        while node is not None and node.is_found and (seq.num_nodes + 1) * size <= num_tokens:
            index, before = seq.num_nodes, len(attached)
            node = seq.node = self._child(node, seq, index * size, (index + 1) * size)
            place = 0
            for table, released, count in zip(seq.block_tables, seq.num_released, self._counts, strict=True):
                for column in range(index * count, (index + 1) * count):
                    if column >= released and tree.can_attach(table[column], node, place):
                        attached.append(table[column])  # first, as an interrupt may come
                        tree.attach(table[column], node, place)
                    place += 1
            seq.num_nodes = index + 1
            if len(attached) == before:
                tree.prune(node)  # it is empty if a window of one token has left all of it behind
        if self._tier is not None:
            self._tier.note_filled(attached[num_known:])

    def make_path(self, seq: Sequence, num_tokens: int) -> None:
        """Make the nodes of a sequence's first tokens, before `record`: those behind all windows have no blocks."""
        node = self.tree.root(seq.adapter, seq.is_long)
        for begin in range(0, num_tokens, self._size):
            node = self._child(node, seq, begin, begin + self._size)

    def forget_all(self, seqs: Iterable[Sequence]) -> None:
        """Let no later sequence share what has been computed so far.

        seqs: all sequences that hold blocks. No other sequence finds what they fill from now on
        """
        if self._states is not None:
            self._states.drop_snapshots()
        if self._tier is not None:
            self._tier.clear()
        self.tree.clear()
        for seq in seqs:
            seq.node = None

    def forget_adapter(self, adapter: int, seqs: Iterable[Sequence]) -> list[int]:
        """Let no later sequence share what has been computed so far with the adapter in a slot.

        seqs: its sequences that hold blocks. No other sequence finds what they fill from now on
        Returns the blocks whose content is forgotten, among others NONE.
        """
        for seq in seqs:
            seq.node = None
        if self._tier is not None:
            self._tier.drop_sequences(adapter)
        nodes = self.tree.uproot(adapter)
        for node in nodes:
            if self._tier is not None:
                self._tier.drop(node)
            self._cut(node)
        return [block_id for node in nodes for block_id in node.blocks]

    def _has_tail(self, root: Node, seq: Sequence) -> bool:
        """Whether there is a tail of a sequence's first tokens."""
        ends = range(self._grid, self._size, self._grid)
        return any(self.tree.find(root, seq.content(0, end)) is not None for end in ends)

    def forget(self, seq: Sequence) -> None:
        """Let no later sequence share what a sequence holds or fills, nor what others computed behind it. All go on."""
        node, seq.node = seq.node, None
        while node is not None:
            if node.parent is None and self._has_tail(node, seq):
                self.tree.drop_root(node)  # others may have begun with its first tokens, or it with theirs
            self._cut(node)
            node = node.parent

    def _cut(self, node: Node) -> None:
        if self._states is not None:
            self._states.drop(node)
        self.tree.cut(node)

    def lose_blocks(self) -> None:
        """Let nodes know nothing of blocks any more, whose content is gone; what host memory holds stays."""
        if self._tier is None:
            self.forget_all([])
            return
        self.tree.detach_all()
        if self._states is not None:
            self._states.drop_snapshots()
