"""States with one order of sums: a token's bits are the same in a prompt's chunk, alone, guessed, and on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import test_delta
import test_mamba
import torch
from conftest import DEVICE
from test_delta import SHORT, chunks_of, convolved, ints, recur
from test_mamba import LIMITS
from torch import Tensor

from nanoinfer.kernels.delta.chunks import CHUNK
from nanoinfer.kernels.delta.convolution import convolve_chunks_triton, convolve_rows_triton
from nanoinfer.kernels.delta.in_order import check_delta, delta_in_order
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.mamba.in_order import check_mamba, mamba_in_order
from nanoinfer.kernels.states.boundaries import begin_rows
from nanoinfer.kernels.states.in_order import Cut, Spans, spans_of_chunks, spans_of_rows
from nanoinfer.kernels.states.memory import StateRows, TokenRings, inputs_length, ring_in_order
from nanoinfer.kernels.states.order_check import TOKENS, check_order
from nanoinfer.runner.message import ChunkStates
from nanoinfer.runner.steps.cut_in_order import cut_in_order

SLOTS, STALE = 6, 1e4


class Layer:
    """A layer's slots, in which texts stand: of a rank that has some of the heads."""

    def __init__(self, guesses: int, dtype: torch.dtype, state_dtype: torch.dtype, part: slice) -> None:
        self.guesses, self.ring = guesses, ring_in_order(guesses)
        self.choose(dtype, part)
        sizes = SLOTS, self.ring
        self.inputs = torch.full((SLOTS, inputs_length(4, guesses), len(self.weight)), STALE, dtype=dtype)
        self.rings = TokenRings(
            torch.full((SLOTS, *self.matrix), STALE, dtype=state_dtype),
            torch.full((*sizes, len(self.weight)), STALE, dtype=dtype),
            torch.full((*sizes, self.gates), STALE, dtype=dtype),
        )
        self.boundaries = torch.full((SLOTS,), 7, dtype=torch.int32)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(DEVICE))
        self.rings = TokenRings(*(numbers.to(DEVICE) for numbers in self.rings))

    weight: Tensor
    bias: Tensor | None
    matrix: tuple[int, int, int]
    gates: int

    def choose(self, dtype: torch.dtype, part: slice) -> None:
        """Make the parameters of the heads in this part."""
        raise NotImplementedError

    def texts(self, *lengths: int) -> list[list[Tensor]]:
        """What layers get of the tokens of some texts, of this rank's heads."""
        raise NotImplementedError

    def answer(self, parts: list[Tensor], spans: Any) -> Tensor:
        raise NotImplementedError

    def prefill(self, parts: list[Tensor], *chunks: tuple[int, int, int, int, dict[int, int]]) -> Tensor:
        """Compute a prefill step. chunks: of each, first position, end, source, slot and snapshots"""
        planned = [(start, end, ChunkStates(source, slot, taken)) for start, end, source, slot, taken in chunks]
        cut = Cut(
            *(torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in cut_in_order(planned, self.ring))
        )
        stand = [int(self.boundaries[source]) if source >= 0 else start for start, _, source, _, _ in chunks]
        where = {"initial": [chunk[2] for chunk in chunks], "final": [chunk[3] for chunk in chunks]}
        taken = chunks[0][4]
        own = chunks_of(*(chunk[:2] for chunk in chunks), **where, snapshots=taken, boundaries=stand, device=DEVICE)
        x, *rest = parts
        x = convolve_chunks_triton(x, self.weight, self.inputs, own, True, self.bias)
        out = self.answer([x, *rest], spans_of_chunks(cut, own))
        for _, end, _, slot, taken in chunks:
            self.boundaries[slot] = end // CHUNK * CHUNK
            for position, snapshot in taken.items():
                self.boundaries[snapshot] = position
        return out

    def step(self, parts: list[Tensor], slots: list[int], positions: list[int], counts: list[int]) -> Tensor:
        """Compute a decode step; positions: of rows, whose guesses stand behind all rows."""
        tokens = positions + [at + 1 + j for at, count in zip(positions, counts, strict=True) for j in range(count)]
        first = [sum(counts[:row]) for row in range(len(counts))]
        rows, at, begins, each = (ints(*x).to(DEVICE) for x in (slots, tokens, first, counts))
        own, boundaries = begin_rows(rows, at[: len(slots)], self.boundaries, CHUNK - 1)
        where = StateRows(own, at, boundaries, *((begins, each, self.guesses) if sum(counts) else ()))
        spans = spans_of_rows(where, self.ring)
        launch_in_between(torch.device(DEVICE))
        x, *rest = parts
        return self.answer([convolve_rows_triton(x, self.weight, self.inputs, where, True, self.bias), *rest], spans)


