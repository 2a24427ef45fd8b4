"""GgufFiles: the tensors of a GGUF file, under the names that a checkpoint has for them."""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from nanoinfer.gguf.blocks import CODES, GgufPart, parts_of
from nanoinfer.gguf.families import family_of
from nanoinfer.gguf.header import Header, import_gguf, layers_of, read_header
from nanoinfer.gguf.tensor import PLAIN, GgufTensor

log = logging.getLogger("nanoinfer")

EXPERT = re.compile(r"\.experts\.(\d+)\.")
ENDS = "", ".weight", ".bias"  # of names in the file, behind those that gguf's tables have
OF_CONFIG = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"  # which config.py reads
DELTA_BIAS = ".dt_bias", ".dt_proj.bias"  # a checkpoint's name, and that in gguf's tables
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
    ) -> Iterator[tuple[str, GgufTensor | GgufPart, Path]]:
        """Yield each tensor's name, what reads it, and its file; tensors that nobody wants have the file's own names.

        wanted: the tensors' names in a table, and their shapes; stored_name: makes a checkpoint's name of one
        """
        header = read_header(self.path)
        plain_names = {f"{name.removesuffix(CODES)}weight" for name in wanted if name.endswith(CODES)}
        stored = {name: stored_name(name).replace(MULTIMODAL, "", 1) for name in (*wanted, *plain_names)}
        names = _names(header, stored)
        family = family_of(header)
        guessing = tuple(f"blk.{number}." for number in range(layers_of(header), header.needed("block_count")))
        for name, entry in header.entries.items():
            if name.startswith(guessing):  # the tokens after the next one: no model runs it
                continue
            plain = GgufTensor(entry, entry.shape, family.change_of(header, name))
            for known in names.get(name, [] if name in OF_CONFIG else [name]):
                expert = EXPERT.search(known)
                if expert is not None and len(entry.shape) == 3:
                    tensor = plain.of_expert(int(expert[1]))
                else:
                    tensor = _shaped(plain, wanted.get(known, entry.shape))
                in_bits = _in_bits(known, tensor, wanted)
                for own, part in in_bits:
                    yield own, part, entry.file
                if not in_bits:
                    yield known, tensor, entry.file

    def log_numbers(self, wanted: Mapping[str, Shape], stored_name: Callable[[str], str], dtype: torch.dtype) -> None:
        """Log which types of few bits became numbers of the dtype, and their bytes before and then."""
        read = (tensor for _, tensor, _ in self.tensors(wanted, stored_name) if isinstance(tensor, GgufTensor))
        entries = {tensor.entry.name: tensor.entry for tensor in read if tensor.entry.type not in PLAIN}.values()
        if entries:
            types = ", ".join(sorted({entry.type for entry in entries}))
            stored, count = sum(entry.num_bytes for entry in entries), sum(math.prod(entry.shape) for entry in entries)
            name = str(dtype).removeprefix("torch.")
            message = "%s: tensors in %s became numbers of %s: they take %.3f GB, and %.3f GB in the file"
            log.info(message, self.path, types, name, count * dtype.itemsize / 1e9, stored / 1e9)


def _in_bits(known: str, tensor: GgufTensor, wanted: Mapping[str, Shape]) -> list[tuple[str, GgufPart]]:
    """Return the parts of a matrix that keeps its bits, as a table wants them; none: it wants numbers."""
    module = known.removesuffix("weight")
    parts = [(f"{module}{end}", part) for end, part in parts_of(tensor).items()]
    return parts if all(wanted.get(name) == tuple(part.get_shape()) for name, part in parts) else []


def _shaped(tensor: GgufTensor, shape: Shape) -> GgufTensor:
    """Return a tensor in a shape that differs by dimensions of one; else as it is."""
    own = tensor.entry.shape
    if own != shape and [size for size in own if size != 1] == [size for size in shape if size != 1]:
        return replace(tensor, shape=shape)
    return tensor


def _names(header: Header, stored: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names in a table by those in the file. stored: a checkpoint's names by those in the table"""
    gguf = import_gguf()
    (architecture,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    table = gguf.get_tensor_name_map(architecture, header.needed("block_count"))
    names: dict[str, list[str]] = defaultdict(list)
    for known, name in stored.items():
        spelled = EXPERT.sub(".experts.", name).replace(*DELTA_BIAS)
        found = table.get_name(spelled, try_suffixes=(".weight", ".bias"))
        in_file = next((f"{found}{end}" for end in ENDS if f"{found}{end}" in header.entries), None)
        if in_file is not None:
            names[in_file].append(known)
    for some in names.values():  # of experts one by one, and their stack, which a table may have as well
        if any(EXPERT.search(name) for name in some):
            some[:] = [name for name in some if EXPERT.search(name)]
    return names
