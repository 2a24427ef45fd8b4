"""Adapters of experts, against experts into whose weights an adapter is merged."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from cases.weights import INT4, MXFP4, draw, matrices_of
from conftest import DEVICE, of_each_kind, whole_only
from test_kernels import DTYPES, SHORT, assert_close, randn
from torch import Tensor

from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs
from nanoinfer.kernels.experts.products import expert_mlps_reference, expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.linear.activation import AnyActivation, ClampedSwiGLU, Ungated, rows_per_output
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.in_order.order import Grouping

ALL_DTYPES = list(dict.fromkeys([*DTYPES, SHORT]))
COUNT, USED, HIDDEN, SIZE, RANK, MAX_ADAPTERS = 5, 2, 128, 64, 16, 3  # experts, those of a token, ...
MIXED = [0, -1, 2, 0, -1, 2, 2] * 3
SLOTS = {"mixed": MIXED, "none": [-1] * 5, "one row": [1], "all in one": [2] * 24}


def weights(dtype: torch.dtype, parts: int = 2) -> tuple[Tensor, Tensor]:
    gate_up, down = randn(COUNT, parts * SIZE, HIDDEN, dtype=dtype), randn(COUNT, HIDDEN, SIZE, dtype=dtype)
    return gate_up / HIDDEN**0.5, down / SIZE**0.5


def pairs_of(parts: tuple[int, ...], in_features: int, dtype: torch.dtype) -> Pairs:
    matrices = COUNT * MAX_ADAPTERS
    a, b = randn(matrices, len(parts) * RANK, in_features, dtype=dtype), randn(matrices, sum(parts), RANK, dtype=dtype)
    return Pairs(a / in_features**0.5, b / RANK**0.5, parts)


def make(slots: list[int], dtype: torch.dtype, parts: int = 2) -> tuple[Tensor, Routes, ExpertAdapters]:
    """Return tokens, the experts that they choose, and adapters, which the tokens name."""
    rows = AdapterRows.of(torch.tensor(slots, dtype=torch.int32, device=DEVICE), MAX_ADAPTERS)
    adapters = ExpertAdapters(pairs_of((SIZE,) * parts, HIDDEN, dtype), pairs_of((HIDDEN,), SIZE, dtype), rows)
    tokens = len(slots)
    experts = torch.rand(tokens, COUNT, device=DEVICE).argsort()[:, :USED].int().contiguous()
    return randn(tokens, HIDDEN, dtype=dtype), Routes(experts, torch.rand(tokens, USED, device=DEVICE)), adapters


def merged(weight: Tensor, pairs: Pairs, slot: int) -> Tensor:
    """Add b a of a slot to each expert's matrix, in float32."""
    if slot < 0:
        return weight.float()
    a, b = (every[slot::MAX_ADAPTERS].float() for every in (pairs.a, pairs.b))
    inputs, outputs = a.split(pairs.rank, dim=1), b.split(pairs.parts, dim=1)
    return weight.float() + torch.cat([up @ down for up, down in zip(outputs, inputs, strict=True)], dim=1)


def expected(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor,
    down: Tensor,
    adapters: ExpertAdapters,
    activation: AnyActivation = "silu",
) -> Tensor:
    """What experts give whose weights have each token's adapter merged into them."""
    out, slots = torch.empty(x.shape, device=x.device), adapters.rows.slots
    for slot in slots.unique().tolist():
        own = slots == slot
        both = merged(gate_up, adapters.gate_up, slot), merged(down, adapters.down, slot)
        out[own] = expert_mlps_reference(x[own].float(), Routes(*(part[own] for part in routes)), *both, activation)
    return out


