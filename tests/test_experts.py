"""Layers of experts: the routes against their references, the two layouts of checkpoints, and bad checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.corrected import CORRECTED
from cases.drafters import DRAFTERS
from conftest import greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from test_kernels import assert_close, randn
from test_loader import rank
from test_models import run
from transformers import AutoConfig, PreTrainedModel

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.kernels.experts.route import RouterScoring, Routing, route_reference, route_triton
from nanoinfer.kernels.sorting import group_reference, group_triton
from nanoinfer.layers.experts import MixtureOfExperts, Router, RouterTensors
from nanoinfer.layers.norm import Joint
from nanoinfer.models import describe
from nanoinfer.models.ranks import check_ranks
from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors
from nanoinfer.weights.formats.plain.experts import PlainExperts
from nanoinfer.weights.shards import table_of
from nanoinfer.weights.sources import FileSource

Weights = dict[str, torch.Tensor]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("count", "used"), [(4, 1), (5, 5), (60, 4), *whole_only([(128, 8), (512, 10)])])
def test_route(count: int, used: int, scoring: RouterScoring, normalised: bool) -> None:
    logits, routing = randn(33, count), Routing(used, scoring, normalised)
    ours, expected = (f(logits, routing) for f in (route_triton, route_reference))
    assert torch.equal(ours.experts, expected.experts)
    assert_close(ours.weights, expected.weights)


def test_route_of_pieces() -> None:
    pieces = randn(3, 33, 60)
    ours, expected = route_triton(pieces, Routing(4)), route_reference(pieces, Routing(4))
    assert torch.equal(ours.experts, expected.experts)
    assert_close(ours.weights, expected.weights)


def test_among_equal_scores_the_first_experts_win() -> None:
    logits = torch.randint(0, 3, (50, 64), device=randn(1).device).float()
    ours, expected = (f(logits, Routing(8)) for f in (route_triton, route_reference))
    assert torch.equal(ours.experts, expected.experts)
    if logits.is_cuda:  # there torch.topk takes the same experts, in another order
        assert torch.equal(ours.experts.sort().values, logits.topk(8).indices.sort().values.int())


def test_a_token_whose_logits_are_no_numbers_has_experts_and_no_weights() -> None:
    logits = randn(3, 60)
    logits[1] = float("nan")
    ours, expected = (f(logits, Routing(4)) for f in (route_triton, route_reference))
    assert torch.equal(ours.experts[::2], expected.experts[::2])
    assert sorted(set(ours.experts[1].tolist())) == [0, 1, 2, 3]
    assert ours.weights[1].isnan().all()
    assert not ours.weights[::2].isnan().any()


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        (1, 4),
        *whole_only([(1, 60), (16, 40)]),
        (700, 7),
        (3000, 5),
        pytest.param(1, 512, marks=pytest.mark.gpu),
        pytest.param(16, 128, marks=pytest.mark.gpu),
    ],
)
def test_group(tokens: int, count: int) -> None:
    experts = torch.rand(tokens, count, device=randn(1).device).argsort().int()[:, : min(count, 3)].contiguous()
    one = experts[:, :1].contiguous()
    for ids in (experts, torch.full_like(one, count - 1), torch.zeros_like(one)):
        for size in (16, 128):
            ours, expected = group_triton(ids, count, size), group_reference(ids, count, size)
            assert torch.equal(ours.choices, expected.choices)
            assert torch.equal(ours.tiles, expected.tiles)


@torch.inference_mode()
def test_a_layer_tells_the_experts_that_each_token_took(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(CASES["qwen3moe"], tmp_path)
    llm = make_llm(str(tmp_path), kvcache_block_size=16, max_model_len=320, enforce_eager=True)
    layers = [
        module for module in llm.engine.ranks.runner.steps.model.modules() if isinstance(module, MixtureOfExperts)
    ]
    for layer in layers:
        layer.keep_taken(100)
    prompt = list(range(40))
    llm.generate([prompt], greedy(1), use_tqdm=False)
    logits = model(input_ids=torch.tensor([prompt]), output_router_logits=True).router_logits
    for layer, router_logits in zip(layers, logits, strict=True):
        assert layer.taken is not None
        assert torch.equal(layer.taken[:40].cpu(), router_logits.topk(3).indices.int())
        assert (layer.taken[40:] == -1).all()


WITH_EXPERTS = [
    name
    for name, case in CASES.items()
    if case.settings.get("num_experts", case.settings.get("num_local_experts")) and name not in CORRECTED
]
PROMPTS = [[5], list(range(40)), [7] * 33, list(range(3, 90))]
HOW_GUESSED: list[dict[str, Any]] = [
    {},
    {"num_kvcache_blocks": 14, "max_num_batched_tokens": 8},
    {"deterministic": True, "max_num_seqs": 5},
]


@torch.inference_mode()
def assert_routes_equal_transformers(output: RequestOutput, model: PreTrainedModel, dtype: str = "uint8") -> None:
    """Check the experts of all tokens but the last generated one, of each sample.

    Where two logits are equal but for float32's rounding, either expert will do.
    """
    for sample in output.samples:
        tokens = (output.prompt_token_ids + sample.token_ids)[:-1]
        given = model(input_ids=torch.tensor([tokens]), output_router_logits=True).router_logits
        logits = torch.stack([layer for layer in given if layer is not None], dim=1)
        experts = torch.from_numpy(sample.routed_experts.astype("int64"))
        assert sample.routed_experts.dtype == dtype
        assert experts.shape[:2] == logits.shape[:2]
        assert all(len(set(chosen)) == len(chosen) for chosen in experts.flatten(0, 1).tolist())
        best = logits.topk(experts.shape[2]).values
        torch.testing.assert_close(logits.gather(2, experts), best, rtol=0, atol=1e-5)


class TestRoutedExperts:
    @pytest.mark.parametrize("name", of_each_kind(WITH_EXPERTS, 0, 2))
    def test_they_are_those_of_transformers(self, name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        """The second time, the prompts' blocks are in the cache."""
        model = build(CASES[name], tmp_path)
        llm = make_llm(str(tmp_path), **CASES[name].small, routed_experts=True)
        params = SamplingParams(max_tokens=20, n=2, seed=1, ignore_eos=True)
        for _ in range(2):
            for output in llm.generate(PROMPTS, params, use_tqdm=False):
                assert_routes_equal_transformers(output, model)

    @pytest.mark.parametrize(
        "options",
        [
            {"num_kvcache_blocks": 14, "max_num_batched_tokens": 50},
            {"max_num_batched_tokens": 7, "max_num_seqs": 3},
            {"tensor_parallel_size": 2},
        ],
        ids=str,
    )
    def test_preempted_in_chunks_and_on_two_ranks(
        self, options: dict[str, int], make_llm: Callable[..., LLM], tmp_path: Path
    ) -> None:
        model = build(CASES["qwen2moe"], tmp_path)
        llm = make_llm(
            str(tmp_path), device="cpu", kvcache_block_size=16, max_model_len=200, routed_experts=True, **options
        )
        params = SamplingParams(max_tokens=20, n=3, seed=1, ignore_eos=True)
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            assert_routes_equal_transformers(output, model)
        assert (llm.engine.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in options)

    @pytest.mark.parametrize(
        ("options", "drafter"),
        [
            *of_each_kind(product(HOW_GUESSED, ["random", "alternating", "suffix"]), 0, 2, 4, 7),
            *whole_only([({"tensor_parallel_size": 2}, "alternating")]),
            pytest.param({"device": "cuda", "dtype": "float32"}, "suffix", marks=pytest.mark.gpu),
        ],
        ids=str,
    )
    def test_tokens_that_were_guessed_have_them(
        self, options: dict[str, Any], drafter: str, make_llm: Callable[..., LLM], tmp_path: Path
    ) -> None:
        model = build(CASES["qwen2moe"], tmp_path)
        how = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 200, "routed_experts": True, **options}
        params = [SamplingParams(temperature=0.8, max_tokens=4 + 2 * i, n=1 + i % 2, seed=i) for i in range(4)]
        plain = make_llm(str(tmp_path), **how).generate(PROMPTS, params, use_tqdm=False)
        known = [output.prompt_token_ids + sample.token_ids for output in plain for sample in output.samples]
        llm = make_llm(str(tmp_path), **how, speculation=DRAFTERS[drafter](known))
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert drafter != "alternating" or sum(output.num_accepted_tokens for output in outputs) > 10
        for output, expected in zip(outputs, plain, strict=True):
            assert_routes_equal_transformers(output, model)
            for sample, own in zip(output.samples, expected.samples, strict=True):
                assert sample.token_ids == own.token_ids
                if "deterministic" in options:
                    assert sample.routed_experts.tolist() == own.routed_experts.tolist()

    def test_more_than_256_experts(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        case = CASES["qwen3moe"]
        many = {"num_experts": 300, "num_experts_per_tok": 5, "moe_intermediate_size": 8}
        model = build(replace(case, settings={**case.settings, **many}), tmp_path)
        llm = make_llm(str(tmp_path), max_model_len=128, routed_experts=True)
        for output in llm.generate(PROMPTS, greedy(5), use_tqdm=False):
            assert_routes_equal_transformers(output, model, "int16")

    def test_the_last_output_of_a_stream_has_them(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        build(CASES["mixtral"], tmp_path)
        llm = make_llm(str(tmp_path), max_model_len=64, routed_experts=True)
        (output,) = llm.generate([[5, 6, 7]], greedy(4, ignore_eos=True), use_tqdm=False)
        *others, last = llm.stream([[5, 6, 7]], greedy(4, ignore_eos=True))
        assert [new.routed_experts for new in others] == [None] * 3
        assert (last.routed_experts == output.routed_experts).all()
        assert output.routed_experts.shape == (6, 4, 2)

    def test_a_prompt_that_is_only_scored_has_all_of_its_tokens(
        self, make_llm: Callable[..., LLM], tmp_path: Path
    ) -> None:
        build(CASES["mixtral"], tmp_path)
        llm = make_llm(str(tmp_path), max_model_len=64, routed_experts=True)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=20)
        (output,) = llm.generate([[5] * 30], params, use_tqdm=False)
        assert output.routed_experts.shape == (30, 4, 2)

    def test_nobody_gets_them_who_did_not_ask(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        build(CASES["mixtral"], tmp_path)
        llm = make_llm(str(tmp_path), max_model_len=64)
        assert llm.generate([[5]], greedy(2), use_tqdm=False)[0].routed_experts is None
        layers = [
            module for module in llm.engine.ranks.runner.steps.model.modules() if isinstance(module, MixtureOfExperts)
        ]
        assert [layer.taken for layer in layers] == [None] * 4

    def test_a_model_without_experts_has_none_to_tell(self, make_llm: Callable[..., LLM]) -> None:
        with pytest.raises(ValueError, match="routed_experts=True: must be False: the model has no experts"):
            make_llm(routed_experts=True)


def test_skewed_routers_follow_zipfs_law() -> None:
    torch.manual_seed(0)
    router = Router(RouterTensors(("gate",)), 256, 128, Routing(8, normalised=True))
    router.weight.normal_(0, 0.02)
    router.skew()
    routes, _, _ = router(torch.randn(20_000, 256), None, Joint(None, None, rank(0, 1)))
    shares = routes.experts.flatten().bincount(minlength=128) / 20_000
    laws = [shares[expert - 1].item() * expert for expert in (4, 8, 16, 32, 64, 128)]
    assert max(laws) < 1.6 * min(laws)
    assert 0.3 < shares[0] < 0.6
    assert shares.sum() == pytest.approx(8)


def stacked(weights: Weights, gate: str, up: str, down: str, module: str) -> Weights:
    """Stack the experts of each layer, as newer checkpoints do."""
    weights, stacks = dict(weights), {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.{module}."
        found = {key: weights.pop(key) for key in list(weights) if key.startswith(f"{prefix}experts.")}
        if not found:
            continue
        count = len(found) // 3
        both, downs = [], []
        for number in range(count):
            of = {name: found[f"{prefix}experts.{number}.{name}.weight"] for name in (gate, up, down)}
            both.append(torch.cat([of[gate], of[up]]))
            downs.append(of[down])
        stacks[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        stacks[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(downs)
        if module != "mlp":
            stacks[f"model.layers.{layer}.mlp.gate.weight"] = weights.pop(f"{prefix}gate.weight")
    return {**weights, **stacks}


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("mixtral", ("w1", "w3", "w2", "block_sparse_moe")),
        ("qwen2moe", ("gate_proj", "up_proj", "down_proj", "mlp")),
        ("olmoe", ("gate_proj", "up_proj", "down_proj", "mlp")),
    ],
)
def test_a_checkpoint_that_stacks_its_experts(
    name: str, names: tuple[str, str, str, str], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    model = build(CASES[name], tmp_path)
    file = tmp_path / "model.safetensors"
    old = load_file(file)
    new = stacked(old, *names)
    assert any(".experts.0." in key for key in old)
    assert not any(".experts.0." in key for key in new)
    save_file(new, file, {"format": "pt"})
    run(make_llm(str(tmp_path), kvcache_block_size=16, max_model_len=320), model, prompt_logprobs=0)


def stacks_of(weights: Weights) -> Weights:
    found = {name: tensor for name, tensor in weights.items() if tensor.ndim == 3 and "visual" not in name}
    assert len(found) == 8
    return found


def test_the_stacks_of_published_qwen3_vl_moe_are_turned(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """transformers turns them when it loads them, and saves them as its modules have them."""
    model = build(CASES["qwen3-vl-moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    published = {**saved, **{name: stack.mT.contiguous() for name, stack in stacks_of(saved).items()}}
    save_file(published, file, {"format": "pt"})
    theirs = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(theirs[name], stack) for name, stack in stacks_of(saved).items())
    options = {"kvcache_block_size": 16, "max_model_len": 320}
    run(make_llm(str(tmp_path), **options), model, prompt_logprobs=0)
    llm = make_llm(str(tmp_path), load_format="dummy", device="cpu", tensor_parallel_size=2, **options)
    llm.update_weights(published)
    run(llm, model)


def test_each_of_the_names_that_the_stacks_of_granitemoe_have(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Files have other names than transformers' modules; a stack may come under one of them alone."""
    model = build(CASES["granitemoe"], tmp_path)
    saved, own = load_file(tmp_path / "model.safetensors"), dict(model.named_parameters())
    assert len(stacks_of(saved).keys() | stacks_of(own).keys()) == 16
    options = {"kvcache_block_size": 16, "max_model_len": 320}
    llm = make_llm(str(tmp_path), **options)
    run(llm, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    llm.update_weights(own)
    run(llm, model)
    with pytest.raises(ValueError, match=r"stored twice: model.layers.0.block_sparse_moe.experts.gate_up_proj"):
        llm.update_weights({**saved, **stacks_of(own)})


def test_dbrx_turns_by_the_base_that_its_published_files_give() -> None:
    """transformers 5 knows rope_parameters alone and rotates a published file by its default."""
    case = CASES["dbrx"]
    attention = case.settings["attn_config"] | {"rope_theta": 5e5}
    published, saved, usual = (
        AutoConfig.for_model(case.model_type, architectures=[case.architecture], **{**case.settings, **changes})
        for changes in (
            {"attn_config": attention},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {},
        )
    )
    assert describe(published).ropes == describe(saved).ropes != describe(usual).ropes


@pytest.mark.parametrize("quantization", [None, *whole_only(["fp8", "int4"])])
@pytest.mark.parametrize("ranks", [1, 2])
def test_flat_stacks_of_dbrx_fill_what_single_tensors_fill(
    ranks: int, quantization: str | None, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Ranks take some columns of a turned matrix; those that split outputs take some of its rows."""
    sizes = {"hidden_size": 256, "d_model": 256, "head_dim": 64, "vocab_size": 256}
    ffn = {"moe_num_experts": 3, "moe_top_k": 2, "ffn_hidden_size": 128}
    case = replace(CASES["dbrx"], settings={**CASES["dbrx"].settings, **sizes, "ffn_config": ffn})
    single = dict(build(case, tmp_path).state_dict())
    for name in [name for name in single if ".experts.mlp." in name]:
        module, _, projection = name.rpartition(".mlp.")
        for number, matrix in enumerate(single.pop(name).unflatten(0, (3, -1))):
            single[f"{module}.{number}.{projection}.weight"] = matrix.mT if projection == "w2" else matrix
    for deterministic in (False, True):
        how = {"tensor_parallel_size": ranks, "quantization": quantization, "deterministic": deterministic}
        llm = make_llm(str(tmp_path), device="cpu", kvcache_block_size=16, max_model_len=320, **how)
        params = greedy(4, ignore_eos=True, prompt_logprobs=0)
        (flat,) = llm.generate([list(range(20))], params, use_tqdm=False)
        llm.update_weights(single)
        (output,) = llm.generate([list(range(20))], params, use_tqdm=False)
        for ours, expected in zip(output["prompt_logprobs"][1:], flat["prompt_logprobs"][1:], strict=True):
            assert ours == pytest.approx(expected, abs=1e-4)


STACKS = (("experts.gate_up_proj", "experts.down_proj"),)
FLAT = "experts.gates", "experts.ups", "experts.downs"
NAMES = ExpertTensors("experts.{}", "gate_proj", "up_proj", "down_proj", STACKS, flat=FLAT)


@pytest.mark.parametrize("form", ["one by one", "stacked", "stacked and turned", "flat"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_shares_make_up_every_expert(size: int, form: str, tmp_path: Path) -> None:
    gates, ups, downs = torch.randn(3, 8, 6), torch.randn(3, 8, 6), torch.randn(3, 6, 8)
    weights = {"experts.gate_up_proj": torch.cat([gates, ups], dim=1), "experts.down_proj": downs}
    if form == "stacked and turned":
        weights = {name: stack.mT.contiguous() for name, stack in weights.items()}
    elif form == "flat":
        weights = dict(zip(FLAT, (gates.flatten(0, 1), ups.flatten(0, 1), downs.mT.flatten(0, 1)), strict=True))
    elif form == "one by one":
        projections = {"gate_proj": gates, "up_proj": ups, "down_proj": downs}
        weights = {f"experts.{i}.{key}.weight": x[i].clone() for key, x in projections.items() for i in range(3)}
    save_file(weights, tmp_path / "model.safetensors")

    def load(index: int) -> PlainExperts:
        tp = rank(index, size)
        experts = PlainExperts(NAMES, ExpertSizes(3, 6, 8, tp.rank * 8 // size, 8 // size))
        FileSource(str(tmp_path)).fill(table_of(experts))
        return experts

    ranks = [load(index) for index in range(size)]
    halves = [experts.gate_up.chunk(2, dim=1) for experts in ranks]
    assert torch.equal(torch.cat([gate for gate, _ in halves], dim=1), gates)
    assert torch.equal(torch.cat([up for _, up in halves], dim=1), ups)
    assert torch.equal(torch.cat([experts.down for experts in ranks], dim=2), downs)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    folder = tmp_path_factory.mktemp("experts")
    build(CASES["qwen3moe"], folder)
    return folder, load_file(folder / "model.safetensors")


class TestCheckpointsThatDoNotFit:
    """Each is named: an expert or a router that is missing, too many of them, or one that is there twice."""

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("missing: model.layers.1.mlp.experts.5.up_proj.weight", None),
            ("missing: model.layers.0.mlp.gate.weight", None),
            ("unknown: model.layers.3.mlp.experts.6.down_proj.weight", torch.zeros(48, 32)),
            ("stored twice: model.layers.2.mlp.experts.down_proj", torch.zeros(6, 48, 32)),
            (r"model.layers.0.mlp.gate.weight has shape \[7, 48\], but the model needs \[6, 48\]", torch.zeros(7, 48)),
            (
                r"model.layers.0.mlp.experts.1.gate_proj.weight has shape \[31, 48\], but .* needs \[32, 48\]",
                torch.zeros(31, 48),
            ),
        ],
    )
    def test_a_tensor(
        self, name: str, change: torch.Tensor | None, weights: tuple[Path, Weights], make_llm: Callable[..., LLM]
    ) -> None:
        folder, tensors = weights
        key = next(word for word in name.split() if word.startswith("model.layers"))
        changed = {other: tensor for other, tensor in tensors.items() if other != key}
        if change is not None:
            changed[key] = change
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=name):
            make_llm(str(folder), max_model_len=64)

    def test_an_expert_in_two_files(self, weights: tuple[Path, Weights], tmp_path: Path) -> None:
        key = "experts.0.up_proj.weight"
        for number, keys in enumerate(([key, "experts.0.gate_proj.weight"], [key, "experts.0.down_proj.weight"])):
            tensors = {key: torch.zeros((6, 8) if "down" in key else (8, 6)) for key in keys}
            save_file(tensors, tmp_path / f"{number}.safetensors")
        index = '{"weight_map": {"a": "0.safetensors", "b": "1.safetensors"}}'
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=f"stored twice: {key}"):
            FileSource(str(tmp_path)).fill(table_of(PlainExperts(NAMES, ExpertSizes(1, 6, 8, 0, 8))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": -1}, "num_experts=-1 .*must be an integer of at least 1"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 .*must be an integer of at least 1"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 .*must be at most the number of experts, 6"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size=0 .*must be an integer of at least 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 .*must be an integer of at least 1"),
        ({"mlp_only_layers": [4]}, r"mlp_only_layers=\[4\] .*must be layers from 0 to 3"),
    ],
)
def test_settings_that_no_model_can_have(changes: dict[str, object], message: str) -> None:
    case = CASES["qwen3moe"]
    config = AutoConfig.for_model(case.model_type, architectures=[case.architecture], **{**case.settings, **changes})
    config.num_hidden_layers = 4
    with pytest.raises(ValueError, match=message):
        describe(config)


@pytest.mark.parametrize("name", ["moe_intermediate_size", "shared_expert_intermediate_size"])
def test_sizes_that_the_ranks_do_not_divide(name: str) -> None:
    case = CASES["qwen2moe"]
    config = AutoConfig.for_model(case.model_type, architectures=[case.architecture], **{**case.settings, name: 31})
    with pytest.raises(ValueError, match=f"tensor_parallel_size=2: {name}=31 is not divisible by it"):
        check_ranks(describe(config), 2)


def test_new_weights_take_experts_of_their_own(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Also those of a sample that shares the blocks of another one when it is computed again."""
    model = build(CASES["qwen3moe"], tmp_path)
    options = {"kvcache_block_size": 16, "max_model_len": 96, "routed_experts": True}
    llm, fresh = make_llm(str(tmp_path), **options), make_llm(str(tmp_path), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape))
    prompt = list(range(5, 45))
    llm.add_request(prompt, SamplingParams(max_tokens=12, seed=1, n=2, ignore_eos=True))
    for _ in range(4):
        llm.step()
    llm.update_weights(model.named_parameters())
    while not (outputs := llm.step()):
        pass
    fresh.update_weights(model.named_parameters())
    for sample in outputs[0].samples:
        (expected,) = fresh.generate([prompt + sample.token_ids], greedy(1), use_tqdm=False)
        assert sample.routed_experts.tolist() == expected.routed_experts[: len(prompt) + 11].tolist()
