"""Kernels of adapters against float64, and what a row's company must not change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from conftest import of_each_kind, whole_only
from test_kernels import DEVICE, DTYPES, SHORT, assert_close, randn
from torch import Tensor
from torch.nn import functional as F

from nanoinfer.kernels.adapters.in_order import check_order
from nanoinfer.kernels.adapters.linear import adapted_linear, adapted_norm_linear
from nanoinfer.kernels.adapters.one_row import RowAdapter
from nanoinfer.kernels.adapters.pairs import BLANKS, AdapterRows, Blanks, Pairs
from nanoinfer.kernels.adapters.products import (
    expand_reference,
    expand_triton,
    pieces_for,
    shrink_reference,
    shrink_triton,
)
from nanoinfer.kernels.groups import pack
from nanoinfer.kernels.linear.activation import Activation, Ungated, gate_mul_reference
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.linear.cpu.packed import PackedWeight
from nanoinfer.kernels.linear.dispatch import AnyWeight, linear
from nanoinfer.kernels.linear.groups.linear import GroupLinearWeight
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight
from nanoinfer.kernels.linear.one_row import one_row_linear, one_row_norm_linear
from nanoinfer.kernels.linear.operands.gathered import GatheredWeight
from nanoinfer.kernels.norm.norm import Norm, normalize_reference

ALL_DTYPES = list(dict.fromkeys([*DTYPES, SHORT]))
MAX_ADAPTERS = 4
MIXED = [0, -1, 2, 0, 3, 3, -1, 0, 2] * 3
SLOTS = {"mixed": MIXED, "all in one": [2] * 20, "none": [-1] * 5, "one row": [3]}
SHAPES = [((96,), 96, 16), ((128, 32, 32), 640, 16), ((40, 7, 9), 200, 48), ((300, 300), 1100, 128)]


def pairs_of(parts: tuple[int, ...], in_features: int, rank: int, dtype: torch.dtype) -> Pairs:
    a = randn(MAX_ADAPTERS, len(parts) * rank, in_features, dtype=dtype) / in_features**0.5
    return Pairs(a, randn(MAX_ADAPTERS, sum(parts), rank, dtype=dtype), parts)


def rows_of(slots: list[int]) -> AdapterRows:
    return AdapterRows.of(torch.tensor(slots, dtype=torch.int32, device=DEVICE), MAX_ADAPTERS)


def added(x: Tensor, pairs: Pairs, slots: list[int]) -> Tensor:
    """What adapters add to each row's outputs, as the definition says, in float64."""
    out = torch.zeros(len(x), pairs.b.shape[1], dtype=torch.float64, device=x.device)
    for row, slot in enumerate(slots):
        if slot >= 0:
            h = (pairs.a[slot].double() @ x[row].double()).split(pairs.rank)
            matrices = pairs.b[slot].double().split(pairs.parts)
            out[row] = torch.cat([b @ part for b, part in zip(matrices, h, strict=True)])
    return out


def test_rows_without_an_adapter_come_last() -> None:
    rows = rows_of(MIXED)
    assert [MIXED[row] for row in rows.groups.choices] == [*sorted(slot for slot in MIXED if slot >= 0), *[-1] * 6]
    tiles = rows.groups.tiles.tolist()
    assert [tile for tile in tiles if tile[1] < tile[2]] == [[0, 0, 9], [2, 9, 15], [3, 15, 21], [4, 21, 27]]


