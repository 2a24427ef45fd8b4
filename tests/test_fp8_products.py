"""Products with weights in FP8: each kernel against float64 of the numbers that its operands stand for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, HAS_CUDA, of_each_kind, whole_only
from torch import Tensor

from nanoinfer.kernels.experts.in_order import check_order
from nanoinfer.kernels.experts.products import expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.fp8 import (
    FP8,
    LARGEST,
    Fp8Tokens,
    Fp8Weight,
    as_bytes,
    quantize,
    quantize_reference,
    quantize_triton,
)
from nanoinfer.kernels.launch import is_recording, recording
from nanoinfer.kernels.linear.activation import (
    Activation,
    fp8_gate_mul_triton,
    gate_mul_reference,
    gate_mul_triton,
)
from nanoinfer.kernels.linear.dispatch import linear, norm_linear
from nanoinfer.kernels.linear.fp8.linear import Fp8LinearWeight, can_multiply_fp8, find_config, fp8_linear_triton
from nanoinfer.kernels.linear.in_order.order import WeightShape
from nanoinfer.kernels.linear.in_order.weight import InOrderWeight, fp8_in_order
from nanoinfer.kernels.linear.one_row import one_row_linear, one_row_norm_linear
from nanoinfer.kernels.norm.rms_norm import Norm, fp8_norm_triton, norm_add_rms_norm_reference, rms_norm_reference

# The interpreter has no products of bfloat16. On a GPU, results are rounded to it up to four times.
DTYPE, CLOSE = (torch.bfloat16, 0.01) if DEVICE == "cuda" else (torch.float32, 1e-5)
BLOCKS = [(128, 128), (64, 256), (1, None)]  # of the weights; None: a whole row


def make_weight(rows: int, columns: int, block: tuple[int, int | None] = (128, 128)) -> tuple[Fp8LinearWeight, Tensor]:
    """Return a weight, and in float64 the matrix that it stands for."""
    height, width = block[0], block[1] or columns
    numbers = (torch.randn(rows, columns, device=DEVICE) * 100).clamp(-LARGEST, LARGEST).to(FP8)
    scales = torch.rand(rows // height, columns // width, device=DEVICE) * 2e-3 + 1e-4
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return Fp8LinearWeight(numbers, scales), numbers.double() * spread.double()


def make_dense(weight: Fp8Weight) -> Tensor:
    height, width = weight.block
    return weight.numbers.double() * weight.scales.double().repeat_interleave(height, 0).repeat_interleave(width, 1)


def dequantized(x: Fp8Tokens) -> Tensor:
    return (x.numbers.double() * x.scales.T.double().repeat_interleave(128, 1))[: x.tokens]


def expected(x: Tensor, matrix: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
    out = F.linear(x.double(), matrix, None if bias is None else bias.double())
    return gate_mul_reference(out, activation) if activation else out


def assert_near(out: Tensor, reference: Tensor, most: float = CLOSE) -> None:
    error = (out.double() - reference).norm() / reference.norm()
    assert error < most


class TestTokens:
    @pytest.mark.parametrize(("tokens", "size"), [(1, 128), (3, 640), (5, 4096)])
    def test_the_kernel_rounds_like_the_reference(self, tokens: int, size: int) -> None:
        x = torch.randn(tokens, size, device=DEVICE) * torch.logspace(-5, 5, size, device=DEVICE)
        x[0, :128] = 0
        reference, out = quantize_reference(x), quantize_triton(x)
        assert out.scales.shape == reference.scales.shape
        assert torch.equal(out.scales[:, :tokens], reference.scales[:, :tokens])
        assert torch.equal(as_bytes(out.numbers)[:tokens], as_bytes(reference.numbers)[:tokens])

    def test_a_number_loses_no_more_than_a_sixteenth(self) -> None:
        x = torch.randn(7, 512, device=DEVICE)
        x[2] *= 1e5
        largest = x.unflatten(1, (-1, 128)).abs().amax(2).repeat_interleave(128, 1)
        error = (dequantized(quantize(x)) - x).abs()
        assert (error <= torch.maximum(x.abs() / 16, largest * 2**-9 / LARGEST) * 1.0001).all()

    @pytest.mark.parametrize("pieces", [1, 3])
    @pytest.mark.parametrize("with_post", [False, True])
    def test_the_norm_rounds_its_result(self, pieces: int, with_post: bool) -> None:
        """One launch adds, normalises and rounds to FP8."""
        x, residual = torch.randn(pieces, 5, 384, device=DEVICE), torch.randn(5, 384, device=DEVICE).to(DTYPE)
        norm, post = (Norm(torch.rand(384, device=DEVICE).to(DTYPE), 1e-6) for _ in range(2))
        summed = x.sum(0).to(DTYPE)
        out, total = fp8_norm_triton(x if pieces > 1 else summed, residual, norm, post if with_post else None)
        if with_post:
            normed, sums = norm_add_rms_norm_reference(summed, residual, post, norm)
        else:
            sums = summed + residual
            normed = rms_norm_reference(sums, norm)
        torch.testing.assert_close(total, sums, rtol=0.02, atol=0.02)
        assert_near(dequantized(out), normed.double(), 0.05)
        assert out.dtype == total.dtype
        alone, same = fp8_norm_triton(total, None, norm, None)
        assert same is total
        assert_near(dequantized(alone), rms_norm_reference(total, norm).double(), 0.05)

    @pytest.mark.parametrize("tokens", [1, 6])
    @pytest.mark.parametrize("size", [128, 1152])
    def test_the_activation_rounds_its_result(self, tokens: int, size: int) -> None:
        """One launch multiplies gates and ups, and rounds to FP8."""
        gate_up = torch.randn(tokens, 2 * size, device=DEVICE).to(DTYPE)
        gated = gate_mul_triton(gate_up, "silu")
        out, reference = fp8_gate_mul_triton(gate_up, "silu"), quantize_triton(gated)
        assert out.dtype == DTYPE
        assert torch.equal(out.scales[:, :tokens], reference.scales[:, :tokens])
        assert torch.equal(as_bytes(out.numbers)[:tokens], as_bytes(reference.numbers)[:tokens])


@pytest.mark.parametrize("with_bias", [*whole_only([False]), True])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
class TestProducts:
    @pytest.mark.parametrize("activation", [None, "silu"])
    @pytest.mark.parametrize(("rows", "columns"), [(256, 512), *whole_only([(384, 768)])])
    def test_one_token(
        self, rows: int, columns: int, block: tuple[int, int | None], with_bias: bool, activation: Activation | None
    ) -> None:
        weight, matrix = make_weight(rows, columns, block)
        # Kernels load weights early: some other kernel must run between what writes these and them.
        bias = torch.randn(rows, device=DEVICE).to(DTYPE) if with_bias else None
        norm = Norm(torch.rand(columns, device=DEVICE).to(DTYPE), 1e-6)
        x = torch.randn(1, columns, device=DEVICE).to(DTYPE)
        assert_near(one_row_linear(x, weight, bias, activation), expected(x, matrix, bias, activation))
        out, total = one_row_norm_linear(x, 300 * x, norm, weight, bias, activation)
        normed = rms_norm_reference(total, norm)
        assert_near(out, expected(normed, matrix, bias, activation))

    @pytest.mark.parametrize("tokens", [2, *whole_only([20, 40, 130])])
    @pytest.mark.parametrize(("may_split", "copies"), [(False, True), (True, True), (True, False)])
    def test_several_tokens(
        self, tokens: int, may_split: bool, copies: bool, block: tuple[int, int | None], with_bias: bool
    ) -> None:
        rows, columns = 256 if HAS_CUDA else 128, 4096 if tokens > 64 else 2048  # the interpreter is slow
        weight, matrix = make_weight(rows, columns, block)
        x = quantize_reference(torch.randn(tokens, columns, device=DEVICE).to(DTYPE))
        bias = torch.randn(rows, device=DEVICE).to(DTYPE) if with_bias else None
        config = find_config(x, weight, may_split)
        assert config is not None
        assert (config.pieces > 1) == may_split
        out = fp8_linear_triton(x, weight, config, bias, copies)
        assert out.shape == (() if config.pieces == 1 else (config.pieces,)) + (tokens, rows)
        assert_near(out.sum(0) if config.pieces > 1 else out, expected(dequantized(x), matrix, bias, None))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_rows_that_fill_no_tile_for_one_token(activation: Activation | None) -> None:
    weight, matrix = make_weight(200, 512, (8, 128))
    x = torch.randn(1, 512, device=DEVICE).to(DTYPE)
    assert_near(one_row_linear(x, weight, None, activation), expected(x, matrix, None, activation))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("tokens", [5, 70])
def test_rows_that_fill_no_tile(tokens: int, copies: bool) -> None:
    weight, matrix = make_weight(200, 512, (8, 128))
    x = torch.randn(tokens, 512, device=DEVICE).to(DTYPE)
    rounded = quantize(x)
    config = find_config(rounded, weight, False)
    assert config is not None
    out = fp8_linear_triton(rounded, weight, config, copies=copies)
    assert_near(out, expected(dequantized(rounded), matrix, None, None))


@pytest.mark.parametrize(
    ("tokens", "count", "used", "hidden_size", "size"),
    [
        (1, 8, 2, 256, 128),
        (40, 4, 2, 128, 256),
        *whole_only([(1, 8, 3, 512, 256), (5, 60, 4, 256, 128), (100, 4, 3, 128, 128), (130, 2, 2, 256, 256)]),
    ],
)
@pytest.mark.parametrize("block", of_each_kind(zip(BLOCKS), 0), ids=str)
def test_experts(
    tokens: int, count: int, used: int, hidden_size: int, size: int, block: tuple[int, int | None]
) -> None:
    """For one token nothing is rounded to FP8; for several the input is, and the activation's result."""
    block = block[0], min(block[1], size, hidden_size) if block[1] else None
    (gate_up, inward), (down, outward) = (
        make_weight(count * rows, columns, block) for rows, columns in ((2 * size, hidden_size), (hidden_size, size))
    )
    gate_up, down = (Fp8Weight(*(part.unflatten(0, (count, -1)) for part in weight)) for weight in (gate_up, down))
    inward, outward = (matrix.unflatten(0, (count, -1)) for matrix in (inward, outward))
    x = torch.randn(tokens, hidden_size, device=DEVICE).to(DTYPE)
    experts = torch.rand(tokens, count, device=DEVICE).argsort()[:, :used].int()
    routes = Routes(experts, torch.rand(tokens, used, device=DEVICE))

    def computed(rounded: Callable[[Tensor], Tensor]) -> Tensor:
        out = torch.zeros(tokens, hidden_size, dtype=torch.float64, device=DEVICE)
        for i in range(used):
            gates = torch.einsum("th,toh->to", rounded(x), inward[experts[:, i]])
            gated = gate_mul_reference(gates.to(DTYPE), "silu")  # a GPU rounds like this
            results = torch.einsum("ts,ths->th", rounded(gated), outward[experts[:, i]])
            out += routes.weights[:, i : i + 1] * results
        return out

    exact = computed(Tensor.double)
    reference = exact if tokens == 1 else computed(lambda vectors: dequantized(quantize(vectors)))
    out = expert_mlps_triton(x, routes, gate_up, down, "silu")
    pieces = expert_mlps_triton(x, routes, gate_up, down, "silu", may_split=True)
    for results in (out, pieces.double().sum(0) if pieces.dim() == 3 else pieces):
        # A gate that rounds to its neighbour may change its block's scale, and so what FP8 makes of the others.
        assert_near(results, reference, CLOSE if tokens == 1 else 0.04 if DEVICE == "cuda" else 0.001)
        errors = [(values.double() - exact).norm() / exact.norm() for values in (results, reference)]
        assert errors[0] < 1.25 * errors[1] + CLOSE


