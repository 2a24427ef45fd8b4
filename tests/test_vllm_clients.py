"""Programs that were written for vLLM run unchanged under its names, and what they give is what LLM gives.

Each runs in a process of its own, where `import vllm` finds nanoinfer. A program that is not installed is skipped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
from conftest import greedy, whole_only

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams

PROMPTS = ["ROMEO:\nWhat is", "My lord,"]
CHATS = [[{"role": "user", "content": text}] for text in ("Who goes there?", "Good morrow!")]
CONTEXT, CHOICES = "JULIET:\nO Romeo,", [" Romeo!", " my lord, I am here."]
MAX_TOKENS = 8
CPU = {"kvcache_block_size": 16, "num_kvcache_blocks": 512}


def under_vllm_names(package: str, program: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file, which imports the package, in a process where nanoinfer has vLLM's names."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=take_names) as process:
        return process.submit(program, *arguments).result()


def take_names() -> None:
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # LLaMA-Factory's, of transformers and others
    import nanoinfer.integrations.vllm.names  # noqa: F401


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, **CPU) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    """What LLM itself makes of PROMPTS."""
    return [output.text for output in llm.generate(PROMPTS, greedy(MAX_TOKENS))]


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[str]:
    """What LLM itself makes of CHATS."""
    return [output.text for output in llm.chat(CHATS, greedy(MAX_TOKENS))]


@pytest.fixture(scope="module")
def scores(llm: LLM) -> list[float]:
    """What LLM itself says of CHOICES."""
    return [score.logprob for score in llm.score(CONTEXT, CHOICES)]


def run_langchain() -> list[str]:
    from langchain_community.llms import VLLM

    llm = VLLM(model=BUNDLED_MODEL, temperature=0, max_new_tokens=MAX_TOKENS, trust_remote_code=True)
    return [row[0].text for row in llm.generate(PROMPTS).generations]


def test_langchain(texts: list[str]) -> None:
    assert under_vllm_names("langchain_community", run_langchain) == texts


def run_llama_index() -> list[str]:
    from llama_index.llms.vllm import Vllm

    llm = Vllm(model=BUNDLED_MODEL, temperature=0, max_new_tokens=MAX_TOKENS)
    return [llm.complete(prompt).text for prompt in PROMPTS]


def test_llama_index(texts: list[str]) -> None:
    assert under_vllm_names("llama_index", run_llama_index) == texts


def run_evalplus() -> list[str]:
    from evalplus.provider.vllm import VllmDecoder

    settings = {"temperature": 0, "max_new_tokens": MAX_TOKENS, "dtype": "float32", "trust_remote_code": True}
    decoder = VllmDecoder(name=BUNDLED_MODEL, dataset="humaneval", force_base_prompt=True, batch_size=2, **settings)
    return decoder.codegen(PROMPTS[0], do_sample=False, num_samples=2)


def test_evalplus(texts: list[str]) -> None:
    assert under_vllm_names("evalplus", run_evalplus) == texts[:1] * 2


def run_flexeval() -> tuple[list[str], list[str], list[float]]:
    from flexeval.core.language_model.vllm_model import VLLM

    lm = VLLM(BUNDLED_MODEL, model_kwargs={"tensor_parallel_size": 1})
    completed = lm.complete_text(PROMPTS, max_new_tokens=MAX_TOKENS)
    answered = lm.generate_chat_response(CHATS, max_new_tokens=MAX_TOKENS)
    log_probs = lm.compute_log_probs(CHOICES, prefix_list=[CONTEXT] * len(CHOICES))
    return [output.text for output in completed], [output.text for output in answered], log_probs


def test_flexeval(texts: list[str], answers: list[str], scores: list[float]) -> None:
    completed, answered, log_probs = under_vllm_names("flexeval", run_flexeval)
    assert (completed, answered) == (texts, answers)
    assert log_probs == pytest.approx(scores, abs=1e-4)


def who() -> type:
    """Return a form as pydantic writes it."""
    from pydantic import create_model

    return create_model("Who", name=Literal["Romeo", "Juliet"], age=Literal[13, 17])


def run_outlines() -> list[str]:
    import outlines
    from vllm import LLM, SamplingParams

    model = outlines.from_vllm_offline(LLM(BUNDLED_MODEL))
    settings = SamplingParams(temperature=0, max_tokens=40)
    wanted = (who(), outlines.types.Regex(r"[a-z]{3,5}!"), Literal["Ay", "No"])
    return [model(CHATS[0][0]["content"], form, sampling_params=settings) for form in wanted]


def test_outlines(llm: LLM) -> None:
    pytest.importorskip("pydantic", reason="needs pydantic: pip install pydantic")
    forms = ({"json": who()}, {"regex": r"[a-z]{3,5}!"}, {"choice": ["Ay", "No"]})
    expected = [llm.chat(CHATS[0], greedy(40, structured_outputs=form))[0].text for form in forms]
    assert under_vllm_names("outlines", run_outlines) == expected


def run_distilabel() -> list[dict[str, Any]]:
    from distilabel.models.llms import vLLM

    llm = vLLM(model=BUNDLED_MODEL, extra_kwargs={"max_model_len": 1024}, disable_cuda_device_placement=True)
    llm.load()
    outputs = llm.generate(CHATS, max_new_tokens=MAX_TOKENS, temperature=0.0, logprobs=1)
    llm.unload()
    return outputs


def test_distilabel(llm: LLM, answers: list[str]) -> None:
    outputs = under_vllm_names("distilabel", run_distilabel)
    assert [output["generations"] for output in outputs] == [[answer] for answer in answers]
    logprobs = llm.chat(CHATS[0], greedy(MAX_TOKENS, logprobs=0))[0].logprobs
    likeliest = [place[0]["logprob"] for place in outputs[0]["logprobs"][0]]
    assert likeliest == pytest.approx([value for place in logprobs for value in place.values()], abs=1e-4)


def run_lighteval(model: str) -> tuple[list[list[str]], list[float]]:
    from lighteval.models.vllm.vllm_model import VLLMModel, VLLMModelConfig
    from lighteval.tasks.requests import Doc

    program = VLLMModel(VLLMModelConfig(model_name=model, dtype="float32", override_chat_template=False))
    prompts = [
        Doc(query=prompt, choices=[], gold_index=0, task_name="go on|0", id=prompt, generation_size=MAX_TOKENS)
        for prompt in PROMPTS
    ]
    choice = Doc(query=CONTEXT, choices=CHOICES, gold_index=0, task_name="choose|0", id="choice")
    return [answer.text for answer in program.greedy_until(prompts)], program.loglikelihood([choice])[0].logprobs


def test_lighteval(tmp_path: Path, texts: list[str], scores: list[float]) -> None:
    model = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")  # lighteval keeps results in the model's folder
    completed, log_probs = under_vllm_names("lighteval", run_lighteval, str(model))
    assert completed == [[text] for text in texts]
    assert log_probs == pytest.approx(scores, abs=1e-4)


def run_flashrag() -> tuple[list[str], list[list[float]]]:
    from flashrag.generator.generator import VLLMGenerator

    config = {
        "generator_model": "shakespeare",
        "generator_model_path": BUNDLED_MODEL,
        "generator_max_input_len": 1024,
        "generator_batch_size": 2,
        "generation_params": {"do_sample": False, "max_tokens": MAX_TOKENS},
        "device": "cpu",
        "seed": 3,
    }
    with patch("flashrag.generator.generator.torch") as torch:
        torch.cuda.device_count.return_value = 1  # it asks for as many ranks as there are GPUs, and here may be none
        generator = VLLMGenerator(config)
    return generator.generate(PROMPTS, return_scores=True)


def test_flashrag(texts: list[str]) -> None:
    generated, scores = under_vllm_names("flashrag", run_flashrag)
    assert generated == texts
    assert all(0 < score <= 1 for own in scores for score in own)


def run_opencompass() -> tuple[list[str], list[float], list[str]]:
    from opencompass.models.vllm import VLLM
    from opencompass.models.vllm_with_tf_above_v4_33 import VLLMwithChatTemplate

    model = VLLM(BUNDLED_MODEL, max_seq_len=1024, generation_kwargs={"temperature": 0})
    completed = model.generate(PROMPTS, max_out_len=MAX_TOKENS)
    log_likelihoods = model.get_ppl(PROMPTS).tolist()
    chat = VLLMwithChatTemplate(BUNDLED_MODEL)
    return completed, log_likelihoods, chat.generate([messages[0]["content"] for messages in CHATS], MAX_TOKENS)


def test_opencompass(llm: LLM, texts: list[str], answers: list[str]) -> None:
    completed, log_likelihoods, answered = under_vllm_names("opencompass", run_opencompass)
    assert (completed, answered) == (texts, answers)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=0, prompt_logprobs=0))
    entries = [[value for place in output.prompt_logprobs[1:] for value in place.values()] for output in outputs]
    assert log_likelihoods == pytest.approx([-sum(own) / len(own) for own in entries], abs=1e-4)


def run_llama_factory() -> tuple[list[list[int]], list[str]]:
    from llamafactory.chat.vllm_engine import VllmEngine
    from llamafactory.hparams import get_infer_args

    settings = {"do_sample": False, "temperature": 0, "max_new_tokens": MAX_TOKENS, "infer_dtype": "float32"}
    model = {"model_name_or_path": BUNDLED_MODEL, "template": "chatml", "infer_backend": "vllm", "vllm_maxlen": 1024}
    engine = VllmEngine(*get_infer_args({**model, **settings}))
    prompts = [engine.template.encode_oneturn(engine.tokenizer, [*chat, answer()])[0] for chat in CHATS]

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*map(engine.chat, CHATS))

    return prompts, [responses[0].response_text for responses in asyncio.run(ask_all())]


def answer() -> dict[str, str]:
    return {"role": "assistant", "content": ""}


def test_llama_factory(llm: LLM) -> None:
    prompts, answered = under_vllm_names("llamafactory", run_llama_factory)
    assert answered == [output.text for output in llm.generate(prompts, greedy(MAX_TOKENS))]


def run_lm_eval(folder: str) -> list[dict[str, list[Any]]]:
    from lm_eval.models.vllm_causallms import VLLM
    from test_lm_eval import responses, write_tasks

    from nanoinfer.integrations.lm_eval import NanoInfer

    tasks = write_tasks(Path(folder))
    theirs, ours = VLLM(BUNDLED_MODEL, max_model_len=1024), NanoInfer(BUNDLED_MODEL, max_model_len=1024)
    settings = {"gen_kwargs": {"do_sample": False}}  # without it, lm-eval's own model of vLLM draws at temperature 1
    return [
        responses(model, tasks, apply_chat_template=chat, **settings)
        for chat in (False, True)
        for model in (theirs, ours)
    ]


def test_lm_eval(tmp_path: Path) -> None:
    told, expected, told_in_chats, expected_in_chats = under_vllm_names("lm_eval", run_lm_eval, str(tmp_path))
    from test_lm_eval import flat

    assert (told["continue"], told_in_chats["continue"]) == (expected["continue"], expected_in_chats["continue"])
    for task in ("choices", "rolling"):
        assert flat(told[task]) == pytest.approx(flat(expected[task]), abs=1e-3)
        assert flat(told_in_chats[task]) == pytest.approx(flat(expected_in_chats[task]), abs=1e-3)


def run_trl(folder: str, sleeps: bool) -> list[float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    settings = {"max_steps": 3, "per_device_train_batch_size": 4, "num_generations": 2, "learning_rate": 1e-3}
    machine = {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sleeps, "vllm_max_model_length": 512}
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32),
        lambda completions, **_: [float(completion.count("o")) for completion in completions],
        args=GRPOConfig(folder, max_completion_length=MAX_TOKENS, **settings, **machine, **vllm),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
    )
    trainer.train()
    name = "sampling/sampling_logp_difference/max"
    return [log[name] for log in trainer.state.log_history if name in log]


@pytest.mark.parametrize("sleeps", [*whole_only([False]), True], ids=["awake", "with sleep mode"])
def test_trl(sleeps: bool, tmp_path: Path) -> None:
    """The trainer's own model, which changes with each step, finds the drawn tokens as likely as the LLM did."""
    differences = under_vllm_names("trl", run_trl, str(tmp_path), sleeps)
    assert len(differences) == 3
    assert max(differences) < 1e-3
