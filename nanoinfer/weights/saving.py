"""Saving: writes the tensors of a table into the files of a checkpoint, from which FileSource reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanoinfer.weights.names import Beside
from nanoinfer.weights.safetensors_files import INDEX_FILE, SINGLE_FILE
from nanoinfer.weights.shards import Saved, Shard, Table

FILE_BYTES = 2 << 30  # of a file; a larger tensor has one of its own


def saved_part(table: Table, stacked: bool) -> Table:
    """Return the part of a table whose tensors a checkpoint has, of those that may stand for each other one.

    stacked: plain experts are stacks, where the table has these
    """
    stacks, in_stacks = dict[str, list[Shard]](), set[str]()
    for name, shards in table.items():  # of two names of a stack, the first
        if stacked and _is_plain_stack(shards[0]) and in_stacks.isdisjoint(shards[0].replaces):
            stacks[name] = shards
            in_stacks.update(shards[0].replaces)
    others = {name: shards for name, shards in table.items() if name not in in_stacks and _is_stored(shards[0])}
    return others | stacks


def _is_plain_stack(shard: Shard) -> bool:
    return shard.entry is not None and isinstance(shard.target, Tensor)


def _is_stored(shard: Shard) -> bool:
    """Whether a checkpoint has the tensor: optional ones only beside numbers of a format."""
    return not shard.replaces and (not shard.optional or isinstance(shard.target, Saved))


def num_bytes_of(shards: list[Shard]) -> int:
    """Return the bytes of a checkpoint's tensor; shards: all that it fills"""
    return math.prod(shards[0].stored_shape) * _dtype_of(shards[0]).itemsize


def tensor_of(shards: list[Shard]) -> Tensor:
    """Return a checkpoint's tensor, in host memory, put together of all that it fills on a single rank."""
    stored = torch.empty(shards[0].stored_shape, dtype=_dtype_of(shards[0]))
    upright = shards[0].upright(stored)
    for shard in shards:
        part = upright[shard.index]
        if isinstance(shard.target, Tensor):
            part.copy_(shard.target)
        else:
            _as_saved(shard).copy_to(part)
    return stored


def _dtype_of(shard: Shard) -> torch.dtype:
    return shard.target.dtype if isinstance(shard.target, Tensor) else _as_saved(shard).dtype


def _as_saved(shard: Shard) -> Saved:
    assert isinstance(shard.target, Saved)
    return shard.target


def save_table(table: Table, folder: Path, names: Beside) -> None:
    """Write all tensors of a table, one file after the other, and if there are several, their index.

    names: those that the checkpoint has
    Host memory holds one of the files at a time. Raises OSError or SafetensorError if the disk does not take them.
    """
    cuts = list(_cut(table))
    files = [SINGLE_FILE]
    if len(cuts) > 1:
        files = [f"model-{number:05}-of-{len(cuts):05}.safetensors" for number in range(1, len(cuts) + 1)]
    weight_map = {}
    for file, some in zip(files, cuts, strict=True):
        tensors = {names.stored_name(name): _as_stored(name, table[name], names) for name in some}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(map(num_bytes_of, table.values()))}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), "utf-8")


def _as_stored(name: str, shards: list[Shard], names: Beside) -> Tensor:
    tensor = tensor_of(shards)
    return tensor.mT.contiguous() if names.is_turned(name) else tensor


def _cut(table: Table) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    names: list[str] = []
    room = FILE_BYTES
    for name, shards in table.items():
        size = num_bytes_of(shards)
        if names and size > room:
            yield names
            names, room = [], FILE_BYTES
        names.append(name)
        room -= size
    yield names
