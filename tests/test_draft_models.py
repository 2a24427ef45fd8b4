"""A draft model guesses well if it is like the model, and changes no result, whatever it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, build
from conftest import HAS_CUDA, assert_equal, greedy, whole_only
from safetensors.torch import load_file, save_file
from test_guesses_of_an_llm import PARAMS, PROMPTS, SOME, SPEECHES, SPREAD, assert_counts, expected, make, plain, run

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.config import Config
from nanoinfer.drafting.options import check_speculating
from nanoinfer.engine.speculation.budget import Budget

__all__ = ["expected", "plain"]  # fixtures

ITSELF = {"speculation": "draft", "draft_model": BUNDLED_MODEL}
PLAIN_PARAMS = [
    SamplingParams(
        temperature=[0, 0.7, 1.3][i % 3], seed=i, max_tokens=[31, 3, 15][i % 3], n=1 + i % 3, ignore_eos=True
    )
    for i in range(9)
]
PLAIN_PROMPTS = [SPEECHES[i % len(SPEECHES)] for i in range(len(PLAIN_PARAMS))]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, make_qwen3: Callable[..., str]) -> dict[str, str]:
    """Drafts of the bundled model: itself, its first two layers, and a random one whose keys have another shape."""
    return {
        "itself": BUNDLED_MODEL,
        "half": first_layers(tmp_path_factory.mktemp("half"), 2),
        "random": make_qwen3(vocab_size=2048, num_hidden_layers=1, head_dim=16),
    }


def first_layers(folder: Path, count: int) -> str:
    """Write the bundled model's first layers as a model of its own."""
    shutil.copytree(BUNDLED_MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config.update(num_hidden_layers=count, layer_types=config["layer_types"][:count])
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = load_file(folder / "model.safetensors")
    behind = tuple(f"model.layers.{layer}." for layer in range(count, 4))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(behind)}
    save_file(kept, folder / "model.safetensors")
    return str(folder)


TOGETHER = [
    *[(draft, "roomy") for draft in ("itself", "half", "random")],
    *[("half", spread) for spread in SPREAD if spread not in ("roomy", "all lines")],
    *whole_only([("itself", spread) for spread in SPREAD if spread not in ("roomy", "all lines")]),
    *whole_only([("random", "tight"), ("random", "one row"), ("random", "two ranks"), ("random", "two replicas")]),
]


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize(("draft", "spread"), TOGETHER)
def test_results_are_those_without(
    draft: str, spread: str, drafts: dict[str, str], expected: list[RequestOutput]
) -> None:
    with make(speculation="draft", draft_model=drafts[draft], **SPREAD[spread]) as llm:
        some = SOME if spread == "one row" else slice(None, None, 2 if spread.startswith("two") else 1)
        outputs = run(llm, PROMPTS[some], PARAMS[some])
        assert_equal(outputs, expected[some])
        assert_counts(llm, outputs)
        assert spread != "tight" or llm.engine.scheduler.num_preemptions > 0
        assert_equal(run(llm, PROMPTS[SOME], PARAMS[SOME]), expected[SOME])  # their prompts are cached now


def assert_all_hold(llm: LLM, wanted: list[RequestOutput]) -> None:
    """All guesses hold of a draft whose logits are the model's."""
    outputs = run(llm, PLAIN_PROMPTS, PLAIN_PARAMS)
    assert_equal(outputs, wanted)
    samples = [sample for output in outputs for sample in output.samples]
    assert [sample.num_accepted_tokens for sample in samples] == [sample.num_proposed_tokens for sample in samples]
    most = llm.config.max_guesses
    least = min(1 / 2, 0.9 * most / (most + 1)) * sum(len(sample.token_ids) for sample in samples)
    assert sum(sample.num_accepted_tokens for sample in samples) > least


@pytest.fixture(scope="module")
def wanted(plain: LLM) -> list[RequestOutput]:
    return run(plain, PLAIN_PROMPTS, PLAIN_PARAMS)


@pytest.mark.parametrize("spread", ["roomy", "tight", "two ranks", *whole_only(["one row", "two replicas"])])
def test_a_model_guesses_all_of_its_own_tokens(spread: str, wanted: list[RequestOutput]) -> None:
    """At any temperature, behind chunks, cached prefixes and a change of rows: its keys are all there."""
    room = {"num_kvcache_blocks": 14, "max_num_seqs": 5} if spread == "tight" else {}  # for guesses of all rows
    with make(**ITSELF | SPREAD[spread] | room) as llm:
        assert_all_hold(llm, wanted)
        assert_all_hold(llm, wanted)


