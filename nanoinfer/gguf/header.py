"""Header: what a GGUF file says before its tensors: the metadata, and where each tensor lies."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

GGUF = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
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
FIRST_OF_SPLIT = re.compile(r"-00001-of-(\d{5})\.gguf$")
OF_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
ALIGNMENT = 32  # bytes, if the file does not say


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies.

    shape: as torch has it, the outputs first
    stored: [..., bytes of a row]
    offset: of its first byte in the file
    """

    name: str
    shape: tuple[int, ...]
    type: str
    file: Path
    offset: int
    stored: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Those that it takes in the file."""
        return math.prod(self.stored)


@dataclass(frozen=True)
class Header:
    """Of a file, or of all the files of a split one.

    metadata: as the file names it; an array of strings, such as a vocabulary, counts as its length
    """

    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]

    @property
    def architecture(self) -> str:
        """What decides the names of tensors and metadata."""
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the architecture's own setting."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def needed(self, key: str) -> Any:
        """Return the architecture's own setting; raises ValueError if the file lacks it."""
        value = self.get(key)
        if value is None:
            raise ValueError(
                f"{self.path}: its metadata lack {self.architecture}.{key}, without which no model is known"
            )
        return value

    def largest(self, key: str, default: int) -> int:
        """Return the architecture's own count, or the largest of those of its layers."""
        value = self.get(key, default)
        return max(value) if isinstance(value, list) else int(value)

    def tensor(self, name: str) -> Entry:
        """Return where a tensor lies; raises ValueError if the file lacks it."""
        if name not in self.entries:
            raise ValueError(f"{self.path}: has no tensor {name}, so it is no language model that nanoinfer knows")
        return self.entries[name]

    def has(self, part: str) -> bool:
        """Return whether a layer has a tensor of this name."""
        return any(name.startswith("blk.") and name.endswith(f".{part}") for name in self.entries)

    def first(self, part: str) -> Entry | None:
        """Return the first layer's tensor of this name; None: no layer has one."""
        found = (entry for name, entry in self.entries.items() if name.startswith("blk.") and name.endswith(f".{part}"))
        return min(found, key=lambda entry: int(entry.name.split(".")[1]), default=None)


def layers_of(header: Header) -> int:
    """Return how many layers the model has; those behind them guess the tokens after the next one."""
    return int(header.needed("block_count")) - int(header.get("nextn_predict_layers", 0))


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, which may be missing."""
    return str(path).endswith(GGUF) and not Path(path).is_dir()


def import_gguf() -> ModuleType:
    """Return the package gguf; raises ValueError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError("GGUF files need the package gguf: pip install 'nanoinfer[gguf]'") from error
    return gguf


def block_of(kind: str) -> tuple[int, int]:
    """Return the numbers of a type's block, and its bytes."""
    gguf = import_gguf()
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return size, num_bytes


def read_header(path: str | Path) -> Header:
    """Read a file, or all files of a split one by its first. Raises ValueError, naming the place, if it is broken."""
    files = _files_of(Path(path))
    return _read(files, tuple(file.stat().st_mtime_ns for file in files))


@lru_cache(maxsize=4)
def _read(files: tuple[Path, ...], _changed: tuple[int, ...]) -> Header:
    path = files[0]
    metadata: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    for number, file in enumerate(files):
        own, found = _read_file(file)
        metadata = own if number == 0 else metadata
        entries.update({entry.name: entry for entry in found})
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError(f"{path}: its metadata lack general.architecture, so no model is known")
    return Header(path, metadata, entries)


def _files_of(path: Path) -> tuple[Path, ...]:
    """Return a split file's parts; raises ValueError if one is missing, or the path is not that of the first."""
    first = FIRST_OF_SPLIT.search(path.name)
    if first is None:
        if OF_SPLIT.search(path.name):
            raise ValueError(f"{path}: is a later part of a split file: give the first, which ends with -00001-of-...")
        return (path,)
    stem, count = path.name[: first.start()], int(first[1])
    files = [path.with_name(f"{stem}-{number:05}-of-{first[1]}{GGUF}") for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{path}: its part {file.name} is not there")
    return tuple(files)


def _read_file(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    with path.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise ValueError(f"{path}: does not begin with {MAGIC.decode()!r}, so it is no GGUF file")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            reader = _Reader(path, content)
            (version,) = reader.take("I")
            if version not in VERSIONS:
                raise ValueError(f"{path}: is in version {version} of GGUF: must be {' or '.join(map(str, VERSIONS))}")
            tensors, keys = reader.take("QQ")
            metadata = dict(reader.pair() for _ in range(keys))
            return metadata, list(_entries(reader, tensors, metadata.get("general.alignment", ALIGNMENT)))


class _Reader:
    """Takes what a file holds from its beginning on, behind the magic bytes."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.place = path, content, 4

    def take(self, kinds: str) -> tuple[Any, ...]:
        """Take numbers, of struct's kinds."""
        try:
            numbers = struct.unpack_from(f"<{kinds}", self.content, self.place)
        except struct.error:
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
            raise ValueError(f"{self.path}: {key} in its metadata has the type {kind}, which GGUF does not have")
        kind, count = self.take("IQ")
        if kind in SINGLE:
            return list(self.take(f"{count}{SINGLE[kind]}"))
        if kind != STRING:
            return [self._value(key, kind) for _ in range(count)]
        for _ in range(count):
            (length,) = self.take("Q")
            self.place += length
        return count


def _entries(reader: _Reader, count: int, alignment: int) -> Iterator[Entry]:
    """Yield the tensors' entries; raises ValueError for an unknown type, and for a tensor beyond the file's end."""
    gguf = import_gguf()
    found = []
    for _ in range(count):
        name, (dims,) = reader.string(), reader.take("I")
        found.append((name, tuple(reversed(reader.take(f"{dims}Q"))), *reader.take("IQ")))
    begin = -(-reader.place // alignment) * alignment
    for name, shape, number, offset in found:
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            where = f"{reader.path}: {name}, at the byte {begin + offset},"
            raise ValueError(f"{where} has the type {number}, which the package gguf does not know") from None
        size, num_bytes = block_of(kind.name)
        if shape[-1] % size:
            raise ValueError(
                f"{reader.path}: {name}, {list(shape)} in {kind.name}: rows must be of {size} numbers or more"
            )
        stored = *shape[:-1], shape[-1] // size * num_bytes
        entry = Entry(name, shape, kind.name, reader.path, begin + offset, stored)
        if (end := entry.offset + entry.num_bytes) > len(reader.content):
            raise ValueError(
                f"{reader.path}: is cut off: {name} in {kind.name} lies at the bytes {entry.offset} to {end}, and the"
                f" file has {len(reader.content)}"
            )
        yield entry
