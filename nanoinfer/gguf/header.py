"""Header: what a GGUF file says before its tensors: the metadata, and where each tensor lies."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from nanoinfer.gguf.content import Content
from nanoinfer.gguf.values import check_value

GGUF = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
FIRST_OF_SPLIT = re.compile(r"-00001-of-(\d{5})\.gguf$")
OF_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
ALIGNMENT = "general.alignment"
USUAL_ALIGNMENT = 32  # bytes
LAYERS, PARTS = "block_count", "split.count"
MOST_DIMS = 4


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
        """Return the architecture's own setting; raises ValueError, naming it, if it has another type than it may."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return default
        check_value(self.path, self.architecture, key, value, self.metadata.get(f"{self.architecture}.{LAYERS}"))
        return value

    def needed(self, key: str) -> Any:
        """Return the architecture's own setting; raises ValueError if the file lacks it, or it is 0."""
        value, name = self.get(key), f"{self.architecture}.{key}"
        if value is None:
            raise ValueError(f"{self.path}: its metadata lack {name}, without which no model is known")
        if value == 0:
            raise ValueError(f"{self.path}: {name} in its metadata is {value!r}: must be above 0")
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
        for entry in found:
            if (other := entries.get(entry.name)) is not None:
                raise ValueError(
                    f"{file}: {entry.name}, at the byte {entry.offset}, is there already, at the byte {other.offset}"
                    f" of {other.file.name}: must be there once"
                )
            entries[entry.name] = entry
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ValueError(f"{path}: general.architecture in its metadata is {name!r}: must be the name of a model")
    parts = metadata.get(PARTS, 0)
    if parts != len(files) and parts not in (0, 1):
        raise ValueError(
            f"{path}: {PARTS} in its metadata is {parts!r}, and {len(files)} of them are given: must be named"
            f" NAME-00001-of-{parts:05}.gguf, with the others beside it"
        )
    header = Header(path, metadata, entries)
    _check_layers(header)
    return header


def _check_layers(header: Header) -> None:
    """Raise ValueError for more layers than tensors could be of, before anything is made for each of them."""
    layers = header.get(LAYERS, 0)
    if layers > len(header.entries):
        raise ValueError(
            f"{header.path}: {header.architecture}.{LAYERS} in its metadata is {layers}: must be at most its"
            f" {len(header.entries)} tensors"
        )


def _files_of(path: Path) -> tuple[Path, ...]:
    """Return a split file's parts; raises ValueError if one is missing, or the path is not that of the first."""
    first = FIRST_OF_SPLIT.search(path.name)
    if first is None:
        if OF_SPLIT.search(path.name):
            raise ValueError(f"{path}: is a later part of a split file: give the first, which ends with -00001-of-...")
        return (path,)
    stem, count = path.name[: first.start()], int(first[1])
    files = [path.with_name(f"{stem}-{number:05}-of-{first[1]}{GGUF}") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        others = f", and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{path}: its part {', '.join(missing[:3])}{others} is not there")
    return tuple(files)


def _read_file(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    with path.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise ValueError(f"{path}: does not begin with {MAGIC.decode()!r}, so it is no GGUF file")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            content = Content(path, mapped)
            (version,) = content.take("I")
            if version not in VERSIONS:
                big = ", or is it big-endian?" if version % 65536 == 0 else ""
                known = " or ".join(map(str, VERSIONS))
                raise ValueError(f"{path}: is in version {version} of GGUF{big}: must be {known}")
            tensors, keys = content.take("QQ")
            metadata: dict[str, Any] = {}
            for _ in range(keys):
                key, value = content.pair()
                if key in metadata:
                    raise ValueError(
                        f"{path}: {key} is twice in its metadata, the second time before the byte {content.place}"
                    )
                metadata[key] = value
            return metadata, list(_entries(content, tensors, _alignment(path, metadata)))


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get(ALIGNMENT, USUAL_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: {ALIGNMENT} in its metadata is {alignment!r}: must be a power of two")
    return alignment


def _entries(content: Content, count: int, alignment: int) -> Iterator[Entry]:
    """Yield the tensors' entries; raises ValueError for an unknown type, and for a tensor beyond the file's end."""
    found = []
    for _ in range(count):
        name, (dims,) = content.string(), content.take("I")
        if dims not in range(1, MOST_DIMS + 1):
            raise ValueError(
                f"{content.path}: {name}, before the byte {content.place}, has {dims} dimensions: must be 1 to"
                f" {MOST_DIMS}"
            )
        found.append((name, tuple(reversed(content.take(f"{dims}Q"))), *content.take("IQ")))
    begin = -(-content.place // alignment) * alignment
    for name, shape, number, offset in found:
        yield _entry(content, name, shape, number, begin + offset)


def _entry(content: Content, name: str, shape: tuple[int, ...], number: int, place: int) -> Entry:
    """number: of the type; place: of the first byte"""
    gguf = import_gguf()
    where = f"{content.path}: {name}, at the byte {place},"
    try:
        kind = gguf.GGMLQuantizationType(number).name
    except ValueError:
        raise ValueError(f"{where} has the type {number}, which the package gguf does not know") from None
    if not _has_numbers(kind):
        raise ValueError(f"{where} has the type {kind}, of which the package gguf makes no numbers")
    if 0 in shape:
        raise ValueError(f"{where} has the shape {list(shape)}: must have numbers")
    size, num_bytes = block_of(kind)
    if shape[-1] % size:
        raise ValueError(f"{where} is {list(shape)} in {kind}: rows must be of a multiple of {size} numbers")
    stored = *shape[:-1], shape[-1] // size * num_bytes
    entry = Entry(name, shape, kind, content.path, place, stored)
    if (end := place + entry.num_bytes) > len(content.content):
        raise ValueError(
            f"{content.path}: is cut off: {name} in {kind} lies at the bytes {place} to {end}, and the file has"
            f" {len(content.content)}"
        )
    return entry


@lru_cache
def _has_numbers(kind: str) -> bool:
    """Whether the package gguf can make numbers of a type."""
    gguf = import_gguf()
    try:
        gguf.dequantize(np.zeros((1, block_of(kind)[1]), np.uint8), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True
