"""Prompts that are only scored: max_tokens=0, prompt_logprobs and prompt_logprobs_start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Oracle, assert_close, greedy

from nanoinfer import LLM, RequestOutput, SamplingParams

Tokens = list[list[int]]
SPREAD = [{}, {"max_num_batched_tokens": 7}, {"tensor_parallel_size": 2}, {"max_num_seqs": 1}]


def scored(start: int = 0, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start, **settings)


def check(output: RequestOutput, prompt: list[int], oracle: Oracle, start: int = 0) -> None:
    """Check that an output has no token, and exactly the log-probabilities of the prompt from `start` on."""
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    first = max(1, start)
    assert output.prompt_logprobs[:first] == [None] * first
    expected = oracle.logits(prompt).log_softmax(-1)[first - 1 : -1]
    told = output.prompt_logprobs[first:]
    assert [set(entry) for entry in told] == [{token} for token in prompt[first:]]
    ours = [entry[token] for entry, token in zip(told, prompt[first:], strict=True)]
    theirs = [row[token].item() for row, token in zip(expected, prompt[first:], strict=True)]
    assert ours == pytest.approx(theirs, abs=1e-4)


def count_prefilled(llm: LLM) -> list[int]:
    """Return a list to which each step adds the tokens that it prefills."""
    prefilled: list[int] = []
    llm.engine.on_step = lambda result: prefilled.append(result.num_prefill_tokens)
    return prefilled


@pytest.fixture(scope="module")
def text(oracle: Oracle) -> list[int]:
    return oracle.greedy([30, 31], 120, ignore_eos=True)


@pytest.mark.parametrize("options", SPREAD, ids=str)
def test_each_part_of_a_prompt_that_fills_the_model(
    options: dict, make_llm: Callable[..., LLM], oracle: Oracle, text: list[int]
) -> None:
    llm = make_llm(device="cpu", kvcache_block_size=16, max_model_len=100, **options)
    starts = [0, 1, 2, 15, 16, 17, 33, 99, 0]
    prompts = [text[i : i + 100] for i in range(len(starts))]
    for expected_cached in (False, True):
        outputs = llm.generate(prompts, [scored(start) for start in starts], use_tqdm=False)
        for output, prompt, start in zip(outputs, prompts, starts, strict=True):
            check(output, prompt, oracle, start)
            if expected_cached:
                assert output.num_cached_tokens == max(0, start - 1) // 16 * 16
    assert llm.engine.is_finished
    assert llm.engine.scheduler.block_manager.share_used == 0


@pytest.mark.parametrize("options", SPREAD, ids=str)
def test_four_choices_prefill_their_context_once(
    options: dict, make_llm: Callable[..., LLM], oracle: Oracle, text: list[int]
) -> None:
    llm = make_llm(device="cpu", kvcache_block_size=16, **options)
    prefilled = count_prefilled(llm)
    context, choices = text[:81], [[40], [41, 42], [43], [44, 45, 46]]
    prompts = [context + choice for choice in choices]
    outputs = llm.generate(prompts, scored(len(context)), use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, prompt, oracle, len(context))
    assert sum(prefilled) == 80 + sum(1 + len(choice) for choice in choices)  # five blocks, then each one's own tokens


def test_beside_requests_that_generate_and_are_preempted(
    make_llm: Callable[..., LLM], oracle: Oracle, mixed_prompts: Tokens, mixed_expected: Tokens
) -> None:
    llm = make_llm(max_model_len=340, kvcache_block_size=16, num_kvcache_blocks=48, max_num_batched_tokens=100)
    pairs = [(prompt, params) for prompt in mixed_prompts for params in (greedy(), scored(len(prompt) // 2))]
    outputs = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs], use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions > 0
    assert [output.token_ids for output in outputs[::2]] == mixed_expected
    for output, prompt in zip(outputs[1::2], mixed_prompts, strict=True):
        check(output, prompt, oracle, len(prompt) // 2)


def test_a_request_that_generates_may_score_the_end_of_its_prompt(
    make_llm: Callable[..., LLM], oracle: Oracle, text: list[int]
) -> None:
    llm = make_llm(kvcache_block_size=16)
    params = greedy(8, n=2, prompt_logprobs=0, prompt_logprobs_start=40, ignore_eos=True)
    for cached in (0, 32):
        (output,) = llm.generate([text[:50]], params, use_tqdm=False)
        assert output.num_cached_tokens == cached
        assert [sample.token_ids for sample in output.samples] == [oracle.greedy(text[:50], 8, ignore_eos=True)] * 2
        alone = llm.generate([text[:50]], scored(40), use_tqdm=False)[0].prompt_logprobs
        assert_close(output.prompt_logprobs, alone)


def test_a_stream_has_one_output(make_llm: Callable[..., LLM], text: list[int]) -> None:
    llm = make_llm()
    first, second = llm.stream([text, text[:1]], scored())
    assert [len(new.prompt_logprobs) for new in (first, second)] == [len(text), 1]
    assert (first.text, first.token_ids, first.finish_reason) == ("", [], "length")
    assert {first.index, second.index} == {0, 1}


def test_requests_come_and_go(make_llm: Callable[..., LLM], oracle: Oracle, text: list[int]) -> None:
    llm = make_llm(max_num_batched_tokens=16)
    aborted, kept = (llm.add_request(prompt, scored()) for prompt in (text, text[:40]))
    plain = llm.add_request([30], greedy(9))
    llm.step()
    llm.abort(aborted)
    outputs = {}
    while llm.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in llm.step())
    assert outputs[aborted].finish_reason == "abort"
    check(outputs[kept], text[:40], oracle)
    assert outputs[kept].timings.first_token is None
    assert outputs[plain].token_ids == oracle.greedy([30], 9)
    assert llm.engine.scheduler.block_manager.share_used == 0