@pytest.mark.parametrize(("dtype", "name"), of_each_kind(product(ALL_DTYPES, SLOTS), *range(1 + len(SLOTS))))
@pytest.mark.parametrize("activation", ["silu", Ungated("relu2")], ids=["gates", "no gates"])
def test_plain_experts(activation: AnyActivation, dtype: torch.dtype, name: str) -> None:
    slots, parts = SLOTS[name], rows_per_output(activation)
    (gate_up, down), (x, routes, adapters) = weights(dtype, parts), make(slots, dtype, parts)
    wanted = expected(x, routes, gate_up, down, adapters, activation)
    multiply = partial(expert_mlps_triton, x, routes, gate_up, down, activation, adapters=adapters)
    assert_close(multiply(), wanted)
    pieces = multiply(in_order=True, may_split=True)
    assert_close(pieces if pieces.dim() == 2 else pieces.float().sum(dim=0).to(dtype), wanted)
    if DEVICE == "cpu" and dtype == torch.float32:
        assert_close(expert_mlps_reference(x, routes, gate_up, down, activation, adapters=adapters), wanted)


@pytest.mark.parametrize("slots", [MIXED, *whole_only([[1]])], ids=lambda slots: f"{len(slots)} rows")
@pytest.mark.parametrize("grouping", [INT4, *whole_only([MXFP4])], ids=str)
def test_experts_in_groups(grouping: Grouping, slots: list[int]) -> None:
    """And what an activation with clamped gates and ups, and biases, make of it."""
    gate_up, down = draw(grouping, COUNT, 2 * SIZE, HIDDEN), draw(grouping, COUNT, HIDDEN, SIZE)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    x, routes, adapters = make(slots, dtype)
    wanted = expected(x, routes, matrices_of(gate_up), matrices_of(down), adapters, ClampedSwiGLU(1.702, 7.0))
    out = expert_mlps_triton(x, routes, gate_up, down, ClampedSwiGLU(1.702, 7.0), adapters=adapters)
    assert_close(out, wanted)


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU multiplies by parts")
@pytest.mark.parametrize("activation", ["silu", Ungated("relu2")], ids=["gates", "no gates"])
def test_experts_in_parts(activation: AnyActivation) -> None:
    above = rows_per_output(activation)
    (gate_up, down), (x, routes, adapters) = weights(torch.float32, above), make(MIXED, torch.float32, above)
    parts = (
        [WeightInParts(weight, [(SIZE, SIZE)] * above) for weight in gate_up],
        [WeightInParts(weight, [(HIDDEN, HIDDEN)]) for weight in down],
    )
    out = expert_mlps_reference(x, routes, *parts, activation, adapters=adapters)
    assert_close(out, expected(x, routes, gate_up, down, adapters, activation))


def test_ranks_that_share_the_outputs() -> None:
    """Each has the outputs of the others: here two ranks are alike."""
    (gate_up, down), (x, routes, adapters) = weights(torch.float32), make(MIXED, torch.float32)
    gates, ups = gate_up.split(SIZE, dim=1)
    half = HIDDEN // 2
    of_rank = replace(
        adapters, down=Pairs(adapters.down.a.repeat(1, 1, 2), adapters.down.b[:, :half].contiguous(), (half,))
    )
    share = gate_up, down.repeat(1, 1, 2)[:, :half].contiguous()
    both = replace(
        adapters,
        gate_up=Pairs(adapters.gate_up.a, twice(adapters.gate_up.b, (SIZE, SIZE)), (2 * SIZE, 2 * SIZE)),
        down=Pairs(of_rank.down.a, twice(of_rank.down.b, (half,)), (HIDDEN,)),
    )
    wanted = expected(x, routes, torch.cat([gates, gates, ups, ups], dim=1), twice(share[1], (half,)), both)
    out = expert_mlps_triton(x, routes, *share, "silu", gather=lambda own: own.repeat(1, 2), adapters=of_rank)
    assert_close(out, wanted)


def twice(rows: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Repeat each part of the rows, [matrices, rows, columns]."""
    return torch.cat([part.repeat(1, 2, 1) for part in rows.split(parts, dim=1)], dim=1)
