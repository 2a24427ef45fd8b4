"""Slots: where adapters lie on this rank's device, one beside the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.weights.adapters.bases import Base
from nanoinfer.weights.adapters.low_rank import Adapter
from nanoinfer.weights.shards import Section


class _PartOfSlot(NamedTuple):
    """What a slot has for one part of its base: rows of a, [rank, inputs], and for each section rows of b."""

    module: str
    a: Tensor
    b: list[tuple[Section, Tensor]]


class _Slot(NamedTuple):
    """One slot of a base, as views."""

    a: Tensor
    b: Tensor
    parts: list[_PartOfSlot]


@dataclass(frozen=True)
class Slots:
    """The slots of one base: a, [slots, parts * rank, inputs], and b, [slots, outputs, rank]."""

    base: Base
    a: Tensor
    b: Tensor
    _kept: dict[int, _Slot] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def make(cls, base: Base, slots: int, rank: int) -> Slots:
        """Make empty ones, of torch's default dtype on its default device. rank: a slot's, from slot_rank"""
        a, b = (torch.empty(slots, *shape).zero_() for shape in base.shapes(rank))
        return cls(base, a, b)

    @classmethod
    def make_alike(cls, bases: Sequence[Base], slots: int, rank: int) -> tuple[list[Slots], Tensor, Tensor]:
        """Make empty ones of bases of one shape, such as experts; rank: as for make.

        Returns also a and b of all, one base's slots after another's: [bases * slots, ...]
        """
        a, b = (torch.empty(len(bases) * slots, *shape).zero_() for shape in bases[0].shapes(rank))
        each = zip(bases, a.split(slots), b.split(slots), strict=True)
        return [cls(*own) for own in each], a, b

    def of(self, slot: int) -> _Slot:
        """Return a slot. Its views are kept until another's are made: a trainer writes one slot again and again."""
        if slot not in self._kept:
            self._kept.clear()
            self._kept[slot] = self._view(slot)
        return self._kept[slot]

    def _view(self, slot: int) -> _Slot:
        a, b, parts = self.a[slot], self.b[slot], self.base.parts
        rows_of_a = a.split(self.b.shape[2])
        sections = ([(section, b[rows]) for section, rows in part.sections] for part in parts)
        modules = (part.module for part in parts)
        return _Slot(a, b, [_PartOfSlot(*own) for own in zip(modules, rows_of_a, sections, strict=True)])

    def copies_to_a(self, adapter: Adapter, slot: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of a that an adapter writes in a slot, and what fills them."""
        whole, columns = self.b.shape[2], self.base.columns
        for module, rows, _ in self.of(slot).parts:
            if (update := adapter.get(module)) is not None:
                a, rank = update.a, update.rank
                assert rank <= whole
                yield rows if rank == whole else rows[:rank], a if a.shape[1] == self.base.inputs else a[:, columns]

    def copies_to_b(self, adapter: Adapter, slot: int) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield the same of b, with the factor of what fills it."""
        whole = self.b.shape[2]
        for module, _, sections in self.of(slot).parts:
            if (update := adapter.get(module)) is not None:
                rank, b = update.rank, update.b
                for section, rows in sections:
                    is_all = section.dim == 1 or section.rows == b.shape[0]
                    source = b if is_all else b.narrow(0, section.start, section.rows)
                    yield rows if rank == whole else rows[:, :rank], source, update.scale


@torch.inference_mode()
def clear(slot: int, slots: Sequence[Slots]) -> None:
    """Take what a slot holds out of it: it adds nothing then."""
    torch._foreach_zero_([one for of_base in slots for one in of_base.of(slot)[:2]])


@torch.inference_mode()
def write(adapter: Adapter, slot: int, slots: Sequence[Slots]) -> None:
    """Write this rank's share of an adapter into a slot, in place of what was there.

    slots: of all bases. The adapter's ranks are at most theirs. b is scaled in float32, and rounded once
    """
    to_a = [copy for of_base in slots for copy in of_base.copies_to_a(adapter, slot)]
    scaled = _scale([copy for of_base in slots for copy in of_base.copies_to_b(adapter, slot)])
    clear(slot, slots)  # only now: if there was no memory to scale in, the slot has what it had
    for copies in (to_a, scaled):
        if copies:
            targets, sources = zip(*copies, strict=True)
            torch._foreach_copy_(list(targets), list(sources))


def _scale(copies: list[tuple[Tensor, Tensor, float]]) -> list[tuple[Tensor, Tensor]]:
    """Multiply what fills each target by its factor, in float32, on the targets' device; rounded once or not at all."""
    if not copies:
        return []
    targets, sources, factors = map(list, zip(*copies, strict=True))
    if all(map(_can_scale, sources, targets)):
        return list(zip(targets, torch._foreach_mul(sources, factors), strict=True))
    sizes = [target.numel() for target in targets]
    memory = torch.empty(sum(sizes), dtype=torch.float32, device=targets[0].device).split(sizes)
    scaled = [numbers.view_as(target) for numbers, target in zip(memory, targets, strict=True)]
    torch._foreach_copy_(scaled, sources)
    torch._foreach_mul_(scaled, factors)
    return list(zip(targets, scaled, strict=True))


def _can_scale(source: Tensor, target: Tensor) -> bool:
    """Whether a product in the source's dtype, which torch computes in float32, is not rounded more than a target's."""
    return source.device == target.device and source.dtype in (target.dtype, torch.float32)