class Delta(Layer):
    HEADS = 4
    KEYS, VALUES = 24, 40

    def choose(self, dtype: torch.dtype, part: slice) -> None:
        torch.manual_seed(0)
        self.part, self.dtype, self.bias = part, dtype, None
        self.plain = test_delta.Layer((self.HEADS, 2 * self.HEADS, self.KEYS, self.VALUES), dtype=dtype, largest=2.0)
        self.values = slice(2 * part.start, 2 * part.stop)
        self.log_decay, self.dt_bias = self.plain.log_decay[self.values], self.plain.dt_bias[self.values]
        self.weight = self.own(self.plain.weight.T).T.contiguous()
        heads = 2 * (part.stop - part.start)
        self.matrix, self.gates = (heads, self.KEYS, self.VALUES), 2 * heads

    def own(self, qkv: Tensor) -> Tensor:
        q, k, v = self.plain.split(qkv)
        return torch.cat([q[:, self.part].flatten(1), k[:, self.part].flatten(1), v[:, self.values].flatten(1)], 1)

    def texts(self, *lengths: int) -> list[list[Tensor]]:
        torch.manual_seed(1)
        drawn = [self.plain.draw(length) for length in lengths]
        return [
            [self.own(qkv).to(DEVICE), a[:, self.values].to(DEVICE), b[:, self.values].to(DEVICE)]
            for qkv, a, b in drawn
        ]

    def answer(self, parts: list[Tensor], spans: Any) -> Tensor:
        return delta_in_order(*parts, self.log_decay, self.dt_bias, self.rings, spans, 2.0)

    def expected(self, parts: list[Tensor]) -> Tensor:
        x, a, b = (part.cpu() for part in parts)
        x = convolved(x.float(), self.plain.weight.float(), True).to(x.dtype)
        return recur(self.plain, x, a, b)[0]


class Mamba(Layer):
    HEADS = 4  # groups, of three heads each

    def choose(self, dtype: torch.dtype, part: slice) -> None:
        torch.manual_seed(0)
        self.part, self.dtype = part, dtype
        self.plain = test_mamba.Layer((3 * self.HEADS, 20, self.HEADS, 24), dtype)
        self.heads = slice(3 * part.start, 3 * part.stop)
        self.log_decay, self.dt_bias = self.plain.log_decay[self.heads], self.plain.dt_bias[self.heads]
        self.skips = self.plain.skips[self.heads]
        self.weight, self.bias = self.own(self.plain.weight.T).T.contiguous(), self.own(self.plain.bias[None])[0]
        heads = self.heads.stop - self.heads.start
        self.matrix, self.gates = (heads, 24, 20), heads

    def own(self, xbc: Tensor) -> Tensor:
        x, b, c = xbc.split([60 * self.HEADS, 24 * self.HEADS, 24 * self.HEADS], dim=1)
        both = (y.unflatten(1, (self.HEADS, 24))[:, self.part].flatten(1) for y in (b, c))
        return torch.cat([x.unflatten(1, (-1, 20))[:, self.heads].flatten(1), *both], 1)

    def texts(self, *lengths: int) -> list[list[Tensor]]:
        torch.manual_seed(1)
        drawn = [self.plain.draw(length) for length in lengths]
        return [[self.own(xbc).to(DEVICE), dt[:, self.heads].to(DEVICE)] for xbc, dt in drawn]

    def answer(self, parts: list[Tensor], spans: Any) -> Tensor:
        return mamba_in_order(*parts, self.log_decay, self.dt_bias, self.skips, self.rings, spans, LIMITS)

    def expected(self, parts: list[Tensor]) -> Tensor:
        x, dt = (part.cpu() for part in parts)
        own = chunks_of((0, len(x)), initial=[-1], final=[-1])
        x = self.plain.convolve(test_mamba.convolve_chunks_reference, x, own)
        return test_mamba.recur(self.plain, x, dt, self.plain.matrices[0].double() * 0)[0]


def taken(text: list[Tensor], start: int, end: int) -> list[Tensor]:
    return [part[start:end] for part in text]


