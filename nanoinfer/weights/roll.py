"""Roll: the list of a table's tensors, on which each is ticked off as it comes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Set
from heapq import nsmallest

import torch

from nanoinfer.weights.shards import FLOATS, Shard, Table

DTYPES = {  # as files name them
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
FILE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
COMPUTED = (
    "rotary_emb.inv_freq",
    ".input_scale",
    ".input_global_scale",
)  # tensors that some checkpoints store and no model reads
GUESSING = ("mtp.", "model.mtp_")  # begin the names of what guesses the tokens after the next one: no model runs it
NUMBER = re.compile(r"\d+")
MOST_NAMES = 5  # in an error message


class Roll:
    """Each tensor of a table may come once, and in the end none may be missing.

    come: the names of the tensors that have come, in their order
    """

    def __init__(self, table: Table, source: str, is_update: bool) -> None:
        """source: where the tensors come from, which begins the messages

        is_update: they change a model that has weights; else they are the checkpoint that it is made from
        """
        self.come: dict[str, None] = {}
        self._table = table
        self._source = source
        self._is_update = is_update
        self._refused: list[str] = []  # why tensors of a checkpoint cannot be taken
        self._in_others: set[str] = set()  # tensors that need not come any more
        self._needed: dict[str, None] = {}  # by tensors whose numbers are no floats
        self._unknown: list[str] = []
        self._twice: list[str] = []

    def tick(self, name: str, shape: Iterable[int], dtype: str, place: str) -> bool:
        """Tick a tensor off; returns whether it is to be read.

        place: where the tensor was found
        Raises ValueError if its shape or its dtype is wrong. `check` raises it for a tensor that is unknown, or twice.
        """
        shards = self._table.get(name)
        if shards is None:
            if not (name.endswith(COMPUTED) or name.startswith(GUESSING)):
                self._unknown.append(name)
            return False
        is_other, replaced = shards[0].is_another_form, shards[0].replaces
        if name in self.come or name in self._in_others or (is_other and self.come.keys() & replaced):
            self._twice.append(name)
            return False
        if shards[0].refusal:
            raise ValueError(f"{place}: {name}: {shards[0].refusal}")
        if shards[0].only_updates and not self._is_update:
            self._refused.append(f"{place}: {name}: {shards[0].only_updates}")
        self._check_dtype(shards[0], dtype, place)
        if not _fits(shards[0], tuple(shape)):
            raise ValueError(
                f"{place}: {name} has shape {list(shape)}, but the model needs {list(shards[0].stored_shape)}"
            )
        self.come[name] = None
        if is_other:
            self._in_others.update(replaced)
        return True

    def _check_dtype(self, shard: Shard, dtype: str, place: str) -> None:
        known = DTYPES.get(dtype) or getattr(torch, dtype, None)
        if known not in shard.dtypes:
            expected = ", ".join(sorted(FILE_NAMES[one] for one in shard.dtypes))
            raise ValueError(f"{place}: {shard.name} has numbers of type {dtype}: must be one of {expected}")
        if known not in FLOATS:
            self._needed.update(dict.fromkeys(shard.needs))

    def check(self, whole: bool = False, with_constants: bool = True) -> None:
        """Raise ValueError if a tensor was unknown, came twice, or has no scales; with `whole`, if one is missing.

        with_constants: constants must not be missing, either
        """
        scales = self._needed.keys() - self.come.keys()
        others = needed(self._table) - (frozenset() if with_constants else constants(self._table))
        self._raise_if(sorted(scales | (others - met_by(self._table, self.come)) if whole else scales))

    def check_names(self) -> None:
        """Raise ValueError if a tensor was unknown, or came twice."""
        self._raise_if([])

    def _raise_if(self, missing: list[str]) -> None:
        if missing or self._unknown or self._twice:
            like = names_like(self._unknown, self._table)
            raise ValueError(
                f"{self._source}:{_list('missing', missing)}{_list('unknown', self._unknown)}"
                f"{_list('known names like that', like)}{_list('stored twice', sorted(self._twice))}"
            )
        if self._refused:
            raise ValueError(self._refused[0])


def names_like(unknown: list[str], known: Collection[str]) -> list[str]:
    """Return the known names that are most like the unknown ones, with these ones' numbers of layers and experts.

    There are few kinds of names, if numbers do not count, so that the search is short.
    """
    kinds = {NUMBER.sub("{}", name): name for name in known}
    found: list[str] = []
    for name in unknown[:MOST_NAMES]:
        for kind in difflib.get_close_matches(NUMBER.sub("{}", name), kinds, n=1):
            numbers = NUMBER.findall(name)
            ours = kind.format(*numbers) if kind.count("{}") == len(numbers) else ""
            found.append(ours if ours in known else kinds[kind])
    return list(dict.fromkeys(found))


def _fits(shard: Shard, shape: tuple[int, ...]) -> bool:
    return shape == shard.stored_shape or shard.is_turned(shape) or (shard.shape == (1,) and shape == ())


def needed(table: Table) -> frozenset[str]:
    """Return the names of the tensors that must come, or others in their place."""
    return frozenset(name for name, (first, *_) in table.items() if not (first.replaces or first.optional))


def constants(table: Table) -> frozenset[str]:
    """Return the names of the constants, see Shard."""
    return frozenset(name for name, (first, *_) in table.items() if first.is_constant)


def met_by(table: Table, come: Iterable[str]) -> set[str]:
    """Return the names of tensors that need not come any more: those that have come, and those that they replace."""
    return {met for name in come for met in (name, *table[name][0].replaces)}


def listed(names: Set[str]) -> str:
    """Return the first names of a set in alphabetical order, and how many there are beside them."""
    return _listed(nsmallest(MOST_NAMES, names), len(names))


def _listed(names: list[str], count: int) -> str:
    rest = f" and {count - MOST_NAMES} more" if count > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{rest}"


def _list(kind: str, names: list[str]) -> str:
    return f" {kind}: {_listed(names, len(names))}." if names else ""