class TestInOrder:
    @pytest.mark.parametrize("block", BLOCKS, ids=str)
    @pytest.mark.parametrize("tokens", [1, 20, *whole_only([70])])
    def test_products_are_right(self, tokens: int, block: tuple[int, int | None]) -> None:
        """Those of a single token, too, whose vector is rounded."""
        weight, matrix = make_weight(256, 512, block)
        x, bias = torch.randn(tokens, 512, device=DEVICE).to(DTYPE), torch.randn(256, device=DEVICE).to(DTYPE)
        rounded = quantize(x)
        assert_near(fp8_in_order(rounded, weight), expected(dequantized(rounded), matrix, None, None))
        assert_near(fp8_in_order(rounded, weight, bias), expected(dequantized(rounded), matrix, bias, None))

    def test_a_weight_that_no_kernel_multiplies(self) -> None:
        weight, _ = make_weight(128, 256)
        with pytest.raises(ValueError, match=r"dtype must have 16 bits.*here dtype is float32, and 128 of 256 inputs"):
            InOrderWeight(weight, torch.float32, False, [1])

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", of_each_kind(zip((torch.bfloat16, torch.float16)), 0))
    @pytest.mark.parametrize(
        ("shape", "block"),
        of_each_kind(product([(4096, 4096), (200, 3072), (6144, 1024)], BLOCKS), 0, 1, 2, 3, 6),
        ids=str,
    )
    def test_a_token_has_the_same_bits(
        self, shape: tuple[int, int], block: tuple[int, int | None], dtype: torch.dtype
    ) -> None:
        """For 1 to 512 tokens, in any order, in graphs and outside of them, with and without an activation."""
        rows, columns = shape
        weight, _ = make_weight(rows, columns, (min(block[0], 8) if rows == 200 else block[0], block[1]))
        half = columns // 2  # which undoes the other half, so that rounding errors are left
        numbers, scales = weight.numbers.float(), weight.scales
        numbers[:, half:] = -numbers[:, :half]
        if block[1]:
            scales[:, half // block[1] :] = scales[:, : half // block[1]]
        weight = Fp8Weight(numbers.to(FP8), scales)
        x = torch.randn(512, columns, device=DEVICE).to(dtype)
        x[:, half:] = x[:, :half]
        sizes = [1, 2, 4, 8, 16, 48, 64, 100, 256, 512]
        in_order = InOrderWeight(weight, dtype, False, sizes)
        whole = in_order.product(x)
        assert whole.ne(0).float().mean() > 0.25
        gated = in_order.product(x, activation="silu")
        assert torch.equal(gated, gate_mul_triton(whole, "silu"))
        for tokens in (*sizes, 3, 17, 33, 65, 130, 200, 300):
            order = torch.randperm(512, device=DEVICE)[:tokens]
            assert torch.equal(in_order.product(x[order]), whole[order])
            with recording():
                assert torch.equal(in_order.product(x[order], activation="silu"), gated[order])

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", of_each_kind(zip((torch.bfloat16, torch.float16)), 0))
    @pytest.mark.parametrize(
        ("shape", "block"), of_each_kind(product([(4096, 4096), (1024, 3072)], BLOCKS), 0, 1, 2, 3), ids=str
    )
    def test_a_share_of_the_outputs_has_the_bits_of_all(
        self, shape: tuple[int, int], block: tuple[int, int | None], dtype: torch.dtype
    ) -> None:
        """So several ranks, each of which computes a share, have the bits of one."""
        weight, _ = make_weight(*shape, block)
        whole = InOrderWeight(weight, dtype, False, [1])
        x = torch.randn(300, shape[1], device=DEVICE).to(dtype)
        for ranks in (2, 4):
            parts = zip(weight.numbers.chunk(ranks), weight.scales.chunk(ranks), strict=True)
            shares = [InOrderWeight(Fp8Weight(*part), dtype, False, [1]) for part in parts]
            for tokens in (1, 16, 20, 64, 300):
                product = torch.cat([share.product(x[:tokens]) for share in shares], dim=1)
                assert torch.equal(product, whole.product(x[:tokens]))
                with recording():
                    product = torch.cat([share.product(x[:tokens]) for share in shares], dim=1)
                    assert torch.equal(product, whole.product(x[:tokens]))

    @pytest.mark.gpu
    @pytest.mark.parametrize("block", BLOCKS, ids=str)
    def test_shares_of_experts_have_the_bits_of_all(self, block: tuple[int, int | None]) -> None:
        """Each of two ranks has half of the gates, of the ups, and of the outputs."""
        count, used, hidden_size, size = 8, 2, 512, 1024
        gate_up, down = (
            Fp8Weight(*(part.unflatten(0, (count, -1)) for part in make_weight(count * rows, columns, block)[0]))
            for rows, columns in ((2 * size, hidden_size), (hidden_size, size))
        )

        def share(weight: Fp8Weight, projections: int, rank: int) -> Fp8Weight:
            halves = (part.unflatten(1, (projections, 2, -1))[:, :, rank] for part in weight)
            return Fp8Weight(*(half.flatten(1, 2).contiguous() for half in halves))

        def exchange(gated: list[Tensor], rank: int, own: Tensor) -> Tensor:
            if own.shape[1] < size // 2:  # the rank's share of the result
                return own
            gated[rank] = own
            return torch.cat(gated, dim=1)

        for tokens in (1, 20, 300):
            x = torch.randn(tokens, hidden_size, device=DEVICE).to(DTYPE)
            experts = torch.rand(tokens, count, device=DEVICE).argsort()[:, :used].int().contiguous()
            routes = Routes(experts, torch.rand(tokens, used, device=DEVICE))
            whole = expert_mlps_triton(x, routes, gate_up, down, "silu", in_order=True)
            shares = [(share(gate_up, 2, rank), share(down, 1, rank)) for rank in range(2)]
            gated = [torch.zeros(tokens * used, size // 2, device=DEVICE, dtype=DTYPE)] * 2
            for _ in range(2):  # at first, the other rank's share is not there yet
                gathers = [partial(exchange, gated, rank) for rank in range(2)]
                parts = [
                    expert_mlps_triton(x, routes, *weights, "silu", in_order=True, gather=gather)
                    for weights, gather in zip(shares, gathers, strict=True)
                ]
            assert torch.equal(torch.cat(parts, dim=1), whole)

    @pytest.mark.gpu
    @pytest.mark.parametrize("used", [1, 8])
    @pytest.mark.parametrize("block", [(128, 128), (1, 2048), (256, 256)], ids=str)
    def test_experts_pass_the_check(self, block: tuple[int, int], used: int) -> None:
        gate_up, down = WeightShape(2 * 768, 2048, block), WeightShape(2048, 768, (block[0], min(block[1], 768)))
        check_order.__wrapped__(gate_up, down, used, "silu", DTYPE, torch.device(DEVICE))

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("sizes", "block"), of_each_kind(product([(128, 8, 2048, 768), (8, 2, 512, 1792)], BLOCKS), 0, 1, 2, 3), ids=str
    )
    def test_experts_have_the_same_bits(self, sizes: tuple[int, int, int, int], block: tuple[int, int | None]) -> None:
        count, used, hidden_size, size = sizes
        gate_up, down = (
            Fp8Weight(*(part.unflatten(0, (count, -1)) for part in make_weight(count * rows, columns, block)[0]))
            for rows, columns in ((2 * size, hidden_size), (hidden_size, size))
        )
        x = torch.randn(3000, hidden_size, device=DEVICE).to(DTYPE)
        experts = torch.rand(3000, count, device=DEVICE).argsort()[:, :used].int().contiguous()
        weights = torch.rand(3000, used, device=DEVICE)
        whole = expert_mlps_triton(x, Routes(experts, weights), gate_up, down, "silu", in_order=True)
        for tokens in (1, 2, 7, 16, 40, 100, 300, 1000):
            order = torch.randperm(3000, device=DEVICE)[:tokens]
            routes = Routes(experts[order], weights[order])
            out = expert_mlps_triton(x[order], routes, gate_up, down, "silu", in_order=True)
            assert torch.equal(out, whole[order])


def test_recording_ends_with_its_block() -> None:
    with suppress(KeyError), recording():
        assert is_recording()
        raise KeyError
    assert not is_recording()


GPU_SHAPES = [(6144, 4096), (1024, 3072), (1152, 1280), (4096, 12288)]


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize(
        ("shape", "tokens"),
        of_each_kind(product(GPU_SHAPES, [1, 2, 16, 17, 33, 64, 65, 128, 200, 300]), *range(10), 10, 22, 36),
        ids=str,
    )
    def test_whichever_way_is_chosen(self, tokens: int, shape: tuple[int, int]) -> None:
        """cuBLAS multiplies many tokens, if it can."""
        weight, matrix = make_weight(*shape)
        assert can_multiply_fp8(torch.bfloat16, weight)
        for dtype in (torch.bfloat16, torch.float16):
            bias = torch.randn(shape[0], device=DEVICE).to(dtype)
            norm = Norm(torch.rand(shape[1], device=DEVICE).to(dtype), 1e-6)
            x = torch.randn(tokens, shape[1], device=DEVICE).to(dtype)
            read = x.double() if tokens == 1 else dequantized(quantize(x))
            for activation in (None, "silu"):
                out = linear(x, weight, bias, activation)
                assert out.dtype == dtype
                assert_near(out, expected(read, matrix, bias, activation))
            gate_up = torch.randn(tokens, 2 * shape[1], device=DEVICE).to(dtype)
            gated = gate_mul_triton(gate_up, "silu")
            inputs = gated.double() if tokens == 1 else dequantized(quantize(gated))
            assert_near(linear(gate_up, weight, bias, before="silu"), expected(inputs, matrix, bias, None))
            pieces = linear(x, weight, may_split=True)
            assert_near(pieces.view(-1, tokens, shape[0]).sum(0), expected(read, matrix, None, None))
            out, total = norm_linear(x, x, norm, weight, None)
            normed = rms_norm_reference(total, norm)
            read = normed.double() if tokens == 1 else dequantized(quantize(normed))
            assert_near(out, expected(read, matrix, None, None))

    @pytest.mark.parametrize("tokens", [5, 20, 60, 200])
    def test_what_a_graph_records(self, tokens: int) -> None:
        """There, other instructions fetch the same numbers."""
        weight, _ = make_weight(1024, 4096)
        x = torch.randn(tokens, 4096, device=DEVICE).to(DTYPE)
        with recording():
            recorded = linear(x, weight)
        assert_near(recorded, linear(x, weight).double())

    def test_what_is_no_number_stays_none(self) -> None:
        """Triton's interpreter makes a number of it."""
        x = torch.randn(2, 256, device=DEVICE)
        x[1, 5] = float("nan")
        assert dequantized(quantize_triton(x))[1, 5].isnan()
        assert not dequantized(quantize_triton(x))[0].isnan().any()

    def test_what_no_kernel_multiplies(self) -> None:
        """Such weights become 16-bit numbers for each product, or 32-bit ones."""
        weight, _ = make_weight(256, 256)
        assert not can_multiply_fp8(torch.float32, weight)
        narrow = Fp8Weight(weight.numbers, torch.ones(4, 4, device=DEVICE))
        assert not can_multiply_fp8(torch.bfloat16, narrow)
        assert not can_multiply_fp8(torch.bfloat16, Fp8Weight(weight.numbers.cpu(), weight.scales.cpu()))

    @pytest.mark.parametrize("block", [(1, None), (256, None), (128, 128)], ids=str)
    def test_many_tokens(self, block: tuple[int, int | None]) -> None:
        """Where cuBLAS has no such scales, our kernel multiplies prompts too."""
        weight, matrix = make_weight(1024, 512, block)
        x = torch.randn(5000, 512, device=DEVICE).to(torch.bfloat16)
        assert_near(linear(x, weight), expected(dequantized(quantize(x)), matrix, None, None))

    def test_one_token_may_be_far_from_1(self) -> None:
        """Its numbers are divided by the largest before they become float16."""
        weight, matrix = make_weight(256, 1024)
        for scale in (1e-30, 1e-6, 1e6, 1e20):
            x = (torch.randn(1, 1024, device=DEVICE) * scale).bfloat16()
            assert_near(linear(x, weight), expected(x, matrix, None, None))
        zero = linear(torch.zeros(1, 1024, device=DEVICE).bfloat16(), weight)
        assert not zero.any()
