"""gpt-oss: its checkpoints, with experts in 16 bits and in MXFP4, its experts' products, and what it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import whole_only
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_kernels import DTYPES, assert_close, randn
from test_models import run
from torch import Tensor
from transformers import GptOssConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from nanoinfer import LLM
from nanoinfer.kernels.experts.products import expert_mlps_reference, expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.groups import GroupWeight, dequantize_reference, pack
from nanoinfer.kernels.linear.activation import ClampedSwiGLU
from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.groups.experts import GroupExperts
from nanoinfer.weights.formats.groups.layouts import GPT_OSS
from nanoinfer.weights.formats.plain.experts import PlainExperts
from nanoinfer.weights.shards import Shard, table_of
from nanoinfer.weights.sources import FileSource

Weights = dict[str, Tensor]

NAMES = ExpertTensors("", "", "", "", (("experts.gate_up_proj", "experts.down_proj"),), paired=True)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
SMALL = {"kvcache_block_size": 16, "max_model_len": 320}


def packed(count: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Draw blocks and scales of matrices, [count, columns, rows], whose numbers are about 1 / sqrt(columns)."""
    blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(122, 126, (count, rows, columns // 32), dtype=torch.uint8)
    return blocks, scales


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return what blocks and scales stand for, [..., groups * 32] bfloat16, as it is computed here."""
    words = pack(GPT_OSS.fields[0].read(blocks), 4)
    weight = GroupWeight(words, scales, None, None, "e2m1", blocks.shape[-2] * 32)
    return dequantize_reference(weight, torch.bfloat16)


class TestDequantization:
    def test_it_is_that_of_transformers(self) -> None:
        """For each byte, under each scale that is a number, all bits are the same."""
        blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
        scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
        ours, theirs = dequantize(blocks, scales).mT, convert_moe_packed_tensors(blocks, scales)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert torch.equal(ours.contiguous().view(torch.int16), theirs.view(torch.int16))

    def test_the_lower_bits_come_first(self) -> None:
        blocks = torch.tensor([[[0x21, 0xF7] + [0] * 14]], dtype=torch.uint8)
        numbers = dequantize(blocks, torch.tensor([[128]], dtype=torch.uint8))[0]
        assert numbers[:5].tolist() == [1, 2, 12, -12, 0]

    def test_a_scale_that_is_no_number_leaves_none(self) -> None:
        numbers = dequantize(torch.arange(16, dtype=torch.uint8)[None, None], torch.tensor([[255]], dtype=torch.uint8))
        assert not numbers.isfinite().any()


def pack_experts(model: PreTrainedModel, folder: Path) -> None:
    """Give the model's experts numbers that MXFP4 holds, and store them so, as published checkpoints do."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, columns, rows = parameter.shape
            blocks, scales = packed(count, rows, columns)
            weights[f"{name}_blocks"], weights[f"{name}_scales"] = blocks, scales
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales))
            del weights[name]
    save_file(weights, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": MXFP4}))


def build_in_mxfp4(folder: Path) -> PreTrainedModel:
    case = CASES["gptoss"]
    case = type(case)(case.architecture, case.model_type, {**case.settings, "hidden_size": 64, "intermediate_size": 96})
    model = build(case, folder)
    pack_experts(model, folder)
    return model


@given(start=st.integers(0, 9), step=st.integers(1, 4), rows=st.integers(1, 9), cut=st.integers(1, 12))
def test_rows_that_come_in_pieces_meet_every_second_one(start: int, step: int, rows: int, cut: int) -> None:
    """Rows of a stack's entry come from another rank in pieces of any length."""
    whole = torch.arange(48.0).unsqueeze(1)
    target = torch.zeros(rows, 1)
    shard = Shard("stack", target, (1, 48, 1), start, step=step, entry=0)
    for first in range(0, len(whole), cut):
        if (meeting := shard.meet(whole[first : first + cut], first)) is not None:
            meeting[0].copy_(meeting[1])
    assert torch.equal(target, whole[None][shard.index])
    assert target.flatten().tolist() == [start + i * step for i in range(rows)]


def test_each_bias_is_written_once() -> None:
    table = table_of(in_mxfp4(ExpertSizes(2, 64, 64, 0, 64)))
    assert len(table["experts.gate_up_proj_bias"]) == 2  # the gates' and the ups'
    assert len(table["experts.down_proj_bias"]) == 1


class TestCheckpoints:
    @pytest.mark.parametrize("ranks", [1, *whole_only([2])])
    def test_experts_in_mxfp4(self, ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        """Two ranks cut a block of 32 numbers: 96 are 48 for each."""
        model = build_in_mxfp4(tmp_path)
        llm = make_llm(str(tmp_path), device="cpu", tensor_parallel_size=ranks, **SMALL)
        run(llm, model, prompt_logprobs=0)

    def test_both_layouts_replace_running_weights(
        self, make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A trainer gives tensors as transformers has them; files may have them in MXFP4."""
        monkeypatch.setattr("test_models.LENGTHS", [1, 17])
        model = build_in_mxfp4(tmp_path)
        llm = make_llm(str(tmp_path), load_format="dummy", device="cpu", tensor_parallel_size=2, **SMALL)
        llm.update_weights(model.named_parameters())
        run(llm, model)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        llm.update_weights(model.named_parameters())
        run(llm, model)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        llm.load_weights(str(tmp_path))
        run(llm, model)

    @pytest.mark.parametrize("form", ["16 bits", "mxfp4", "mxfp4 in two files"])
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_the_ranks_shares_make_up_every_expert(self, size: int, form: str, tmp_path: Path) -> None:
        """Of 96 numbers two ranks have 48, and four 24: they cut blocks of 32."""
        (blocks, scales), (down_blocks, down_scales) = packed(3, 192, 64), packed(3, 64, 96)
        gate_up, down = dequantize(blocks, scales).float(), dequantize(down_blocks, down_scales).float()
        biases = {"experts.gate_up_proj_bias": torch.randn(3, 192), "experts.down_proj_bias": torch.randn(3, 64)}
        if form == "16 bits":
            stacks = {"experts.gate_up_proj": gate_up.mT.contiguous(), "experts.down_proj": down.mT.contiguous()}
            write(tmp_path, {**stacks, **biases})
        else:
            firsts = {"experts.gate_up_proj_blocks": blocks, "experts.down_proj_scales": down_scales, **biases}
            seconds = {"experts.gate_up_proj_scales": scales, "experts.down_proj_blocks": down_blocks}
            write(tmp_path, *([firsts, seconds] if form == "mxfp4 in two files" else [{**firsts, **seconds}]))

        def load(index: int) -> PlainExperts | GroupExperts:
            sizes = ExpertSizes(3, 64, 96, index * 96 // size, 96 // size)
            experts = PlainExperts(NAMES, sizes, biases=True) if form == "16 bits" else in_mxfp4(sizes)
            FileSource(str(tmp_path)).fill(table_of(experts))
            return experts

        ranks = [load(index) for index in range(size)]
        weights = [numbers_of(experts) for experts in ranks]
        halves = [gates_and_ups.chunk(2, dim=1) for gates_and_ups, _ in weights]
        assert torch.equal(torch.cat([gate for gate, _ in halves], dim=1), gate_up[:, ::2])
        assert torch.equal(torch.cat([up for _, up in halves], dim=1), gate_up[:, 1::2])
        assert torch.equal(torch.cat([downs for _, downs in weights], dim=2), down)
        of_halves = [experts.biases.gate_up.chunk(2, dim=1) for experts in ranks]
        bias = biases["experts.gate_up_proj_bias"]
        assert torch.equal(torch.cat([gate for gate, _ in of_halves], dim=1), bias[:, ::2])
        assert torch.equal(torch.cat([up for _, up in of_halves], dim=1), bias[:, 1::2])
        assert all(torch.equal(experts.biases.down, biases["experts.down_proj_bias"]) for experts in ranks)

    def test_ranks_that_split_outputs(self, tmp_path: Path) -> None:
        """Each has some rows of down, and their biases; deterministic ranks on GPUs do so."""
        down, bias = torch.randn(2, 8, 6), torch.randn(2, 6)
        stacks = {"experts.gate_up_proj": torch.zeros(2, 6, 16), "experts.down_proj": down}
        write(tmp_path, {**stacks, "experts.gate_up_proj_bias": torch.zeros(2, 16), "experts.down_proj_bias": bias})
        for outputs in (range(3), range(3, 6)):
            sizes = ExpertSizes(2, 6, 8, 4 * (outputs.start > 0), 4)
            experts = PlainExperts(NAMES, sizes, OutputShare(outputs, lambda x: x), biases=True)
            FileSource(str(tmp_path)).fill(table_of(experts))
            assert torch.equal(experts.down, down.mT[:, outputs.start : outputs.stop])
            assert torch.equal(experts.biases.down, bias[:, outputs.start : outputs.stop])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"experts.down_proj_scales": None}, "missing: experts.down_proj_scales"),
            ({"experts.gate_up_proj_blocks": None}, "missing: experts.gate_up_proj_blocks"),
            (
                {"experts.down_proj_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)},
                r"down_proj_scales has shape \[3, 64, 2\], but the model needs \[3, 64, 3\]",
            ),
            (
                {"experts.down_proj_blocks": torch.zeros(3, 3, 64, 16, dtype=torch.uint8)},
                r"down_proj_blocks has shape \[3, 3, 64, 16\], but the model needs \[3, 64, 3, 16\]",
            ),
            (
                {"experts.down_proj_blocks": None, "experts.down_proj_scales": None},
                "missing: experts.down_proj_blocks, experts.down_proj_scales",
            ),
            ({"experts.down_proj": torch.zeros(3, 96, 64)}, "stored twice: experts.down_proj"),
            (
                {"experts.down_proj_bias": torch.zeros(3, 96)},
                r"_bias has shape \[3, 96\], but the model needs \[3, 64\]",
            ),
        ],
    )
    def test_what_does_not_fit_is_named(self, change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
        (blocks, scales), (down_blocks, down_scales) = packed(3, 192, 64), packed(3, 64, 96)
        weights: dict[str, Tensor | None] = {
            "experts.gate_up_proj_blocks": blocks,
            "experts.gate_up_proj_scales": scales,
            "experts.down_proj_blocks": down_blocks,
            "experts.down_proj_scales": down_scales,
            "experts.gate_up_proj_bias": torch.zeros(3, 192),
            "experts.down_proj_bias": torch.zeros(3, 64),
            **change,
        }
        write(tmp_path, {name: tensor for name, tensor in weights.items() if tensor is not None})
        with pytest.raises(ValueError, match=message):
            FileSource(str(tmp_path)).fill(table_of(in_mxfp4(ExpertSizes(3, 64, 96, 0, 96))))

    def test_square_matrices_are_not_mistaken_for_turned_ones(self, tmp_path: Path) -> None:
        """Those of gpt-oss's experts are: 2,880 by 2,880."""
        down = torch.randn(2, 8, 8)
        biases = {"experts.gate_up_proj_bias": torch.zeros(2, 16), "experts.down_proj_bias": torch.zeros(2, 8)}
        write(tmp_path, {"experts.gate_up_proj": torch.randn(2, 8, 16), "experts.down_proj": down, **biases})
        experts = PlainExperts(NAMES, ExpertSizes(2, 8, 8, 0, 8), biases=True)
        FileSource(str(tmp_path)).fill(table_of(experts))
        assert torch.equal(experts.down, down.mT)


def in_mxfp4(sizes: ExpertSizes) -> GroupExperts:
    return GroupExperts(NAMES, sizes, GPT_OSS, "MXFP4", biases=True)


def numbers_of(experts: PlainExperts | GroupExperts) -> list[Tensor]:
    """Return the gates and ups, and the downs, of all experts."""
    weights = experts.gate_up, experts.down
    if isinstance(experts, PlainExperts):
        return list(weights)
    return [store.dense(torch.float32).unflatten(0, (experts.sizes.count, -1)) for store in weights]


def write(folder: Path, *files: Weights) -> None:
    """Write a checkpoint of several files."""
    places = {}
    for number, weights in enumerate(files):
        save_file(weights, folder / f"{number}.safetensors")
        places |= dict.fromkeys(weights, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


SHAPES = [(1, 5, 3, 64, 32), (1, 4, 1, 72, 40), (7, 6, 4, 64, 48)]  # tokens, experts, used, hidden_size, size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "count", "used", "hidden_size", "size"),
    [
        *SHAPES,
        *whole_only([(40, 4, 2, 96, 64), (200, 4, 3, 64, 72)]),
        *(pytest.param(tokens, 32, 4, 2880, 2880, marks=pytest.mark.gpu) for tokens in (1, 16, 256, 4096)),
    ],
)
def test_products_of_experts_with_biases(
    tokens: int, count: int, used: int, hidden_size: int, size: int, dtype: torch.dtype
) -> None:
    """One launch, few tokens and many add the biases, and the activation's limits are reached."""
    x, activation = randn(tokens, hidden_size, dtype=dtype), ClampedSwiGLU(1.702, 1.5)
    gate_up, down = (
        randn(count, *shape, dtype=dtype) / shape[1] ** 0.5 for shape in ((2 * size, hidden_size), (hidden_size, size))
    )
    biases = randn(count, 2 * size, dtype=dtype), randn(count, hidden_size, dtype=dtype)
    experts = torch.rand(tokens, count, device=x.device).argsort()[:, :used].int().contiguous()
    routes = Routes(experts, torch.rand(experts.shape, device=x.device))
    expected = torch.zeros(tokens, hidden_size, dtype=torch.float64, device=x.device)
    for choice in range(used):
        for token, expert in enumerate(experts[:, choice].tolist()):
            gates_and_ups = gate_up[expert].double() @ x[token].double() + biases[0][expert].double()
            gate, up = gates_and_ups.split(size)
            gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            out = down[expert].double() @ inner + biases[1][expert].double()
            expected[token] += routes.weights[token, choice].double() * out
    assert_close(expert_mlps_triton(x, routes, gate_up, down, activation, False, False, None, *biases), expected)
    assert_close(expert_mlps_triton(x, routes, gate_up, down, activation, False, True, None, *biases), expected)
    assert_close(expert_mlps_reference(x, routes, gate_up, down, activation, None, *biases), expected)


def test_experts_are_those_of_transformers() -> None:
    """Ups and gates beside each other there, one after another here."""
    config = GptOssConfig(hidden_size=48, intermediate_size=32, num_local_experts=5, swiglu_limit=0.9)
    config._experts_implementation = "eager"
    module = GptOssExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x, weights = torch.randn(9, 48), torch.rand(9, 2)
    experts = torch.rand(9, 5).argsort()[:, :2]
    gate_up, bias = module.gate_up_proj.mT, module.gate_up_proj_bias
    ours = expert_mlps_reference(
        x,
        Routes(experts.int(), weights),
        torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1),
        module.down_proj.mT,
        ClampedSwiGLU(1.702, 0.9),
        None,
        torch.cat([bias[:, ::2], bias[:, 1::2]], dim=1),
        module.down_proj_bias,
    )
    assert_close(ours, module(x, experts, weights))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, "quantization='fp8': experts with biases, .* cannot be in FP8; leave it out"),
        ({"attention_backend": "flash_attn"}, "attention_backend='flash_attn': cannot attend with the sinks"),
    ],
)
def test_options_that_it_cannot_have(
    options: dict[str, Any], message: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    build(CASES["gptoss"], tmp_path)
    with pytest.raises(ValueError, match=message):
        make_llm(str(tmp_path), device="cpu", **options)
