"""PrefixTree: what the KV cache holds of which prefixes. A hash finds a node, which counts only if it is equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from operator import attrgetter

from xxhash import xxh64_intdigest

NONE = -1  # in place of a block


class Block:
    """One block of the KV cache.

    ref_count: this many sequences hold the block
    node: the block holds tokens of this node, which a lookup finds; None: of nobody whom a lookup would find
    place: which of the node's blocks it is
    tails: nodes of fewer tokens, which the block's first ones are
    """

    __slots__ = ("node", "place", "ref_count", "tails")

    def __init__(self) -> None:
        self.ref_count = 0
        self.node: Node | None = None
        self.place = 0
        self.tails: list[Node] = []

    @property
    def is_known(self) -> bool:
        """Whether a lookup may find what it holds."""
        return self.node is not None or bool(self.tails)


class Node:
    """A prefix: the parent's, and some more tokens, as many in each node, but for tails.

    A tail has fewer, and no children. It is where states were kept amid a block, whose first tokens are the tail's,
    whatever comes behind them.

    serial: no other prefix has it
    content: the parent's serial and the node's own tokens, as bytes
    digest: the content's hash
    blocks: those that hold the node's own tokens, one group's after another's; NONE where a block is lost
    copies: likewise, the slots of host memory that hold the content of such blocks (see HostTier)
    snapshot: the slot that holds the states behind the node's last token; NONE: no slot does
    kept: the slots of host memory that hold these states; of a tail, those with its blocks' content come first
    beginnings: hashes of its parent's serial and some of its first tokens (see PrefixTree.begun)
    """

    __slots__ = (
        "beginnings",
        "blocks",
        "content",
        "copies",
        "digest",
        "is_found",
        "is_tail",
        "kept",
        "num_children",
        "parent",
        "serial",
        "snapshot",
    )

    def __init__(self, parent: Node | None, serial: int, content: bytes, digest: int, num_blocks: int) -> None:
        self.parent, self.serial, self.content, self.digest = parent, serial, content, digest
        self.blocks = [NONE] * num_blocks
        self.copies = [NONE] * num_blocks
        self.snapshot = NONE
        self.kept: list[int] = []
        self.num_children = 0
        self.is_found = True  # by a lookup
        self.is_tail = False
        self.beginnings: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing, and leads to no other node; of a tail, whether it has no states."""
        if self.snapshot != NONE or self.kept:
            return False
        if self.is_tail:
            return True
        if self.num_children:
            return False
        return all(block == NONE for block in self.blocks) and all(slot == NONE for slot in self.copies)