@pytest.mark.parametrize(
    ("shape", "name", "dtype"), of_each_kind(product(SHAPES, SLOTS, ALL_DTYPES), 0, 1, 2, 4, 6, 8, 17)
)
def test_products(shape: tuple[tuple[int, ...], int, int], name: str, dtype: torch.dtype) -> None:
    (parts, in_features, rank), slots = shape, SLOTS[name]
    pairs, rows = pairs_of(parts, in_features, rank, dtype), rows_of(slots)
    x, y = randn(len(slots), in_features, dtype=dtype), randn(len(slots), sum(parts), dtype=dtype)
    expected = y.double() + added(x, pairs, slots)
    for shrink, expand in ((shrink_triton, expand_triton), (shrink_reference, expand_reference)):
        out = y.clone()
        assert expand(shrink(x, pairs, rows), pairs, rows, out) is out
        assert_close(out, expected)
        assert torch.equal(out[rows.slots < 0], y[rows.slots < 0])
    h = pieces_for(x, pairs, rows)
    assert shrink_triton(x, pairs, rows, h) is h
    alone = expand_triton(h, pairs, rows)
    assert_close(y + alone, expected)
    assert not alone[rows.slots < 0].any()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "parts", [(70, 70), (140,), (30, 40, 70)], ids=["gates and ups", "one tensor of both", "other parts"]
)
def test_gates_and_ups(parts: tuple[int, ...], activation: Activation) -> None:
    pairs, rows = pairs_of(parts, 96, 16, torch.float32), rows_of(MIXED)
    x, y = randn(len(MIXED), 96), randn(len(MIXED), 140)
    expected = gate_mul_reference(y + added(x, pairs, MIXED).float(), activation)
    for shrink, expand in ((shrink_triton, expand_triton), (shrink_reference, expand_reference)):
        assert_close(expand(shrink(x, pairs, rows), pairs, rows, y.clone(), activation), expected)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among few, and among so many that one program multiplies all inputs, or that tiles are larger."""
    pairs, slots = pairs_of((48, 32), 1100, 16, dtype), (MIXED * 4)[:100]
    x, y = randn(len(slots), 1100, dtype=dtype), randn(len(slots), 80, dtype=dtype)

    def outputs(tokens: int) -> Tensor:
        rows, out = rows_of(slots[:tokens]), y[:tokens].clone()
        h = shrink_triton(x[:tokens], pairs, rows)
        pieces.append(len(h))
        return expand_triton(h, pairs, rows, out)

    pieces: list[int] = []
    monkeypatch.setattr("nanoinfer.kernels.adapters.products.num_multiprocessors", lambda device: 132)
    alone, few, many = outputs(1), outputs(20), outputs(100)
    monkeypatch.setattr("nanoinfer.kernels.adapters.products.num_multiprocessors", lambda device: 1)
    undivided = outputs(100)
    monkeypatch.setattr("nanoinfer.kernels.adapters.pairs.FEW_ROWS", 50)
    wide = outputs(100)
    assert pieces[0] == 3
    assert pieces[-1] == 1
    assert torch.equal(few[:1], alone)
    assert torch.equal(many[:20], few)
    assert torch.equal(undivided, many)
    assert torch.equal(wide, many) or DEVICE == "cpu"  # whose libraries may add up otherwise for other tiles


@pytest.mark.parametrize(
    ("parts", "activation", "slots"),
    [
        pytest.param((300, 70, 9), None, [*range(MAX_ADAPTERS), -1] * 12, id="all-mixed"),
        pytest.param((300, 300), "silu", [-1] * 60, id="gates-none"),
        *whole_only(
            [
                pytest.param((300, 70, 9), None, [-1] * 60, id="all-none"),
                pytest.param((300, 300), "silu", [*range(MAX_ADAPTERS), -1] * 12, id="gates-mixed"),
            ]
        ),
    ],
)
def test_programs_go_over_many_tiles(
    parts: tuple[int, ...], activation: Activation | None, slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computes several blocks of outputs for several tiles of rows, where the device has few multiprocessors."""
    pairs, rows = pairs_of(parts, 96, 16, torch.float32), rows_of(slots)
    x, y = randn(len(slots), 96), randn(len(slots), sum(parts))
    h = shrink_triton(x, pairs, rows)
    expected = expand_triton(h, pairs, rows, y.clone(), activation)
    assert_close(expected, expand_reference(h, pairs, rows, y.clone(), activation))
    for multiprocessors in (1, 132):
        monkeypatch.setattr("nanoinfer.kernels.adapters.products.num_multiprocessors", lambda _, n=multiprocessors: n)
        assert torch.equal(expand_triton(h, pairs, rows, y.clone(), activation), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(
    ("parts", "in_features", "rank"), [*of_each_kind(SHAPES, 0, 1, 2), ((4096, 1024, 1024), 4096, 16)]
)
def test_a_gpu_passes_the_check(parts: tuple[int, ...], in_features: int, rank: int, dtype: torch.dtype) -> None:
    check_order.__wrapped__(in_features, parts, rank, dtype, torch.device(DEVICE))


def test_the_check_compares_tiles_of_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int] = set()

    def check(wrong: int | None) -> None:
        def expand(h: Tensor, pairs: Pairs, rows: AdapterRows) -> Tensor:
            sizes.add(rows.size)
            out = expand_reference(h, pairs, rows, torch.zeros(h.shape[1], sum(pairs.parts), device=DEVICE))
            return out.round(decimals=2) + (rows.size == wrong)

        monkeypatch.setattr("nanoinfer.kernels.adapters.in_order.shrink_triton", shrink_reference)
        monkeypatch.setattr("nanoinfer.kernels.adapters.in_order.expand_triton", expand)
        check_order.__wrapped__(64, (20, 12), 16, torch.float32, torch.device(DEVICE))

    check(None)
    assert sizes == {16, 64}
    for size in sizes:
        with pytest.raises(ValueError, match="products with adapters in other orders"):
            check(size)