def joined(*pieces: list[Tensor]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def each_kind(test: Any) -> Any:
    states = [(torch.float32, torch.float32), (SHORT, torch.float32), (SHORT, torch.bfloat16)]
    test = pytest.mark.parametrize(("dtype", "state_dtype"), states)(test)
    return pytest.mark.parametrize("kind", [Delta, Mamba])(test)


def layer_of(
    kind: type[Layer], dtypes: tuple[torch.dtype, torch.dtype], guesses: int = 0, part: slice | None = None
) -> Layer:
    return kind(guesses, *dtypes, slice(0, kind.HEADS) if part is None else part)


@each_kind
def test_steps_have_the_bits_of_a_prompt(kind: type[Layer], dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """A text at once, in chunks beside another, and one token a step, from amid a chunk on, beside an empty row."""
    layer = layer_of(kind, (dtype, state_dtype))
    text, other = layer.texts(137, 70)
    whole = layer.prefill(text, (0, 137, -1, 0, {64: 1, 128: 2}))
    error = (whole.double().cpu() - layer.expected(text)).norm() / layer.expected(text).norm()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype] * (
        1 + 9 * (state_dtype != torch.float32)
    )
    outs = [layer.prefill(joined(taken(text, 0, 64), other), (0, 64, -1, 3, {}), (0, 70, -1, 4, {}))[:64]]
    outs.append(layer.prefill(taken(text, 64, 125), (64, 125, 1, 3, {})))
    for at in range(125, 137):
        parts = joined(taken(other, at - 67, at - 66), taken(text, at, at + 1), taken(text, 0, 1))
        outs.append(layer.step(parts, [-1, 3, -1], [-1, at, -1], [0, 0, 0])[1:2])
    assert torch.cat(outs).equal(whole)
    for ring in layer.rings[1:]:
        assert ring[3, :9].equal(ring[0, :9])
    assert layer.rings.matrices[3].equal(layer.rings.matrices[0])
    assert layer.rings.matrices[2].equal(layer.rings.matrices[0])
    assert layer.boundaries[[0, 3]].tolist() == [128, 128]


@each_kind
def test_guesses_have_the_bits_too(kind: type[Layer], dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Some hold, others are noise; rows pass boundaries with them, and a prefill step goes on behind guesses."""
    layer = layer_of(kind, (dtype, state_dtype), guesses=5)
    text, other, noise = layer.texts(150, 150, 40)
    wanted = [layer.prefill(parts, (0, 150, -1, 0, {})) for parts in (text, other)]
    layer.prefill(joined(taken(text, 0, 60), taken(other, 0, 58)), (0, 60, -1, 1, {}), (0, 58, -1, 2, {}))
    at, other_at = 60, 58
    for held, count in [(0, 3), (2, 5), (5, 5), (1, 2), (0, 0)]:
        guessed = joined(taken(text, at + 1, at + 1 + held), taken(noise, 0, count - held))
        parts = joined(
            taken(text, at, at + 1),
            taken(other, other_at, other_at + 1),
            guessed,
            taken(other, other_at + 1, other_at + 3),
        )
        out = layer.step(parts, [1, 2], [at, other_at], [count, 2])
        assert out[0].equal(wanted[0][at])
        assert out[2 : 2 + held].equal(wanted[0][at + 1 : at + 1 + held])
        assert out[[1, -2, -1]].equal(wanted[1][other_at : other_at + 3])
        at, other_at = at + 1 + held, other_at + 3
    rest = joined(taken(text, at, 150), taken(other, other_at, 140))
    out = layer.prefill(rest, (at, 150, 1, 3, {}), (other_at, 140, 2, 2, {}))
    assert out.equal(torch.cat([wanted[0][at:], wanted[1][other_at:140]]))
    assert layer.step(taken(other, 140, 141), [2], [140], [0]).equal(wanted[1][140:141])


@pytest.mark.parametrize("held", [4, 5])
@pytest.mark.parametrize("kind", [Delta, Mamba])
def test_a_prompt_goes_on_behind_guesses_that_filled_a_chunk(kind: type[Layer], held: int) -> None:
    """The matrices still stand a chunk further back, whether the next token begins a chunk or not."""
    layer = layer_of(kind, (SHORT, torch.float32), guesses=5)
    (text,) = layer.texts(90)
    wanted = layer.prefill(text, (0, 90, -1, 0, {}))
    layer.prefill(taken(text, 0, 59), (0, 59, -1, 1, {}))
    layer.step(taken(text, 59, 59 + held + 1), [1], [59], [held])
    end = 59 + held + 1
    assert layer.boundaries[1] == 0
    assert layer.prefill(taken(text, end, 90), (end, 90, 1, 1, {})).equal(wanted[end:])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", [Delta, Mamba])
def test_ranks_have_the_bits_of_one(kind: type[Layer], ranks: int) -> None:
    def compute(part: slice) -> Tensor:
        layer = layer_of(kind, (SHORT, torch.float32), part=part)
        (text,) = layer.texts(68)
        outs = [layer.prefill(taken(text, 0, 66), (0, 66, -1, 0, {}))]
        return torch.cat([*outs, *(layer.step(taken(text, at, at + 1), [0], [at], [0]) for at in (66, 67))])

    size = kind.HEADS // ranks
    parts = [compute(slice(first, first + size)) for first in range(0, kind.HEADS, size)]
    assert torch.cat(parts, 1).equal(compute(slice(0, kind.HEADS)))


class TestTheStart:
    """An LLM compares bits once, and raises where a GPU has others for a token that comes alone."""

    def test_both_rules_pass(self) -> None:
        check_delta(1, 2, 16, 24, 1.0, torch.float32, torch.device(DEVICE))
        check_mamba(1, 2, 16, 24, torch.float32, torch.device(DEVICE))

    def test_other_bits_are_refused(self) -> None:
        def compute(terms: Sequence[Tensor], rings: TokenRings, spans: Spans) -> Tensor:
            return terms[1][:, :, None] + 1e-6 * (len(terms[1]) == 1)

        terms = [torch.zeros(TOKENS, 8, device=DEVICE), torch.ones(TOKENS, 2, device=DEVICE)]
        with pytest.raises(ValueError, match="in another order in prompts than token by token; device='cpu' does not"):
            check_order(compute, terms, (2, 16, 24), 2)
