"""LongCat-Flash: choices that are no experts, factors of latents, published checkpoints, formats and adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.layouts import PUBLISHED
from cases.weights import BLOCKS, DTYPE, INT4, Form, draw, matrices_of
from conftest import DEVICE, Oracle, greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from test_four_bits import write_checkpoint as write_in_four_bits
from test_kernels import DTYPES, assert_close, randn
from test_quantization import FP8_CONFIG, write_checkpoint
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.kernels.experts.identities import add_identities_reference, add_identities_triton
from nanoinfer.kernels.experts.products import expert_mlps_reference, expert_mlps_triton
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.latent.store import rotate_and_store_reference, rotate_and_store_triton
from nanoinfer.kernels.linear.cpu.in_parts import WeightInParts
from nanoinfer.kernels.norm.norm import Norm, normalize_reference
from nanoinfer.kernels.sorting import group_reference, group_triton
from nanoinfer.layers.rotary import Rope, RotaryEmbedding
from nanoinfer.models import describe
from nanoinfer.weights.formats.plain.format import PLAIN

CASE = CASES["longcat"]
PROMPTS = [list(range(3, 90)), [7] * 20, [9]]
EXPERTS, NONE, USED = 6, 3, 4  # of the kernels' layers
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "kvcache_block_size": 16}


def choose(tokens: int) -> Routes:
    """Return choices of which some are no experts: three of the first token, and none of the last of several tokens."""
    numbers = torch.rand(tokens, EXPERTS + NONE, device=DEVICE).argsort(dim=1)[:, :USED].int().contiguous()
    numbers[0, :NONE] = torch.arange(EXPERTS, EXPERTS + NONE)
    numbers[0, NONE:] = 0
    numbers[-1] = torch.arange(USED) if tokens > 1 else numbers[-1]
    return Routes(numbers, torch.rand(tokens, USED, device=DEVICE))


def of_experts_alone(routes: Routes) -> Routes:
    """Return the same choices, but that a token gives no weight to other experts in place of those that are none."""
    rows = routes.experts.tolist()
    for row in rows:
        others = (number for number in range(EXPERTS) if number not in row)
        row[:] = [number if number < EXPERTS else next(others) for number in row]
    weights = routes.weights.masked_fill(routes.experts >= EXPERTS, 0)
    return Routes(torch.tensor(rows, dtype=torch.int32, device=DEVICE), weights)


@pytest.mark.parametrize("tokens", [1, 5, *whole_only([40, 100])])
@pytest.mark.parametrize("form", [None, BLOCKS[0], INT4], ids=str)
@pytest.mark.parametrize("in_order", [False, *whole_only([True])])
def test_products_skip_what_is_no_expert(form: Form, tokens: int, in_order: bool) -> None:
    weights, x, routes = (
        (draw(form, EXPERTS, 2 * 128, 128), draw(form, EXPERTS, 128, 128)),
        randn(tokens, 128, dtype=DTYPE),
        choose(tokens),
    )
    plain, alone = [matrices_of(weight).float() for weight in weights], of_experts_alone(routes)
    out = expert_mlps_triton(x, routes, *weights, "silu", in_order=in_order, count=EXPERTS)
    if form != BLOCKS[0]:
        assert_close(out, expert_mlps_reference(x.float(), alone, *plain, "silu"))
    else:  # the kernels round several tokens alike
        assert torch.equal(out, expert_mlps_triton(x, alone, *weights, "silu", in_order=True))


def test_the_cpu_skips_what_is_no_expert() -> None:
    """So it does in parts, and where no token chooses an expert."""
    gate_up, down, x, routes = randn(EXPERTS, 64, 48), randn(EXPERTS, 48, 32), randn(5, 48), choose(5)
    parts = (
        [WeightInParts(weight, [(32, 32)] * 2) for weight in gate_up],
        [WeightInParts(weight, [(48, 48)]) for weight in down],
    )
    expected = expert_mlps_reference(x, of_experts_alone(routes), gate_up, down, "silu")
    for weights in ((gate_up, down), parts):
        assert_close(expert_mlps_reference(x, routes, *weights, "silu", count=EXPERTS), expected)
    none = Routes(routes.experts.clamp(min=EXPERTS), routes.weights)
    assert not expert_mlps_reference(x, none, gate_up, down, "silu", count=EXPERTS).any()


@pytest.mark.parametrize("tokens", [1, 70])
def test_groups_leave_out_what_is_no_expert(tokens: int) -> None:
    experts = choose(tokens).experts
    ours, expected = group_triton(experts, EXPERTS, 16), group_reference(experts, EXPERTS, 16)
    assert torch.equal(ours.tiles, expected.tiles)
    grouped = int((experts < EXPERTS).sum())
    assert torch.equal(ours.choices[:grouped], expected.choices[:grouped])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, *whole_only([6144])])
def test_identities_give_back_the_token(size: int, dtype: torch.dtype) -> None:
    x, out, routes = randn(9, size, dtype=dtype), randn(9, size, dtype=dtype), choose(9)
    expected = out.double()
    for token, choice in (routes.experts >= EXPERTS).nonzero().tolist():
        expected[token] += routes.weights[token, choice] * x[token].double()
    for add in (add_identities_triton, add_identities_reference):
        assert_close(add(out, x, routes, EXPERTS), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_of_latents(dtype: torch.dtype) -> None:
    """It is none of the keys that all heads share."""
    q, kv, norm = randn(3, 2, 20, dtype=dtype), randn(3, 48, dtype=dtype), Norm(randn(40, dtype=dtype), 1e-6)
    cos_sin = RotaryEmbedding(Rope((0.1, 0.2, 0.3, 0.4)), 100).cos_sin.to(DEVICE)
    places = torch.tensor([7, 0, 12], dtype=torch.int32, device=DEVICE)
    for write in (rotate_and_store_reference, rotate_and_store_triton):
        caches = [torch.zeros(1, 16, 1, 48, dtype=dtype, device=DEVICE) for _ in range(2)]
        for cache, factor in zip(caches, (1.0, 3.5), strict=True):
            own = q.clone()
            write(own, own[..., 12:], kv, norm, cos_sin, True, None, places, cache, places, None, factor)
        plain, larger = (cache[0, places.long(), 0] for cache in caches)
        assert torch.equal(plain[:, 40:], larger[:, 40:])
        assert_close(
            larger[:, :40], (3.5 * normalize_reference(kv[:, :40].float(), Norm(norm.weight.float(), 1e-6))).to(dtype)
        )


def publish(folder: Path) -> PreTrainedModel:
    """Build the case as published files have it: without gates of what is no expert, and with layers that guess."""
    model = build(CASE, folder)
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        if re.search(r"\.experts\.1[0-4]\.", name):
            del weights[name]
    weights |= {f"model.mtp.{name}.weight": torch.zeros(3, 4) for name in ("embed_tokens", "layers.0.eh_proj")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA"}
    (folder / "config.json").write_text(json.dumps({**config, "zero_expert_type": "identity"}))
    return model


def continued(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=count, **how)[0, len(prompt) :].tolist()


def chosen_by(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Return what transformers' routers choose, [tokens, layers, used]."""
    chosen = list[Tensor]()

    def keep(_: nn.Module, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen.append(outputs[2])

    hooks = [layer.mlp.router.register_forward_hook(keep) for layer in model.model.layers]
    model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


def test_a_published_checkpoint(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """And which choices a token took; those of transformers' router have the same numbers."""
    model = publish(tmp_path)
    llm = make_llm(str(tmp_path), **SMALL, routed_experts=True)
    for output in llm.generate(PROMPTS, greedy(5, ignore_eos=True), use_tqdm=False):
        assert output.token_ids == continued(model, output.prompt_token_ids, 5)
        theirs = chosen_by(model, output.prompt_token_ids)
        ours = torch.from_numpy(output.routed_experts.astype("int64"))[: len(theirs)]
        assert torch.equal(ours.sort(dim=-1).values, theirs.sort(dim=-1).values)
        assert ours.max() >= 10 or len(ours) == 1


def test_the_layers_of_a_description(tmp_path: Path) -> None:
    publish(tmp_path)
    model = describe(Checkpoint.open(str(tmp_path)).hf_config)
    assert model.num_layers == len(model.memory(1)) == 4
    assert [model.names.prefix(layer) for layer in range(4)] == ["model.layers.0."] * 2 + ["model.layers.1."] * 2
    assert model.names_of(3).o == "self_attn.1.o_proj"
    assert model.different_layers == [0, 1]
    assert model.mlp_sizes == [64] * 4
    assert model.experts is not None
    assert (model.experts.count, model.experts.choices) == (10, 15)
    assert replace(model.experts, count=252).number_type == "int16"


@pytest.mark.parametrize("ranks", [1, *whole_only([2, 4])])
def test_matrices_in_fp8(ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    build(CASE, tmp_path / "source")
    dense = write_checkpoint(tmp_path / "source", tmp_path, {**FP8_CONFIG, "weight_block_size": [32, 16]})
    assert_alike(make_llm(str(tmp_path), tensor_parallel_size=ranks, **SMALL), dense)


@pytest.mark.parametrize("ranks", [1, *whole_only([2, 4])])
def test_matrices_in_int4(ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "expert_ffn_hidden_size": 96}
    latents = {"kv_lora_rank": 64, "q_lora_rank": 32, "v_head_dim": 16}
    build(replace(CASE, settings={**CASE.settings, **sizes, **latents}), tmp_path / "source")
    dense = write_in_four_bits(tmp_path / "source", tmp_path, PUBLISHED["awq"])
    assert_alike(make_llm(str(tmp_path), tensor_parallel_size=ranks, **SMALL), dense)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS[1:], greedy(5, ignore_eos=True), use_tqdm=False)]


def assert_alike(llm: LLM, folder: Path) -> None:
    oracle = Oracle(str(folder))
    for output in llm.generate(PROMPTS, greedy(5, ignore_eos=True), use_tqdm=False):
        assert output.token_ids == oracle.greedy(output.prompt_token_ids, 5, ignore_eos=True)


@pytest.mark.parametrize("quantization", of_each_kind(zip(["int8", "fp8", "int4", "mxfp4"]), 0))
def test_matrices_that_are_rounded_as_they_load(
    quantization: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """A trainer's stacks of gates and ups have entries for what is no expert."""
    weights = publish(tmp_path).state_dict()
    llm = make_llm(str(tmp_path), quantization=quantization, **SMALL)
    formats = llm.config.description.formats
    assert PLAIN not in [formats.of(f"model.layers.1.{name}") for name in ("self_attn.1.q_b_proj", "mlps.0.up_proj")]
    before = tokens_of(llm)
    llm.update_weights({name: weight / 2 if "kv_b_proj" in name else weight for name, weight in weights.items()})
    assert tokens_of(llm) != before
    llm.update_weights(weights)
    assert tokens_of(llm) == before


def test_no_bit_depends_on_company(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    publish(tmp_path)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=8, logprobs=2, ignore_eos=True)
    together = make_llm(str(tmp_path), deterministic=True, **SMALL).generate(PROMPTS, params, use_tqdm=False)
    llm = make_llm(str(tmp_path), deterministic=True, speculation="suffix", max_num_batched_tokens=24, **SMALL)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.mark.parametrize("target", ["layers", *whole_only(["stacks"])])
def test_adapters(target: str, make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand beside both halves' projections, and experts'."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr("peft.utils.transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING", {})
    model = build(CASE, tmp_path)
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    halves = {"target_modules": [*names, "mlps.0.up_proj", "mlps.1.down_proj"]}
    stacks = {"target_modules": names, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    config = peft.LoraConfig(r=4, init_lora_weights=False, **(halves if target == "layers" else stacks))
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    llm = make_llm(str(tmp_path), max_adapters=2, **SMALL)
    llm.load_adapter("adapter", str(tmp_path / "adapter"))
    for output in llm.generate(PROMPTS, greedy(5, ignore_eos=True, adapter="adapter"), use_tqdm=False):
        assert output.token_ids == continued(adapted, output.prompt_token_ids, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_topk": 16}, re.escape("moe_topk=16 in its config: must be at most the number of experts, 10 + 5")),
        ({"zero_expert_num": -1}, "zero_expert_num=-1 in its config"),
        ({"zero_expert_type": "constant"}, "zero_expert_type='constant' in its config is not supported"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora=False in its config is not supported"),
        ({"router_bias": True}, "router_bias=True in its config is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True in its config is not supported"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0 in its config"),
        ({"attention_method": "MHA"}, "attention_method='MHA' in its config is not supported"),
        ({"q_lora_rank": 0}, "q_lora_rank=0 in its config: must be an integer of at least 1"),
    ],
)
def test_settings_that_no_model_has(settings: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model("longcat_flash", **{**CASE.text_settings, **settings})
    config.architectures = [CASE.architecture]
    with pytest.raises(ValueError, match=message):
        describe(config)
