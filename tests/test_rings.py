"""Tokens beside states: steps that verify guesses, chunks that begin behind a boundary, and boundaries that move on."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

import pytest
import test_delta
import test_mamba
import torch
from conftest import DEVICE
from test_delta import DTYPES, STALE, assert_near, chunks_of, ints, rows_of
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks
from nanoinfer.kernels.delta.convolution import (
    convolve_chunks_reference,
    convolve_chunks_triton,
    convolve_rows_reference,
    convolve_rows_triton,
)
from nanoinfer.kernels.delta.decode import delta_rows_reference, delta_rows_triton
from nanoinfer.kernels.delta.prefill import delta_chunks_reference, delta_chunks_triton
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.mamba.decode import mamba_rows_reference, mamba_rows_triton
from nanoinfer.kernels.mamba.prefill import mamba_chunks_reference, mamba_chunks_triton
from nanoinfer.kernels.states.boundaries import begin_rows, begin_rows_reference, begin_rows_triton
from nanoinfer.kernels.states.fold import fold_tails_reference, fold_tails_triton
from nanoinfer.kernels.states.memory import StateRows

MOST = 3  # guesses of a row


class Layer:
    """A layer with slots, on the device of its functions: of chunks' convolutions, of chunks, of rows, and of tails."""

    functions: ClassVar[dict[str, tuple[Any, ...]]]

    def __init__(self, dtype: torch.dtype, used: str) -> None:
        self.device = DEVICE if used == "kernels" else "cpu"
        self.convolve, self.in_chunks, self.in_rows, self.fold = self.functions[used]
        self.plain = self.make(dtype)
        self.own = self.copy()
        self.boundaries = torch.full((8,), 7, dtype=torch.int32, device=self.device)

    def make(self, dtype: torch.dtype) -> Any:
        raise NotImplementedError

    def copy(self) -> Any:
        raise NotImplementedError

    def expected(self, parts: list[Tensor]) -> Tensor:
        """What each token of a sequence is answered, as the recurrence is defined, in float64."""
        raise NotImplementedError

    def convolved(self, x: Tensor, chunks: Chunks) -> Tensor:
        out: Tensor = self.own.convolve(self.convolve, x, chunks)
        return out

    def prefill(self, parts: list[Tensor], chunks: Chunks) -> Tensor:
        """Compute a prefill step's tokens, behind tails that may begin it."""
        x, *rest = (part.to(self.device) for part in parts)
        if chunks.may_fold:
            self.fold(self.own.recurrence, chunks)
        out: Tensor = self.own.chunks(self.in_chunks, self.convolved(x, chunks), *rest, chunks)
        return out

    def step(self, parts: list[Tensor], slots: list[int], positions: list[int], counts: list[int]) -> Tensor:
        """Compute a decode step; positions: of rows, whose guesses stand behind all rows."""
        tokens = positions + [at + 1 + j for at, count in zip(positions, counts, strict=True) for j in range(count)]
        first = [sum(counts[:row]) for row in range(len(counts))]
        rows, at, begins, each = (ints(*x).to(self.device) for x in (slots, tokens, first, counts))
        own, boundaries = begin_rows(rows, at[: len(slots)], self.boundaries)
        guessed = (begins, each, MOST) if sum(counts) else ()
        launch_in_between(torch.device(self.device))
        moved = (part.to(self.device) for part in parts)
        out: Tensor = self.own.rows(self.in_rows, *moved, StateRows(own, at, boundaries, *guessed))
        return out


class Delta(Layer):
    functions: ClassVar = {
        "references": (convolve_chunks_reference, delta_chunks_reference, delta_rows_reference, fold_tails_reference),
        "kernels": (convolve_chunks_triton, delta_chunks_triton, delta_rows_triton, fold_tails_triton),
    }

    def make(self, dtype: torch.dtype) -> test_delta.Layer:
        return test_delta.Layer((1, 2, 24, 40), dtype=dtype, guesses=MOST)

    def copy(self) -> test_delta.Layer:
        layer = self.plain.copy(self.device)
        layer.convolve = lambda function, x, chunks: function(x, layer.weight, layer.inputs, chunks, True)
        return layer

    def expected(self, parts: list[Tensor]) -> Tensor:
        x, *rest = parts
        convolved = test_delta.convolved(x.float(), self.plain.weight.float(), True).to(x.dtype)
        return test_delta.recur(self.plain, convolved, *rest)[0]


