"""GRPOTrainer of TRL trains on what an LLM draws with the trainer's own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("trl", reason="needs trl: pip install -e '.[trl]'")
peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[trl]'")

from cases import CASES, build
from conftest import greedy
from datasets import Dataset
from test_models import run
from test_weights import results
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.integrations.trl import ADAPTER, _named_tensors, rollout_func

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.usefixtures("one_thread"),
]

TEXTS = ["ROMEO:\nBut, soft!", "JULIET:\n", "GLOUCESTER:\nNow is the winter", "O Romeo, Romeo!"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GENERATIONS, TOKENS, TEMPERATURE = 4, 8, 1.3
OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160, "logprobs_mode": "processed_logprobs"}

LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
SETTINGS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2 * GENERATIONS,
    "num_generations": GENERATIONS,
    "max_completion_length": TOKENS,
    "temperature": TEMPERATURE,
    "learning_rate": 1e-3,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


class Call(NamedTuple):
    """A call of the rollout function, and what was so at that time: the weights, and what the trainer's model says."""

    prompts: list[Any]
    result: dict[str, list[Any]]
    step: int
    version: int
    weights: dict[str, Tensor]
    logprobs: list[list[float]]


class Run:
    """A GRPOTrainer of the bundled model, and what the rollout function and the reward saw."""

    def __init__(self, llm: LLM, folder: Path, params: SamplingParams | None, settings: dict[str, Any]) -> None:
        self.calls: list[Call] = []
        self.rewarded: list[tuple[list[Any], list[Any]]] = []
        self._llm, self._rollout = llm, rollout_func(llm, params)
        prompts, lora = settings.pop("prompts", TEXTS), settings.pop("lora", None)
        model = settings.pop("model", None)
        self.trainer = GRPOTrainer(
            model or AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32),
            self.reward,
            args=GRPOConfig(str(folder), **{**SETTINGS, **settings}),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            peft_config=lora,
            rollout_func=self.rollout,
        )

    def rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        result = self._rollout(prompts, trainer)
        step, version = trainer.state.global_step, self._llm.weights_version
        weights = {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}
        logprobs = [
            logprobs_of(trainer.model, prompt, drawn)
            for prompt, drawn in zip(result["prompt_ids"], result["completion_ids"], strict=True)
        ]
        self.calls.append(Call(prompts, result, step, version, weights, logprobs))
        return result

    def reward(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        self.rewarded.append((prompts, completions))
        return [float(str(completion).count("o")) for completion in completions]

    def train(self) -> list[Call]:
        self.trainer.train()
        return self.calls


@torch.no_grad()
def logprobs_of(model: nn.Module, prompt: list[int], drawn: list[int]) -> list[float]:
    """Return the log-probabilities of the drawn tokens at the trainers' temperature."""
    logits = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(drawn)[:, None])[:, 0].tolist()


def check_logprobs(call: Call) -> None:
    for logprobs, expected in zip(call.result["logprobs"], call.logprobs, strict=True):
        assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(**OPTIONS)


@pytest.fixture
def make_run(llm: LLM, tmp_path: Path) -> Callable[..., Run]:
    """Return a function that makes a trainer which generates with the LLM. Settings: GRPOConfig's, prompts, lora."""

    def make(params: SamplingParams | None = None, **settings: Any) -> Run:
        return Run(llm, tmp_path, params, settings)

    return make


@pytest.mark.parametrize(
    "prompts", [pytest.param(TEXTS, id="texts", marks=pytest.mark.whole), pytest.param(CHATS, id="conversations")]
)
def test_three_steps(prompts: list[Any], make_run: Callable[..., Run], llm: LLM) -> None:
    run = make_run(prompts=prompts)
    calls = run.train()
    assert [(call.step, call.version) for call in calls] == [(0, 1), (1, 2), (2, 3)]
    for call, rewarded in zip(calls, run.rewarded, strict=True):
        check_shapes(call, llm)
        check_logprobs(call)
        texts = llm.detokenize(call.result["completion_ids"])
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        assert rewarded == (call.prompts, texts if prompts is TEXTS else messages)


