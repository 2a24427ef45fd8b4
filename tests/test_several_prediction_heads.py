"""MiMo-V2-Flash's prediction heads guess as their definition says, each at its distance, and change no result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases.heads import MIMO, Drawn, Head, build_with_heads, record_rounds
from conftest import greedy, of_each_kind
from test_guesses_of_an_llm import run
from test_prediction_heads import SMALL
from transformers import PreTrainedModel

from nanoinfer import LLM


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Drawn]]:
    """What the heads have computed for the guesses of each verifying step."""
    return record_rounds(monkeypatch)


@torch.inference_mode()
def assert_defined(rounds: list[list[Drawn]], text: list[int], model: PreTrainedModel, heads: list[Head]) -> None:
    """Check that guesses of a text are what the definition says: head k has the model's hidden states, and guess k."""
    hidden = model.model(torch.tensor([text])).last_hidden_state[0]
    for drawn in rounds:
        begin = drawn[0][0]
        tokens = text[1 : begin + 2]
        for number, (position, token, after) in enumerate(drawn):
            assert (position, token) == (begin, tokens[-1])
            expected = heads[number](torch.tensor(tokens[number:]), hidden[: begin + 1])[-1]
            torch.testing.assert_close(after, expected, atol=2e-4, rtol=2e-4)
            tokens = [*tokens, int(model.lm_head(expected).argmax())]


@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize("name", of_each_kind(MIMO, 0))
def test_guesses_are_what_the_definition_says(
    name: str, agrees: bool, rounds: list[list[Drawn]], tmp_path: Path
) -> None:
    """Behind chunks, cached prefixes, and guesses that held or did not; texts are longer than windows."""
    model, heads = build_with_heads(MIMO[name], tmp_path, agrees)
    prompt = list(range(3, 44))
    with LLM(str(tmp_path), **SMALL, max_num_batched_tokens=17, speculation="mtp") as llm:
        assert llm.config.max_guesses == 3
        rounds.clear()
        for _ in range(2):
            (output,) = run(llm, [prompt], greedy(20, ignore_eos=True))
            assert output.num_proposed_tokens > 3
            assert (output.num_accepted_tokens > 0.5 * output.num_proposed_tokens) == agrees
            assert_defined(rounds, prompt + output.token_ids, model, heads)
            assert len(rounds) > 2
            assert max(map(len, rounds)) == (3 if agrees else 2)
            rounds.clear()
        assert output.num_cached_tokens == 32
