"""Kernels whose sums have one order: right, and on a GPU the same bits for a token in any company."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from conftest import DEVICE, of_each_kind, plan_ahead, whole_only
from test_kernels import DTYPES, LARGE_HEADS, SHAPES, SHORT, assert_close, attend_densely, forget, paged, randn

from nanoinfer.attention.context import Scoring
from nanoinfer.kernels.attention.in_order.decode import decode_in_order, decode_programs
from nanoinfer.kernels.attention.in_order.prefill import prefill_in_order
from nanoinfer.kernels.experts.in_order import check_order
from nanoinfer.kernels.experts.operand import group_linear
from nanoinfer.kernels.experts.products import Gather, choices_in_a_tile, expert_mlps_reference, expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import FP8, Fp8Weight
from nanoinfer.kernels.groups import dequantize_reference
from nanoinfer.kernels.linear.activation import Activation, gate_mul_reference, gate_mul_triton
from nanoinfer.kernels.linear.in_order import weight as in_order
from nanoinfer.kernels.linear.in_order.order import AnyNumbers, Grouping, WeightShape, sizes_alike
from nanoinfer.kernels.linear.in_order.weight import (
    CONFIGS,
    FEW,
    NARROW,
    SOME,
    WIDE,
    InOrderWeight,
    choose_config,
    fits_float32,
    in_order_triton,
)

ALL_CONFIGS = (*CONFIGS, SOME, FEW, NARROW, WIDE, FEW._replace(used=48), WIDE._replace(used=80))
Pages = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
GPU_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HOW = [(None, None), (1, None), (50, 2.0), (300, None)]  # windows and soft caps


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def prefill(q: torch.Tensor, pages: Pages, query_lens: list[int], lens: list[int], how: Scoring) -> torch.Tensor:
    cu_query_lens = ints([0, *query_lens]).cumsum(0).int()
    options = how.scale, how.window, how.softcap, None, how.sinks
    return prefill_in_order(q, *pages, cu_query_lens, ints(lens), max(query_lens), *options)


def decode(q: torch.Tensor, pages: Pages, lens: list[int], how: Scoring, workers: int | None = None) -> torch.Tensor:
    plan = plan_ahead(ints(lens), pages[0], workers, how.window, programs=decode_programs(pages[0].shape[3]))
    for _ in range(2):  # two layers: the first must leave the plan unchanged
        out = decode_in_order(q, *pages, ints(lens), max(lens), how.scale, plan, how.softcap, None, how.sinks)
        assert plan.arrivals.eq(0).all()
    return out


def rounding_error(tokens: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Operands whose products are all rounding error, so that another order of their sums shows in every output."""
    x, weight = randn(tokens, in_features, dtype=dtype), randn(out_features, in_features, dtype=dtype)
    half = in_features // 2
    x[:, half:], weight[:, half:] = x[:, :half], -weight[:, :half]
    return x, weight


