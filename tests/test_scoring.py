"""Scoring: LLM.score, and the settings below it, max_tokens=0 with prompt_logprobs and prompt_logprobs_start."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import DEVICE, Oracle, assert_close, greedy, of_each_kind

from nanoinfer import BUNDLED_MODEL, LLM, LogProb, RequestOutput, SamplingParams, Score

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
    starts = [0, 1, 15, 16, 17, 99]
    prompts = [text[i : i + 100] for i in range(len(starts))]
    for expected_cached in (False, True):
        outputs = llm.generate(prompts, [scored(start) for start in starts], use_tqdm=False)
        for output, prompt, start in zip(outputs, prompts, starts, strict=True):
            check(output, prompt, oracle, start)
            if expected_cached:
                assert output.num_cached_tokens == max(0, start - 1) // 16 * 16
    assert llm.engine.is_finished
    assert llm.engine.scheduler.block_manager.share_used == 0


@pytest.mark.parametrize(
    "options",
    of_each_kind([*SPREAD, {"attention_backend": "triton", "device": DEVICE}], 0, 1),
    ids=str,
)
def test_four_choices_prefill_their_context_once(
    options: dict, make_llm: Callable[..., LLM], oracle: Oracle, text: list[int]
) -> None:
    llm = make_llm(**{"device": "cpu", "kvcache_block_size": 16, **options})
    prefilled = count_prefilled(llm)
    context, choices = text[:81], [[40], [41, 42], [43], [44, 45, 46]]
    prompts = [context + choice for choice in choices]
    outputs = llm.generate(prompts, scored(len(context)), use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, prompt, oracle, len(context))
    assert sum(prefilled) == 80 + sum(1 + len(choice) for choice in choices)  # five blocks, then each one's own tokens


LEADING = list(range(500, 525))  # its tail of 8 tokens, before the last, can be copied


@pytest.mark.parametrize("ended", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_one_of_several_continuations_may_end_early(
    ended: int, steps: int, make_llm: Callable[..., LLM], oracle: Oracle
) -> None:
    """The first computes what all begin with; without it, or with its blocks handed out, another one does."""
    llm = make_llm(device="cpu", kvcache_block_size=16, max_num_batched_tokens=64)
    prompts = [[*LEADING, 40 + i, 50] for i in range(3)]
    numbers = [llm.add_request(prompt, scored(len(LEADING))) for prompt in prompts]
    outputs = [output for _ in range(steps) for output in llm.step()]
    llm.abort(numbers[ended])
    while llm.has_unfinished_requests():
        outputs += llm.step()
    by_id = {output.request_id: output for output in outputs}
    for number, prompt in zip(numbers, prompts, strict=True):
        if number != numbers[ended] or by_id[number].finish_reason != "abort":
            check(by_id[number], prompt, oracle, len(LEADING))
    assert llm.engine.is_finished
    assert llm.engine.scheduler.admission.is_roomy
    assert llm.engine.scheduler.block_manager.share_used == 0


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5}, {"max_num_seqs": 2}, {"num_kvcache_blocks": 4}], ids=str
)
def test_continuations_beside_others(options: dict, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    llm = make_llm(**{"device": "cpu", "kvcache_block_size": 16, "max_model_len": 60, **options})
    prompts = [[*LEADING, 40 + i // 2] for i in range(4)] + [LEADING, LEADING[:9], [*LEADING[:20], 7, 8]]
    params = [scored(25), scored(25), scored(24), scored(25), greedy(6), greedy(6), scored(9)]
    for output, prompt, own in zip(llm.generate(prompts, params, use_tqdm=False), prompts, params, strict=True):
        if own.max_tokens:
            assert output.token_ids == oracle.greedy(prompt, 6)
        else:
            check(output, prompt, oracle, own.prompt_logprobs_start)
    assert llm.engine.scheduler.block_manager.share_used == 0


def test_a_tail_from_before_a_reset_of_the_prefix_cache_is_computed_again(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(device="cpu", kvcache_block_size=16)
    for index in range(3):
        llm.add_request([*LEADING, 40 + index], scored(len(LEADING)))
    llm.step()
    llm.reset_prefix_cache()
    prefilled = count_prefilled(llm)
    while llm.has_unfinished_requests():
        llm.step()
    first, second, third = prefilled[0], 26, 26 - 16  # the third shares the second's whole block, in its step
    assert (first, sum(prefilled[1:])) == (26, second + third)


@pytest.mark.whole
@pytest.mark.usefixtures("no_foresight")
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


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", kvcache_block_size=16, num_kvcache_blocks=128, max_model_len=128) as llm:
        yield llm


CONTEXT = "ROMEO:\nBut, soft! what light through yonder"


class TestScore:
    def check(self, score: Score, first: list[int], rest: list[int], oracle: Oracle) -> None:
        logits = oracle.logits(first + rest)[len(first) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rest)[:, None])[:, 0].tolist()
        assert score.token_ids == rest
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        assert score.logprob == pytest.approx(sum(expected), abs=1e-3)
        assert score.is_greedy == (logits.argmax(-1).tolist() == rest)

    def test_continuations_of_a_text(self, llm: LLM, oracle: Oracle) -> None:
        greedy_text = llm.generate(CONTEXT, greedy(6), use_tqdm=False)[0].text
        continuations = [" door opens", greedy_text, "!", " window"]
        first = llm.tokenizer.encode(CONTEXT)
        scores = llm.score(CONTEXT, continuations)
        for score, continuation in zip(scores, continuations, strict=True):
            self.check(score, first, llm.tokenizer.encode(CONTEXT + continuation)[len(first) :], oracle)
        assert [score.is_greedy for score in scores][:3] == [False, True, False]

    def test_spaces_at_the_end_of_the_prompt_are_the_continuations(self, llm: LLM) -> None:
        assert llm.score(CONTEXT + " ", "window") == llm.score(CONTEXT, " window")

    def test_any_of_them_may_be_token_ids(self, llm: LLM, oracle: Oracle) -> None:
        first, rest = llm.tokenizer.encode(CONTEXT), llm.tokenizer.encode(" window")
        for prompt in (
            CONTEXT,
            first,
            {"prompt": CONTEXT},
            {"prompt_token_ids": first},
            torch.tensor(first),
            iter(first),
        ):
            scores = llm.score(prompt, [rest, torch.tensor(rest), " window"])
            for score in scores:
                self.check(score, first, rest, oracle)

    def test_a_lone_one_counts_as_a_list_of_one(self, llm: LLM) -> None:
        ids = llm.tokenizer.encode(" window")
        assert llm.score(CONTEXT, " window") == llm.score(CONTEXT, [" window"]) == llm.score(CONTEXT, ids)
        assert llm.score(CONTEXT, []) == []

    def test_the_context_is_prefilled_once(self, llm: LLM) -> None:
        prompt, prefilled = [77] * 81, count_prefilled(llm)
        llm.score(prompt, [[40], [41], [42], [43]])
        assert sum(prefilled) == 80 + 4 * 2

    @pytest.mark.parametrize("length", [81, 82, 90, 96])
    def test_so_is_what_stands_behind_its_last_whole_block(self, length: int, llm: LLM, oracle: Oracle) -> None:
        prompt, prefilled, choices = list(range(100 + length, 100 + 2 * length)), count_prefilled(llm), [[40], [41, 42]]
        scores = llm.score(prompt, [*choices, [43, 44, 45], [46]])
        assert sum(prefilled) == length - 1 + 4 + 7
        for score, choice in zip(scores, choices, strict=False):
            self.check(score, prompt, choice, oracle)

    def test_of_many_prompts_each_gets_the_scores_that_it_gets_alone(self, llm: LLM) -> None:
        prompts = [CONTEXT, {"prompt": "JULIET:\nO Romeo,"}, llm.tokenizer.encode(CONTEXT), CONTEXT]
        continuations = [[" window", " door"], " Romeo", [[5, 6, 7], " window"], []]
        told = llm.score(prompts, continuations, use_tqdm=False)
        expected = [llm.score(*pair) for pair in zip(prompts, continuations, strict=True)]
        assert [[score.token_ids for score in own] for own in told] == [[s.token_ids for s in own] for own in expected]
        for ours, theirs in zip(told, expected, strict=True):
            logprobs = [[score.logprob for score in own] for own in (ours, theirs)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)

    def test_many_prompts_compute_what_they_share_once(self, llm: LLM, oracle: Oracle) -> None:
        begin, prefilled = list(range(300, 337)), count_prefilled(llm)
        prompts = [[*begin, *range(400 + 20 * i, 410 + i + 20 * i)] for i in range(6)]
        choices = [[[50], [51, 52], [53]] for _ in prompts]
        for prompt, scores in zip(prompts, llm.score(prompts, choices, use_tqdm=False), strict=True):
            for score, choice in zip(scores, choices[0], strict=True):
                self.check(score, prompt, choice, oracle)
        alone = len(begin) // 16 * 16
        own = [len(prompt) - alone - 1 + sum(1 + len(choice) for choice in choices[0]) for prompt in prompts]
        assert sum(prefilled) == alone + sum(own)

    def test_a_bar_shows_many_prompts_alone(self, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        llm.score([[5], [6]], [[[7]], [[8]]], use_tqdm=True)
        assert "2/2" in capsys.readouterr().err
        llm.score([5], [[7]], use_tqdm=True)
        assert capsys.readouterr().err == ""

    def test_prompt_and_continuation_may_fill_the_model(self, llm: LLM, oracle: Oracle) -> None:
        first, rest = [30] * 100, [31] * 28
        (score,) = llm.score(first, [rest])
        self.check(score, first, rest, oracle)

    def test_a_score_is_a_dictionary_of_python_values(self, llm: LLM) -> None:
        (score,) = llm.score(CONTEXT, " window")
        assert type(score) is Score
        assert score.keys() == {"logprob", "is_greedy", "token_ids", "logprobs", "hidden_states"}
        assert score["logprob"] is score.logprob
        assert [type(value) for value in score.logprobs] == [LogProb] * len(score.token_ids)
        assert "".join(value.decoded_token for value in score.logprobs) == " window"
        assert pickle.loads(pickle.dumps(score)) == score

    @pytest.mark.parametrize(
        ("prompt", "continuations", "message"),
        [
            ("", " a", "prompt is empty"),
            ([], [[5]], "prompt is empty"),
            (CONTEXT, [" a", ""], "continuations[1] is '': must add a token to the prompt's"),
            (CONTEXT, [[5], []], "continuations[1] is []: must add a token to the prompt's"),
            ([5], [[2048]], "prompt + continuations[0] has token id 2048: must be from 0 to 2047"),
            (
                [5] * 100,
                [[5] * 28, [5] * 29],
                "prompt + continuations[1] has 129 tokens: must be at most max_model_len",
            ),
            ([5], 7, "continuations=7: must be a string or a list of token ids, or a list of these"),
            ([5], [["a"]], "continuations[0] is ['a']: must be a string or a list of token ids"),
            (7, [[5]], "prompt is 7: must be a string or a list of token ids"),
            ({"prompt": [5]}, [[5]], "prompt['prompt'] is [5]: must be a string"),
            ([[5], [6]], [[[7]]], "continuations has 1 entries for 2 prompts: give each its own list"),
            ([[5], 7], [[[5]], [[5]]], "prompt[1] is 7: must be a string or a list of token ids"),
            (["a"], " b", "continuations=' b': must be a list that has continuations for each prompt"),
            (["a", "b"], [[" c"], [" c", ""]], "continuations[1][1] is '': must add a token to the prompt's"),
        ],
        ids=repr,
    )
    def test_a_mistake_is_named(self, prompt: Any, continuations: Any, message: str, llm: LLM) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.score(prompt, continuations)


class TestTokenize:
    TEXTS = (CONTEXT, "", "Now is the winter 🤗")

    def test_a_text_or_a_list(self, llm: LLM) -> None:
        expected = [llm.tokenizer.encode(text) for text in self.TEXTS]
        assert [llm.tokenize(text) for text in self.TEXTS] == llm.tokenize(self.TEXTS) == expected
        assert llm.tokenize([]) == []

    def test_there_and_back(self, llm: LLM) -> None:
        assert llm.detokenize(llm.tokenize(self.TEXTS)) == list(self.TEXTS)
        assert llm.detokenize(torch.tensor(llm.tokenize(CONTEXT))) == CONTEXT
        assert llm.detokenize([]) == ""

    def test_special_tokens_have_no_text(self, llm: LLM) -> None:
        (output,) = llm.generate(CONTEXT, greedy(4, logit_bias={2: 1000.0}), use_tqdm=False)
        assert output.token_ids == [2]
        assert llm.detokenize(output.token_ids) == output.text == ""

    @pytest.mark.parametrize(
        ("method", "given", "message"),
        [
            ("tokenize", 7, "texts=7: must be a string or a list of strings"),
            ("tokenize", ["a", 7], "texts[1] is 7: must be a string"),
            ("detokenize", "a", "ids='a': must be a list of token ids, or a list of such lists"),
            ("detokenize", [1, "a"], "ids is [1, 'a']: must be a list of token ids, and 'a' is none"),
            ("detokenize", [[1], "a"], "ids[1] is 'a': must be a list of token ids"),
            ("detokenize", [[1], [2048]], "ids[1] has token id 2048: must be from 0 to 2047"),
        ],
        ids=repr,
    )
    def test_a_mistake_is_named(self, method: str, given: Any, message: str, llm: LLM) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(llm, method)(given)

    def test_without_a_tokenizer(self, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
        bare = make_llm(make_qwen3())
        for call in (lambda: bare.tokenize("a"), lambda: bare.detokenize([5])):
            with pytest.raises(ValueError, match=r"tokenize needs text, but .* has no tokenizer"):
                call()
        (score,) = bare.score([30], [[31, 32]])
        assert [value.decoded_token for value in score.logprobs] == [None, None]