class Mamba(Layer):
    functions: ClassVar = {
        "references": (convolve_chunks_reference, mamba_chunks_reference, mamba_rows_reference, fold_tails_reference),
        "kernels": (convolve_chunks_triton, mamba_chunks_triton, mamba_rows_triton, fold_tails_triton),
    }

    def make(self, dtype: torch.dtype) -> test_mamba.Layer:
        return test_mamba.Layer((2, 12, 1, 24), dtype, guesses=MOST)

    def copy(self) -> test_mamba.Layer:
        return self.plain.on(self.device)

    def expected(self, parts: list[Tensor]) -> Tensor:
        x, dt = parts
        layer = self.plain.on("cpu")
        convolved = layer.convolve(convolve_chunks_reference, x, chunks_of((0, len(x)), initial=[-1], final=[-1]))
        return test_mamba.recur(layer, convolved, dt, layer.matrices[0].double() * 0)[0]


KINDS = [Delta, Mamba]
EACH = [
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("used", ["references", "kernels"]),
    pytest.mark.parametrize("dtype", DTYPES),
]


def each_kind(test: Any) -> Any:
    for mark in EACH:
        test = mark(test)
    return test


def joined(pieces: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(list(parts)) for parts in zip(*pieces, strict=True)]


@each_kind
def test_guesses_that_fail_leave_nothing(kind: type[Layer], used: str, dtype: torch.dtype) -> None:
    """Rows go through boundaries with guesses, of which some hold, beside an empty row; others are noise."""
    torch.manual_seed(0)
    random, layer, ends = Random(1), kind(dtype, used), [60, 121]
    most = 14 if used == "kernels" else 24
    texts = [list(layer.plain.draw(end + most + MOST)) for end in ends]
    wanted = [layer.expected(parts) for parts in texts]
    for slot, (end, parts) in enumerate(zip(ends, texts, strict=True)):
        begun = chunks_of((0, end), initial=[-1], final=[slot], device=layer.device)
        assert_near(layer.prefill([part[:end] for part in parts], begun), wanted[slot][:end], dtype)
        layer.boundaries[slot] = end // CHUNK * CHUNK
    positions = list(ends)
    while max(at - end for at, end in zip(positions, ends, strict=True)) < most:
        counts = [random.randrange(MOST + 1) for _ in ends]
        held = [random.randrange(count + 1) for count in counts]
        last = [[part[at : at + 1] for part in parts] for at, parts in zip(positions, texts, strict=True)]
        guesses = [
            [part[at + 1 + j : at + 2 + j] for part in parts] if j < holds else list(layer.plain.draw(1))
            for at, parts, count, holds in zip(positions, texts, counts, held, strict=True)
            for j in range(count)
        ]
        noise = list(layer.plain.draw(1))
        rows = [last[0], noise, last[1]]
        out = layer.step(
            joined(rows + guesses), [0, -1, 1], [positions[0], -1, positions[1]], [counts[0], 0, counts[1]]
        )
        first = 3
        for row, (at, count, holds) in enumerate(zip(positions, counts, held, strict=True)):
            places = [2 * row, *range(first, first + holds)]
            assert_near(out[places], wanted[row][at : at + 1 + holds], dtype)
            first += count
            positions[row] += 1 + holds
    assert layer.boundaries[:2].ge(CHUNK).all()


