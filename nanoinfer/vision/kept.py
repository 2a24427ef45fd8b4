"""Embeddings that are kept in host memory for images that come again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from nanoinfer.vision.spans import Encoded


class KeptEmbeddings:
    """What the tower made of images, by their keys; the least recently used goes first.

    most_bytes: never more are kept
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[bytes, Encoded] = OrderedDict()  # the most recently used last

    def find(self, key: bytes) -> Encoded | None:
        """Return what is kept of an image, in host memory; None: nothing."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: bytes, encoded: Encoded) -> None:
        """Keep a copy in host memory. An image that alone is too large is not kept."""
        self.drop(key)
        if encoded.num_bytes > self.most_bytes:
            return
        while self.num_bytes + encoded.num_bytes > self.most_bytes:
            self.drop(next(iter(self._kept)))
        deep = tuple(tensor.to("cpu", copy=True) for tensor in encoded.deep)
        self._kept[key] = replace(encoded, embeddings=encoded.embeddings.to("cpu", copy=True), deep=deep)
        self.num_bytes += encoded.num_bytes

    def drop(self, key: bytes) -> None:
        """Forget an image, if it is kept."""
        if (encoded := self._kept.pop(key, None)) is not None:
            self.num_bytes -= encoded.num_bytes

    def clear(self) -> None:
        """Forget all, as new weights of the tower need."""
        self._kept.clear()
        self.num_bytes = 0