def check_shapes(call: Call, llm: LLM) -> None:
    """Check that each repetition of a prompt has a completion of its own."""
    prompts, completions, logprobs = (call.result[key] for key in ("prompt_ids", "completion_ids", "logprobs"))
    assert len(call.prompts) == len(completions) == 2 * GENERATIONS
    assert [len(ids) for ids in completions] == [len(each) for each in logprobs]
    assert all(0 < len(ids) <= TOKENS for ids in completions)
    assert len(set(map(tuple, completions))) > len(set(map(str, call.prompts))) == 2
    call_llm = llm.generate if isinstance(call.prompts[0], str) else llm.chat
    assert prompts == [output.prompt_token_ids for output in call_llm(call.prompts, greedy(1), use_tqdm=False)]


def test_the_weights_are_the_trainers(make_run: Callable[..., Run], llm: LLM, make_llm: Callable[..., LLM]) -> None:
    old = results(llm)
    calls = make_run(max_steps=2).train()
    for call in calls:
        fresh = make_llm(**OPTIONS)
        fresh.update_weights(call.weights)
        assert results(fresh) == (old if call.step == 0 else results(llm))
    assert results(llm) != old


def test_a_step_that_generates_twice_takes_the_weights_once(make_run: Callable[..., Run]) -> None:
    calls = make_run(max_steps=2, gradient_accumulation_steps=2, steps_per_generation=1).train()
    assert [(call.step, call.version) for call in calls] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_a_second_run_begins_with_its_own_weights(make_run: Callable[..., Run]) -> None:
    run = make_run(max_steps=1)
    run.train()
    assert [(call.step, call.version) for call in run.train()] == [(0, 1), (0, 2)]


def test_weights_from_elsewhere_do_not_stay(make_run: Callable[..., Run], llm: LLM) -> None:
    run = make_run(max_steps=1, gradient_accumulation_steps=2, steps_per_generation=1)
    run.trainer.reward_funcs[0] = lambda **_: [llm.load_weights(BUNDLED_MODEL)] * 2 * GENERATIONS
    calls = run.train()
    assert [(call.step, call.version) for call in calls] == [(0, 1), (0, 3)]


def test_lora_comes_merged(make_run: Callable[..., Run]) -> None:
    """The adapted weights of the trainer stay as they are, to the last bit."""
    run = make_run(lora=LORA, learning_rate=1e-2, max_steps=2)
    before = {name: tensor.clone() for name, tensor in run.trainer.model.state_dict().items()}
    calls = run.train()
    assert [call.version for call in calls] == [1, 2]
    for call in calls:
        check_logprobs(call)
    after = run.trainer.model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        n for n in before if "lora_" in n
    }


