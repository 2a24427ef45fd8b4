"""Products of few outputs and many tokens, as captured steps compute them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, HAS_CUDA, of_each_kind
from torch import Tensor

pytest.importorskip("triton")

from nanoinfer.kernels.launch import can_copy, recording
from nanoinfer.kernels.linear import few_outputs
from nanoinfer.kernels.linear.dispatch import linear
from nanoinfer.kernels.linear.few_outputs import Tiling, few_outputs_linear, find_tiling, parts_of, tile
from nanoinfer.kernels.norm.norm import Norm, add_norm_reference, add_norm_triton

SHORT = torch.bfloat16 if HAS_CUDA else torch.float16  # the interpreter's products of bfloat16 are wrong
TOLERANCE = 1e-2 if HAS_CUDA else 2e-3  # of the whole product
MULTIPROCESSORS = 132  # of an H100


def draw(tokens: int, out_features: int, in_features: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return vectors, a weight, a bias, and their product without the bias."""
    x = torch.randn(tokens, in_features, device=DEVICE).to(SHORT)
    weight = (torch.randn(out_features, in_features, device=DEVICE) / in_features**0.5).to(SHORT)
    return x, weight, torch.randn(out_features, device=DEVICE).to(SHORT), F.linear(x.double(), weight.double())


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Check the relative error of the whole product, whose pieces may be apart."""
    total = out.double() if out.dim() == 2 else out.double().sum(dim=0)
    assert total.shape == expected.shape
    assert (total - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("pieces", of_each_kind(zip((1, 3)), 1))
@pytest.mark.parametrize(
    ("tokens", "width", "token_tiles"),
    of_each_kind([(65, 80, 1), (96, 48, 2), (100, 64, 2), (144, 80, 2), (176, 192, 1)], 0, 1, 3),
)
def test_tiles_and_pieces(tokens: int, width: int, token_tiles: int, pieces: int) -> None:
    """Some tiles lack tokens, or have some of their neighbour's; the last ones lack outputs and inputs."""
    x, weight, bias, expected = draw(tokens, 200, 1000)
    for outputs in (64, 128):
        tiling = Tiling(width, outputs, (token_tiles, -(-200 // outputs), pieces))
        out = few_outputs_linear(x, weight, tiling)
        assert out.shape == ((3, tokens, 200) if pieces > 1 else (tokens, 200))
        assert out.dtype == (torch.float32 if pieces > 1 else SHORT)
        assert_near(out, expected)
        with_bias = few_outputs_linear(x, weight, tiling, bias)
        assert_near(with_bias, expected + bias.double())
        assert pieces == 1 or torch.equal(with_bias[1:], out[1:])


def test_no_token_depends_on_its_tile() -> None:
    """Nor do the bits of a token that two tiles compute."""
    x, weight, _, _ = draw(100, 128, 520)
    alone = few_outputs_linear(x, weight, Tiling(128, 64, (1, 2, 2)))
    assert torch.equal(few_outputs_linear(x, weight, Tiling(64, 64, (2, 2, 2))), alone)
    assert torch.equal(few_outputs_linear(x[30:], weight, Tiling(48, 64, (2, 2, 2))), alone[:, 30:])


def test_the_norm_adds_the_pieces() -> None:
    x, weight, _, expected = draw(70, 128, 512)
    residual, norm = torch.randn_like(x[:, :128]), Norm(torch.ones(128, device=DEVICE, dtype=SHORT), 1e-6)
    out, total = add_norm_triton(few_outputs_linear(x, weight, Tiling(80, 64, (1, 2, 2))), residual, norm)
    expected_out, expected_total = add_norm_reference(expected.to(SHORT), residual, norm)
    assert_near(total, expected_total.double())
    assert_near(out, expected_out.double())


def test_every_width_is_a_power_of_two_or_the_sum_of_two() -> None:
    for width in {width for _, _, widths in few_outputs.TILES for width in widths}:
        first, second = parts_of(width)
        assert first + second == width
        assert first & (first - 1) == second & (second - 1) == 0
        assert second == 0 or second >= 16  # the fewest tokens of a block


def test_every_tile_has_a_multiprocessor_and_every_token_a_tile() -> None:
    for out_features in (1024, 2048, 2560, 3840, 4096, 5120):
        for tokens in range(few_outputs.LEAST_TOKENS, few_outputs.MOST_TOKENS + 1):
            if tiling := tile(tokens, out_features, 12288, MULTIPROCESSORS):
                token_tiles, output_tiles, pieces = tiling.grid
                assert 0.8 * MULTIPROCESSORS <= token_tiles * output_tiles * pieces <= MULTIPROCESSORS
                assert tokens <= token_tiles * tiling.tokens
                assert tiling.tokens <= tokens + few_outputs.MOST_LACKING
                assert output_tiles * tiling.outputs >= out_features


def test_only_captured_steps_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a graph, the host would take longer than the device."""
    monkeypatch.setattr(few_outputs, "is_measured", lambda _: True)
    monkeypatch.setattr(few_outputs, "num_multiprocessors", lambda _: MULTIPROCESSORS)
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (128, 4096))
    assert find_tiling(x, weight) is None
    with recording():
        assert find_tiling(x, weight) is not None
        assert find_tiling(x[:64], weight) is None
        assert find_tiling(x.float(), weight.float()) is None
        assert find_tiling(x[:, :100], weight[:, :100]) is None  # the rows would begin between what is copied
        assert find_tiling(x[:, :2048], weight[:, :2048].contiguous()) is None  # their rows do not follow each other
        assert find_tiling(x.repeat(3, 1), weight) is None


def test_what_tensor_memory_copies_can_read() -> None:
    numbers = torch.empty(4 * 64 + 1, dtype=SHORT, device=DEVICE)
    first, later = numbers[:-1].view(4, 64), numbers[1:].view(4, 64)
    assert can_copy(first, first)
    assert not can_copy(first, later)  # it begins between what is copied
    assert not can_copy(first[:, :32])
    assert not can_copy(numbers[: 4 * 12].view(4, 12))  # so do its rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", of_each_kind(zip((torch.bfloat16, torch.float16)), 0))
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 12288), (1024, 2048), (2560, 9728), (5120, 17408)], ids=str)
def test_what_a_graph_records(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Graphs replay it with other numbers in the same places, and have the same bits each time."""
    out_features, in_features = shape
    weight = (torch.randn(out_features, in_features, device=DEVICE) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features, device=DEVICE).to(dtype)
    for tokens in (65, 80, 100, 144, 200, 256):
        x, graph = torch.zeros(tokens, in_features, device=DEVICE, dtype=dtype), torch.cuda.CUDAGraph()
        with recording():
            linear(x, weight, bias, may_split=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = linear(x, weight, bias, may_split=True)
        x.copy_(torch.randn(tokens, in_features, device=DEVICE))
        graph.replay()
        first = out.clone()
        expected = F.linear(x.float(), weight.float(), bias.float())
        total = first.float() if first.dim() == 2 else first.sum(dim=0)
        assert (total - expected).norm() < 5e-3 * expected.norm()
        graph.replay()
        assert torch.equal(out, first)
