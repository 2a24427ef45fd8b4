"""A model's prediction head guesses as its definition says, and changes no result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import build
from cases.heads import HEADS, Drawn, Head, body_of, build_with_head, record_rounds
from cases.tuned import ALPHA, Tuned
from conftest import HAS_CUDA, assert_equal, greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from test_guesses_of_an_llm import PARAMS, PROMPTS, SOME, SPREAD, assert_counts, run
from test_quantization import SMALL_BLOCKS, write_checkpoint
from torch import Tensor
from transformers import PreTrainedModel

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.config import Config
from nanoinfer.drafting.options import check_speculating
from nanoinfer.engine.speculation.budget import Budget

SMALL = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 60}
FILE = "model.safetensors"
COUNTS = "num_accepted_tokens", "num_proposed_tokens"
NAMES_NONE = r"^speculation='mtp': must be left out for this model: its config names no layer that predicts"


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Drawn]]:
    """What the head has computed for the guesses of each verifying step."""
    return record_rounds(monkeypatch)


@torch.inference_mode()
def assert_defined(rounds: list[list[Drawn]], text: list[int], model: PreTrainedModel, head: Head) -> None:
    """Check that guesses of a text are what the definition says: each is the likeliest token behind the one before."""
    hidden = body_of(model)(torch.tensor([text])).last_hidden_state[0]
    for drawn in rounds:
        begin, states, tokens = drawn[0][0], hidden, text[1:]
        states, tokens = states[: begin + 1], tokens[: begin + 1]
        for number, (position, token, after) in enumerate(drawn):
            assert (position, token) == (begin + number, tokens[-1])
            expected = head(torch.tensor(tokens), states)[-1]
            torch.testing.assert_close(after, expected, atol=2e-4, rtol=2e-4)
            states = torch.cat([states, expected[None]])
            tokens = [*tokens, int(model.lm_head(expected).argmax())]


@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize("name", of_each_kind(HEADS, 0, 2))
def test_guesses_are_what_the_definition_says(
    name: str, agrees: bool, rounds: list[list[Drawn]], tmp_path: Path
) -> None:
    """Behind chunks, cached prefixes, and guesses that held or did not."""
    model, head = build_with_head(HEADS[name], tmp_path, agrees)
    prompt = list(range(3, 44))
    with LLM(str(tmp_path), **SMALL, max_num_batched_tokens=17, speculation="mtp", max_guesses=3) as llm:
        rounds.clear()
        for _ in range(2):
            (output,) = run(llm, [prompt], greedy(14, ignore_eos=True))
            assert output.num_proposed_tokens > 3
            assert (output.num_accepted_tokens > 0.5 * output.num_proposed_tokens) == agrees
            assert_defined(rounds, prompt + output.token_ids, model, head)
            assert len(rounds) > 2
            rounds.clear()
        assert output.num_cached_tokens == 32


def test_plain_steps_keep_its_keys(rounds: list[list[Drawn]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the keys of their tokens, too, so that it need not catch up."""
    choose, steps = Budget.choose, iter(range(10**9))

    def choose_seldom(self: Budget, *rows: int) -> int:
        return choose(self, *rows) if next(steps) % 5 > 2 else 0

    monkeypatch.setattr(Budget, "choose", choose_seldom)
    model, head = build_with_head(HEADS["glm4moe"], tmp_path, agrees=True)
    with LLM(str(tmp_path), **SMALL, speculation="mtp", max_guesses=2) as llm:
        rounds.clear()
        (output,) = run(llm, [[5, 6, 7]], greedy(30, ignore_eos=True))
    assert len(rounds) > 2
    assert 0 < output.num_proposed_tokens < 16
    assert_defined(rounds, [5, 6, 7, *output.token_ids], model, head)