@pytest.mark.skipif(HAS_CUDA, reason="no kernel is interpreted where there is a GPU; the last test has its graphs")
@pytest.mark.parametrize("is_itself", [True, *whole_only([False])])
def test_empty_places_change_nothing(is_itself: bool, make_qwen3: Callable[..., str]) -> None:
    """Where kernels are interpreted, steps have all places, as a GPU's graphs have. One row ends before the other."""
    folder = make_qwen3(num_hidden_layers=1, vocab_size=64)
    draft = folder if is_itself else make_qwen3(num_hidden_layers=1, vocab_size=64, head_dim=16)
    shape = {
        "device": "cpu",
        "max_model_len": 32,
        "kvcache_block_size": 16,
        "num_kvcache_blocks": 20,
        "max_num_seqs": 2,
    }
    params = [SamplingParams(temperature=0.8 * i, max_tokens=3 + 3 * i, seed=1, ignore_eos=True) for i in range(2)]
    outputs = []
    for options in (
        {},
        {"attention_backend": "triton", "speculation": "draft", "draft_model": draft, "max_guesses": 2},
    ):
        with LLM(folder, **shape, **options) as llm:
            outputs.append(run(llm, [[5, 6, 7], [8, 9]], params))
    assert_equal(outputs[1], outputs[0])
    for output in outputs[1]:
        assert (output.num_accepted_tokens == output.num_proposed_tokens) == is_itself


def test_it_catches_up_with_plain_steps(monkeypatch: pytest.MonkeyPatch, wanted: list[RequestOutput]) -> None:
    """Long stretches of plain steps, of which a draft model computes nothing, come between those that verify."""
    choose, steps = Budget.choose, iter(range(10**9))

    def choose_seldom(self: Budget, *rows: int) -> int:
        return choose(self, *rows) if next(steps) % 13 > 9 else 0

    monkeypatch.setattr(Budget, "choose", choose_seldom)
    with make(**ITSELF, max_num_batched_tokens=32) as llm:
        outputs = run(llm, PLAIN_PROMPTS, PLAIN_PARAMS)
    assert_equal(outputs, wanted)
    samples = [sample for output in outputs for sample in output.samples]
    assert sum(sample.num_accepted_tokens for sample in samples) > 50
    assert [sample.num_accepted_tokens for sample in samples] == [sample.num_proposed_tokens for sample in samples]


def test_a_sequence_that_left_in_a_step_leaves_the_others_right(wanted: list[RequestOutput]) -> None:
    with make(**ITSELF) as llm:
        stream = llm.stream(PLAIN_PROMPTS, PLAIN_PARAMS)
        for _ in range(10):
            next(stream)
        stream.close()
        assert_all_hold(llm, wanted)


def test_it_sleeps_and_keeps_its_weights(wanted: list[RequestOutput]) -> None:
    """New weights are the model's alone."""
    with make(**ITSELF) as llm:
        llm.sleep(level=1)
        llm.wake_up()
        assert_all_hold(llm, wanted)
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights(BUNDLED_MODEL)
        assert_all_hold(llm, wanted)
        tensors = load_file(Path(BUNDLED_MODEL) / "model.safetensors")
        llm.update_weights({name: tensor * 1.05 for name, tensor in tensors.items()})
        (other,) = run(llm, SPEECHES[:1], greedy(40, ignore_eos=True))
        assert other.num_accepted_tokens < other.num_proposed_tokens


def test_bits_are_those_without_if_sums_have_one_order() -> None:
    prompts, params = PROMPTS[12:15], [replace(own, max_tokens=8) for own in PARAMS[12:15]]
    results = []
    for options in ({}, ITSELF):
        with make(deterministic=True, **options) as llm:
            outputs = run(llm, prompts, params)
            results.append([sample.token_ids for output in outputs for sample in output.samples])
    assert results[0] == results[1]


def test_weights_that_are_drawn_are_alike_in_both(tmp_path: Path) -> None:
    """Models of one shape have the same random weights."""
    with make(**ITSELF, load_format="dummy") as llm:
        (output,) = run(llm, SPEECHES[:1], greedy(30, ignore_eos=True))
    assert output.num_accepted_tokens == output.num_proposed_tokens > 20


def test_the_memory_counts_it(plain: LLM) -> None:
    with make(**ITSELF) as llm:
        assert llm.memory.used == 2 * plain.memory.used
        assert llm.memory.block_bytes == 2 * plain.memory.block_bytes


def test_a_draft_that_leaves_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoinfer.runner.memory.plan.CPU_BUDGET", 1 << 20)
    message = "the KV cache has 1 MiB, but one sequence of max_model_len=2048 needs 32 MiB in blocks .*, draft_model="
    with pytest.raises(ValueError, match=f"{message}'.*' takes 16 MiB"):
        make(**ITSELF, max_model_len=2048, num_kvcache_blocks=None, max_num_seqs=4)


