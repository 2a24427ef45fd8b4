"""BlockNames: which block holds a content. Its hash finds the block, which counts only if the content is equal."""

from __future__ import annotations

from xxhash import xxh64_intdigest


class Block:
    """One block of the KV cache.

    ref_count: this many sequences hold the block
    content: the block's name, as bytes: the serial of the block before it, and its own tokens; None: it has no name
    digest: the content's hash
    serial: of a named block, the number of its prefix: of all tokens up to the block's end. No other prefix has it
    """

    __slots__ = ("content", "digest", "ref_count", "serial")

    def __init__(self) -> None:
        self.ref_count = 0
        self.content: bytes | None = None
        self.digest = 0
        self.serial = 0


class BlockNames:
    """The names of blocks. If several blocks have equal content, a lookup finds the first that was named.

    by_hash: hash of a content -> the block that a lookup of the content finds
    collided: content whose hash leads to another content's block -> its own block
    """

    _hash = staticmethod(xxh64_intdigest)

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.by_hash: dict[int, int] = {}
        self.collided: dict[bytes, int] = {}
        self._are_given = False  # some, since the last `clear`

    def find(self, content: bytes) -> int | None:
        """Return a block of this content; None: a lookup finds none."""
        return self._find(content, self._hash(content))

    def _find(self, content: bytes, digest: int) -> int | None:
        block_id = self.by_hash.get(digest)
        if block_id is not None and self.blocks[block_id].content == content:
            return block_id
        return self.collided.get(content) if self.collided else None

    def add(self, block_id: int, content: bytes) -> None:
        """Name a block by its content. If another block has that name, this one takes that one's serial.

        So blocks of equal content have one serial, and a lookup finds the blocks that follow any of them.
        """
        block = self.blocks[block_id]
        block.content, block.digest = content, self._hash(content)
        self._are_given = True
        found = self._find(content, block.digest)
        if found is not None:
            block.serial = self.blocks[found].serial
        elif self.by_hash.setdefault(block.digest, block_id) != block_id:
            self.collided[content] = block_id

    def remove(self, block_id: int) -> None:
        """Remove the name of a block, if it has one."""
        block = self.blocks[block_id]
        if block.content is None:
            return
        if self.by_hash.get(block.digest) == block_id:
            del self.by_hash[block.digest]
        elif self.collided.get(block.content) == block_id:
            del self.collided[block.content]
        block.content = None

    def clear(self) -> None:
        """Remove the names of all blocks."""
        if not self._are_given:
            return
        self._are_given = False
        self.by_hash.clear()
        self.collided.clear()
        for block in self.blocks:
            block.content = None