class PrefixTree:
    """All nodes that have a block or a snapshot, or lead to such a one.

    roots: by the adapter's slot, and by whether the sequence is long (see Scheduler): others' keys differ
    by_hash: hash of a content -> the node that a lookup of the content finds
    collided: content whose hash leads to another content's node -> its own node
    begun: hash of a content -> how many nodes' contents begin with it, of those that others may part amid. Two that are
        equal by chance cost a snapshot that is taken in vain
    """

    _hash = staticmethod(xxh64_intdigest)

    def __init__(self, blocks: list[Block], num_places: int) -> None:
        """num_places: the blocks of one node."""
        self._blocks, self._num_places = blocks, num_places
        self._serials = count()
        self.roots: dict[tuple[int, bool], Node] = {}
        self.by_hash: dict[int, Node] = {}
        self.collided: dict[bytes, Node] = {}
        self.begun: Counter[int] = Counter()
        self.num_attached = 0  # blocks that are nodes'

    def __iter__(self) -> Iterator[Node]:
        yield from self.by_hash.values()
        yield from self.collided.values()

    def __len__(self) -> int:
        return len(self.by_hash) + len(self.collided)

    def root(self, adapter: int = NONE, is_long: bool = False) -> Node:
        """Return the empty prefix of sequences of one kind, which is made if there is none.

        adapter: the slot of theirs; NONE: the model alone computes them
        """
        root = self.roots.get((adapter, is_long))
        if root is None:
            root = self.roots[adapter, is_long] = Node(None, next(self._serials), b"", 0, 0)
        return root

    def uproot(self, adapter: int) -> list[Node]:
        """Let no lookup begin at an adapter's roots; returns the nodes that it would have found behind them."""
        lost = {self.roots.pop(kind) for kind in list(self.roots) if kind[0] == adapter}
        behind: list[Node] = []
        for node in sorted(self, key=attrgetter("serial")) if lost else ():  # a parent's is less
            if node.parent in lost:
                lost.add(node)
                behind.append(node)
        return behind

    def drop_root(self, root: Node) -> None:
        """Let no lookup begin at this root."""
        self.roots = {kind: own for kind, own in self.roots.items() if own is not root}

    def find(self, parent: Node, tokens: bytes) -> Node | None:
        """Return the node of these tokens behind its parent; None: there is none."""
        content = _content(parent, tokens)
        return self._find(content, self._hash(content))

    def _find(self, content: bytes, digest: int) -> Node | None:
        node = self.by_hash.get(digest)
        if node is not None and node.content == content:
            return node
        return self.collided.get(content) if self.collided else None

    def has_begun(self, parent: Node, tokens: bytes) -> bool:
        """Whether some node behind a parent begins with these tokens, as far as note_beginnings has told."""
        return self.begun[self._hash(_content(parent, tokens))] > 0

    def note_beginnings(self, node: Node, beginnings: Iterable[bytes]) -> None:
        """Note first tokens of a node, amid which others may part from it. It has none yet."""
        assert node.parent is not None
        node.beginnings = [self._hash(_content(node.parent, tokens)) for tokens in beginnings]
        self.begun.update(node.beginnings)

    def child(self, parent: Node, tokens: bytes, is_tail: bool = False) -> Node:
        """Return the node of these tokens behind its parent, which is made if there is none.

        is_tail: they are fewer than a node's
        """
        content = _content(parent, tokens)
        digest = self._hash(content)
        node = self._find(content, digest)
        if node is None:
            node = Node(parent, next(self._serials), content, digest, self._num_places)
            node.is_tail = is_tail
            parent.num_children += 1
            if self.by_hash.setdefault(digest, node) is not node:
                self.collided[content] = node
        return node

    def can_attach(self, block_id: int, node: Node, place: int) -> bool:
        """Whether a block is no node's, and the node lacks one there."""
        return self._blocks[block_id].node is None and node.blocks[place] == NONE

    def attach(self, block_id: int, node: Node, place: int) -> None:
        """Let a block be the node's."""
        block = self._blocks[block_id]
        block.node, block.place = node, place  # first: an interrupt must not leave a node whose block goes unnoticed
        node.blocks[place] = block_id
        self.num_attached += 1

    def attach_tail(self, tail: Node, blocks: list[int]) -> None:
        """Let a tail have these blocks in place of those that it had; they may be nodes', too, and other tails'."""
        self._leave_blocks(tail)
        for block_id in blocks:
            if block_id != NONE:
                self._blocks[block_id].tails.append(tail)
        tail.blocks = blocks

    def _leave_blocks(self, tail: Node) -> None:
        """Let a tail have no block: it needs all of them."""
        blocks, tail.blocks = tail.blocks, [NONE] * len(tail.blocks)  # first, as an interrupt may come
        for block_id in blocks:
            if block_id != NONE and tail in self._blocks[block_id].tails:
                self._blocks[block_id].tails.remove(tail)

    def detach_tails(self, block_id: int) -> None:
        """Let a block be no tail's."""
        block = self._blocks[block_id]
        while block.tails:
            tail = block.tails.pop()
            self._leave_blocks(tail)
            self.prune(tail)

    def detach(self, block_id: int) -> None:
        """Let a block be no node's."""
        block = self._blocks[block_id]
        self.detach_tails(block_id)
        if (node := block.node) is not None:
            block.node = None
            node.blocks[block.place] = NONE
            self.num_attached -= 1
            self.prune(node)

    def detach_all(self) -> None:
        """Let no block be a node's."""
        for block_id in range(len(self._blocks)):
            self.detach(block_id)

    def cut(self, node: Node) -> None:
        """Let no lookup find a node, nor those behind it. These go when their blocks are handed out."""
        if node.parent is not None and node.is_found:
            if not node.is_tail:
                for block_id in node.blocks:
                    if block_id != NONE:
                        self._blocks[block_id].node = None
                        self.num_attached -= 1
            self._remove(node, node.parent)
            self.prune(node.parent)

    def prune(self, node: Node) -> None:
        """Remove a node if it has nothing, and then its parent likewise."""
        while node.parent is not None and node.is_found and node.is_empty:
            self._remove(node, node.parent)
            node = node.parent

    def _remove(self, node: Node, parent: Node) -> None:
        node.is_found = False
        if node.is_tail:
            self._leave_blocks(node)
        if self.by_hash.get(node.digest) is node:
            del self.by_hash[node.digest]
        else:
            del self.collided[node.content]
        parent.num_children -= 1
        for digest in node.beginnings:
            self.begun[digest] -= 1
            if self.begun[digest] <= 0:
                del self.begun[digest]

    def clear(self) -> None:
        """Remove all nodes."""
        for node in self:
            node.is_found = False
            for block_id in node.blocks:
                if block_id != NONE:
                    self._blocks[block_id].node = None
                    self._blocks[block_id].tails.clear()
        self.roots.clear()
        self.num_attached = 0
        self.by_hash.clear()
        self.collided.clear()
        self.begun.clear()


def _content(parent: Node, tokens: bytes) -> bytes:
    return parent.serial.to_bytes(8, "little") + tokens