@pytest.fixture
def vocabularies(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Folders of drafts that are none of the bundled model's."""
    swapped = first_layers(tmp_path / "swapped", 1)
    text = (Path(swapped) / "tokenizer.json").read_text("utf-8")
    vocabulary = json.loads(text)["model"]["vocab"]
    one, other = [token for token, number in vocabulary.items() if number in (300, 301)]
    content = json.loads(text)
    content["model"]["vocab"].update({one: vocabulary[other], other: vocabulary[one]})
    (Path(swapped) / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    build(CASES["lfm2"], tmp_path / "lfm2")
    return {"swapped": swapped, "lfm2": str(tmp_path / "lfm2")}


def test_a_draft_of_other_tokens_is_refused(vocabularies: dict[str, str], make_qwen3: Callable[..., str]) -> None:
    for folder, message in [
        (make_qwen3(), "must have the model's vocabulary of 2048 tokens, not one of 512"),
        (vocabularies["swapped"], "2 differ, such as token 300, which is '.*', not '"),
    ]:
        with pytest.raises(ValueError, match=f"^draft_model='{folder}': .*{message}"):
            Config(BUNDLED_MODEL, speculation="draft", draft_model=folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "draft"}, "draft_model=None: must be the folder or the Hugging Face Hub id of a small model"),
        ({"draft_model": "x"}, "draft_model='x': must be left out, or speculation must be 'draft' or 'auto'"),
        ({"speculation": "draft", "draft_model": "no/such/folder"}, "draft_model='no/such/folder': no such folder"),
        (ITSELF | {"tensor_parallel_size": 3}, "tensor_parallel_size=3: "),
    ],
    ids=repr,
)
def test_what_cannot_be_is_said_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(BUNDLED_MODEL, **options)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("lfm2", {}, "some of its layers keep a state"),
        ("mistral", {"sliding_window": 16}, "its layers see 16 tokens at most: must see all; lower max_model_len="),
    ],
)
def test_models_that_cannot_draft_say_so(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path, make_qwen3: Callable[..., str]
) -> None:
    case = CASES[family]
    build(replace(case, settings=case.settings | settings), tmp_path)
    vocabulary = json.loads((tmp_path / "config.json").read_text("utf-8"))["vocab_size"]
    with pytest.raises(ValueError, match=f"^draft_model='{tmp_path}': .*{message}"):
        Config(make_qwen3(vocab_size=vocabulary), speculation="draft", draft_model=str(tmp_path))


def test_ranks_in_order_must_divide_it(make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3(vocab_size=2048, num_key_value_heads=1)
    options = {"speculation": "draft", "draft_model": folder, "tensor_parallel_size": 2, "deterministic": True}
    with pytest.raises(ValueError, match=f"^draft_model='{folder}': deterministic=True .*num_key_value_heads=1 is not"):
        Config(BUNDLED_MODEL, device="cpu", **options)


def test_an_llm_that_sees_has_no_draft_model() -> None:
    with pytest.raises(ValueError, match="draft_model='x': must be left out, or images=False set: a draft model sees"):
        check_speculating("auto", "x", generates=True, sees=True)


def test_auto_takes_a_draft_models_guesses_while_they_pay(
    wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model guesses for itself, so that all guesses hold: they pay only if a step of many tokens is fast."""
    counts = []
    for seconds in (1.2, 99.0):
        measured = {(rows, guesses): seconds if guesses else 1.0 for rows in (1, 4, 16) for guesses in (0, 8 * rows)}
        monkeypatch.setattr("nanoinfer.runner.model_runner.ModelRunner.time_steps", lambda _, times=measured: times)
        with make(**ITSELF | {"speculation": "auto"}) as llm:
            outputs = run(llm, PLAIN_PROMPTS, PLAIN_PARAMS)
        assert_equal(outputs, wanted)
        counts.append(sum(sample.num_accepted_tokens for output in outputs for sample in output.samples))
    assert counts[0] > sum(len(sample.token_ids) for output in wanted for sample in output.samples) / 2
    assert counts[1] == 0


@pytest.mark.parametrize("method", [{}, {"method": "draft_model"}], ids=repr)
def test_vllms_names_work(method: dict[str, str]) -> None:
    config = {"model": BUNDLED_MODEL, "num_speculative_tokens": 3, **method}
    with make(speculative_config=config) as llm:
        assert (llm.config.speculation, llm.config.draft_model, llm.config.max_guesses) == ("draft", BUNDLED_MODEL, 3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"enforce_eager": True}, {"deterministic": True}], ids=repr
)
@pytest.mark.parametrize("draft", ["itself", "random"])
def test_a_gpu_gives_the_same_tokens(draft: str, options: dict[str, Any], drafts: dict[str, str]) -> None:
    """Rows come and go, so that graphs have empty rows; a draft of nearly equal logits is nearly always right."""
    params = [SamplingParams(temperature=0.4 * (i % 3), seed=i, max_tokens=8 + 5 * (i % 17)) for i in range(40)]
    prompts, texts, held, proposed = [SPEECHES[i % len(SPEECHES)] for i in range(40)], [], 0, 0
    for own in ({}, {"speculation": "draft", "draft_model": drafts[draft]}):
        with make(**{"device": "cuda", **options, **own}) as llm:
            outputs = run(llm, prompts, params)
            texts.append([output.token_ids for output in outputs])
            held, proposed = llm.stats().num_accepted_tokens, llm.stats().num_proposed_tokens
    assert proposed > 300
    if draft == "itself":
        assert held > 0.9 * proposed
    if options.get("dtype") != "bfloat16":
        assert texts[0] == texts[1]
