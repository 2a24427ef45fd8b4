"""Which tensors of a checkpoint fill a GroupStore, and how a rank slices them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors
from nanoinfer.weights.formats.groups.fields import OF_GROUPS, Field
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.parts import Expected, ExpectedShape, Part, Rounded
from nanoinfer.weights.formats.groups.store import GroupStore, rows_and_inputs
from nanoinfer.weights.shards import Section, Shard, rows_of

REFUSAL = "weights in {} cannot be rounded from others: they must come as checkpoints in that format have them"
ONLY_UPDATES = (
    "its numbers are plain, but the model's config says that they are in {}; name its module in the config among those"
    " that are not quantized"
)


def shards_of(store: GroupStore) -> Iterator[Shard]:
    """Yield the shards of a store: of its layout's fields, and of plain weights, which are rounded, or refused."""
    layout = store.layout
    for number, part in enumerate(rounded_parts(store)):
        section = store.sections[number]
        names = stored_names(layout, f"{section.name}.")
        for field in layout.fields:
            yield _shard_of(store, field, f"{section.name}.", section, part.first, number)
        if f"{section.name}.weight" not in names:
            name, start = f"{section.name}.weight", part.start(section.dim)
            plain = Shard(name, part, section.shape, start, section.dim, replaces=names)
            yield of_plain(plain.within(section.part), store)


def of_plain(shard: Shard, store: GroupStore) -> Shard:
    """Return the shard of a plain tensor with the reasons not to take it, if the checkpoint is in another format."""
    if not store.layout.fields:
        return shard
    if not store.layout.rounds:
        return replace(shard, refusal=REFUSAL.format(store.label))
    return replace(shard, only_updates=ONLY_UPDATES.format(store.label))


def paired_shards(
    gate_up: GroupStore, down: GroupStore, tensors: ExpertTensors, sizes: ExpertSizes, dim: int
) -> Iterator[Shard]:
    """Yield the shards of paired stacks, in few bits if they are stored so, and of plain ones, which are rounded.

    dim: that in which ranks split downs
    """
    ((gate_up_name, down_name),) = tensors.stacks
    gates_and_ups = Stack(gate_up_name, (sizes.count, 2 * sizes.size, sizes.hidden_size), step=2)
    for number, part in enumerate(rounded_parts(gate_up)):
        yield from _stack_shards(gates_and_ups, part, number, number // 2, 2 * sizes.start + number % 2)
    downs = Stack(down_name, (sizes.count, sizes.hidden_size, sizes.size), dim)
    for number, part in enumerate(rounded_parts(down)):
        yield from _stack_shards(downs, part, number, number)


@dataclass(frozen=True)
class Stack:
    """A stack of experts' matrices: its name, its shape if it is plain and upright, and how a rank slices it."""

    name: str
    shape: tuple[int, int, int]
    dim: int = 0
    step: int = 1


def _stack_shards(stack: Stack, part: Rounded, number: int, entry: int, start: int | None = None) -> Iterator[Shard]:
    """Yield the shards of a section, which is of one entry.

    start: where it begins; None: where the section does in its matrix
    """
    store, (count, *shape) = part.store, stack.shape
    section = replace(store.sections[number], shape=(shape[0], shape[1]))
    for field in store.layout.fields if store.layout.stacked else ():
        shard = _shard_of(store, field, stack.name, section, part.first, number)
        begin = shard.start if start is None else start
        yield replace(shard, shape=(count, *shard.shape), start=begin, step=stack.step, entry=entry)
    begin = part.start(stack.dim) if start is None else start
    stored = [stack.name] if store.layout.stacked else [f"{one.name}." for one in store.sections]
    names = tuple(name for prefix in stored for name in stored_names(store.layout, prefix))
    how = begin, stack.dim, stack.step
    plain = Shard(stack.name, part, stack.shape, *how, entry=entry, always_turned=True, replaces=names)
    yield of_plain(plain, store)


def stored_names(layout: Layout, prefix: str) -> tuple[str, ...]:
    """Return the names of the tensors that hold a matrix, of which each begins alike."""
    return tuple(f"{prefix}{field.name}" for field in layout.fields)


def rounded_parts(store: GroupStore) -> list[Rounded]:
    """Return the rows of each section, which round what is written there."""
    parts, group = [], store.own_group
    for section, rows in zip(store.sections, rows_of(store.sections), strict=True):
        own = rows_and_inputs(section, store.in_features)
        end = min(-(-own[1].stop // group) * group, section.shape[1])
        parts.append(Rounded(store, rows.start, own, range(own[1].start // group * group, end)))
    return parts


def _shard_of(store: GroupStore, field: Field, prefix: str, section: Section, first: int, number: int) -> Shard:
    """prefix: of the names; first: the section's first row in the store; number: the section's"""
    name, matrix = f"{prefix}{field.name}", section.whole_shape if field.constant else section.shape
    outputs, inputs = matrix
    steps, dtypes = field.steps(store.own_group), field.dtypes(store.layout.scales)
    shape = field.shape_of(-(-outputs // steps[0]), -(-inputs // steps[1]))
    if field.constant:
        kind = ExpectedShape if field.fills == "shape" else Expected
        expected = kind(store, name, field, torch.Size(shape), matrix)
        return Shard(name, expected, shape, optional=True, dtypes=dtypes)
    own = rows_and_inputs(section, store.in_features)
    if store.order is not None and field.fills in OF_GROUPS:
        own = own[0], range(inputs)
    cover = tuple(range(some.start // step, -(-some.stop // step)) for some, step in zip(own, steps, strict=True))
    part = Part(store, field, number, first, own, (cover[0], cover[1]))
    dim, start = section.dim, cover[section.dim].start
    if field.fills == "factors" or (field.fills == "g_idx" and section.dim == 0):
        dim, start = 0, 0
    elif field.fills == "g_idx":
        dim = 0
    elif field.turned:
        dim = 1 - dim
    needs = tuple(f"{prefix}{other.name}" for other in store.layout.fields if not (other.constant or other == field))
    shard = Shard(name, part, shape, start, dim, dtypes=dtypes, needs=needs if field.fills == "numbers" else ())
    return shard if field.fills == "factors" else shard.within(section.part, field.turned)