class TestProducts:
    @pytest.mark.parametrize("dtype", [torch.float32, SHORT])
    @pytest.mark.parametrize(
        ("tokens", "out_features", "in_features"), [(5, 100, 96), *whole_only([(40, 200, 300), (150, 260, 128)])]
    )
    def test_they_are_right(self, tokens: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        x, weight = randn(tokens, in_features, dtype=dtype), randn(out_features, in_features, dtype=dtype)
        bias = randn(out_features, dtype=dtype)
        expected = x.double() @ weight.double().T
        for config in (None, *ALL_CONFIGS):
            assert_close(in_order_triton(x, weight, config=config), expected)
            assert_close(in_order_triton(x, weight, bias, config=config), expected + bias)
        out = torch.empty(tokens, out_features, dtype=dtype, device=DEVICE)
        assert InOrderWeight(weight, dtype, False, [tokens]).product(x, out=out) is out
        assert_close(out, expected)
        assert_close(InOrderWeight(weight, dtype, True, [3]).product(x, bias), expected + bias)

    @pytest.mark.parametrize(
        ("has_bias", "dtype", "activation"),
        of_each_kind(product([False, True], [torch.float32, SHORT], ["silu", "gelu_tanh"]), 1, 6),
    )
    def test_gated_ones(self, has_bias: bool, dtype: torch.dtype, activation: Activation) -> None:
        """On a GPU a token has the same bits, whether the product applies the activation or a launch of its own."""
        x, weight = randn(40, 96, dtype=dtype), randn(200, 96, dtype=dtype) / 10
        bias = randn(200, dtype=dtype) if has_bias else None
        product = in_order_triton(x, weight, bias)
        expected = gate_mul_triton(product, activation)
        assert_close(expected, gate_mul_reference(product, activation))
        in_order = InOrderWeight(weight, dtype, has_bias, [20])
        for tokens in (1, 5, 16, 20, 33):
            out = in_order.product(x[:tokens], bias, activation)
            assert_close(out, expected[:tokens])
            assert torch.equal(out, expected[:tokens]) or DEVICE == "cpu"

    def test_tiles_fit_what_they_are_chosen_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sums in float32 need room, and so do the outputs of a tile where multiprocessors have little memory."""
        for tokens in (1, 16, 17, 64, 128, 256, 16384):
            for out_features in (1024, 4096, 6144, 24576):
                assert fits_float32(choose_config(torch.empty(tokens, 1), out_features))
        monkeypatch.setattr("nanoinfer.kernels.linear.in_order.weight.num_multiprocessors", lambda device: 132)
        monkeypatch.setattr("nanoinfer.kernels.linear.tiles.shared_memory", lambda device: 99 << 10)
        for out_features in (1024, 4096, 6144, 12288, 17408, 151936):
            assert choose_config(torch.empty(1, 4096, dtype=torch.bfloat16), out_features).block_n <= 64

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        of_each_kind(product([(1024, 2048), (4096, 4096), (96, 160), (256, 12288)], GPU_DTYPES), 0, 3, 7, 8, 9),
    )
    def test_they_have_the_same_bits(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """For 1 to 512 tokens, in any order, by tiles of any size, and by cuBLAS where it is taken."""
        out_features, in_features = shape
        x, weight = rounding_error(512, out_features, in_features, dtype)
        bias = 1e-6 * randn(out_features, dtype=dtype)
        sizes = [1, 2, 4, 8, 16, 48, 64, 100, 256, 512]
        for own_bias in (None, bias):
            expected = in_order_triton(x, weight, own_bias)
            assert expected.ne(0).float().mean() > 0.5
            for config in ALL_CONFIGS:
                if dtype == torch.float32 and not fits_float32(config):
                    continue
                assert torch.equal(in_order_triton(x, weight, own_bias, config=config), expected)
            in_order = InOrderWeight(weight, dtype, own_bias is not None, sizes)
            for tokens in (*sizes, 3, 17, 33, 65, 130, 300):
                order = torch.randperm(512, device=DEVICE)[:tokens]
                assert torch.equal(in_order.product(x[order], own_bias), expected[order])


INT4 = WeightShape(100, 384, None, Grouping("int4", 64, SHORT, True, True))
ONE_BLOCK = WeightShape(256, 128, (128, 128))
SHAPES_TO_CHECK = [
    WeightShape(100, 384),
    *(WeightShape(256, inputs, block) for block, inputs in product([(128, 128), (64, 256)], [512, 1280])),
    *(WeightShape(256, inputs, (height, inputs)) for height, inputs in [(1, 512), (256, 512), (1, 1280)]),
    ONE_BLOCK,
    *(
        WeightShape(100, 384, None, Grouping("int4", *form))
        for form in [(64, SHORT, True, True), (384, SHORT, False, False)]
    ),
    WeightShape(100, 384, None, Grouping("int8", 32, SHORT, True, False)),
    WeightShape(100, 384, None, Grouping("e2m1", 16, FP8, False, True)),
    WeightShape(100, 384, None, Grouping("e2m1", 32, torch.uint8, False, False)),
]


def dense(weight: AnyNumbers) -> torch.Tensor:
    """What the numbers and scales of a weight, or of several experts', stand for."""
    if isinstance(weight, torch.Tensor):
        return weight.double()
    if isinstance(weight, Fp8Weight):
        scales, (height, width) = weight.scales.double(), weight.block
        return weight.numbers.double() * scales.repeat_interleave(height, -2).repeat_interleave(width, -1)
    if weight.words.dim() == 3:
        return torch.stack([dense(group_linear(weight, expert)) for expert in range(len(weight.words))])
    return dequantize_reference(weight, torch.float64)


@pytest.mark.parametrize("shape", SHAPES_TO_CHECK, ids=str)
class TestTheCheck:
    def test_what_is_compared_is_all_rounding_error(self, shape: WeightShape) -> None:
        seen: list[torch.Tensor] = []

        def multiply(x: torch.Tensor, weight: AnyNumbers, bias: torch.Tensor | None) -> torch.Tensor:
            assert WeightShape.like(weight) == shape
            product, size = x.double() @ dense(weight).T, x.double().abs() @ dense(weight).abs().T
            seen.append(product)
            assert (product.abs() < 1e-9 * size).all() == (shape != ONE_BLOCK)
            assert (size > 0).all()
            return product if bias is None else product + bias

        for has_bias in (False, True):
            how = shape, SHORT, has_bias, torch.device(DEVICE), (1, 16)
            assert sizes_alike.__wrapped__(multiply, multiply, *how) <= {1, 16}
        assert [len(product) for product in seen] == [16, 1, 16] * 2

    def test_the_numbers_of_tokens_that_have_other_bits(self, shape: WeightShape) -> None:
        def differ(x: torch.Tensor, weight: AnyNumbers, bias: torch.Tensor | None) -> torch.Tensor:
            return torch.full((len(x), 8), float(len(x) == 2))

        how = shape, SHORT, False, torch.device(DEVICE), (1, 2, 16)
        assert sizes_alike.__wrapped__(differ, differ, *how) == {1, 16}

    def test_products_with_experts_are_as_large_as_their_inputs(self, shape: WeightShape) -> None:
        weight = shape.draw_experts(3, SHORT, torch.Generator(DEVICE))
        assert WeightShape.like(weight) == shape
        assert 0.5 < (randn(100, shape.inputs, dtype=torch.float64) @ dense(weight)[0].T).std() < 2


@pytest.mark.parametrize(("bits", "named"), [("FP8", "in FP8 "), ("int4", "in int4 "), ("", "")])
def test_other_bits_are_refused(bits: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"FP8": SHAPES_TO_CHECK[1], "int4": INT4, "": SHAPES_TO_CHECK[0]}[bits]
    weight = shape.draw(SHORT, torch.Generator(DEVICE))
    monkeypatch.setattr(in_order, "sizes_alike", lambda *_, sizes, **__: frozenset(sizes) - {17})
    assert in_order.find_sizes(weight, SHORT, False, (1, 8)) == frozenset()
    with pytest.raises(ValueError, match=f"True: this GPU adds up products {named}in other orders for other numbers"):
        in_order.find_sizes(weight, SHORT, False, (1, 17))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", of_each_kind(zip((torch.bfloat16, torch.float32)), 0))
@pytest.mark.parametrize(
    ("count", "used", "hidden_size", "size"), [(128, 8, 2048, 768), (8, 2, 512, 1792), (60, 4, 72, 40)]
)
@pytest.mark.parametrize("has_biases", of_each_kind(zip((False, True)), 1))
def test_experts_have_the_same_bits(
    count: int, used: int, hidden_size: int, size: int, has_biases: bool, dtype: torch.dtype
) -> None:
    """For any number of tokens, and so for tiles of any size."""
    x = randn(3000, hidden_size, dtype=dtype)
    gate_up = randn(count, 2 * size, hidden_size, dtype=dtype) / hidden_size**0.5
    down = randn(count, hidden_size, size, dtype=dtype) / size**0.5
    experts = torch.rand(3000, count, device=x.device).argsort()[:, :used].int().contiguous()
    weights = torch.rand(experts.shape, device=x.device)
    biases = {"gate_up_bias": randn(count, 2 * size, dtype=dtype), "down_bias": randn(count, hidden_size, dtype=dtype)}
    multiply = partial(expert_mlps_triton, activation="silu", in_order=True, **(biases if has_biases else {}))
    expected = multiply(x, Routes(experts, weights), gate_up, down)
    for tokens in (1, 2, 7, 16, 40, 100, 300, 1000):
        order = torch.randperm(3000, device=x.device)[:tokens]
        routes = Routes(experts[order], weights[order])
        assert torch.equal(multiply(x[order], routes, gate_up, down), expected[order])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", of_each_kind(zip(GPU_DTYPES), 0))
@pytest.mark.parametrize(("hidden_size", "share", "ranks"), [(2048, 768, 1), (512, 896, 2), (72, 40, 1)])
@pytest.mark.parametrize("used", of_each_kind(zip((1, 2, 8)), 0, 2))
def test_experts_pass_the_check(used: int, hidden_size: int, share: int, ranks: int, dtype: torch.dtype) -> None:
    gate_up = WeightShape(2 * share, hidden_size)
    down = WeightShape(hidden_size // ranks, share * ranks)
    check_order.__wrapped__(gate_up, down, used, "silu", dtype, torch.device(DEVICE))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("used", [1, 3])
def test_the_check_of_experts_compares_tiles_of_all_sizes(
    used: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = WeightShape(2 * 48, 64), WeightShape(64 // ranks, 48 * ranks)
    tiles: set[int] = set()

    def check(wrong: int | None) -> None:
        def multiply(
            x: torch.Tensor,
            routes: Routes,
            *weights: torch.Tensor,
            activation: Activation,
            in_order: bool,
            gather: Gather,
        ) -> torch.Tensor:
            assert in_order
            assert (gather is None) == (ranks == 1)
            tile = choices_in_a_tile(routes.experts.numel(), used)
            tiles.add(tile)
            gate_up, down = (weight.double() for weight in weights)
            exact = expert_mlps_reference(x.double(), routes, gate_up, down, activation, gather)
            assert exact.shape == x.shape
            return exact.float().round(decimals=3) + (tile == wrong)

        monkeypatch.setattr("nanoinfer.kernels.experts.in_order.expert_mlps_triton", multiply)
        check_order.__wrapped__(*matrices, used, "silu", torch.float32, torch.device(DEVICE))

    check(None)
    assert tiles == {16, 32, 64, 128}
    for tile in tiles:
        with pytest.raises(ValueError, match="products with experts in other orders"):
            check(tile)


class TestAttention:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("window", "softcap"), of_each_kind(HOW, 2))
    @pytest.mark.parametrize("shape", of_each_kind(zip(SHAPES), 1))
    def test_prefill_is_right(
        self, shape: tuple[int, int, int, int], window: int | None, softcap: float | None, dtype: torch.dtype
    ) -> None:
        heads, _, head_dim, _ = shape
        query_lens, lens = [1, 16, 70, 3, 130, 90], [1, 16, 100, 66, 130, 600]
        pages = paged(lens, *shape, dtype)
        q, how = randn(sum(query_lens), heads, head_dim, dtype=dtype), Scoring(head_dim**-0.5, window, softcap)
        expected = attend_densely(q, *pages, query_lens, lens, how)
        starts = [
            0 if window is None else max(0, length - queries + 1 - window)
            for queries, length in zip(query_lens, lens, strict=True)
        ]
        assert_close(prefill(q, forget(*pages, starts), query_lens, lens, how), expected)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("window", "softcap"), of_each_kind(HOW, 2))
    @pytest.mark.parametrize("shape", of_each_kind(zip(SHAPES), 0))
    def test_decode_is_right(
        self, shape: tuple[int, int, int, int], window: int | None, softcap: float | None, dtype: torch.dtype
    ) -> None:
        """Some rows have one worker, some several; one has no context."""
        heads, _, head_dim, _ = shape
        lens = [1, 16, 100, 300, 64, 0, 1700]
        rows = [row for row, length in enumerate(lens) if length]
        pages = paged(lens, *shape, dtype)
        q, how = randn(len(lens), heads, head_dim, dtype=dtype), Scoring(head_dim**-0.5, window, softcap)
        expected = attend_densely(q, *pages, [1] * len(lens), lens, how)[rows]
        pages = forget(*pages, [0 if window is None else max(0, length - window) for length in lens])
        for workers in (1, 2, 7, None):
            assert_close(decode(q, pages, lens, how, workers)[rows], expected)

    @pytest.mark.parametrize("dtype", of_each_kind(zip((torch.float32, SHORT)), 1))
    def test_large_heads(self, dtype: torch.dtype) -> None:
        """They have programs of their own."""
        heads, _, head_dim, _ = shape = LARGE_HEADS[0]
        query_lens, lens = [40, 1], [300, 20]
        pages = paged(lens, *shape, dtype)
        q, how = randn(sum(query_lens), heads, head_dim, dtype=dtype), Scoring(head_dim**-0.5)
        expected = attend_densely(q, *pages, query_lens, lens, how)
        assert_close(prefill(q, pages, query_lens, lens, how), expected)
        last = torch.tensor(query_lens, device=DEVICE).cumsum(0) - 1
        assert_close(decode(q[last], pages, lens, how), expected[last])


MANY_SHAPES = [*SHAPES, *LARGE_HEADS, (16, 8, 128, 256), (32, 4, 128, 32), (8, 2, 256, 256)]
OFTEN = [
    *product(MANY_SHAPES, HOW[:1], [False], [torch.bfloat16]),
    *product(MANY_SHAPES[:1], HOW[1:], [True], [torch.bfloat16]),
    *product(MANY_SHAPES[:1], HOW[:1], [False], GPU_DTYPES[1:]),
]
SELDOM = [case for case in product(MANY_SHAPES, HOW, [False, True], GPU_DTYPES) if case not in OFTEN]


@pytest.mark.gpu
class TestBits:
    @pytest.mark.parametrize(("shape", "limits", "has_sinks", "dtype"), [*OFTEN, *whole_only(SELDOM)])
    def test_a_token_attends_alike_in_prompts_and_in_steps(
        self,
        shape: tuple[int, int, int, int],
        limits: tuple[int | None, float | None],
        has_sinks: bool,
        dtype: torch.dtype,
    ) -> None:
        """As part of a whole prompt, of chunks of any length, and as a row of decode steps with any company."""
        heads, _, head_dim, _ = shape
        lens = [1, 40, 257, 600, 1500, 2048]
        pages = paged(lens, *shape, dtype)
        how = Scoring(head_dim**-0.5, *limits, sinks=randn(heads) if has_sinks else None)
        queries = [3 * randn(length, heads, head_dim, dtype=dtype) for length in lens]  # of large scores
        whole = prefill(torch.cat(queries), pages, lens, lens, how).split(lens)

        def row(number: int) -> Pages:
            return pages[0], pages[1], pages[2][number : number + 1]

        for number, length in enumerate(lens):
            assert torch.equal(prefill(queries[number], row(number), [length], [length], how), whole[number])
            for chunk in (1, 7, 64, 300):
                begin = max(0, length - 2 * chunk)
                end = min(begin + chunk, length)
                some = prefill(queries[number][begin:end], row(number), [end - begin], [end], how)
                assert torch.equal(some, whole[number][begin:end])
        for drawn in range(12):
            counts = [1 + int(torch.randint(length, ())) if drawn else length for length in lens]
            order = torch.randperm(len(lens)).tolist()[: 1 + drawn % len(lens)]
            rows = order * (1 + 10 * (drawn % 3))
            q = torch.stack([queries[number][counts[number] - 1] for number in rows])
            some = pages[0], pages[1], pages[2][rows]
            out = decode(q, some, [counts[number] for number in rows], how)
            expected = torch.stack([whole[number][counts[number] - 1] for number in rows])
            assert torch.equal(out, expected)
