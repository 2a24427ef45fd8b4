"""Weights of few bits on the CPU in bfloat16: few rows are multiplied by the bits themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import greedy
from safetensors.torch import load_file

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.kernels.groups import BITS, GroupWeight, Numbers, dequantize_reference, pack
from nanoinfer.kernels.linear.cpu import few_bits
from nanoinfer.kernels.linear.cpu.packed import PackedWeight
from nanoinfer.kernels.linear.dispatch import linear
from nanoinfer.weights.formats import made

COUNTS = {"int4": 16, "int6": 64, "int8": 256}
needs_product = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="torch multiplies by four bits the slow way here",
)


def _weight(numbers: Numbers, group: int, zeros: str = "", outputs: int = 80, inputs: int = 768) -> GroupWeight:
    shape = outputs, inputs // group
    codes = torch.randint(COUNTS[numbers], (outputs, inputs))
    codes[0, :2] = torch.tensor([0, COUNTS[numbers] - 1])
    scales = torch.rand(shape).add(0.5) / COUNTS[numbers]
    own = {
        "minima": scales * COUNTS[numbers] * torch.rand(shape),
        "zeros": torch.randint(COUNTS[numbers], shape, dtype=torch.uint8),
    }
    return GroupWeight(pack(codes, BITS[numbers]), scales, own.get(zeros), None, numbers, inputs)


def _few_bits(weight: GroupWeight) -> few_bits.FewBitsWeight:
    return few_bits.FewBitsWeight(weight, PackedWeight(dequantize_reference(weight, torch.bfloat16)))


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.float() - expected).norm() / expected.norm()).item()


@needs_product
class TestProducts:
    @pytest.mark.parametrize("rows", [1, 2, 5, 8, 9])
    @pytest.mark.parametrize(
        ("numbers", "group", "zeros"),
        [
            ("int4", 32, ""),  # Q4_0
            ("int4", 32, "minima"),  # Q4_K, Q4_1
            ("int4", 128, "zeros"),  # AWQ, GPTQ
            ("int4", 768, ""),  # one for each row
            ("int6", 16, ""),  # Q6_K
            ("int6", 32, "minima"),  # Q5_K, Q5_1
            ("int8", 32, ""),  # Q8_0
            ("int8", 128, "zeros"),
            ("int8", 768, ""),
        ],
    )
    def test_they_err_by_at_most_twice_what_numbers_of_bfloat16_do(
        self, numbers: Numbers, group: int, zeros: str, rows: int
    ) -> None:
        weight, x, bias = _weight(numbers, group, zeros), torch.randn(rows, 768).bfloat16(), torch.randn(80).bfloat16()
        assert few_bits.fits(weight)
        exact = dequantize_reference(weight, torch.float32)
        expected = F.linear(x.float(), exact, bias.float())
        error = _error(linear(x, _few_bits(weight), bias), expected)
        assert error <= 2 * _error(F.linear(x, exact.bfloat16(), bias), expected), error

    def test_an_activation_comes_after(self) -> None:
        weight, x, bias = _weight("int4", 32), torch.randn(2, 768).bfloat16(), torch.randn(80).bfloat16()
        gates, ups = F.linear(x.float(), dequantize_reference(weight, torch.float32), bias.float()).chunk(2, dim=1)
        out = linear(x, _few_bits(weight), bias, "silu")
        assert _error(out, F.silu(gates) * ups) < 0.01

    def test_large_weights_are_packed_part_by_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, x = _weight("int8", 32, outputs=208), torch.randn(1, 768).bfloat16()
        whole = linear(x, _few_bits(weight))
        monkeypatch.setattr(few_bits, "NUMBERS_AT_ONCE", 768)
        assert torch.equal(linear(x, _few_bits(weight)), whole)


@needs_product
@pytest.mark.parametrize(
    "weight",
    [
        _weight("int4", 16),  # a smaller group than torch's
        _weight("int4", 32, outputs=72),  # no multiple of 16
        _weight("int4", 32)._replace(numbers="nf4"),
    ],
)
def test_others_do_not_fit(weight: GroupWeight) -> None:
    assert not few_bits.fits(weight)


@needs_product
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_changed_weights_count(
    quantization: str, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oracle multiplies one row by numbers of bfloat16, too."""

    def logprobs() -> list[float]:
        made._tell_of_bits.cache_clear()
        llm = make_llm(BUNDLED_MODEL, device="cpu", max_model_len=32, dtype="bfloat16", quantization=quantization)
        weights, name = load_file(Path(BUNDLED_MODEL) / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
        llm.update_weights({**weights, name: weights[name].flip(0)}.items())
        outputs = llm.generate([[5, 6, 7]], greedy(2, logprobs=0, ignore_eos=True), use_tqdm=False)
        return [next(iter(entry.values())) for output in outputs for entry in output.logprobs]

    with caplog.at_level("INFO", "nanoinfer"):
        own = logprobs()
    assert "in the order of its product of few rows" in caplog.text
    monkeypatch.setattr(few_bits, "fits", lambda weight: False)
    assert own == pytest.approx(logprobs(), abs=0.05)
