"""A model's prediction head guesses as its definition says, and changes no result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.heads import HEADS, Head, build_with_head
from conftest import assert_equal, greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from test_guesses_of_an_llm import PARAMS, PROMPTS, SOME, SPREAD, assert_counts, run
from torch import Tensor
from transformers import PreTrainedModel

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.config import Config
from nanoinfer.engine.speculation.budget import Budget
from nanoinfer.runner.drafting.head_steps import HeadSteps

SMALL = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 60}
Drawn = tuple[int, int, Tensor]  # behind a position: its next token, and the head's hidden state


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Drawn]]:
    """What the head has computed for the guesses of each verifying step. Steps have one row."""
    rounds, propose, draw = list[list[Drawn]](), HeadSteps.propose, HeadSteps._draw_all

    def propose_and_tell(self: HeadSteps, *sizes: int) -> tuple[Tensor, Tensor]:
        rounds.append([])
        return propose(self, *sizes)

    def draw_and_tell(self: HeadSteps, tokens: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        drawn, after = draw(self, tokens, positions, *rest)
        if rounds:
            rounds[-1].append((int(positions[0]), int(tokens[0]), after[0].clone()))
        return drawn, after

    monkeypatch.setattr(HeadSteps, "propose", propose_and_tell)
    monkeypatch.setattr(HeadSteps, "_draw_all", draw_and_tell)
    return rounds


@torch.inference_mode()
def assert_defined(rounds: list[list[Drawn]], text: list[int], model: PreTrainedModel, head: Head) -> None:
    """Check that guesses of a text are what the definition says: each is the likeliest token behind the one before."""
    hidden = model.model(torch.tensor([text])).last_hidden_state[0]
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
            assert (output.num_accepted_tokens > 6) == agrees
            assert_defined(rounds, prompt + output.token_ids, model, head)
            assert len(rounds) > 2
            rounds.clear()
        assert output.num_cached_tokens == 32


def test_plain_steps_keep_its_keys(
    rounds: list[list[Drawn]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with the bundled one's tokenizer, and a head that is mostly right."""
    folder, case = tmp_path_factory.mktemp("agrees"), HEADS["glm4moe"]
    build_with_head(replace(case, settings={**case.settings, "vocab_size": 2048}), folder, agrees=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED_MODEL) / name, folder)
    return str(folder)


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


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize("spread", ["roomy", "tight", "one row", "two ranks", *whole_only(["two replicas"])])
def test_results_are_those_without(spread: str, folder: str, expected: list[RequestOutput]) -> None:
    """All settings, samples of one prompt, and structured outputs; most guesses hold."""
    with make(folder, **MTP | SPREAD[spread]) as llm:
        some = SOME if spread == "one row" else slice(None, None, 2 if spread.startswith("two") else 1)
        outputs = run(llm, PROMPTS[some], PARAMS[some])
        assert_equal(outputs, expected[some])
        assert_counts(llm, outputs)
        assert llm.stats().num_accepted_tokens > 0.2 * llm.stats().num_proposed_tokens > 0
        assert spread != "tight" or llm.engine.scheduler.num_preemptions > 0
        assert_equal(run(llm, PROMPTS[SOME], PARAMS[SOME]), expected[SOME])  # their prompts are cached now
