"""lm-evaluation-harness gets from us what it gets from its own model of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_DATASETS_OFFLINE"] = "1"  # set before lm_eval imports datasets: the tasks are files of these tests
lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval: pip install -e '.[eval]'")
pytest.importorskip("accelerate", reason="lm-eval's own model needs accelerate: pip install 'lm_eval[hf]'")

import yaml
from cases.tuned import Tuned
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from nanoinfer import BUNDLED_MODEL
from nanoinfer.integrations.lm_eval import NanoInfer

MAX_LENGTH = 128
PASSAGE = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n"
QUESTIONS = [
    {"question": PASSAGE + "Who is the sun?", "choices": ["Juliet", "the moon", "a rose", "Mercutio"], "answer": 0},
    {"question": "Who is in love? ", "choices": ["Romeo", "No one"], "answer": 0},  # spaces belong to the choices
    {"question": PASSAGE * 8 + "Where is the light?", "choices": ["in the east", "in the west"], "answer": 0},
]
TEXTS = [{"text": "Now is the winter of our discontent"}, {"text": PASSAGE * 6}, {"text": "O Romeo, Romeo! 🤗"}]
CONTEXTS = [{"context": "JULIET:\nO Romeo,", "next": "Romeo"}, {"context": PASSAGE * 7 + "JULIET:\n", "next": "Ay me"}]

TASKS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {
            "task": "choices",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
        QUESTIONS,
    ),
    (
        {
            "task": "rolling",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        TEXTS,
    ),
    (
        {
            "task": "continue",
            "output_type": "generate_until",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{next}}",
            "generation_kwargs": {"until": ["\n", "?"], "max_gen_toks": 20},
            "metric_list": [{"metric": "exact_match"}],
        },
        CONTEXTS,
    ),
]
NAMES = [task["task"] for task, _ in TASKS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks and their documents."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def write_tasks(folder: Path) -> Path:
    for task, documents in TASKS:
        data = folder / f"{task['task']}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        settings = {**task, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test"}
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(settings))
    return folder


OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 512, "max_model_len": MAX_LENGTH + 1}


@pytest.fixture(scope="module")
def ours() -> Iterator[NanoInfer]:
    model = NanoInfer(BUNDLED_MODEL, **OPTIONS)
    yield model
    model.llm.close()


@pytest.fixture(scope="module")
def theirs() -> HFLM:
    return HFLM(BUNDLED_MODEL, device="cpu", dtype="float32", max_length=MAX_LENGTH, batch_size=1)


def responses(model: LM, folder: Path, **settings: Any) -> dict[str, list[Any]]:
    """Evaluate the model on all tasks; returns each task's responses, in the documents' order."""
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model, tasks=NAMES, task_manager=tasks, bootstrap_iters=0, verbosity="ERROR", **settings
    )
    samples = {name: sorted(results["samples"][name], key=lambda sample: sample["doc_id"]) for name in NAMES}
    return {name: [sample["resps"] for sample in samples[name]] for name in NAMES}


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat template"])
def test_it_answers_as_lm_evals_own_model(chat: bool, ours: NanoInfer, theirs: HFLM, folder: Path) -> None:
    told, expected = (responses(model, folder, apply_chat_template=chat) for model in (ours, theirs))
    for name in ("choices", "rolling"):
        assert flat(told[name]) == pytest.approx(flat(expected[name]), abs=1e-3)
    assert told["continue"] == expected["continue"]


def test_an_adapter_answers_as_in_lm_evals_own_model(ours: NanoInfer, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="lm-eval's own model needs it: pip install -e '.[trl]'")
    adapter = Tuned(BUNDLED_MODEL, seed=1).save(tmp_path)
    theirs = HFLM(BUNDLED_MODEL, peft=adapter, device="cpu", dtype="float32", max_length=MAX_LENGTH, batch_size=1)
    made = [NanoInfer(BUNDLED_MODEL, **{name: adapter}, **OPTIONS) for name in ("peft", "lora_local_path")]
    choices = enumerate(["a", "b", "c"])
    scored = [Instance("loglikelihood", {}, ("JULIET:\nO Romeo,", choice), i) for i, choice in choices]
    continued = [Instance("generate_until", {}, (PASSAGE, {"until": ["\n"], "max_gen_toks": 8}), 0)]
    expected = flat(theirs.loglikelihood(scored, disable_tqdm=True))
    for model in made:
        assert flat(model.loglikelihood(scored, disable_tqdm=True)) == pytest.approx(expected, abs=1e-3)
        assert model.generate_until(continued, True) == theirs.generate_until(continued, True)
        model.llm.close()
    assert flat(ours.loglikelihood(scored, disable_tqdm=True)) != pytest.approx(expected, abs=0.1)


def flat(value: Any) -> list[float]:
    """Return the numbers and booleans of nested lists."""
    return [leaf for entry in value for leaf in flat(entry)] if isinstance(value, (list, tuple)) else [float(value)]


def test_the_choices_of_a_context_prefill_it_once(ours: NanoInfer) -> None:
    context = "JULIET:\n" + "Good morrow, good morrow, " * 8
    prefilled: list[int] = []
    ours.llm.engine.on_step = lambda result: prefilled.append(result.num_prefill_tokens)
    choices = [" my lord", " nurse", " friar", " cousin"]
    requests = [Instance("loglikelihood", {}, (context.rstrip(), choice), i) for i, choice in enumerate(choices)]
    assert len(ours.loglikelihood(requests, disable_tqdm=True)) == 4
    num_context = len(ours.tok_encode(context.rstrip()))
    num_choices = sum(len(ours.tok_encode(context.rstrip() + choice)) - num_context for choice in choices)
    in_blocks = (num_context - 1) // 16 * 16
    assert sum(prefilled) == in_blocks + 4 * (num_context - in_blocks) + num_choices


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": 128}, "max_gen_toks=128: must be less than 128"),
        (
            {"max_gen_toks": 8, "num_beams": 4},
            r"unknown argument 'num_beams': write BeamSearchParams\(beam_width=...\)",
        ),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_named(settings: dict, message: str, ours: NanoInfer) -> None:
    with pytest.raises(ValueError, match=message):
        ours.generate_until([Instance("generate_until", {}, ("JULIET:\n", settings), 0)])


def test_the_command(folder: Path) -> None:
    model = f"model={BUNDLED_MODEL},num_kvcache_blocks=64"
    options = ["--tasks", "choices", "--include_path", str(folder), "--device", "cpu", "--model_args", model]
    command = [sys.executable, "-m", "nanoinfer.integrations.lm_eval", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "nanoinfer (" in done.stdout, done.stderr
    assert "|choices|" in done.stdout