def test_an_llm_with_room_for_adapters_gets_the_lora_alone(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computes with it what the trainer does; the model's weights stay."""
    llm = make_llm(**OPTIONS, max_adapters=1, max_adapter_rank=LORA.r)
    sent, load = [], llm.load_adapter

    def spy(name: str, tensors: dict[str, Tensor], config: Any) -> int:
        sent.append(sum(tensor.nbytes for tensor in tensors.values()))
        return load(name, tensors, config)

    monkeypatch.setattr(llm, "load_adapter", spy)
    base = results(llm)
    calls = Run(llm, tmp_path, None, {"lora": LORA, "learning_rate": 1e-2, "max_steps": 2}).train()
    for call in calls:
        check_logprobs(call)
    assert calls[0].logprobs != calls[1].logprobs
    assert (llm.weights_version, llm.adapters[ADAPTER].version) == (0, 2)
    assert results(llm) == base
    lora = [tensor for name, tensor in calls[0].weights.items() if "lora_" in name]
    assert sent == [sum(tensor.nbytes for tensor in lora)] * 2
    assert 50 * sent[0] < sum(tensor.nbytes for tensor in calls[0].weights.values())


def test_a_lora_goes_on_from_another(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """TRL then keeps a copy of the first one, for its KL term; the one that learns is sent."""
    llm = make_llm(**OPTIONS, max_adapters=1, max_adapter_rank=LORA.r)
    run = Run(llm, tmp_path, None, {"lora": LORA, "max_steps": 1})
    before = peft.get_peft_model_state_dict(run.trainer.model)
    again = Run(llm, tmp_path, None, {"model": run.trainer.model, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-2})
    for call in again.train():
        check_logprobs(call)
    assert set(again.trainer.model.peft_config) == {"default", "ref"}
    assert len(before) == len(peft.get_peft_model_state_dict(again.trainer.model))


def test_the_corrections_of_routers_come_too(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """transformers keeps them as buffers."""
    model = build(CASES["glm4moe"], tmp_path)
    llm = make_llm(str(tmp_path), load_format="dummy", **CASES["glm4moe"].small)
    llm.update_weights(_named_tensors(model))
    run(llm, model)


def test_an_error_leaves_no_layer_merged(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    held = []  # as the error's traceback would hold them

    def fail(tensors: Iterator[tuple[str, Tensor]]) -> int:
        held.append(tensors)
        name, tensor = next(tensors)
        assert not torch.equal(tensor, before[f"base_model.model.{name}".replace("weight", "base_layer.weight")])
        raise ZeroDivisionError

    monkeypatch.setattr(llm, "update_weights", fail)
    model = (run := make_run(lora=LORA)).trainer.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_trainers_settings_are_used(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1}
    (used, *_) = spied(
        monkeypatch, llm, make_run(max_steps=1, **settings, generation_kwargs={"frequency_penalty": 0.1})
    )
    assert used == SamplingParams(
        **settings,
        max_tokens=TOKENS,
        frequency_penalty=0.1,
        stop_token_ids=[llm.tokenizer.eos_token_id],
        n=GENERATIONS,
        seed=used.seed,
        logprobs=0,
    )


def test_given_settings_are_used(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    first, second, *_ = spied(monkeypatch, llm, make_run(SamplingParams(top_k=3, max_tokens=5), max_steps=1))
    assert first == SamplingParams(top_k=3, max_tokens=5, n=GENERATIONS, seed=first.seed, logprobs=0)
    assert second.seed != first.seed


def spied(monkeypatch: pytest.MonkeyPatch, llm: LLM, run: Run) -> list[SamplingParams]:
    """Train; returns the settings of all requests."""
    seen: list[SamplingParams] = []
    generate = llm.generate

    def spy(prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> Any:
        seen.extend(params)
        return generate(prompts, params, **options)

    monkeypatch.setattr(llm, "generate", spy)
    run.train()
    return seen


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"n": 2}, "params has n=2: must be 1.*num_generations"), ({"seed": 3}, "params has seed=3: must be None")],
    ids=["n", "seed"],
)
def test_settings_that_are_the_trainers_to_choose(settings: dict[str, int], message: str, llm: LLM) -> None:
    with pytest.raises(ValueError, match=message):
        rollout_func(llm, SamplingParams(**settings))


def test_a_setting_that_there_is_not(make_run: Callable[..., Run]) -> None:
    with pytest.raises(ValueError, match=r"unknown argument 'num_beams': write BeamSearchParams\(beam_width=...\)"):
        make_run(generation_kwargs={"num_beams": 2}).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": [print]}, "tools=.*print.*must be None"),
        ({"processing_class": object()}, "processing_class=.*must be a tokenizer"),
        ({"is_fsdp_enabled": True}, "FSDP splits its model: must be whole"),
        ({"zero_stage": 3}, "DeepSpeed's ZeRO 3 splits its model: must be whole"),
        ({"peft": peft.PromptTuningConfig(task_type="CAUSAL_LM")}, "peft_config=Prompt.*must be a LoraConfig"),
        ({"peft": peft.LoraConfig(modules_to_save=["lm_head"])}, "peft_config=.*without modules_to_save"),
    ],
    ids=["tools", "processor", "FSDP", "ZeRO", "prompt tuning", "modules_to_save"],
)
def test_a_trainer_that_cannot_work_is_refused(changes: dict[str, Any], message: str, llm: LLM) -> None:
    stage, adapter = changes.pop("zero_stage", None), changes.pop("peft", None)
    plugin = stage and SimpleNamespace(zero_stage=stage)
    trainer = {
        "tools": [],
        "processing_class": AutoTokenizer.from_pretrained(BUNDLED_MODEL),
        "is_fsdp_enabled": False,
        "accelerator": SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
        "model": SimpleNamespace(peft_config={"default": adapter} if adapter else {}),
    }
    with pytest.raises(ValueError, match=message):
        rollout_func(llm)(TEXTS, SimpleNamespace(**{**trainer, **changes}))
    assert llm.weights_version == 0
