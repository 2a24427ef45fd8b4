"""Compares prompts with images with transformers: its own tower, tokens and positions; our decoder and engine."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from cases.case import build
from cases.seeing import SEEING, OracleTower, logprobs, make_image, make_prompt
from conftest import greedy
from transformers import PreTrainedModel

from nanoinfer import LLM
from nanoinfer.engine.images import PromptImages
from nanoinfer.engine.sequence import Sequence
from nanoinfer.vision.spans import VisionPrompt

MAX_TOKENS = 6


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, PreTrainedModel]]:
    """Return a function that makes a case's folder and transformers' model, once each."""

    @functools.cache
    def make(name: str) -> tuple[str, PreTrainedModel]:
        folder = tmp_path_factory.mktemp("seeing")
        return str(folder), build(SEEING[name], folder)

    return make


@pytest.fixture
def make_seeing_llm(
    seeing: Callable[[str], tuple[str, PreTrainedModel]], make_llm: Callable[..., LLM]
) -> Callable[..., LLM]:
    """Return a function that makes the LLM of a case, whose images transformers' tower encodes."""

    def make(name: str, **options: object) -> LLM:
        folder, model = seeing(name)
        llm = make_llm(folder, **options)
        llm.engine.ranks.call("holdings.see", OracleTower(model))
        return llm

    return make


def text(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(150, (count,), generator=generator).tolist()


def prompts(name: str, model: PreTrainedModel) -> list[VisionPrompt]:
    """One image or several of odd sizes, first, last and in between, some of them twice."""
    one, two, wide = (make_image(SEEING[name], *how) for how in ((3, 5, 0), (7, 2, 1), (11, 4, 2)))
    return [
        make_prompt(model, parts)
        for parts in (
            [text(5, 0), one, text(9, 1)],
            [one, text(20, 2)],
            [text(30, 3), two, text(1, 4), wide, text(3, 5)],
            [text(17, 6), wide, wide, one, text(40, 7)],
            [text(2, 8), two],
        )
    ]


def generate(llm: LLM, prompts: list[VisionPrompt | list[int]], **settings: object) -> list[list[Sequence]]:
    """Run prompts, with images or without; returns the sequences of each."""
    params = greedy(MAX_TOKENS, ignore_eos=True, logprobs=0, **settings)
    requests = []
    for prompt in prompts:
        if isinstance(prompt, VisionPrompt):
            requests.append(llm.engine.add_request(prompt.token_ids, params, images=PromptImages(prompt)))
        else:
            requests.append(llm.engine.add_request(prompt, params))
    while not llm.engine.is_finished:
        llm.engine.step()
    return requests


def check(seq: Sequence, prompt: VisionPrompt, model: PreTrainedModel) -> None:
    """Check that each token is the likeliest after those before it, and that log-probabilities equal transformers'."""
    tokens = seq.output_token_ids
    assert len(tokens) == MAX_TOKENS
    theirs = logprobs(model, prompt, tokens[:-1])
    rows = theirs[len(prompt.token_ids) - 1 :]
    ours = [entry[token] for entry, token in zip(seq.logprobs.logprobs(None), tokens, strict=True)]
    assert ours == pytest.approx(rows[range(MAX_TOKENS), tokens].tolist(), abs=1e-4)
    assert tokens == rows.argmax(dim=-1).tolist()
    if seq.params.prompt_logprobs is not None:
        given = prompt.token_ids[1:]
        ours = [entry[token] for entry, token in zip(seq.prompt_logprobs.logprobs(None), given, strict=True)]
        assert ours == pytest.approx(theirs[range(len(given)), given].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", SEEING)
def test_images_equal_transformers(
    name: str, seeing: Callable[[str], tuple[str, PreTrainedModel]], make_seeing_llm: Callable[..., LLM]
) -> None:
    """Prompts are fresh, then prefix-cached, then in chunks in a cache so small that sequences are preempted."""
    model, case = seeing(name)[1], SEEING[name]
    given = prompts(name, model)
    llm = make_seeing_llm(name, **case.small)
    for settings in {"prompt_logprobs": 0}, {}:
        for (seq,), prompt in zip(generate(llm, given, **settings), given, strict=True):
            check(seq, prompt, model)
    assert sum(seq.num_cached_tokens for (seq,) in generate(llm, given)) > 0
    llm = make_seeing_llm(name, **case.tight)
    for (seq,), prompt in zip(generate(llm, given), given, strict=True):
        check(seq, prompt, model)
