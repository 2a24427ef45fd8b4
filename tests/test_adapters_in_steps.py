"""Steps whose rows name adapters: log-probabilities are those of PEFT's models, whatever runs beside a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from cases import CASES, build
from cases.adapters import draw
from cases.layouts import MIXED, PUBLISHED
from conftest import of_each_kind, whole_only
from test_four_bits import write_checkpoint as write_in_groups
from test_quantization import CONFIGS
from test_quantization import write_checkpoint as write_in_fp8
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.layers.adapted import AdaptedHead, AdaptedMatrix
from nanoinfer.parallel.buckets import PART_BYTES, SharedBuckets
from nanoinfer.runner.adapters.receiver import AdapterReceiver, parcel
from nanoinfer.runner.cuda_graphs import DecodeGraphs
from nanoinfer.runner.start.trials import Trials
from nanoinfer.runner.steps.kinds import (
    PLAIN,
    DecodeKind,
    graph_batch_sizes,
    sharing_batch_sizes,
    sizes_by_kind,
)
from nanoinfer.runner.steps.steps import Steps
from nanoinfer.weights.adapters.low_rank import LowRank

pytest.importorskip("peft", reason="needs peft: pip install -e '.[trl]'")
pytestmark = pytest.mark.usefixtures("one_thread")

MakeLLM = Callable[..., LLM]
ADAPTERS = {
    "linear": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "exclude_modules": r".*gate$"},
    "head": {"r": 19, "lora_alpha": 9, "target_modules": r".*(o_proj|out_proj|down_proj|lm_head)", "use_rslora": True},
}
EXPERTS = {
    "experts": {"r": 4, "lora_alpha": 6, "target_modules": ["o_proj"],
                "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cpu", "max_adapters": 3, "max_adapter_rank": 19, "num_kvcache_blocks": 64}
LONG = list(range(20, 60))
PROMPTS = [[7], LONG, [5, 6] * 30, [11, 12], LONG, [40] * 17, LONG]
NAMES = ["linear", None, "head", "head", "linear", None, "head"]
FAMILIES = [
    "qwen3", "llama", "llama tied, linear rope", "gemma3", "gptoss", "qwen3.5", "gemma4", "granite", "phi3", "lfm2",
    "glm4moe",
]  # fmt: skip


@pytest.fixture(autouse=True)
def unconverted(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT adapts linear layers, and not what layers of experts were before transformers 5."""
    monkeypatch.setattr("peft.utils.transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING", {})


class OfPeft:
    """A checkpoint, adapters as PEFT has saved them, and PEFT's model of all, which is the oracle."""

    def __init__(self, base: Path, model: Any, saved: Path, adapters: dict[str, Any] = ADAPTERS) -> None:
        """adapters: their settings, by name"""
        from peft import LoraConfig, PeftModel

        self.base, self.saved = str(base), saved
        first, *others = adapters.items()
        self.model = PeftModel(model, LoraConfig(**first[1]), first[0])
        for name, settings in others:
            self.model.add_adapter(name, LoraConfig(**settings))
        draw(self.model, std=0.1)
        self.model.save_pretrained(saved)

    def widen(self) -> None:
        """Compute in float64 from now on, which torch's product for groups of tokens cannot."""
        self.model.base_model.model.set_experts_implementation("eager")
        self.model.double()

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], name: str | None) -> Tensor:
        """Those of all tokens but the first."""
        if name is not None:
            self.model.set_adapter(name)
        with nullcontext() if name else self.model.disable_adapter():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1))[:, 0]


Make = Callable[[str], OfPeft]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, OfPeft] = {}

    def make(family: str) -> OfPeft:
        if family not in made:
            folder = tmp_path_factory.mktemp("tuned")
            made[family] = OfPeft(folder / "base", build(CASES[family], folder / "base"), folder / "adapters")
        return made[family]

    return make


class Result(NamedTuple):
    tokens: list[int]  # prompt and output
    logprobs: Tensor  # of all but the first


def load(llm: LLM, tuned: OfPeft) -> LLM:
    """Load both adapters."""
    for name in ADAPTERS:
        llm.load_adapter(name, tuned.saved / name)
    return llm


def generate(
    llm: LLM, prompts: list[list[int]] = PROMPTS, names: list[str | None] = NAMES, **settings: Any
) -> list[Result]:
    """Run all prompts at once; names: of their adapters."""
    settings = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0, **settings}
    pairs, results = list(zip(prompts, names, strict=True)), []
    params = [SamplingParams(adapter=name, seed=len(prompt), **settings) for prompt, name in pairs]
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens, entries = prompt + output.token_ids, output.prompt_logprobs[1:] + output.logprobs
        values = [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]
        results.append(Result(tokens, torch.tensor(values)))
    return results


