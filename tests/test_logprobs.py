"""Log-probabilities that a trainer can use: of the distribution that was drawn from."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from conftest import Oracle, greedy
from test_sampling import definition, wants

from nanoinfer import LLM, LogProb, SamplingParams
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.extras import Extras
from nanoinfer.runner.logits.processors import LogitsProcessors

VOCABULARY = 2048  # the bundled model's
PROMPT = [30, 31]
SPREAD = [
    {},
    {"tensor_parallel_size": 2},
    {"kvcache_block_size": 16, "num_kvcache_blocks": 8, "max_model_len": 60, "max_num_batched_tokens": 7},
]
SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.85},
    {"min_p": 0.05, "top_p": 0.95, "top_k": 20},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "top_p": 0.9},
    {"logit_bias": {14: 4.0, 201: -3.0}, "top_k": 3},
    {"stop_token_ids": [14, 16], "min_tokens": 12, "top_p": 0.9},
]


def make_llm_of(make_llm: Callable[..., LLM], **options: Any) -> LLM:
    return make_llm(device="cpu", **{"logprobs_mode": "processed_logprobs", **options})


def sampled(seed: int = 0, **settings: Any) -> SamplingParams:
    """SamplingParams whose logprobs have every token that could be drawn."""
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprobs": VOCABULARY, "seed": seed, **settings})


def assert_is_distribution(entry: Mapping[int, LogProb], drawn: int) -> None:
    """Check that the probabilities add up to 1, that ranks are their order, and that the drawn token is listed."""
    assert sum(map(math.exp, entry.values())) == pytest.approx(1, abs=1e-5)
    descending = sorted(-value for value in entry.values())
    assert all(value.rank == 1 + bisect_left(descending, -value) for value in entry.values())
    assert drawn in entry


def assert_is_definition(entry: Mapping[int, LogProb], expected: torch.Tensor) -> None:
    """Check an entry with every token that could be drawn against probabilities in float64."""
    kept = expected.nonzero().flatten().tolist()
    assert sorted(entry) == kept
    ours = torch.tensor([entry[token] for token in kept], dtype=torch.float64)
    torch.testing.assert_close(ours, expected[kept].log(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processed_logprobs_are_those_of_the_definition(settings: dict[str, Any]) -> None:
    """Ten rows of random logits, each with a history of its own."""
    size, count = 30, 10
    processors = LogitsProcessors(size, count, 20, torch.device("cpu"), TensorParallel(), is_processed=True)
    in_range = {**settings, "stop_token_ids": [4, 5]} if "stop_token_ids" in settings else settings
    if "logit_bias" in settings:
        in_range = {**settings, "logit_bias": {4: 4.0, 21: -3.0}}
    params = sampled(logprobs=size, **in_range)
    logits, histories = torch.randn(count, size) * 2, torch.randint(size, (count, 6)).tolist()
    for row, tokens in enumerate(histories):
        processors.join(row, wants(params, tokens))
    extras, token_ids = Extras(), torch.zeros(count, dtype=torch.int32)
    temperatures, seeds = torch.full((count,), params.temperature), torch.arange(count)
    processors.redraw(0, logits, token_ids, temperatures, seeds, torch.full((count,), 6, dtype=torch.int32), extras)
    entries = dict(entry for logprobs in extras.logprobs for entry in logprobs.entries())
    for row, tokens in enumerate(histories):
        entry = entries[row].logprobs(None)
        assert_is_definition(entry, definition(logits[row].double(), params, tokens))
        assert_is_distribution(entry, int(token_ids[row]))


@pytest.mark.parametrize("options", SPREAD, ids=str)
def test_every_token_of_a_text(options: dict[str, Any], make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    llm = make_llm_of(make_llm, **options)
    params = [sampled(seed, **settings) for seed, settings in enumerate(SETTINGS)]
    for output, setting in zip(llm.generate([PROMPT] * len(params), params, use_tqdm=False), params, strict=True):
        tokens = PROMPT + output.token_ids
        logits = oracle.logits(tokens).double()
        for place, entry in enumerate(output.logprobs, len(PROMPT)):
            assert_is_definition(entry, definition(logits[place - 1], setting, tokens[:place]))
            assert_is_distribution(entry, tokens[place])


def test_few_tokens_are_listed_as_they_are_among_all(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm_of(make_llm)
    for settings in SETTINGS:
        few, every = (llm.generate([PROMPT], sampled(4, **settings, logprobs=k), use_tqdm=False)[0] for k in (5, 2048))
        for token, some, entry in zip(few.token_ids, few.logprobs, every.logprobs, strict=True):
            likeliest = sorted(entry, key=lambda token, entry=entry: -entry[token])[:5]
            assert set(some) == {token, *likeliest}
            assert dict(some) == pytest.approx({token: entry[token] for token in some}, abs=1e-5)


def test_at_temperature_0_the_drawn_token_has_all_the_mass(make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    (output,) = make_llm_of(make_llm).generate([PROMPT], greedy(9, logprobs=4, ignore_eos=True), use_tqdm=False)
    assert output.token_ids == oracle.greedy(PROMPT, 9, ignore_eos=True)
    assert output.logprobs == [{token: 0.0} for token in output.token_ids]
    assert output.cumulative_logprob == 0


def test_streams_and_samples_have_the_logprobs_of_generate(make_llm: Callable[..., LLM]) -> None:
    llm, params = make_llm_of(make_llm), sampled(3, top_p=0.9, temperature=0.7, n=3, prompt_logprobs=2)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    streamed: list[list[Mapping[int, LogProb]]] = [[], [], []]
    for new in llm.stream([PROMPT], params):
        streamed[new.sample] += new.logprobs
        if new.prompt_logprobs is not None:
            assert new.prompt_logprobs == output.prompt_logprobs
    assert streamed == [sample.logprobs for sample in output.samples]
    for sample in output.samples:
        for entry, token in zip(sample.logprobs, sample.token_ids, strict=True):
            assert_is_distribution(entry, token)


@pytest.mark.parametrize("options", SPREAD, ids=str)
def test_of_the_settings_only_the_temperature_changes_a_prompts(
    options: dict[str, Any], make_llm: Callable[..., LLM], oracle: Oracle
) -> None:
    llm = make_llm_of(make_llm, **options)
    prompt = oracle.greedy(PROMPT, 40, ignore_eos=True)
    params = [
        sampled(temperature=temperature, top_k=3, repetition_penalty=1.5, prompt_logprobs=3, max_tokens=1)
        for temperature in (0.5, 2.0, 0.0)
    ]
    for output, temperature in zip(llm.generate([prompt] * 3, params, use_tqdm=False), (0.5, 2.0, 1.0), strict=True):
        expected = (oracle.logits(prompt) / temperature).log_softmax(-1)
        for token, entry, row in zip(prompt[1:], output.prompt_logprobs[1:], expected, strict=False):
            assert set(entry) == {token, *row.topk(3).indices.tolist()}
            assert dict(entry) == pytest.approx({token: row[token].item() for token in entry}, abs=3e-4)


def test_raw_logprobs_are_the_models_own(make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    llm = make_llm(device="cpu")
    assert llm.config.logprobs_mode == "raw_logprobs"
    (output,) = llm.generate([PROMPT], sampled(2, temperature=0.7, top_k=2), use_tqdm=False)
    expected = oracle.logits(PROMPT + output.token_ids).log_softmax(-1)
    for entry, row in zip(output.logprobs, expected[len(PROMPT) - 1 :], strict=False):
        assert [entry[token] for token in range(VOCABULARY)] == pytest.approx(row.tolist(), abs=1e-3)


def test_an_unknown_mode_is_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match="logprobs_mode='raw': must be one of 'raw_logprobs', 'processed_logprobs'"):
        make_llm(logprobs_mode="raw")