@pytest.mark.parametrize(("shape", "slot", "dtype"), of_each_kind(product(SHAPES, [2, -1], ALL_DTYPES), 0, 3, 4, 9))
def test_one_row(shape: tuple[tuple[int, ...], int, int], slot: int, dtype: torch.dtype) -> None:
    parts, in_features, rank = shape
    pairs = pairs_of(parts, in_features, rank, dtype)
    rows = rows_of([slot])
    x, residual = randn(1, in_features, dtype=dtype), randn(1, in_features, dtype=dtype)
    weight, norm = randn(sum(parts), in_features, dtype=dtype), Norm(randn(in_features, dtype=dtype), 1e-6)

    def expected(x: Tensor) -> Tensor:
        return x.double() @ weight.double().T + added(x, pairs, [slot])

    assert_close(one_row_linear(x, weight, of_row=RowAdapter.of(pairs, rows)), expected(x))
    out, total = one_row_norm_linear(x, residual, norm, weight, of_row=RowAdapter.of(pairs, rows))
    assert_close(out, expected(normalize_reference(x + residual, norm)))
    assert torch.equal(total, x + residual)
    out, _ = one_row_norm_linear(x, residual, norm, weight, post=norm, of_row=RowAdapter.of(pairs, rows))
    assert_close(out, expected(normalize_reference(normalize_reference(x, norm) + residual, norm)))


def test_a_negative_zero_is_no_reason_to_wait() -> None:
    pairs, weight = pairs_of((40, 16), 256, 16, torch.float32), randn(56, 256)
    pairs.a.abs_()
    x, of_row = torch.full((1, 256), -0.0, device=DEVICE), RowAdapter.of(pairs, rows_of([0]))
    assert not one_row_linear(x, weight, of_row=of_row).any()


def test_no_room_is_taken_twice() -> None:
    blanks, taken = Blanks(torch.device(DEVICE)), []
    for count in (16, BLANKS - 32, 48, BLANKS + 16, 16):
        room = blanks.take(count)
        assert len(room) == count
        assert torch.equal(room.view(torch.int32), torch.full_like(room, -0.0).view(torch.int32))
        taken.append(room.fill_(1))


@pytest.mark.parametrize("parts", [(70, 70), (140,)], ids=["gates and ups", "one tensor of both"])
def test_gates_and_ups_of_one_row(parts: tuple[int, ...]) -> None:
    pairs, x, weight, bias = pairs_of(parts, 96, 16, torch.float32), randn(1, 96), randn(140, 96), randn(140)
    of_row = RowAdapter.of(pairs, rows_of([1]))
    expected = gate_mul_reference(x @ weight.T + bias + added(x, pairs, [1]).float(), "silu")
    assert_close(one_row_linear(x, weight, bias, "silu", of_row), expected)


