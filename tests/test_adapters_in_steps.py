"""Steps whose rows name adapters: log-probabilities are those of PEFT's models, whatever runs beside a row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import CASES, build
from cases.adapters import draw
from conftest import of_each_kind, whole_only
from test_four_bits import PUBLISHED
from test_four_bits import write_checkpoint as write_in_groups
from test_quantization import CONFIGS
from test_quantization import write_checkpoint as write_in_fp8
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.ranks.carrier import AdapterCarrier
from nanoinfer.layers.adapted import AdaptedHead, AdaptedMatrix
from nanoinfer.parallel.buckets import PART_BYTES, SharedBuckets
from nanoinfer.runner.adapters.receiver import Receiver, parcel
from nanoinfer.runner.cuda_graphs import PLAIN, DecodeKind, graph_batch_sizes, sharing_batch_sizes, sizes_by_kind
from nanoinfer.weights.adapters.low_rank import LowRank

pytest.importorskip("peft", reason="needs peft: pip install -e '.[trl]'")
pytestmark = pytest.mark.usefixtures("one_thread")

MakeLLM = Callable[..., LLM]
ADAPTERS = {
    "linear": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "exclude_modules": r".*gate$"},
    "head": {"r": 19, "lora_alpha": 9, "target_modules": r".*(o_proj|out_proj|down_proj|lm_head)", "use_rslora": True},
}
SLOTS = {"head": 2, "linear": 0, None: -1}  # of three
OPTIONS: dict[str, Any] = {"device": "cpu", "max_adapters": 3, "max_adapter_rank": 19, "num_kvcache_blocks": 64}
PROMPTS = [[7], list(range(20, 60)), [5, 6] * 30, [11, 12], list(range(90, 60, -1)), [40] * 17]
NAMES = ["linear", None, "head", "head", "linear", None]
FAMILIES = [
    "qwen3", "llama", "llama tied, linear rope", "gemma3", "gptoss", "qwen3.5", "gemma4", "granite", "phi3", "lfm2",
    "glm4moe",
]  # fmt: skip


@pytest.fixture(autouse=True)
def unconverted(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT adapts linear layers, and not what layers of experts were before transformers 5."""
    monkeypatch.setattr("peft.utils.transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING", {})


class Tuned:
    """A checkpoint, two adapters as PEFT has saved them, and PEFT's model of both, which is the oracle."""

    def __init__(self, base: Path, model: Any, saved: Path) -> None:
        from peft import LoraConfig, PeftModel

        self.base, self.saved = str(base), saved
        first, *others = ADAPTERS.items()
        self.model = PeftModel(model, LoraConfig(**first[1]), first[0])
        for name, settings in others:
            self.model.add_adapter(name, LoraConfig(**settings))
        draw(self.model, std=0.1)
        self.model.save_pretrained(saved)

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], name: str | None) -> Tensor:
        """Those of all tokens but the first."""
        if name is not None:
            self.model.set_adapter(name)
        with nullcontext() if name else self.model.disable_adapter():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1))[:, 0]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tuned]:
    made: dict[str, Tuned] = {}

    def make(family: str) -> Tuned:
        if family not in made:
            folder = tmp_path_factory.mktemp("tuned")
            made[family] = Tuned(folder / "base", build(CASES[family], folder / "base"), folder / "adapters")
        return made[family]

    return make


class Result(NamedTuple):
    tokens: list[int]  # prompt and output
    logprobs: Tensor  # of all but the first


def load(llm: LLM, tuned: Tuned) -> LLM:
    """Load both adapters."""
    adapters = llm.engine.ranks.runner.holdings.adapters
    assert adapters is not None
    for name in ADAPTERS:
        AdapterCarrier(llm.engine.ranks).write(SLOTS[name], adapters.reader.read(name, tuned.saved / name))
    return llm


def generate(
    llm: LLM, prompts: list[list[int]] = PROMPTS, names: list[str | None] = NAMES, **settings: Any
) -> list[Result]:
    """Run all prompts at once; names: of their adapters."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0, **settings)
    seqs = []
    for prompt, name in zip(prompts, names, strict=True):
        (seq,) = llm.engine.add_request(prompt, params, seed=len(prompt))
        seq.adapter = SLOTS[name]
        seqs.append(seq)
    while not llm.engine.is_finished:
        llm.engine.step()
    results = []
    for seq in seqs:
        tokens = seq.token_ids.tolist()
        entries = seq.prompt_logprobs.logprobs(None) + seq.logprobs.logprobs(None)
        values = [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]
        results.append(Result(tokens, torch.tensor(values)))
    return results


def check(results: list[Result], tuned: Tuned, names: list[str | None] = NAMES, atol: float = 1e-4) -> None:
    for result, name in zip(results, names, strict=True):
        torch.testing.assert_close(result.logprobs, tuned.logprobs(result.tokens, name), atol=atol, rtol=0)


class TestFamilies:
    """Two adapters and the base in one batch; one of them has matrices beside the head, the other has none."""

    @pytest.mark.parametrize("family", of_each_kind(zip(FAMILIES), 0, 2, 3, 4, 5))
    def test_log_probabilities(self, family: str, tuned: Callable[[str], Tuned], make_llm: MakeLLM) -> None:
        model = tuned(family)
        llm = load(make_llm(model.base, **OPTIONS, **CASES[family].small), model)
        results = generate(llm)
        check(results, model)
        for prompt, name, result in zip(PROMPTS, NAMES, results, strict=True):
            (alone,) = generate(llm, [prompt], [name])
            assert alone.tokens == result.tokens
            torch.testing.assert_close(alone.logprobs, result.logprobs, atol=2e-5, rtol=0)

    @pytest.mark.parametrize("family", of_each_kind(zip(FAMILIES), 1))
    def test_chunks_and_preemption(self, family: str, tuned: Callable[[str], Tuned], make_llm: MakeLLM) -> None:
        model, case = tuned(family), CASES[family]
        llm = load(make_llm(model.base, **{**OPTIONS, **case.tight, "max_num_batched_tokens": 64}), model)
        prompts, names = [[3 + place] + prompt for place, prompt in enumerate(PROMPTS * 2)], NAMES + NAMES[::-1]
        check(generate(llm, prompts, names, temperature=0.8), model, names)

    @pytest.mark.parametrize("family", of_each_kind(zip(FAMILIES), 2, 5))
    def test_two_ranks(self, family: str, tuned: Callable[[str], Tuned], make_llm: MakeLLM) -> None:
        model = tuned(family)
        check(generate(load(make_llm(model.base, **OPTIONS, **CASES[family].small, tensor_parallel_size=2), model)), model)


@pytest.mark.parametrize("head", ["auto", *whole_only(["float32"])])
def test_sampled_tokens_of_bfloat16_are_as_likely_as_peft_says(
    head: str, tuned: Callable[[str], Tuned], make_llm: MakeLLM
) -> None:
    model = tuned("llama")
    llm = load(make_llm(model.base, **OPTIONS, dtype="bfloat16", lm_head_dtype=head), model)
    check(generate(llm, temperature=1.0), model, atol=0.2)
