"""Sources: where a model's weights come from: files, random numbers, or a trainer's tensors."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoinfer.checks import short
from nanoinfer.gguf.header import is_gguf
from nanoinfer.gguf.tensors.blocks import GgufPart
from nanoinfer.gguf.tensors.files import GgufFiles
from nanoinfer.process.bar import Advance, MakeBar, ignore, no_bar
from nanoinfer.process.host_memory import free_bytes
from nanoinfer.weights.bitsandbytes.files import log_numbers, split
from nanoinfer.weights.bitsandbytes.matrix import CODES, BnbMatrix
from nanoinfer.weights.finite import describe_not_finite, find_not_finite
from nanoinfer.weights.in_blocks import InBlocks
from nanoinfer.weights.names import NOTHING, Names
from nanoinfer.weights.pinned import Uploads
from nanoinfer.weights.roll import DTYPES, Roll
from nanoinfer.weights.safetensors_files import SafetensorsFiles
from nanoinfer.weights.shards import SPREAD, Away, Drawn, Fill, Shard, Table, Target, at_hand, device_of_table

Shapes = Mapping[str, tuple[int, ...]]  # by the tensors' names
NEEDED = "must be pairs of a name and a torch.Tensor, as named_parameters() gives them"


class Source(Protocol):
    """Gives the tensors that a table names when a model is loaded."""

    def fill(self, table: Table, bar: MakeBar = no_bar) -> None:
        """Fill every target of the table; raises ValueError, naming them, if tensors are missing or do not fit.

        bar: counts the bytes that are read or drawn
        """
        ...


class RandomSource:
    """Normal noise of standard deviation 0.02, drawn on the targets' device, or ones or zeros where a shard says so."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device

    def fill(self, table: Table, bar: MakeBar = no_bar) -> None:
        """Fill every target of the table, always alike for the same seed. bar: as for Source.fill"""
        shards = [shard for entries in table.values() for shard in entries if not (shard.replaces or shard.optional)]
        generator: torch.Generator | None = None
        with bar(sum(_drawn_bytes(shard.target) for shard in shards)) as advance:
            for shard in shards:
                target = at_hand(shard.target, writes=True)
                device = target.device if isinstance(target, Tensor) else self.device
                generator = generator or torch.Generator(device).manual_seed(self.seed)
                if isinstance(target, Drawn):
                    target.draw(generator)
                else:
                    _draw(target, shard.random, generator, device)
                advance(_drawn_bytes(target))


def _draw(target: Target, fill: Fill, generator: torch.Generator, device: torch.device) -> None:
    """Draw what fills a target."""
    numbers = target if isinstance(target, Tensor) else torch.empty(target.shape, device=device)
    if fill == "noise":
        numbers.normal_(0, SPREAD, generator=generator)
    else:
        numbers.fill_(float(fill == "ones"))
    if not isinstance(target, Tensor):
        target.copy_(numbers)


