"""Packed weights: the CPU's products of float32 weights with many outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nanoinfer import LLM
from nanoinfer.kernels.linear.cpu.packed import PackedWeight, can_pack, packed_copy
from nanoinfer.kernels.linear.dispatch import linear
from nanoinfer.weights.formats.plain.matrix import PlainMatrix

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")


@pytest.mark.parametrize("tokens", [1, 3, 16, 200])
@pytest.mark.parametrize("in_features", [1, 192, 256, 257, 600])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_equals_the_plain_one(tokens: int, in_features: int, has_bias: bool) -> None:
    x, weight = torch.randn(tokens, in_features), torch.randn(2 * in_features + 2, in_features)
    bias = torch.randn(len(weight)) if has_bias else None
    packed = PackedWeight(weight)
    torch.testing.assert_close(linear(x, packed, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    gated = linear(x, packed, bias, activation="silu")
    torch.testing.assert_close(gated, linear(x, weight, bias, activation="silu"), rtol=1e-4, atol=1e-3)


def test_a_packed_product_takes_columns_of_a_wider_input() -> None:
    wide, weight = torch.randn(5, 900), torch.randn(700, 300)
    out = PackedWeight(weight).product(wide[:, 300:600], None)
    torch.testing.assert_close(out, wide[:, 300:600] @ weight.T, rtol=1e-5, atol=1e-4)


def test_a_packed_product_of_many_inputs_rounds_no_worse_than_half_again_the_plain_one() -> None:
    x, weight = torch.randn(16, 4096), torch.randn(1024, 4096)
    exact = x.double() @ weight.double().T
    ours, plain = (out.double().sub(exact).norm() for out in (PackedWeight(weight).product(x, None), x @ weight.T))
    assert ours < 1.5 * plain


def test_rows_of_a_packed_weight_are_written_and_read() -> None:
    weight, values = torch.randn(700, 300), torch.randn(10, 300, dtype=torch.bfloat16)
    packed = PackedWeight(weight)
    rows = packed[100:400]
    assert rows.shape == (300, 300)
    rows[50:60].copy_(values)
    weight[150:160] = values
    assert torch.equal(packed.unpacked(), weight)
    assert torch.equal(rows.unpacked(), weight[100:400])
    x = torch.randn(3, 300)
    assert torch.equal(packed.product(x, None), PackedWeight(weight).product(x, None))


def test_only_float32_weights_of_many_outputs_are_packed() -> None:
    assert can_pack(torch.empty(128, 64))
    assert not can_pack(torch.empty(127, 64))
    assert not can_pack(torch.empty(128, 64, dtype=torch.bfloat16))
    assert not can_pack(torch.empty(128, 64, device="meta"))


def test_a_loaded_model_keeps_packed_weights_alone(make_llm: Callable[..., LLM]) -> None:
    model = make_llm(device="cpu").engine.ranks.runner.steps.model
    matrices = [module for module in model.modules() if isinstance(module, PlainMatrix)]
    packed = [matrix for matrix in matrices if isinstance(matrix.weight, PackedWeight)]
    assert len(packed) == len(matrices) / 2  # those of queries, keys and values, and of gate and up
    assert all("weight" not in dict(matrix.named_parameters()) for matrix in packed)


@pytest.mark.parametrize("tokens", [1, 3, 16, 200])
@pytest.mark.parametrize("shape", [(70, 1), (33, 257), (600, 192), (64, 1000)])
def test_a_packed_copy_in_bfloat16_rounds_as_the_plain_product(tokens: int, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(tokens, shape[1]).bfloat16(), torch.randn(shape).bfloat16()
    bias = torch.randn(shape[0]).bfloat16()
    copy = packed_copy(weight)
    assert isinstance(copy, PackedWeight) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    exact = x.float() @ weight.float().T + bias.float()
    torch.testing.assert_close(linear(x, copy, bias).float(), exact, rtol=2**-7, atol=1e-3 * shape[1] ** 0.5)


def test_a_packed_copy_of_few_outputs_in_float32_stays_as_it_is() -> None:
    weight = torch.randn(127, 64)
    assert packed_copy(weight) is weight