@each_kind
def test_chunks_begin_behind_tokens_that_stand_beside_a_state(kind: type[Layer], used: str, dtype: torch.dtype) -> None:
    """In the slot of those before them, and in another, as one that follows. A row goes on from there."""
    torch.manual_seed(0)
    layer = kind(dtype, used)
    text = list(layer.plain.draw(166))
    wanted = layer.expected(text)

    def part(start: int, end: int) -> list[Tensor]:
        return [tokens[start:end] for tokens in text]

    layer.prefill(part(0, 100), chunks_of((0, 100), initial=[-1], final=[0], device=layer.device))
    where = {"initial": [0], "boundaries": [64], "device": layer.device}
    before = [kept[0].clone() for kept in (layer.own.inputs, *layer.own.recurrence)]
    out = layer.prefill(part(100, 163), chunks_of((100, 163), **where, final=[1]))
    assert_near(out, wanted[100:163], dtype)
    assert all(kept[0].equal(own) for kept, own in zip((layer.own.inputs, *layer.own.recurrence), before, strict=True))
    assert_near(layer.prefill(part(100, 101), chunks_of((100, 101), **where, final=[0])), wanted[100:101], dtype)
    layer.boundaries[:2] = 100
    for t in range(163, 166):  # the second one folds
        out = layer.step(joined([part(t - 62, t - 61), part(t, t + 1)]), [0, 1], [t - 62, t], [0, 0])
        assert_near(out, torch.stack([wanted[t - 62], wanted[t]]), dtype)
    assert layer.boundaries[:2].tolist() == [100, 164]


@pytest.mark.parametrize("used", ["references", "kernels"])
def test_a_tail_may_be_longer_than_a_chunk(used: str) -> None:
    """Guesses that have held may have brought more tokens before the next step, which would have folded."""
    torch.manual_seed(0)
    layer = Delta(torch.float32, used)
    text = list(layer.plain.draw(80))
    wanted = layer.expected(text)
    layer.prefill([part[:63] for part in text], chunks_of((0, 63), initial=[-1], final=[0], device=layer.device))
    layer.boundaries[0] = 0
    assert_near(layer.step([part[63:67] for part in text], [0], [63], [MOST]), wanted[63:67])
    assert layer.boundaries[0] == 0
    behind = chunks_of((67, 80), initial=[0], final=[2], boundaries=[0], device=layer.device)
    assert_near(layer.prefill([part[67:] for part in text], behind), wanted[67:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 4])
def test_a_convolution_of_guesses(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = test_delta.Layer((1, 1, 8, 8), dtype=dtype, width=width, guesses=MOST)
    x, random, at = layer.draw(60)[0], Random(2), 1
    wanted = test_delta.convolved(x.float(), layer.weight.float(), False)
    layers = [(layer, "cpu", convolve_rows_reference), (layer.copy(DEVICE), DEVICE, convolve_rows_triton)]
    for own, device, function in layers:
        own.convolve(function, x[:1].to(device), rows_of([3], [0], device=device), False)
    while at < 50:
        count = random.randrange(MOST + 1)
        held = random.randrange(count + 1)
        tokens = torch.cat([torch.full_like(x[:1], STALE), x[at : at + 1 + held], layer.draw(count - held)[0]])
        for own, device, function in layers:
            numbers = [-1, 3], [-1, at, *range(at + 1, at + 1 + count)], [0, 0], [0, 0], [0, count]
            rows = StateRows(*(ints(*x).to(device) for x in numbers), MOST)
            launch_in_between(own.inputs.device)
            out = own.convolve(function, tokens.to(device), rows, False)
            assert_near(out[1 : 2 + held], wanted[at : at + 1 + held], dtype)
        at += 1 + held


def test_boundaries_move_on() -> None:
    """Of rows that have CHUNK tokens beside their matrices; empty ones, and those that compute nothing, are left."""
    slots, positions = ints(4, -1, 2, 0, 3, *range(5, 305)), ints(63, 70, 64, -1, 200, *[77] * 300)
    before = torch.arange(305, dtype=torch.int32) % 3 * 10
    ours, expected = before.clone().to(DEVICE), before.clone()
    own, boundaries = begin_rows_reference(slots, positions, expected)
    assert own[:5].tolist() == [4, -1, 2, -1, 3]
    assert boundaries[own >= 0].equal(before[own[own >= 0].long()])
    assert (expected - before).tolist()[:5] == [0, 0, 0, 64, 0]
    assert (expected - before)[5:].tolist() == [64 * (int(at) <= 13) for at in before[5:]]
    launched = begin_rows_triton(slots.to(DEVICE), positions.to(DEVICE), ours)
    assert launched[0].cpu().equal(own)
    assert launched[1].cpu()[own >= 0].equal(boundaries[own >= 0])
    assert ours.cpu().equal(expected)