def check(results: list[Result], tuned: OfPeft, names: list[str | None] = NAMES, atol: float = 1e-4) -> None:
    for result, name in zip(results, names, strict=True):
        torch.testing.assert_close(result.logprobs, tuned.logprobs(result.tokens, name), atol=atol, rtol=0)


class TestFamilies:
    """Two adapters and the base in one batch; one of them has matrices beside the head, the other has none."""

    @pytest.mark.parametrize("family", of_each_kind(zip(FAMILIES), 0, 2, 3, 4, 5))
    def test_log_probabilities(self, family: str, tuned: Make, make_llm: MakeLLM) -> None:
        model = tuned(family)
        llm = load(make_llm(model.base, **OPTIONS, **CASES[family].small), model)
        results = generate(llm)
        check(results, model)
        for prompt, name, result in list(zip(PROMPTS, NAMES, results, strict=True))[:3]:  # with each adapter, and none
            (alone,) = generate(llm, [prompt], [name])
            assert alone.tokens == result.tokens
            torch.testing.assert_close(alone.logprobs, result.logprobs, atol=2e-5, rtol=0)

    @pytest.mark.parametrize("family", of_each_kind(zip(FAMILIES), 1))
    @pytest.mark.usefixtures("no_foresight")
    def test_chunks_and_preemption(self, family: str, tuned: Make, make_llm: MakeLLM) -> None:
        model, case = tuned(family), CASES[family]
        llm = load(make_llm(model.base, **{**OPTIONS, **case.tight, "max_num_batched_tokens": 64}), model)
        prompts, names = [[3 + place, *prompt] for place, prompt in enumerate(PROMPTS * 2)], NAMES + NAMES[::-1]
        check(generate(llm, prompts, names, temperature=0.8, max_tokens=30), model, names)
        assert llm.engine.scheduler.num_preemptions > 0

    @pytest.mark.parametrize("family", of_each_kind(zip(FAMILIES), 2, 5))
    def test_two_ranks(self, family: str, tuned: Make, make_llm: MakeLLM) -> None:
        model = tuned(family)
        check(
            generate(load(make_llm(model.base, **OPTIONS, **CASES[family].small, tensor_parallel_size=2), model)), model
        )


@pytest.mark.parametrize("head", ["auto", *whole_only(["float32"])])
def test_bfloat16_errs_with_adapters_as_without(head: str, tuned: Make, make_llm: MakeLLM) -> None:
    model, errors = tuned("llama"), []
    llm = load(make_llm(model.base, **OPTIONS, dtype="bfloat16", lm_head_dtype=head), model)
    nobody: list[str | None] = [None] * len(NAMES)
    for names in (NAMES, nobody):
        results = generate(llm, names=names)
        off = [one.logprobs - model.logprobs(one.tokens, name) for one, name in zip(results, names, strict=True)]
        errors.append(torch.cat(off).abs().mean())
    with_adapters, without = errors
    assert with_adapters < 1.5 * without < 0.1


class TestQuantizedBases:
    """Adapters stay in the model's dtype beside matrices in FP8 and of few bits."""

    @pytest.fixture
    def stored(self, request: pytest.FixtureRequest, tmp_path: Path) -> OfPeft:
        """A checkpoint in a format, whose adapters stand beside what it stands for."""
        case = CASES["qwen3"]
        sizes = {"hidden_size": 64, "intermediate_size": 96}
        build(replace(case, settings={**case.settings, **sizes}), tmp_path / "source")
        write, how = request.param
        dense = write(tmp_path / "source", tmp_path, how)
        return OfPeft(tmp_path, AutoModelForCausalLM.from_pretrained(dense).float().eval(), tmp_path / "adapters")

    @pytest.mark.parametrize("ranks", [1, *whole_only([2])])
    @pytest.mark.parametrize(
        "stored",
        [
            pytest.param((write_in_fp8, CONFIGS["small blocks"]), id="fp8"),
            pytest.param((write_in_groups, MIXED["gptq"]), id="int4, its head too"),
            *whole_only(
                [
                    pytest.param((write_in_groups, PUBLISHED["gptq act order with zeros"]), id="int4 act order"),
                    pytest.param((write_in_groups, PUBLISHED["nvfp4"]), id="nvfp4"),
                    pytest.param((write_in_groups, PUBLISHED["nf4 twice"]), id="nf4"),
                ]
            ),
        ],
        indirect=True,
    )
    def test_log_probabilities(self, stored: OfPeft, ranks: int, make_llm: MakeLLM) -> None:
        llm = load(make_llm(stored.base, **OPTIONS, tensor_parallel_size=ranks), stored)
        check(generate(llm), stored)