def test_an_activation_without_gates_comes_behind_the_adapter() -> None:
    pairs, x, weight, bias = pairs_of((140,), 96, 16, torch.float32), randn(3, 96), randn(140, 96), randn(140)
    one, some = rows_of([1]), rows_of([1, -1, 0])
    products = x @ weight.T + bias + added(x, pairs, [1, -1, 0]).float()
    assert_close(one_row_linear(x[:1], weight, bias, Ungated("gelu"), RowAdapter.of(pairs, one)), F.gelu(products[:1]))
    assert_close(adapted_linear(x, weight, pairs, some, bias, Ungated("gelu")), F.gelu(products))


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_linear_adds_what_rows_name(slots: list[int]) -> None:
    """Before the product's bias and activation are applied, whatever comes before, and whichever kernels multiply."""
    pairs, rows = pairs_of((128, 128), 256, 16, torch.float32), rows_of(slots)
    x, residual, gates_and_ups = randn(len(slots), 256), randn(len(slots), 256), randn(len(slots), 512)
    weight, bias, norm = randn(256, 256), randn(256), Norm(randn(256), 1e-6)

    def expected(x: Tensor) -> Tensor:
        return x @ weight.T + bias + added(x, pairs, slots).float()

    gated = gate_mul_reference(gates_and_ups, "silu")
    assert_close(adapted_linear(gates_and_ups, weight, pairs, rows, bias, before="silu"), expected(gated))
    assert_close(adapted_linear(x, weight, pairs, rows, bias, "silu"), gate_mul_reference(expected(x), "silu"))
    pieces = adapted_linear(x, weight, pairs, rows, bias, may_split=True)
    assert_close(pieces if pieces.dim() == 2 else pieces.sum(dim=0), expected(x))
    normed = normalize_reference(x + residual, norm)
    out, total = adapted_norm_linear(x, residual, norm, weight, pairs, rows, bias, "silu")
    assert_close(out, gate_mul_reference(expected(normed), "silu"))
    assert_close(total, x + residual)


def in_int4(weight: Tensor) -> GroupLinearWeight:
    """Any numbers of four bits, in the shape of a weight."""
    rows, columns = weight.shape
    words, scales = pack(torch.randint(16, weight.shape, device=DEVICE), 4), randn(rows, columns // 32) / 10
    return GroupLinearWeight(words, scales, None, None, "int4", columns)


def in_order(weight: Tensor) -> InOrderWeight:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":  # numpy adds up in another order for another number of rows
            patch.setattr("nanoinfer.kernels.linear.in_order.weight.find_sizes", lambda *_: frozenset())
        return InOrderWeight(weight, weight.dtype, True, [1, len(MIXED)])


def in_parts(weight: Tensor) -> WeightInParts:
    return WeightInParts(weight, [(128, 128), (128, 128)])


def gathered(weight: Tensor) -> GatheredWeight:
    return GatheredWeight(in_int4(weight), torch.arange(weight.shape[1], device=DEVICE).flip(0).int())


ON_CPU = [] if DEVICE == "cuda" else [in_parts, PackedWeight]


@pytest.mark.parametrize("slots", [MIXED, [1]], ids=["mixed", "one row"])
@pytest.mark.parametrize("weigh", [in_int4, in_order, gathered, *ON_CPU], ids=lambda weigh: weigh.__name__)
def test_every_weight_has_adapters(weigh: Callable[[Tensor], AnyWeight], slots: list[int]) -> None:
    pairs, rows = pairs_of((64, 64, 128), 64, 16, torch.float32), rows_of(slots)
    x, weight, bias = randn(len(slots), 64), weigh(randn(256, 64)), randn(256)
    expected = linear(x, weight, bias) + added(x, pairs, slots).float()
    assert_close(adapted_linear(x, weight, pairs, rows, bias), expected)
    assert_close(adapted_linear(x, weight, pairs, rows, bias, "silu"), gate_mul_reference(expected, "silu"))
    total = x + x
    expected = linear(total, weight, bias) + added(total, pairs, slots).float()
    out, residual = adapted_norm_linear(x, x, None, weight, pairs, rows, bias)
    assert_close(out, expected)
    assert torch.equal(residual, total)


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU multiplies by parts")
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_the_outputs_change_no_bit(ranks: int, activation: Activation | None) -> None:
    """Not even where a rank has so few that the CPU multiplies, or applies an activation, in another way."""
    halves, x, bias = (56, 56), randn(1, 96), randn(112)
    weight, pairs = randn(112, 96), pairs_of(halves, 96, 16, torch.float32)

    def outputs(first: int, size: int) -> Tensor:
        """Of both halves, these rows alone."""
        own = torch.cat([torch.arange(first, first + size), torch.arange(56 + first, 56 + first + size)])
        share = Pairs(pairs.a, pairs.b[:, own].contiguous(), (size, size))
        parts = WeightInParts(weight[own], [(size, 56), (size, 56)])
        out = adapted_linear(x, parts, share, rows_of([2]), bias[own], activation)
        return out.view(1 if activation else 2, size)

    size = 56 // ranks
    of_ranks = torch.cat([outputs(first, size) for first in range(0, 56, size)], dim=1)
    assert torch.equal(of_ranks, outputs(0, 56))