def test_a_checkpoint_in_fp8_keeps_the_projection(rounds: list[list[Drawn]], tmp_path: Path) -> None:
    """As DeepSeek-V3's does, whose config does not say so; the layer's matrices are in FP8."""
    build_with_head(HEADS["deepseek-v3"], tmp_path, agrees=True)
    projection = {name: own for name, own in load_file(tmp_path / FILE).items() if name.endswith("eh_proj.weight")}
    in_fp8, states = tmp_path / "fp8", list[Tensor]()
    in_fp8.mkdir()
    for own in (write_checkpoint(tmp_path, in_fp8, SMALL_BLOCKS), in_fp8):
        others = {name: tensor for name, tensor in load_file(own / FILE).items() if "eh_proj" not in name}
        save_file(others | projection, own / FILE, {"format": "pt"})
        with LLM(str(own), **SMALL, speculation="mtp", max_guesses=1) as llm:
            rounds.clear()
            run(llm, [[5, 6, 7]], greedy(9, ignore_eos=True))
            states.append(torch.stack([after for ((_, _, after),) in rounds]))
    assert len(states[0]) > 2
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with the bundled one's tokenizer, and a head that is mostly right."""
    folder, case = tmp_path_factory.mktemp("agrees"), HEADS["glm4moe"]
    build_with_head(replace(case, settings={**case.settings, "vocab_size": 2048}), folder, agrees=True)
    copy_tokenizer(folder)
    return str(folder)


def copy_tokenizer(folder: Path) -> None:
    """Give a checkpoint the bundled model's."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED_MODEL) / name, folder)


MTP = {"speculation": "mtp", "max_guesses": 3}


def make(folder: str, **options: Any) -> LLM:
    return LLM(folder, **{**SMALL, "num_kvcache_blocks": 300, "use_tqdm": False, **options})


@pytest.fixture(scope="module")
def plain(folder: str) -> Iterator[LLM]:
    with make(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[RequestOutput]:
    return run(plain)


def assert_same(llm: LLM, spread: str, expected: list[RequestOutput]) -> None:
    """Check that results are those without guesses, of which most hold."""
    some = SOME if spread == "one row" else slice(None, None, 2 if spread.startswith("two") else 1)
    outputs = run(llm, PROMPTS[some], PARAMS[some])
    assert_equal(outputs, expected[some])
    assert_counts(llm, outputs)
    assert llm.stats().num_accepted_tokens > 0.2 * llm.stats().num_proposed_tokens > 0
    assert spread != "tight" or llm.engine.scheduler.num_preemptions > 0
    assert_equal(run(llm, PROMPTS[SOME], PARAMS[SOME]), expected[SOME])  # their prompts are cached now


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize("spread", ["roomy", "tight", "one row", "two ranks", *whole_only(["two replicas"])])
def test_results_are_those_without(spread: str, folder: str, expected: list[RequestOutput]) -> None:
    """All settings, samples of one prompt, and structured outputs; most guesses hold."""
    with make(folder, **MTP | SPREAD[spread]) as llm:
        assert_same(llm, spread, expected)


@pytest.mark.skipif(HAS_CUDA, reason="no kernel is interpreted where there is a GPU; the last test has its graphs")
@pytest.mark.parametrize("name", of_each_kind(["glm4moe", "deepseek-v3"], 0))
def test_empty_places_change_nothing(name: str, tmp_path: Path) -> None:
    """Where kernels are interpreted, steps have all places, as a GPU's graphs have. One row ends before the other."""
    case = HEADS[name]
    build_with_head(replace(case, settings={**case.settings, "num_hidden_layers": 2}), tmp_path, agrees=True)
    shape = {**SMALL, "max_model_len": 32, "num_kvcache_blocks": 20, "max_num_seqs": 2}
    params = [SamplingParams(temperature=0.8 * i, max_tokens=3 + 3 * i, seed=1, ignore_eos=True) for i in range(2)]
    outputs, prompts = [], [[5, 6, 7], [8, 9]]
    for options in ({}, {"attention_backend": "triton", "speculation": "mtp", "max_guesses": 2}):
        with LLM(str(tmp_path), **{**shape, **options}) as llm:
            outputs.append(run(llm, prompts, params))
    assert_equal(outputs[1], outputs[0])
    assert all(output.num_accepted_tokens for output in outputs[1])


def assert_most_hold(llm: LLM) -> None:
    before = llm.stats()
    run(llm, PROMPTS[:6], [SamplingParams(temperature=0.3 * (i % 3), seed=i, max_tokens=30) for i in range(6)])
    after = llm.stats()
    held, proposed = (getattr(after, name) - getattr(before, name) for name in COUNTS)
    assert held > 0.5 * proposed > 10