FEW_PROMPTS = [[7], [11, 12], LONG, [40] * 17]
FEW_NAMES = ["linear", "head", "head", None]


class TestDeterministic:
    """No bit of a row depends on the adapters of others, nor on chunks or the number of ranks."""

    @pytest.mark.parametrize("ranks", [*whole_only([1]), 2])
    def test_alone_and_in_company(self, ranks: int, tuned: Make, make_llm: MakeLLM) -> None:
        model = tuned("qwen3")
        options = {**OPTIONS, "deterministic": True, "kvcache_block_size": 16}
        together = load(make_llm(model.base, **options, max_num_batched_tokens=24, tensor_parallel_size=ranks), model)
        results = generate(together, FEW_PROMPTS, FEW_NAMES, temperature=0.7, max_tokens=3)
        check(results, model, FEW_NAMES)
        alone = load(make_llm(model.base, **options), model)
        for prompt, name, result in zip(FEW_PROMPTS, FEW_NAMES, results, strict=True):
            (own,) = generate(alone, [prompt], [name], temperature=0.7, max_tokens=3)
            assert own.tokens == result.tokens
            assert own.logprobs.equal(result.logprobs)

    def test_rows_without_an_adapter_have_the_bits_of_a_plain_llm(self, tuned: Make, make_llm: MakeLLM) -> None:
        model = tuned("llama")
        plain = make_llm(model.base, device="cpu", deterministic=True)
        adapted = load(make_llm(model.base, **OPTIONS, deterministic=True), model)
        nobody: list[str | None] = [None] * len(FEW_PROMPTS)
        alone = generate(plain, FEW_PROMPTS, nobody, max_tokens=3)
        for own, beside, name in zip(
            alone, generate(adapted, FEW_PROMPTS, FEW_NAMES, max_tokens=3), FEW_NAMES, strict=True
        ):
            assert name is not None or own.logprobs.equal(beside.logprobs)


class TestMemory:
    def test_slots_count_as_the_model_does(self, tuned: Make, make_llm: MakeLLM) -> None:
        model, used = tuned("qwen3"), []
        for slots, rank in ((0, 16), (1, 16), (3, 16), (3, 17)):
            llm = make_llm(model.base, **{**OPTIONS, "max_adapters": slots, "max_adapter_rank": rank})
            used.append(llm.memory.used)
        plain, one, three, of_higher_rank = used
        assert three - plain == 3 * (one - plain) > 0
        assert of_higher_rank - plain == 2 * (three - plain)

    def test_an_llm_without_adapters_has_nothing_of_them(self, make_llm: MakeLLM) -> None:
        runner = make_llm(device="cpu").engine.ranks.runner
        assert runner.holdings.adapters is runner.steps.batch.adapters is None
        assert not any(isinstance(one, (AdaptedMatrix, AdaptedHead)) for one in runner.holdings.model.modules())


