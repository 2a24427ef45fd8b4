"""Content: what a GGUF file holds, read from its beginning on."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

SINGLE = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # in struct's terms
STRING, ARRAY = 8, 9


class Content:
    """Takes one thing after another, behind the magic bytes."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.place = path, content, 4

    def take(self, kinds: str) -> tuple[Any, ...]:
        """Take numbers, of struct's kinds."""
        try:
            numbers = struct.unpack_from(f"<{kinds}", self.content, self.place)
        except (struct.error, OverflowError):
            raise self.ends() from None
        self.place += struct.calcsize(f"<{kinds}")
        return numbers

    def string(self) -> str:
        """Take a string."""
        (length,) = self.take("Q")
        text = self.content[self.place : self.place + length]
        if len(text) < length:
            raise self.ends()
        self.place += length
        return text.decode("utf-8", "replace")

    def pair(self) -> tuple[str, Any]:
        """Take a key of the metadata and its value."""
        key, (kind,) = self.string(), self.take("I")
        return key, self._value(key, kind)

    def ends(self) -> ValueError:
        """Return the error for a file that ends too early."""
        return ValueError(f"{self.path}: is cut off: it ends within its header, behind byte {self.place}")

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SINGLE:
            return self.take(SINGLE[kind])[0]
        if kind != ARRAY:
            raise self._unknown(key, kind)
        kind, count = self.take("IQ")
        if kind in SINGLE:
            return list(self.take(f"{count}{SINGLE[kind]}"))
        if kind != STRING:
            raise self._unknown(key, kind, "an array of ")
        for _ in range(count):
            (length,) = self.take("Q")
            self.place += length
        if self.place > len(self.content):
            raise self.ends()
        return count

    def _unknown(self, key: str, kind: int, of: str = "") -> ValueError:
        return ValueError(
            f"{self.path}: {key} in its metadata, before the byte {self.place}, is {of}the type {kind}: must be a"
            f" string ({STRING}), a number ({', '.join(map(str, SINGLE))}), or an array of those ({ARRAY})"
        )