class FileSource:
    """The safetensors files of a folder, or a GGUF file."""

    def __init__(self, folder: str, names: Names = NOTHING, argument: str = "model") -> None:
        """folder: or the path of a GGUF file

        names: which tensors are read; by default all, as those of a language model that is alone

        argument: that which the user gave the folder as
        """
        self.what = f"{argument}={folder!r}"  # begins the messages of errors
        self.names = names
        self._files = GgufFiles(folder, self.what) if is_gguf(folder) else SafetensorsFiles(folder, self.what)

    def fill(self, table: Table, bar: MakeBar = no_bar) -> None:
        """Fill every target of the table; raises ValueError as Source.fill says. bar: as for Source.fill"""
        num_bytes, made = self.check(table), None
        if isinstance(self._files, GgufFiles):
            made = self._files.made_numbers(_shapes(table), self.names.stored_name, torch.get_default_dtype())
        if made is not None and device_of_table(table).type == "cpu":  # a GPU's memory is taken already
            made.check(free_bytes())
        with bar(num_bytes) as advance:
            copied = self.copy(table, advance)
        if made is not None:
            made.log()
        if not isinstance(self._files, GgufFiles):
            log_numbers(
                self.what, (tensor for _, tensor, _ in self._tensors(_shapes(table))), torch.get_default_dtype()
            )
        name = find_not_finite(table, copied)
        if name is not None:
            raise ValueError(f"{self.what}: {describe_not_finite(table, name)}")

    def check(self, table: Table, is_update: bool = False) -> int:
        """Return how many bytes `copy` reads. Raise ValueError if names, shapes or dtypes do not fit the table.

        is_update: as for Roll
        """
        roll = Roll(table, f"{self.what}: the checkpoint does not fit the model", is_update)
        num_bytes = 0
        for name, tensor, file in self._tensors(_shapes(table)):
            if roll.tick(name, tensor.get_shape(), tensor.get_dtype(), file.name):
                num_bytes += sum(_stored_bytes(tensor, shard) for shard in table[name])
        roll.check(whole=True)
        return num_bytes

    def copy(self, table: Table, advance: Advance = ignore) -> list[str]:
        """Copy tensors, which fit, from the mapped files into their targets; returns the tensors' names.

        advance: told the bytes that are read
        """
        copied = []
        uploads = Uploads(device_of_table(table), advance)
        for name, tensor, _ in self._tensors(_shapes(table)):
            if name in table:
                upright = _upright(tensor, table[name][0])
                for shard in table[name]:
                    index = ... if shard.takes_all else shard.index
                    if isinstance(tensor, GgufPart):
                        uploads.add(InBlocks(shard.target, tensor, index), tensor.stored(index))
                    else:
                        uploads.add(shard.target, tensor[...] if shard.takes_all else upright[index])
                copied.append(name)
        uploads.finish()
        return copied

    @property
    def number_types(self) -> set[str]:
        """The types of the numbers that the files hold, as files name them, in tensors that `names` knows."""
        return {tensor.get_dtype() for _, tensor, _ in self._tensors({})}

    @property
    def is_empty(self) -> bool:
        """Whether the files hold no tensor that `names` knows."""
        return next(self._tensors({}), None) is None

    def has_own_head(self, head: str, embedding: str) -> bool:
        """Return whether the files hold an output projection unlike the embedding. Arguments: the two tensors' names"""
        wanted: Shapes = {head: (), embedding: ()}
        found = {name: tensor for name, tensor, _ in self._tensors(wanted) if name in (head, embedding)}
        return len(found) == 2 and not torch.equal(found[head][:], found[embedding][:])

    def _tensors(self, wanted: Shapes) -> Iterator[tuple[str, Any, Path]]:
        """Yield each tensor's name in the table, a slice object that reads it lazily, and its file.

        wanted: the tensors in the table: a GGUF file names tensors otherwise than any table does
        """
        if isinstance(self._files, GgufFiles):
            yield from self._files.tensors(wanted, self.names.stored_name)
            return
        for name, tensor, file in self._files.tensors():
            known = self.names.known_name(name)
            if known is not None and isinstance(tensor, BnbMatrix):  # upright, also where others are turned
                parts = tensor.parts(known, in_bits=f"{known}{CODES}" in wanted)
                yield from ((own, part, file) for own, part in parts.items())
            elif known is not None:
                yield known, _TurnedMatrix(tensor) if self.names.is_turned(known) else tensor, file


def _stored_bytes(tensor: Any, shard: Shard) -> int:
    """Return how many bytes of a tensor fill a shard's target."""
    if isinstance(tensor, GgufPart):
        return tensor.num_bytes(... if shard.takes_all else shard.index)
    return math.prod(shard.target.shape) * DTYPES[tensor.get_dtype()].itemsize


def _shapes(table: Table) -> Shapes:
    return {name: shards[0].stored_shape for name, shards in table.items()}


def _upright(tensor: Any, shard: Shard) -> Any:
    """Return what reads a tensor as Shard.upright views it. tensor: a slice object of safetensors"""
    stack = _Stacked(tensor, shard.shape[0]) if shard.is_flat else tensor
    return _Turned(stack) if shard.is_turned(stack.get_shape()) else stack