class TestGraphs:
    def test_each_kind_has_its_sizes(self) -> None:
        sizes = graph_batch_sizes(64)
        adapted, sharing = DecodeKind(has_adapters=True), DecodeKind(shares=True)
        assert sizes_by_kind(64, may_share=False, may_adapt=False) == {PLAIN: sizes}
        assert sizes_by_kind(64, may_share=False, may_adapt=True) == {PLAIN: sizes, adapted: sizes}
        by_kind = sizes_by_kind(64, may_share=True, may_adapt=True)
        assert by_kind[sharing] == by_kind[DecodeKind(True, True)] == sharing_batch_sizes(sizes)

    def test_a_step_replays_the_graph_of_its_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Graphs are named by what was recorded for each: a step's model, its draw, or the whole."""
        steps: list[tuple[str, int, DecodeKind]] = []
        replayed: list[tuple[str, int, DecodeKind]] = []

        class Graph:
            def replay(self) -> None:
                replayed.append(self.step)

        @contextmanager
        def record(graph: Any, **_: Any) -> Iterator[None]:
            steps.clear()
            yield
            name, *step = steps[-1]
            graph.step = ("whole" if len(steps) > 1 else name, *step)

        for name in ("graph_pool_handle", "Stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", record)
        sizes = sizes_by_kind(16, may_share=True, may_adapt=True)
        own = SimpleNamespace(
            forward=lambda rows, kind, _: steps.append(("model", rows, kind)),
            launched=lambda num_rows, size, kind: SimpleNamespace(rows=size, kind=kind, size=(size, kind.guesses)),
            draw=lambda launched: steps.append(("draw", launched.rows, launched.kind)),
            logits_processors=SimpleNamespace(draws_anew=True),
        )
        graphs = DecodeGraphs(cast(Steps, own), sizes, 99, lambda count: None)
        asked = [(3, PLAIN), (3, DecodeKind(has_adapters=True)), (9, DecodeKind(True, True)), (2, DecodeKind(True))]
        for rows, kind in asked:
            assert not graphs.forward(rows, kind).is_drawn
        wanted = [(4, asked[0][1]), (4, asked[1][1]), (16, asked[2][1]), (16, asked[3][1])]
        assert replayed == [("model", *step) for step in wanted]
        replayed.clear()
        own.logits_processors.draws_anew = False
        launched = [graphs.forward(rows, kind) for rows, kind in asked]
        assert [step.is_drawn for step in launched] == [True, True, False, False]
        for step in launched[:3]:
            graphs.draw(step)
        assert replayed == [
            *(("whole", *step) for step in wanted[:2]),
            *(("model", *step) for step in wanted[2:]),
            ("draw", 16, DecodeKind(True, True)),
        ]

    def test_steps_are_tried_with_and_without_adapters(self, make_llm: MakeLLM) -> None:
        """A GPU runs these before the first request, to compile their kernels and to measure their memory."""
        runner = make_llm(**OPTIONS, max_num_seqs=4, max_num_batched_tokens=600).engine.ranks.runner
        trials = Trials(runner.config, runner.steps.max_blocks, runner.device)
        prompts, largest = trials.prefills(), trials.largest_prefills()
        tried = [(chunk.adapter, len(chunk.token_ids)) for step in prompts for chunk in step.chunks]
        assert tried == [(adapter, 2**power) for adapter in (-1, 0) for power in range(10)]
        assert [{chunk.adapter for chunk in step.chunks} for step in largest] == [{-1}, {0}]
        for step in [*prompts, *largest]:
            runner.run(step)
        with torch.inference_mode():
            runner._decode_rows(4, DecodeKind(has_adapters=True))

    @pytest.mark.gpu
    def test_graphs_equal_eager(self, tuned: Make, make_llm: MakeLLM) -> None:
        model, options = tuned("qwen3"), {**OPTIONS, "device": "cuda", "kvcache_block_size": 16}
        graph, eager = (load(make_llm(model.base, **options, enforce_eager=one), model) for one in (False, True))
        names: list[list[str | None]] = [NAMES, [None] * len(NAMES), ["head"] * len(NAMES)]
        for some in names:
            results = generate(graph, names=some)
            assert [one.tokens for one in results] == [one.tokens for one in generate(eager, names=some)]
            check(results, model, some)
        (alone,) = generate(graph, PROMPTS[:1], ["linear"])
        check([alone], model, ["linear"])


def test_adapters_come_to_other_ranks_in_several_buckets() -> None:
    """A tensor that is larger than a bucket comes in pieces of rows."""
    receiver = AdapterReceiver(torch.device("cpu"))
    large = torch.randn(PART_BYTES // 4 // 64 + 300, 64, dtype=torch.float32)
    sent = {
        "down": LowRank(torch.randn(64, 8), large, 0.5),
        "up": LowRank(torch.randn(3, 5).half(), large[:9, :3], 2.0),
    }
    buckets = SharedBuckets(receiver.read)
    try:
        buckets.open()
        for name, tensor in parcel(sent).items():
            buckets.put(name, tensor, is_stack=False)
        buckets.flush()
        received = receiver.take({name: update.scale for name, update in sent.items()})
    finally:
        buckets.close()
    for name, update in sent.items():
        assert received[name].scale == update.scale
        assert received[name].a.equal(update.a)
        assert received[name].b.equal(update.b)


class TestExperts:
    """PEFT adapts all experts of a layer at once."""

    @pytest.mark.parametrize("ranks", [1, *whole_only([2])])
    @pytest.mark.parametrize("family", of_each_kind(zip(["qwen3moe", "gptoss", "qwen3next"]), 0, 1))
    def test_log_probabilities(self, family: str, ranks: int, tmp_path: Path, make_llm: MakeLLM) -> None:
        """They are those of the oracle, in float32 or float64: a near tie can part these by more than 1e-4."""
        model = OfPeft(tmp_path / "base", build(CASES[family], tmp_path / "base"), tmp_path / "adapters", EXPERTS)
        llm = make_llm(model.base, **OPTIONS, **CASES[family].small, tensor_parallel_size=ranks)
        llm.load_adapter("experts", model.saved / "experts")
        names = [name and "experts" for name in NAMES]
        results = generate(llm, names=names)
        narrow = [model.logprobs(result.tokens, name) for result, name in zip(results, names, strict=True)]
        model.widen()
        wide = [model.logprobs(result.tokens, name) for result, name in zip(results, names, strict=True)]
        for result, *oracles in zip(results, narrow, wide, strict=True):
            errors = torch.stack([(result.logprobs - oracle).abs() for oracle in oracles])
            assert errors.amin(0).max() < 1e-4