def test_it_sleeps_and_keeps_its_weights(folder: str) -> None:
    with make(folder, **MTP) as llm:
        assert_most_hold(llm)
        llm.sleep(level=1)
        llm.wake_up()
        assert_most_hold(llm)
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights(folder)
        assert_most_hold(llm)


def test_requests_with_adapters_get_the_same_tokens(folder: str) -> None:
    """The head has none, and reads hidden states that come of them."""
    texts, tuned = [], Tuned(folder, seed=1, only="o_proj", std=0.05)
    params = [
        SamplingParams(temperature=0.4 * i, seed=i, max_tokens=12, adapter=["red", None][i % 2]) for i in range(5)
    ]
    for options in ({}, MTP):
        with make(folder, max_adapters=1, **options) as llm:
            llm.load_adapter("red", tuned.tensors, alpha=ALPHA)
            texts.append([output.token_ids for output in run(llm, PROMPTS[:5], params)])
            assert llm.stats().num_accepted_tokens > 0 or not options
    assert texts[0] == texts[1]


def test_bits_are_those_without_if_sums_have_one_order(folder: str) -> None:
    prompts, params = PROMPTS[12:15], [replace(own, max_tokens=8) for own in PARAMS[12:15]]
    results = []
    for options in ({}, MTP):
        with make(folder, deterministic=True, **options) as llm:
            outputs = run(llm, prompts, params)
            results.append([(sample.token_ids, sample.logprobs) for output in outputs for sample in output.samples])
    assert results[0] == results[1]


def test_the_memory_counts_it(folder: str, plain: LLM) -> None:
    """Its layer is one more than the model's four."""
    with make(folder, **MTP) as llm:
        assert llm.memory.block_bytes == plain.memory.block_bytes * 5 / 4
        assert llm.memory.used > plain.memory.used


@pytest.mark.parametrize("name", of_each_kind(["glm4moe", "deepseek-v3"], 0))
def test_models_without_a_head_say_so(name: str, tmp_path: Path, make_qwen3: Callable[..., str]) -> None:
    """Some configs name none, and some files lack what their config names."""
    with pytest.raises(ValueError, match=NAMES_NONE):
        Config(make_qwen3(), speculation="mtp")
    case = HEADS[name]
    build(replace(case, settings={**case.settings, "num_nextn_predict_layers": 0}), tmp_path / "none")
    with pytest.raises(ValueError, match=NAMES_NONE):
        Config(str(tmp_path / "none"), speculation="mtp")
    build(case, tmp_path / "lost")
    with pytest.raises(ValueError, match=r"^speculation='mtp': .* prediction head, model\.layers\.4\.\*: transformers"):
        Config(str(tmp_path / "lost"), speculation="mtp")
    assert Config(str(tmp_path / "lost"), speculation="mtp", load_format="dummy").draft is not None


def test_a_head_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    build_with_head(HEADS["glm4moe"], tmp_path)
    tensors = load_file(tmp_path / FILE)
    del tensors["model.layers.4.eh_proj.weight"]
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit the model: missing: model\.layers\.4\.eh_proj\.weight"):
        LLM(str(tmp_path), **SMALL, **MTP)
    LLM(str(tmp_path), **SMALL).close()


def test_llms_that_see_have_none() -> None:
    with pytest.raises(ValueError, match=r"^speculation='mtp': must be left out, or images=False set: a prediction"):
        check_speculating("mtp", None, generates=True, sees=True)


def test_vllms_names_work(folder: str) -> None:
    with make(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 1}) as llm:
        assert (llm.config.speculation, llm.config.max_guesses) == ("mtp", 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"enforce_eager": True}, {"deterministic": True}], ids=repr
)
def test_a_gpu_gives_the_same_tokens(options: dict[str, Any], folder: str) -> None:
    """Rows come and go, so that graphs have empty rows."""
    params = [SamplingParams(temperature=0.4 * (i % 3), seed=i, max_tokens=8 + 5 * (i % 17)) for i in range(40)]
    prompts, texts = [PROMPTS[i % 6] for i in range(40)], []
    for own in ({}, MTP):
        with make(folder, **{"device": "cuda", **options, **own}) as llm:
            texts.append([output.token_ids for output in run(llm, prompts, params)])
            held, proposed = (getattr(llm.stats(), name) for name in COUNTS)
    assert held > 0.5 * proposed > 150
    if options.get("dtype") != "bfloat16":
        assert texts[0] == texts[1]
