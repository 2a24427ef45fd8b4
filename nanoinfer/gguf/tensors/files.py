"""GgufFiles: the tensors of a GGUF file, under the names that a checkpoint has for them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from nanoinfer.gguf.architectures.families import family_of
from nanoinfer.gguf.architectures.names import GgufNames
from nanoinfer.gguf.header import Entry, Header, layers_of, read_header
from nanoinfer.gguf.tensors.blocks import CODES
from nanoinfer.gguf.tensors.composed import Slices, WholeTensor, in_bits
from nanoinfer.gguf.tensors.tensor import PLAIN, GgufTensor

log = logging.getLogger("nanoinfer")

OF_CONFIG = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"  # which rotations.py reads
MULTIMODAL = "language_model."  # in the names of a multimodal original, which the file has not
Shape = tuple[int, ...]


class GgufFiles:
    """A file, or all files of a split one. Ranks get only its path."""

    def __init__(self, path: str, what: str) -> None:
        """what: begins the messages of errors"""
        self.path = path
        try:
            family_of(read_header(path))
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error

    def tensors(
        self, wanted: Mapping[str, Shape], stored_name: Callable[[str], str]
    ) -> Iterator[tuple[str, Slices, Path]]:
        """Yield each tensor's name, what reads it, and its file; tensors that nobody wants have the file's own names.

        wanted: the tensors' names in a table, and their shapes; stored_name: makes a checkpoint's name of one
        """
        header = read_header(self.path)
        readers = _readers(header, wanted, stored_name)
        for known, reader in sorted(readers.items(), key=lambda item: _place(item[1])):  # as the file has them
            tensor, file = _shaped(reader, wanted.get(known)), reader.entries[0].file
            parts = _in_bits(known, tensor, wanted)
            yield from ((name, part, file) for name, part in parts.items())
            if not parts:
                yield known, tensor, file
        for entry in _others(header, readers):
            yield entry.name, GgufTensor(entry, entry.shape), entry.file

    def made_numbers(
        self, wanted: Mapping[str, Shape], stored_name: Callable[[str], str], dtype: torch.dtype
    ) -> MadeNumbers | None:
        """Return what of few bits becomes numbers of the dtype; None: nothing. Arguments: as for tensors"""
        readers = _readers(read_header(self.path), wanted, stored_name)
        numbers = [reader for known, reader in readers.items() if not _in_bits(known, reader, wanted)]
        found = {entry.name: entry for reader in numbers for entry in reader.entries if entry.type not in PLAIN}
        types = ", ".join(sorted({entry.type for entry in found.values()}))
        stored = sum(entry.num_bytes for entry in found.values())
        count = sum(math.prod(entry.shape) for entry in found.values())
        made = f"{self.path}: tensors in {types}", str(dtype).removeprefix("torch.")
        return MadeNumbers(*made, stored, count * dtype.itemsize) if found else None


class MadeNumbers(NamedTuple):
    """Tensors of few bits that become numbers.

    what: the file, and their types; dtype: of the numbers
    stored, needed: their bytes in the file, and then
    """

    what: str
    dtype: str
    stored: int
    needed: int

    def check(self, free: int) -> None:
        """Raise ValueError if they do not fit the memory, of which so many bytes are free."""
        if self.needed > free:
            raise ValueError(
                f"{self.what} become numbers of {self.dtype}: they take {self.needed / 1e9:.3f} GB, and"
                f" {free / 1e9:.3f} GB are free; a file in Q4_K or Q8_0 stays in its bits"
            )

    def log(self) -> None:
        """Log how much memory they take."""
        message = "%s became numbers of %s: they take %.3f GB, and %.3f GB in the file"
        log.info(message, self.what, self.dtype, self.needed / 1e9, self.stored / 1e9)


def _readers(header: Header, wanted: Mapping[str, Shape], stored_name: Callable[[str], str]) -> dict[str, WholeTensor]:
    """Return what reads each tensor that the file has, by its name in the table."""
    plain_names = {f"{name.removesuffix(CODES)}weight" for name in wanted if name.endswith(CODES)}
    stored = {name: stored_name(name).replace(MULTIMODAL, "", 1) for name in (*wanted, *plain_names)}
    readers = GgufNames(header).readers(stored.values())
    return {name: readers[known] for name, known in stored.items() if known in readers}


def _place(reader: WholeTensor) -> tuple[str, int]:
    return str(reader.entries[0].file), reader.entries[0].offset


def _others(header: Header, readers: Mapping[str, WholeTensor]) -> Iterator[Entry]:
    """Yield the tensors that nobody reads, but for those of the config, and of layers that guess the next tokens."""
    read = {entry.name for reader in readers.values() for entry in reader.entries} | set(OF_CONFIG)
    guessing = tuple(f"blk.{number}." for number in range(layers_of(header), header.needed("block_count")))
    for name, entry in header.entries.items():
        if name not in read and not name.startswith(guessing):
            yield entry


def _in_bits(known: str, tensor: WholeTensor, wanted: Mapping[str, Shape]) -> dict[str, Slices]:
    """Return the parts of a matrix that keeps its bits, as a table wants them; none: it wants numbers."""
    module = known.removesuffix("weight")
    parts = {f"{module}{end}": part for end, part in in_bits(tensor).items()}
    return parts if all(wanted.get(name) == tuple(part.get_shape()) for name, part in parts.items()) else {}


def _shaped(reader: WholeTensor, shape: Shape | None) -> WholeTensor:
    """Return a tensor in a shape that differs by dimensions of one, or is flat; else as it is."""
    if shape is None or not isinstance(reader, GgufTensor) or reader.number is not None:
        return reader
    own = reader.entry.shape
    is_flat = len(shape) == 1 and math.prod(own) == math.prod(shape)
    if is_flat or (own != shape and [size for size in own if size != 1] == [size for size in shape if size != 1]):
        return replace(reader, shape=shape)
    return reader
