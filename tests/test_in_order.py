"""Kernels whose sums have one order: right, and on a GPU the same bits for a token in any company."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from cases.weights import (
    BLOCKS,
    DTYPE,
    FOR_EXPERTS,
    GROUPINGS,
    SELDOM_FOR_EXPERTS,
    SMALL_GROUPS,
    Block,
    Form,
    assert_near,
    draw,
    expected,
    matrix_of,
    most_error,
    routes_of,
)
from conftest import DEVICE, of_each_kind, plan_ahead, whole_only
from test_kernels import DTYPES, LARGE_HEADS, SHAPES, SHORT, assert_close, attend_densely, forget, paged, randn

from nanoinfer.attention.context import Scoring
from nanoinfer.kernels.attention.in_order.decode import decode_in_order, decode_programs
from nanoinfer.kernels.attention.in_order.prefill import prefill_in_order
from nanoinfer.kernels.experts.in_order import check_order
from nanoinfer.kernels.experts.products import Gather, choices_in_a_tile, expert_mlps_reference, expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import FP8, Fp8Weight, quantize
from nanoinfer.kernels.launch import recording
from nanoinfer.kernels.linear.activation import (
    Activation,
    AnyActivation,
    Ungated,
    gate_mul_reference,
    gate_mul_triton,
    rows_per_output,
)
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
    fp8_in_order,
    group_in_order,
    in_order_triton,
)

ALL_CONFIGS = (*CONFIGS, SOME, FEW, NARROW, WIDE, FEW._replace(used=48), WIDE._replace(used=80))
Pages = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
GPU_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHORT_DTYPES = GPU_DTYPES[:2]
EXPERTS = [(128, 8, 2048, 768), (8, 2, 512, 1792), (60, 4, 72, 40)]  # all, a token's, hidden size and their own
RANKS = [(2048, 768, 1), (512, 896, 2), (72, 40, 1)]  # hidden sizes, a rank's share of an expert, and the ranks
HOW = [(None, None), (1, None), (50, 2.0), (300, None)]  # windows and soft caps


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def prefill(q: torch.Tensor, pages: Pages, query_lens: list[int], lens: list[int], how: Scoring) -> torch.Tensor:
    cu_query_lens = ints([0, *query_lens]).cumsum(0).int()
    options = how.scale, how.window, how.softcap, None, how.sinks, how.slopes
    return prefill_in_order(q, *pages, cu_query_lens, ints(lens), max(query_lens), *options)


def decode(q: torch.Tensor, pages: Pages, lens: list[int], how: Scoring, workers: int | None = None) -> torch.Tensor:
    plan = plan_ahead(ints(lens), pages[0], workers, how.window, programs=decode_programs(pages[0].shape[3]))
    options = how.softcap, None, how.sinks, how.slopes
    for _ in range(2):  # two layers: the first must leave the plan unchanged
        out = decode_in_order(q, *pages, ints(lens), max(lens), how.scale, plan, *options)
        assert plan.arrivals.eq(0).all()
    return out


def operands(form: Form, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, AnyNumbers, torch.Tensor]:
    """Return 512 vectors, a weight, and a bias.

    All products are rounding error, so that another order of their sums shows in every output. Only those of groups are
    any, since sums of a few bits may be exact.
    """
    rows, inputs = shape
    x, bias = randn(512, inputs, dtype=dtype), randn(rows, dtype=dtype)
    if isinstance(form, Grouping):
        return x, draw(form, rows, inputs), bias
    drawn = WeightShape(rows, inputs, form and (form[0], form[1] or inputs))
    return drawn.undone(x), drawn.draw(dtype, torch.Generator(DEVICE)), 1e-6 * bias


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

    @pytest.mark.parametrize("tokens", [1, 20, *whole_only([70])])
    @pytest.mark.parametrize("form", [*BLOCKS, *of_each_kind(zip(GROUPINGS), 0, 1, 2, 3, 4)], ids=str)
    def test_those_with_scales_are_right(self, form: Form, tokens: int) -> None:
        """Those of a single token, too, whose vector is rounded for a weight in FP8."""
        rows, inputs = (256, 512) if form in BLOCKS else (100, 384)
        weight, x, bias = draw(form, rows, inputs), randn(tokens, inputs, dtype=DTYPE), randn(rows, dtype=DTYPE)
        if isinstance(weight, Fp8Weight):
            assert_near(fp8_in_order(quantize(x), weight), expected(x, weight, in_order=True), most_error(weight))
            out = fp8_in_order(quantize(x), weight, bias)
        else:
            out = group_in_order(x, weight, bias)
        assert_near(out, expected(x, weight, bias, in_order=True), most_error(weight))

    @pytest.mark.parametrize(
        ("form", "dtype", "message"),
        [
            (BLOCKS[0], torch.float32, "dtype must have 16 bits.*here dtype is float32, and 128 of 256 inputs"),
            (GROUPINGS[0], torch.float32, "here dtype is float32"),
            (
                SMALL_GROUPS[1],
                torch.bfloat16,
                "in int4, .* here dtype is bfloat16, and 8 of 256 inputs share one; device='cpu' takes all",
            ),
        ],
        ids=str,
    )
    def test_weights_that_no_kernel_multiplies(self, form: Form, dtype: torch.dtype, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            InOrderWeight(draw(form, 128, 256), dtype, False, [1])

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("form", "shape", "dtype"),
        [
            *of_each_kind(
                product([None], [(1024, 2048), (4096, 4096), (96, 160), (256, 12288)], GPU_DTYPES), 0, 3, 7, 8, 9
            ),
            *of_each_kind(product(BLOCKS, [(4096, 4096)], SHORT_DTYPES), 0, 2, 4),
            *of_each_kind(product([(8, 128), (8, 256), (1, 0)], [(200, 3072)], SHORT_DTYPES), 0),
            *of_each_kind(product(BLOCKS, [(6144, 1024)], SHORT_DTYPES), 0),
            *product(GROUPINGS, [(4096, 4096)], [torch.bfloat16]),
        ],
        ids=str,
    )
    def test_a_token_has_the_same_bits(self, form: Form, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """For 1 to 512 tokens, in any order, by tiles of any size, by cuBLAS, in graphs, and with an activation."""
        x, weight, bias = operands(form, shape, dtype)
        sizes = [1, 2, 4, 8, 16, 48, 64, 100, 256, 512]
        for own_bias in (None, bias):
            in_order = InOrderWeight(weight, dtype, own_bias is not None, sizes)
            whole, gated = in_order.product(x, own_bias), in_order.product(x, own_bias, "silu")
            assert whole.ne(0).float().mean() > (0.5 if form is None else 0.25)
            if form is None:
                for config in (None, *ALL_CONFIGS):
                    if dtype != torch.float32 or config is None or fits_float32(config):
                        assert torch.equal(in_order_triton(x, weight, own_bias, config=config), whole)
            if isinstance(weight, Fp8Weight):
                assert torch.equal(gated, gate_mul_triton(whole, "silu"))
            for tokens in (*sizes, 3, 17, 33, 65, 130, 200, 300):
                order = torch.randperm(512, device=DEVICE)[:tokens]
                assert torch.equal(in_order.product(x[order], own_bias), whole[order])
                if form is not None:
                    with recording():
                        assert torch.equal(in_order.product(x[order], own_bias, "silu"), gated[order])

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", of_each_kind(zip(SHORT_DTYPES), 0))
    @pytest.mark.parametrize(
        ("shape", "block"), of_each_kind(product([(4096, 4096), (1024, 3072)], BLOCKS), 0, 1, 2, 3), ids=str
    )
    def test_a_share_of_the_outputs_has_the_bits_of_all(
        self, shape: tuple[int, int], block: Block, dtype: torch.dtype
    ) -> None:
        """So several ranks, each of which computes a share, have the bits of one."""
        weight, x = draw(block, *shape), randn(300, shape[1], dtype=dtype)
        whole = InOrderWeight(weight, dtype, False, [1])
        for ranks in (2, 4):
            parts = zip(weight.numbers.chunk(ranks), weight.scales.chunk(ranks), strict=True)
            shares = [InOrderWeight(Fp8Weight(*part), dtype, False, [1]) for part in parts]
            for tokens, recorded in product((1, 16, 20, 64, 300), (False, True)):
                with recording() if recorded else nullcontext():
                    out = torch.cat([share.product(x[:tokens]) for share in shares], dim=1)
                    assert torch.equal(out, whole.product(x[:tokens]))


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
    *(WeightShape(100, 384, None, Grouping(numbers, 64, torch.float32, False, False)) for numbers in ("nf4", "fp4")),
]


@pytest.mark.parametrize("shape", SHAPES_TO_CHECK, ids=str)
class TestTheCheck:
    def test_what_is_compared_is_all_rounding_error(self, shape: WeightShape) -> None:
        seen: list[torch.Tensor] = []

        def multiply(x: torch.Tensor, weight: AnyNumbers, bias: torch.Tensor | None) -> torch.Tensor:
            assert WeightShape.like(weight) == shape
            product, size = x.double() @ matrix_of(weight).T, x.double().abs() @ matrix_of(weight).abs().T
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
        assert 0.5 < (randn(100, shape.inputs, dtype=torch.float64) @ matrix_of(weight)[0].T).std() < 2


@pytest.mark.parametrize(("bits", "named"), [("FP8", "in FP8 "), ("int4", "in int4 "), ("", "")])
def test_other_bits_are_refused(bits: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"FP8": SHAPES_TO_CHECK[1], "int4": INT4, "": SHAPES_TO_CHECK[0]}[bits]
    weight = shape.draw(SHORT, torch.Generator(DEVICE))
    monkeypatch.setattr(in_order, "sizes_alike", lambda *_, sizes, **__: frozenset(sizes) - {17})
    assert in_order.find_sizes(weight, SHORT, False, (1, 8)) == frozenset()
    with pytest.raises(ValueError, match=f"True: this GPU adds up products {named}in other orders for other numbers"):
        in_order.find_sizes(weight, SHORT, False, (1, 17))


@pytest.mark.gpu
class TestExperts:
    @pytest.mark.parametrize(
        ("form", "sizes", "dtype", "has_biases"),
        [
            *product([None], EXPERTS, [torch.bfloat16], [True]),
            *whole_only(product([None], EXPERTS, [torch.bfloat16], [False])),
            *whole_only(product([None], EXPERTS, [torch.float32], [False, True])),
            *of_each_kind(product(BLOCKS, EXPERTS[:2], [torch.bfloat16], [False]), 0, 1, 2, 4),
            *product(FOR_EXPERTS, [(16, 4, 512, 256)], [torch.bfloat16], [False]),
            *whole_only(product(SELDOM_FOR_EXPERTS, [(16, 4, 512, 256)], [torch.bfloat16], [False])),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("activation", ["silu", *whole_only([Ungated("relu2")])], ids=str)
    def test_they_have_the_same_bits(
        self,
        activation: AnyActivation,
        form: Form,
        sizes: tuple[int, int, int, int],
        dtype: torch.dtype,
        has_biases: bool,
    ) -> None:
        """For any number of tokens, and so for tiles of any size."""
        count, used, hidden_size, size = sizes
        x, routes = randn(3000, hidden_size, dtype=dtype), routes_of(3000, count, used)
        rows = rows_per_output(activation) * size
        gate_up, down = (draw(form, count, *shape, dtype=dtype) for shape in ((rows, hidden_size), (hidden_size, size)))
        of_each = {"gate_up_bias": rows, "down_bias": hidden_size} if has_biases else {}
        biases = {name: randn(count, features, dtype=dtype) for name, features in of_each.items()}
        how = {"gate_up": gate_up, "down": down, "activation": activation, "in_order": True, **biases}
        multiply = partial(expert_mlps_triton, **how)
        whole = multiply(x, routes)
        for tokens in (1, 2, 7, 9, 16, 33, 40, 100, 300, 700, 1000):
            order = torch.randperm(3000, device=DEVICE)[:tokens]
            assert torch.equal(multiply(x[order], Routes(*(part[order] for part in routes))), whole[order])

    @pytest.mark.parametrize("block", BLOCKS, ids=str)
    def test_shares_have_the_bits_of_all(self, block: Block) -> None:
        """Each of two ranks has half of the gates, of the ups, and of the outputs."""
        count, used, hidden_size, size = 8, 2, 512, 1024
        gate_up, down = draw(block, count, 2 * size, hidden_size), draw(block, count, hidden_size, size)

        def share(weight: Fp8Weight, projections: int, rank: int) -> Fp8Weight:
            halves = (part.unflatten(1, (projections, 2, -1))[:, :, rank] for part in weight)
            return Fp8Weight(*(half.flatten(1, 2).contiguous() for half in halves))

        def exchange(gated: list[torch.Tensor], rank: int, own: torch.Tensor) -> torch.Tensor:
            if own.shape[1] < size // 2:  # the rank's share of the result
                return own
            gated[rank] = own
            return torch.cat(gated, dim=1)

        for tokens in (1, 20, 300):
            x, routes = randn(tokens, hidden_size, dtype=DTYPE), routes_of(tokens, count, used)
            whole = expert_mlps_triton(x, routes, gate_up, down, "silu", in_order=True)
            shares = [(share(gate_up, 2, rank), share(down, 1, rank)) for rank in range(2)]
            gated = [torch.zeros(tokens * used, size // 2, device=DEVICE, dtype=DTYPE)] * 2
            for _ in range(2):  # at first, the other rank's share is not there yet
                parts = [
                    expert_mlps_triton(
                        x, routes, *weights, "silu", in_order=True, gather=partial(exchange, gated, rank)
                    )
                    for rank, weights in enumerate(shares)
                ]
            assert torch.equal(torch.cat(parts, dim=1), whole)

    @pytest.mark.parametrize(
        ("form", "used", "sizes", "dtype"),
        [
            *product([None], [1, 8], RANKS, [torch.bfloat16]),
            *whole_only(product([None], [1, 8], RANKS, GPU_DTYPES[1:])),
            *whole_only(product([None], [2], RANKS, GPU_DTYPES)),
            *product([(128, 128), (1, 0), (256, 256)], [1, 8], RANKS[:1], [torch.bfloat16]),
            *product(FOR_EXPERTS, [8], RANKS[:1], [torch.bfloat16]),
            *whole_only(product(SELDOM_FOR_EXPERTS, [8], RANKS[:1], [torch.bfloat16])),
        ],
        ids=str,
    )
    def test_they_pass_the_check(self, form: Form, used: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
        hidden_size, share, ranks = sizes
        shapes = (2 * share, hidden_size), (hidden_size // ranks, share * ranks)
        gate_up, down = (WeightShape.like(draw(form, *shape)) for shape in shapes)
        check_order.__wrapped__(gate_up, down, used, "silu", dtype, torch.device(DEVICE))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("used", "function"), [(1, "silu"), (3, Ungated("relu2")), *whole_only([(3, "silu")])], ids=str
)
def test_the_check_of_experts_compares_tiles_of_all_sizes(
    used: int, function: AnyActivation, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = WeightShape(rows_per_output(function) * 48, 64), WeightShape(64 // ranks, 48 * ranks)
    tiles: set[int] = set()

    def check(wrong: int | None) -> None:
        def multiply(
            x: torch.Tensor,
            routes: Routes,
            *weights: torch.Tensor,
            activation: AnyActivation,
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
        check_order.__wrapped__(*matrices, used, function, torch.float32, torch.device(DEVICE))

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


def check_bits(shape: tuple[int, int, int, int], how: Scoring, dtype: torch.dtype) -> None:
    """Attend from tokens as parts of whole prompts, of chunks of any length, and as rows with any company."""
    heads, _, head_dim, _ = shape
    lens = [1, 40, 257, 600, 1500, 2048]
    pages = paged(lens, *shape, dtype)
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
        heads, _, head_dim, _ = shape
        check_bits(shape, Scoring(head_dim**-0.5, *limits, sinks=randn(heads) if has_sinks else None), dtype)
