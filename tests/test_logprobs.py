"""What a trainer can use: log-probabilities of the distribution that was drawn from, kept tokens, float32 logits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, VOCAB, build
from conftest import Oracle, greedy, of_each_kind
from test_sampling import definition, wants

from nanoinfer import BUNDLED_MODEL, LLM, LogProb, SamplingParams
from nanoinfer.logprob import Candidates
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.logits.lines import StepLines
from nanoinfer.runner.logits.processors import LogitsProcessors
from nanoinfer.runner.results.extras import Extras

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


def assert_is_kept(
    kept: tuple[int, float], logits: torch.Tensor, params: SamplingParams, tokens: list[int], expected: torch.Tensor
) -> None:
    """Check a count and a log mass by brute force; expected: the probabilities after tokens were left out."""
    count, log_mass = kept
    before = definition(logits, replace(params, top_k=0, top_p=1, min_p=0, min_tokens=0), tokens)
    assert count == (expected > 0).sum()
    assert log_mass == pytest.approx(before[expected > 0].sum().log().item(), abs=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processed_logprobs_are_those_of_the_definition(settings: dict[str, Any]) -> None:
    """Ten rows of random logits, each with a history of its own."""
    size, count = 30, 10
    processors = LogitsProcessors(size, count, 20, torch.device("cpu"), TensorParallel(), is_processed=True)
    in_range = {**settings, "stop_token_ids": [4, 5]} if "stop_token_ids" in settings else settings
    if "logit_bias" in settings:
        in_range = {**settings, "logit_bias": {4: 4.0, 21: -3.0}}
    params = sampled(logprobs=size, kept_tokens=True, **in_range)
    logits, histories = torch.randn(count, size) * 2, torch.randint(size, (count, 6)).tolist()
    for row, tokens in enumerate(histories):
        processors.join(row, wants(params, tokens), None)
    extras, drawn = Extras(), torch.zeros(count, dtype=torch.int32)
    temperatures, seeds = torch.full((count,), params.temperature), torch.arange(count)
    positions = torch.full((count,), 6, dtype=torch.int32)
    processors.draw(StepLines(0, logits, positions, temperatures, seeds), drawn, extras)
    entries = {key: Candidates(*own) for logprobs in extras.logprobs for key, *own in logprobs.entries()}
    kept = dict(entry for kept_tokens in extras.kept_tokens for entry in kept_tokens.entries())
    for row, tokens in enumerate(histories):
        entry, expected = entries[row].logprobs(None), definition(logits[row].double(), params, tokens)
        assert_is_definition(entry, expected)
        assert_is_kept(kept[row], logits[row].double(), params, tokens, expected)
        assert_is_distribution(entry, int(drawn[row]))


@pytest.mark.parametrize("options", SPREAD, ids=str)
def test_every_token_of_a_text(options: dict[str, Any], make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    llm = make_llm_of(make_llm, **options)
    params = [sampled(seed, kept_tokens=True, **settings) for seed, settings in enumerate(SETTINGS)]
    for output, setting in zip(llm.generate([PROMPT] * len(params), params, use_tqdm=False), params, strict=True):
        tokens = PROMPT + output.token_ids
        logits = oracle.logits(tokens).double()
        for place, (entry, kept) in enumerate(zip(output.logprobs, output.kept_tokens, strict=True), len(PROMPT)):
            expected = definition(logits[place - 1], setting, tokens[:place])
            assert_is_definition(entry, expected)
            assert_is_kept(kept, logits[place - 1], setting, tokens[:place], expected)
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
    params = greedy(9, logprobs=4, kept_tokens=True, ignore_eos=True)
    (output,) = make_llm_of(make_llm).generate([PROMPT], params, use_tqdm=False)
    assert output.token_ids == oracle.greedy(PROMPT, 9, ignore_eos=True)
    assert output.logprobs == [{token: 0.0} for token in output.token_ids]
    assert output.cumulative_logprob == 0
    assert output.kept_tokens == [(1, 0.0)] * 9


def test_streams_and_samples_have_the_logprobs_of_generate(make_llm: Callable[..., LLM]) -> None:
    llm, params = (
        make_llm_of(make_llm),
        sampled(3, top_p=0.9, temperature=0.7, n=3, prompt_logprobs=2, kept_tokens=True),
    )
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    streamed: list[list[Mapping[int, LogProb]]] = [[], [], []]
    kept: list[list[tuple[int, float]]] = [[], [], []]
    for new in llm.stream([PROMPT], params):
        streamed[new.sample] += new.logprobs
        kept[new.sample] += new.kept_tokens
        if new.prompt_logprobs is not None:
            assert new.prompt_logprobs == output.prompt_logprobs
    assert streamed == [sample.logprobs for sample in output.samples]
    assert kept == [sample.kept_tokens for sample in output.samples]
    for sample in output.samples:
        for entry, token in zip(sample.logprobs, sample.token_ids, strict=True):
            assert_is_distribution(entry, token)


def test_kept_tokens_come_in_every_mode_to_those_who_ask(make_llm: Callable[..., LLM]) -> None:
    params = [sampled(1, top_k=5, logprobs=None, kept_tokens=wanted) for wanted in (True, False)]
    raw, processed = (
        make_llm(logprobs_mode=mode).generate([PROMPT] * 2, params, use_tqdm=False)
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert [count for count, _ in raw[0].kept_tokens] == [5] * 12
    assert raw[0].kept_tokens == processed[0].kept_tokens
    assert (raw[1].kept_tokens, raw[0].logprobs) == (None, None)
    assert raw[0].token_ids == raw[1].token_ids


@pytest.mark.parametrize("options", of_each_kind(SPREAD, 0, 1), ids=str)
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


class TestLogitsInFloat32:
    """The model of each case is in bfloat16, but for its output projection."""

    NAMES = ("llama tied, linear rope", "qwen3", "granite", "gemma2 low caps")  # two are tied, one scales, one caps

    @pytest.mark.parametrize(("name", "ranks"), of_each_kind(product(NAMES, [1, 2]), 0, 2, 4, 6, 7))
    @torch.inference_mode()
    def test_they_equal_transformers(self, name: str, ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        model = build(CASES[name], tmp_path)
        options = {"dtype": "bfloat16", "lm_head_dtype": "float32", "max_model_len": 64, "tensor_parallel_size": ranks}
        llm = make_llm(str(tmp_path), device="cpu", **options)
        hidden, logits = self.watch(llm)
        prompt = list(range(3, 20))
        (output,) = llm.generate([prompt], greedy(1, logprobs=VOCAB), use_tqdm=False)

        expected = F.linear(hidden[-1].float(), model.lm_head.weight) * llm.config.description.logit_scale
        if (cap := llm.config.description.logit_cap) is not None:
            expected = cap * (expected / cap).tanh()
        torch.testing.assert_close(logits[-1], expected[:, : logits[-1].shape[1]])  # the ids of rank 0
        ours = torch.tensor([output.logprobs[0][token] for token in range(VOCAB)])
        torch.testing.assert_close(ours, expected[-1].log_softmax(0))

        theirs = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(0)
        assert (ours - theirs).abs().max() < 0.25  # bfloat16 rounds the hidden states

    @staticmethod
    def watch(llm: LLM) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return two lists to which each step adds its hidden states, and rank 0's logits of these."""
        hidden: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        model = llm.engine.ranks.runner.steps.model
        compute_logits = model.compute_logits

        def watched(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            hidden.append(x.clone())
            result = compute_logits(x, out)
            logits.append(result.clone())
            return result

        model.compute_logits = watched
        return hidden, logits

    def test_decode_steps_have_them_too(self, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        llm = make_llm(dtype="bfloat16", lm_head_dtype=torch.float32, enforce_eager=True)
        hidden, logits = self.watch(llm)
        llm.generate([PROMPT], greedy(5, ignore_eos=True), use_tqdm=False)
        assert len(logits) == 5
        for x, ours in zip(hidden, logits, strict=True):
            assert (x.dtype, ours.dtype) == (torch.bfloat16, torch.float32)
            expected = F.linear(x.cpu().float(), oracle.model.lm_head.weight)
            torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-4)

    def test_only_a_tied_matrix_is_held_twice(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        build(CASES["qwen3"], tmp_path)
        tied, untied, plain = (
            make_llm(folder, dtype="bfloat16", **options).engine.ranks.runner.steps.model
            for folder, options in (
                (BUNDLED_MODEL, {"lm_head_dtype": "float32"}),
                (str(tmp_path), {"lm_head_dtype": "float32"}),
                (BUNDLED_MODEL, {}),
            )
        )
        dtypes = [(model.embedding.weight.dtype, model.lm_head.weight.dtype) for model in (tied, untied, plain)]
        assert dtypes == [(torch.bfloat16, torch.float32)] * 2 + [(torch.bfloat16, torch.bfloat16)]
        assert plain.lm_head is plain.embedding

    def test_another_dtype_is_refused(self, make_llm: Callable[..., LLM]) -> None:
        for dtype in ("float16", torch.float16):
            with pytest.raises(ValueError, match="lm_head_dtype='float16': must be one of 'auto', 'float32'"):
                make_llm(lm_head_dtype=dtype)