class _Stacked:
    """Reads a matrix in a file as a stack of matrices, the rows of one after those of another."""

    def __init__(self, matrix: Any, count: int) -> None:
        """matrix: a slice object of safetensors; count: of the stack's matrices"""
        self._matrix, self._count = matrix, count

    def get_shape(self) -> list[int]:
        """Return the shape of the stack."""
        rows, columns = self._matrix.get_shape()
        return [self._count, rows // self._count, columns]

    def __getitem__(self, index: tuple[Any, ...]) -> Tensor:
        entry, rows, columns = index
        start, stop, _ = rows.indices(self.get_shape()[1])
        first = entry * self.get_shape()[1]
        matrix: Tensor = self._matrix[first + start : first + stop, columns]
        return matrix


class _Turned:
    """Reads a stack in a file as if each of its matrices were the other way round."""

    def __init__(self, stack: Any) -> None:
        """stack: a slice object of safetensors"""
        self._stack = stack

    def __getitem__(self, index: tuple[slice | int, ...]) -> Tensor:
        entry, rows, columns = index
        matrix: Tensor = self._stack[entry, columns, rows]
        return matrix.mT


class _TurnedMatrix:
    """Reads a matrix in a file as if it were the other way round."""

    def __init__(self, matrix: Any) -> None:
        """matrix: a slice object of safetensors"""
        self._matrix = matrix

    def get_shape(self) -> list[int]:
        """Return the shape the other way round."""
        return list(reversed(self._matrix.get_shape()))

    def get_dtype(self) -> str:
        """Return the type of the numbers, as the file names it."""
        return str(self._matrix.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        if index is not ...:
            rows, columns = index
            index = columns, rows
        matrix: Tensor = self._matrix[index]
        return matrix.mT


class TensorSource:
    """A trainer's tensors, from any iterable of names and tensors: the names and shapes are those of the checkpoint.

    holds_tensors: they all are there at once, as in a list; an iterator may give one memory again and again
    is_partial: tensors may be missing
    what: the argument that the user gave them as, which begins the messages of errors
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
        partial: bool = False,
        names: Names = NOTHING,
        may_be_empty: bool = False,
        argument: str = "named_tensors",
    ) -> None:
        """partial: tensors may be missing, and with may_be_empty all of them

        names, argument: as for FileSource
        """
        self.what = argument
        self.holds_tensors = type(named_tensors) in (list, tuple, dict, OrderedDict)
        if isinstance(named_tensors, Mapping):
            named_tensors = named_tensors.items()
        try:
            self._pairs = iter(named_tensors)
        except TypeError:
            raise ValueError(f"{argument}={short(named_tensors)}: {NEEDED}") from None
        self.is_partial = partial
        self._names = names
        self._may_be_empty = may_be_empty

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name in the table and the tensor as they come; if they all are there, bitsandbytes' as its parts.

        Raises ValueError for what is no tensor, and in the end for a part in which there was none.
        """
        yield from split(self._known_pairs(), self.what) if self.holds_tensors else self._known_pairs()

    def _known_pairs(self) -> Iterator[tuple[str, Tensor]]:
        are_there = False
        for pair in self._pairs:
            are_there = True
            name, tensor = _name_and_tensor(pair, self.what)
            known = self._names.known_name(name)
            if known is not None:
                is_turned = self._names.is_turned(known) and tensor.dim() == 2 and tensor.is_floating_point()
                yield known, tensor.mT if is_turned else tensor  # integers are bitsandbytes', which are upright
            del pair, tensor  # so that they can go before the next ones come
        if self.is_partial and not (are_there or self._may_be_empty):
            raise ValueError(f"{self.what}: has no tensor; a generator gives its tensors only once")

    def tensors(self, table: Table) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor and its name in the table as it comes, if it fits; raises ValueError if not.

        In the end, raises ValueError, naming them, if tensors other than constants are missing.
        """
        roll = Roll(table, f"{self.what} do not fit the model", is_update=True)
        for name, tensor in self.pairs():
            if roll.tick(name, tensor.shape, _dtype_name(tensor.dtype), self.what):
                yield name, table[name][0].upright(tensor)
            else:
                roll.check_names()
            del tensor  # so that it can go before the next one comes
        roll.check(whole=not self.is_partial, with_constants=False)


def _drawn_bytes(target: Target) -> int:
    """Return how many bytes of random numbers fill a target; those of one that is no tensor are rounded afterwards."""
    own = target.target if isinstance(target, Away) else target
    dtype = own.dtype if isinstance(own, Tensor) else torch.get_default_dtype()
    return math.prod(target.shape) * dtype.itemsize


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name_and_tensor(pair: Any, what: str) -> tuple[str, Tensor]:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise ValueError(f"{what} has {short(pair)}: {NEEDED}")
    name, tensor = pair
    if not (isinstance(name, str) and isinstance(tensor, Tensor)):
        raise ValueError(f"{what} has {short(pair)}: {NEEDED}")
    if _is_distributed(tensor):
        raise ValueError(f"{what}: {name} is a DTensor, split over processes: pass its full_tensor()")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{what}: {name} has no numbers to copy: its layout is {layout}, on {tensor.device}")
    return name, tensor.detach() if tensor.requires_grad else tensor


def _is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Whoever has one has imported its module, which takes most of a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
