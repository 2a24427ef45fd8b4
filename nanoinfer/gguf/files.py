"""GgufFiles: the tensors of a GGUF file, under the names that a checkpoint has for them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nanoinfer.gguf.families import family_of
from nanoinfer.gguf.header import Header, import_gguf, read_header
from nanoinfer.gguf.tensor import GgufTensor

EXPERT = re.compile(r"\.experts\.(\d+)\.")
ENDS = "", ".weight", ".bias"  # of names in the file, behind those that gguf's tables have
OF_CONFIG = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"  # which config.py reads
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
    ) -> Iterator[tuple[str, GgufTensor, Path]]:
        """Yield each tensor's name, what reads it, and its file; tensors that nobody wants have the file's own names.

        wanted: the tensors' names in a table, and their shapes; stored_name: makes a checkpoint's name of one
        """
        header = read_header(self.path)
        names = _names(header, {name: stored_name(name) for name in wanted})
        family = family_of(header)
        for name, entry in header.entries.items():
            plain = GgufTensor(entry, entry.shape, heads=family.heads_of(header, name), more=family.more_of(name))
            for known in names.get(name, [] if name in OF_CONFIG else [name]):
                expert = EXPERT.search(known)
                if expert is not None and len(entry.shape) == 3:
                    yield known, plain.of_expert(int(expert[1])), entry.file
                else:
                    yield known, _shaped(plain, wanted.get(known, entry.shape)), entry.file


def _shaped(tensor: GgufTensor, shape: Shape) -> GgufTensor:
    """Return a tensor in a shape that differs by dimensions of one; else as it is."""
    own = tensor.entry.shape
    if own != shape and [size for size in own if size != 1] == [size for size in shape if size != 1]:
        return GgufTensor(tensor.entry, shape, heads=tensor.heads, more=tensor.more)
    return tensor


def _names(header: Header, stored: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names in a table by those in the file. stored: a checkpoint's names by those in the table"""
    gguf = import_gguf()
    (architecture,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    table = gguf.get_tensor_name_map(architecture, header.needed("block_count"))
    names: dict[str, list[str]] = defaultdict(list)
    for known, name in stored.items():
        found = table.get_name(EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        in_file = next((f"{found}{end}" for end in ENDS if f"{found}{end}" in header.entries), None)
        if in_file is not None:
            names[in_file].append(known)
    for some in names.values():  # of experts one by one, and their stack, which a table may have as well
        if any(EXPERT.search(name) for name in some):
            some[:] = [name for name in some if EXPERT.search(name)]
    return names
