"""Every setting of SamplingParams changes the draw as it should, alone and with others. transformers is the oracle."""

from __future__ import annotations

import cProfile
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from conftest import DEVICE, Oracle, assert_equal, different_settings, greedy, of_each_kind, whole_only
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoinfer import BUNDLED_MODEL, LLM, LogProb, RequestOutput, SamplingParams
from nanoinfer.engine.row_map import describe_logits
from nanoinfer.engine.sequence import Sequence
from nanoinfer.kernels.sampling import cutoff
from nanoinfer.kernels.sampling.cutoff import find_cutoff_cpu, find_cutoff_reference, find_cutoff_triton
from nanoinfer.kernels.sampling.draw import draw
from nanoinfer.kernels.sampling.penalties import penalize, penalize_reference, penalize_triton
from nanoinfer.runner.logits.lines import EACH, Lines
from nanoinfer.runner.logits.processor_group import LogitsProcessorGroup
from nanoinfer.runner.message import LogitsMessage

VOCABULARY = 40
MINUS_INFINITY = float("-inf")


def token_ids(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def kept(
    logits: torch.Tensor, top_k: int, top_p: float, min_p: float, find_cutoff: Callable = find_cutoff_reference
) -> torch.Tensor:
    """Return which tokens stay; all rows have the same settings."""
    rows = len(logits)
    on_device = logits.to(DEVICE) if find_cutoff is find_cutoff_triton else logits
    settings = [torch.full((rows,), value, device=on_device.device) for value in (1.0, top_k, top_p, min_p)]
    lowest, first_ids = (column[:, None].cpu() for column in find_cutoff(on_device, *settings))
    ids = torch.arange(logits.shape[1])
    return (logits > lowest) | ((logits == lowest) & (ids >= first_ids))


def reference_support(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that may be drawn, computed in float64 from the definitions."""
    scores = torch.tensor(logits, dtype=torch.float64)
    kth = scores.sort(descending=True).values[top_k - 1]
    probabilities = scores.masked_fill(scores < kth, MINUS_INFINITY).softmax(0).tolist()
    support, mass = [], 0.0
    for token in sorted(range(len(logits)), key=lambda token: (-probabilities[token], -token)):
        if probabilities[token] == 0 or (top_p < 1 and support and mass >= top_p):
            break
        support.append(token)
        mass += probabilities[token]
    return {token for token in support if probabilities[token] >= min_p * probabilities[support[0]]}


class TestFilters:
    @pytest.mark.parametrize("find_cutoff", [find_cutoff_reference, find_cutoff_cpu, find_cutoff_triton])
    @settings(max_examples=40, deadline=None)
    @given(
        logits=st.lists(st.integers(-12, 12).map(lambda x: x * 0.37), min_size=VOCABULARY, max_size=VOCABULARY),
        top_k=st.integers(1, VOCABULARY),
        top_p=st.sampled_from([0.05, 0.3, 0.77, 0.9, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.013, 0.11, 0.6, 1.0]),
    )
    def test_the_support_is_that_of_the_definitions(
        self, find_cutoff: Callable, logits: list[float], top_k: int, top_p: float, min_p: float
    ) -> None:
        (row,) = kept(torch.tensor([logits]), top_k, top_p, min_p, find_cutoff)
        assert set(row.nonzero().flatten().tolist()) == reference_support(logits, top_k, top_p, min_p)

    @pytest.mark.parametrize("ties", [False, True])
    def test_they_keep_what_transformers_keeps(self, ties: bool) -> None:
        scores = torch.randn(200, VOCABULARY) * 2
        scores = scores.round() if ties else scores
        for top_k in (1, 3, 17, VOCABULARY):
            for top_p in (0.2, 0.5, 0.9):
                for min_p in (0.02, 0.3):
                    expected = scores
                    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
                        expected = warper(None, expected)
                    # Of equally likely tokens, transformers keeps as many as we do, but any of them.
                    ours = scores.masked_fill(~kept(scores, top_k, top_p, min_p), MINUS_INFINITY)
                    assert torch.equal(ours.sort(dim=1).values, expected.sort(dim=1).values)
                    if not ties:
                        assert torch.equal(ours, expected)

    def test_all_that_are_as_likely_as_the_kth_stay(self) -> None:
        scores = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
        assert kept(scores, 2, 1.0, 0.0).tolist() == [[True, False, True, True, True, False]]

    def test_the_token_that_crosses_p_stays_and_of_equals_the_larger_ids(self) -> None:
        scores = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
        assert kept(scores, 4, 0.5, 0.0).tolist() == [[True, False, False, True]]
        assert kept(scores, 4, 1e-9, 0.0).tolist() == [[True, False, False, False]]


class TestOnTheCpu:
    """Each row takes the cheapest way that suits it; all ways find what a sort of the whole vocabulary finds."""

    TOP_K, TOP_P, MIN_P = (
        [1, 2, 20, 50, 300, 2**31 - 1],
        [1.0, 1.0, 0.9, 0.5, 0.9999, 1e-30],
        [0.0, 0.0, 0.05, 1.0, 1e-20],
    )

    @pytest.mark.parametrize("vocabulary", [1, 5, 64, 100, 4096, 32_003, 151_936])
    @pytest.mark.parametrize("grid", [None, 4, 1], ids="ties of {}".format)
    def test_the_same_tokens_stay_as_after_a_whole_sort(self, vocabulary: int, grid: int | None) -> None:
        rand, rows = random.Random(vocabulary), 6 if vocabulary > 4096 else 40
        logits = torch.randn(rows, vocabulary) * 3
        logits = logits if grid is None else (logits * grid).round() / grid
        if vocabulary > 5:
            logits[0, 5], logits[1, 3], logits[2, 1:] = float("nan"), MINUS_INFINITY, MINUS_INFINITY
        columns = [
            torch.tensor(rand.choices(own, k=rows)) for own in ([0.01, 0.7, 1.0], self.TOP_K, self.TOP_P, self.MIN_P)
        ]
        expected, found = (find(logits, *columns) for find in (find_cutoff_reference, find_cutoff_cpu))
        ids = torch.arange(vocabulary)
        theirs, ours = (
            (logits > low) | ((logits == low) & (ids >= first)) for low, first in map(as_columns, (expected, found))
        )
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize(
        ("top_k", "top_p", "min_p"), [(1, 1.0, 0.0), (50, 0.9, 0.1), (300, 0.5, 0.0), (2**31 - 1, 1.0, 0.05)]
    )
    def test_no_whole_vocabulary_is_sorted(
        self, top_k: int, top_p: float, min_p: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cutoff, "_sort_all", None)
        assert kept(torch.randn(2, 151_936) * 3, top_k, top_p, min_p, find_cutoff_cpu).any(dim=1).all()

    def test_a_token_on_the_edge_of_min_p_lets_the_row_be_sorted(self) -> None:
        scores = torch.cat([torch.tensor([0.4, 0.2, 0.1]).log(), torch.full((100_000,), -20.0)])[None]
        for min_p in (0.25, 0.5):
            ours, theirs = (
                kept(scores, 2**31 - 1, 1.0, min_p, find) for find in (find_cutoff_cpu, find_cutoff_reference)
            )
            assert torch.equal(ours, theirs)


def as_columns(found: cutoff.Cutoff) -> list[torch.Tensor]:
    return [part[:, None] for part in found]


class TestPenalties:
    TOKENS = torch.tensor([[3, 5, 3, 7, 7, 9], [1, 1, 2, 0, 0, 0]])
    LENGTHS = torch.tensor([6, 3], dtype=torch.int32)
    PROMPTS = torch.tensor([3, 1])

    def penalized(self, logits: torch.Tensor, repetition: float, presence: float, frequency: float) -> torch.Tensor:
        columns = [torch.full((len(logits),), value) for value in (repetition, presence, frequency)]
        return penalize(logits, self.TOKENS, self.LENGTHS, self.PROMPTS, *columns)

    def test_repetition_as_in_transformers(self) -> None:
        logits = torch.randn(2, VOCABULARY)
        for penalty in (0.5, 1.3):
            processor = RepetitionPenaltyLogitsProcessor(penalty)
            expected = [
                processor(row[None, :n], logits[None, i])
                for i, (row, n) in enumerate(zip(self.TOKENS, (6, 3), strict=True))
            ]
            torch.testing.assert_close(self.penalized(logits, penalty, 0.0, 0.0), torch.cat(expected))

    def test_long_rows_are_read_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = torch.randn(2, VOCABULARY)
        whole = self.penalized(logits, 1.3, 0.5, 0.25)
        monkeypatch.setattr("nanoinfer.kernels.sampling.penalties.TOKENS_AT_ONCE", 4)
        assert torch.equal(self.penalized(logits, 1.3, 0.5, 0.25), whole)

    @pytest.mark.parametrize("longest", [7, 2500])
    def test_a_kernel_counts_as_torch(self, longest: int) -> None:
        """Logits in several slices of the vocabulary, whose rows do not lie side by side; one row has no tokens yet."""
        rows, vocabulary = 4, 5000
        logits = torch.randn(rows, vocabulary + 3, device=DEVICE)[:, :vocabulary]
        tokens = torch.randint(vocabulary, (rows, longest), dtype=torch.int32, device=DEVICE)
        tokens[:, : longest // 2] %= 3  # some come often
        lengths = torch.tensor([longest, 0, longest - 2, 5], dtype=torch.int32, device=DEVICE)
        columns = [torch.tensor(own, device=DEVICE) for own in ([1.3, 1, 0.7, 1], [0.5, 0, -0.5, 0], [0, 2, 0.25, 0.1])]
        args = logits, tokens, lengths, lengths // 3, *columns
        torch.testing.assert_close(penalize_triton(*args), penalize_reference(*args), rtol=1e-6, atol=1e-6)

    def test_presence_and_frequency_count_the_output_alone(self) -> None:
        change = self.penalized(torch.zeros(2, VOCABULARY), 1.0, 0.5, 0.25)
        expected = torch.zeros(2, VOCABULARY)
        expected[0, 7], expected[0, 9] = -0.5 - 2 * 0.25, -0.75
        expected[1, 1], expected[1, 2] = -0.75, -0.75
        assert torch.equal(change, expected)


def wants(params: SamplingParams, tokens: list[int]) -> LogitsMessage:
    """Describe a row whose first two tokens are the prompt."""
    seq = Sequence(tokens[:2], params, 0, 100, frozenset(params.stop_token_ids or ()))
    seq.token_ids.extend(tokens[2:])
    return describe_logits(seq)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, logprobs=0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1, top_p=0.95),
        SamplingParams(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
        SamplingParams(temperature=1.0, logit_bias={1: 2.5, 2: -3}, stop_token_ids=[4], min_tokens=9, max_tokens=9),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_should(params: SamplingParams) -> None:
    """Chi-squared over 20,000 draws against probabilities computed in float64 from the definitions."""
    draws, tokens = 20_000, [1, 6, 6, 8]
    logits = torch.randn(12) * 1.5
    expected = definition(logits.double(), params, tokens)

    positions = torch.full((draws,), len(tokens), dtype=torch.int32)
    group = LogitsProcessorGroup({0: wants(params, tokens)}, True, 64, torch.device("cpu"))
    temperatures, seeds = torch.full((draws,), params.temperature), torch.arange(draws) * 7 + 3
    known = temperatures[:1], positions[:1], torch.tensor([[*tokens, 0, 0]])
    _, allowed = group.change(logits[None], *known, Lines(torch.zeros(1, dtype=torch.int64), EACH))
    cutoff = group.find_cutoff(allowed, temperatures[:1])
    if cutoff is not None:
        cutoff = cutoff[0].expand(draws), cutoff[1].expand(draws)
    drawn = draw(allowed.expand(draws, -1), temperatures, seeds, positions, cutoff=cutoff)[1]

    counts = torch.bincount(drawn, minlength=12).double()
    assert set(counts.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
    possible = expected > 0
    chi_squared = ((counts - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum().item()
    degrees = int(possible.sum()) - 1
    assert chi_squared < degrees + 4 * (2 * degrees) ** 0.5 + 4  # four standard deviations and some


def definition(logits: torch.Tensor, params: SamplingParams, tokens: list[int]) -> torch.Tensor:
    """Return each token's probability, in float64; the first two of `tokens` are the prompt."""
    logits = logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(tokens) - 2 < params.min_tokens:
        logits[list(params.stop_token_ids or ())] = MINUS_INFINITY
    for token in set(tokens):
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token in set(tokens[2:]):
        logits[token] -= params.presence_penalty + params.frequency_penalty * tokens[2:].count(token)
    scores = logits / params.temperature
    support = reference_support(scores.tolist(), params.top_k or len(scores), params.top_p, params.min_p)
    mask = torch.tensor([token not in support for token in range(len(scores))])
    return scores.masked_fill(mask, MINUS_INFINITY).softmax(0)


class TestAgainstTransformers:
    """Greedy generation with penalties and least lengths gives transformers' tokens."""

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
            ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
            ({"min_tokens": 20}, {"min_new_tokens": 20}),
            ({"logit_bias": {201: -100.0, 14: 2.0}}, {"sequence_bias": [[[201], -100.0], [[14], 2.0]]}),
            ({"repetition_penalty": 1.2, "min_tokens": 30}, {"repetition_penalty": 1.2, "min_new_tokens": 30}),
        ],
        ids=str,
    )
    def test_greedy(self, ours: dict, theirs: dict, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        prompts = [[30, 31], [1112, 333, 1192]]
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = oracle.model.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0, **theirs)
            expected.append(out[0, len(prompt) :].tolist())
        assert token_ids(make_llm(), prompts, greedy(32, **ours)) == expected

    @pytest.mark.parametrize(
        "options", [{}, {"max_num_batched_tokens": 7}, *whole_only([{"tensor_parallel_size": 2}])], ids=str
    )
    def test_logprobs(self, options: dict, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        llm = make_llm(device="cpu", kvcache_block_size=16, **options)
        prompt = oracle.greedy([30, 31], 40, ignore_eos=True)
        params = SamplingParams(temperature=0.7, max_tokens=12, seed=3, logprobs=3, prompt_logprobs=2, top_k=9)
        llm.generate([prompt], greedy(1), use_tqdm=False)  # the prompt is cached
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        expected = oracle.logits([*prompt, *output["token_ids"]]).log_softmax(-1)
        self.check(output["logprobs"], output["token_ids"], expected[len(prompt) - 1 :], 3)
        assert output["prompt_logprobs"][0] is None
        self.check(output["prompt_logprobs"][1:], prompt[1:], expected, 2)
        assert output["num_cached_tokens"] == 0  # the cached tokens' logits are needed

    def test_logprobs_of_prompts_whose_last_chunk_is_one_token(
        self, make_llm: Callable[..., LLM], oracle: Oracle
    ) -> None:
        llm = make_llm(max_num_batched_tokens=7)
        prompts = [[30], list(range(30, 38)), list(range(50, 65))]
        outputs = llm.generate(prompts, greedy(1, prompt_logprobs=1), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.check(output["prompt_logprobs"][1:], prompt[1:], oracle.logits(prompt).log_softmax(-1), 1)

    @staticmethod
    def check(logprobs: list[dict[int, LogProb]], tokens: list[int], expected: torch.Tensor, most: int) -> None:
        assert len(logprobs) == len(tokens)
        for entry, token, row in zip(logprobs, tokens, expected[: len(tokens)], strict=True):
            assert set(entry) == {token, *row.topk(most).indices.tolist()}
            for token_id, value in entry.items():
                assert value == pytest.approx(row[token_id].item(), abs=1e-4)
                likelier, as_likely = (row > value + 1e-4).sum(), (row >= value - 1e-4).sum()
                assert likelier < value.rank <= as_likely

    def test_logprobs_change_no_token(self, make_llm: Callable[..., LLM]) -> None:
        llm, params = make_llm(), {"temperature": 1.0, "seed": 5, "max_tokens": 20}
        plain, told = (token_ids(llm, [[30], [31]], SamplingParams(**params, logprobs=k)) for k in (None, 0))
        assert plain == told


class Alone(NamedTuple):
    """Requests, and what each gives alone."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    outputs: list[RequestOutput]


@pytest.fixture(scope="module")
def alone(mixed_prompts: list[list[int]]) -> Alone:
    prompts = [prompt[:50] for prompt in [*mixed_prompts, *mixed_prompts]]
    params = different_settings(len(prompts))
    with LLM(BUNDLED_MODEL, dtype="float32", device="cpu", kvcache_block_size=16, num_kvcache_blocks=2049) as llm:
        requests = zip(prompts, params, strict=True)
        return Alone(prompts, params, [llm.generate([one], own, use_tqdm=False)[0] for one, own in requests])


@pytest.mark.parametrize(
    "options",
    whole_only(
        [{}, {"kvcache_block_size": 16, "num_kvcache_blocks": 40, "max_model_len": 100}, {"tensor_parallel_size": 2}]
    ),
    ids=["roomy", "preempted", "two ranks"],
)
def test_64_requests_with_different_settings_are_what_each_is_alone(
    options: dict, make_llm: Callable[..., LLM], alone: Alone
) -> None:
    together = make_llm(device="cpu", **options)
    outputs = together.generate(alone.prompts, alone.params, use_tqdm=False)
    assert (together.engine.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in options)
    assert_equal(outputs, alone.outputs)


def test_one_that_starts_again_as_a_long_one_keeps_its_settings(
    make_llm: Callable[..., LLM], mixed_prompts: list[list[int]]
) -> None:
    """The model computes long and short sequences alike, so that only their way through the engine differs."""
    prompts = [prompt[:50] for prompt in mixed_prompts]
    params = different_settings(len(prompts))
    expected = make_llm(device="cpu", kvcache_block_size=16).generate(prompts, params, use_tqdm=False)
    llm = make_llm(device="cpu", kvcache_block_size=16)
    llm.engine.scheduler.long_from = 52
    num_prefilled = []
    llm.engine.on_step = lambda result: num_prefilled.append(result.num_prefill_tokens)
    assert_equal(llm.generate(prompts, params, use_tqdm=False), expected)
    assert sum(num_prefilled) > sum(map(len, prompts))  # some sequences did
    assert llm.engine.scheduler.num_preemptions == 0


class TestSamples:
    def test_the_prompt_is_held_once(self, make_llm: Callable[..., LLM]) -> None:
        """1,000 tokens fill three blocks of 256, which samples share, and begin a fourth, which each sample has."""
        llm = make_llm(kvcache_block_size=256)
        held = []
        llm.engine.on_step = lambda result: held.append(round(result.blocks_used * llm.memory.blocks))
        (output,) = llm.generate([[30] * 1000], SamplingParams(n=8, max_tokens=4, seed=1), use_tqdm=False)
        assert max(held) == 3 + 8
        assert len(output["samples"]) == 8
        assert {key: output[key] for key in output["samples"][0]} == output["samples"][0]

    @pytest.mark.parametrize("options", [{}, *whole_only([{"max_num_seqs": 3}]), {"tensor_parallel_size": 2}], ids=str)
    def test_each_sample_is_what_a_request_of_its_seed_is(self, options: dict, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(device="cpu", kvcache_block_size=16, **options)
        settings = {"temperature": 1.0, "max_tokens": 12, "top_p": 0.9}
        prompt = list(range(30, 54))
        seqs = llm.engine.add_request(prompt, SamplingParams(**settings, n=5, seed=4))
        while not llm.engine.is_finished:
            llm.engine.step()
        alone = [SamplingParams(**settings, seed=seq.seed) for seq in seqs]
        assert seqs[0].seed == 4
        assert [seq.output_token_ids for seq in seqs] == token_ids(llm, [prompt] * 5, alone)
        assert len({tuple(seq.output_token_ids) for seq in seqs}) > 1

    def test_four_times_the_samples_are_four_times_the_work(self, make_llm: Callable[..., LLM]) -> None:
        """Work is counted in function calls."""
        llm = make_llm(kvcache_block_size=16, max_num_seqs=64)

        def work(n: int) -> int:
            with cProfile.Profile() as profile:
                (output,) = llm.generate([[30] * 20], SamplingParams(n=n, max_tokens=2), use_tqdm=False)
            assert len(output["samples"]) == n
            return sum(entry.callcount for entry in profile.getstats())

        work(64)
        assert work(800) < 4.5 * work(200)

    def test_the_prompts_logprobs_are_computed_once(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(max_num_seqs=2, kvcache_block_size=16)
        prefilled = []
        llm.engine.on_step = lambda result: prefilled.append(result.num_prefill_tokens)
        (output,) = llm.generate([[30] * 33], greedy(4, n=5, prompt_logprobs=0, ignore_eos=True), use_tqdm=False)
        assert len(output["prompt_logprobs"]) == 33
        assert sum(prefilled) <= 33 + 3  # samples that came when a row was free found two blocks in the cache


def test_a_row_is_drawn_again_until_its_least_length_only(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.add_request([30], greedy(30, min_tokens=5, ignore_eos=True))
    llm.add_request([31], greedy(30, min_tokens=9, ignore_eos=True, top_k=5))
    llm.add_request([32], SamplingParams(max_tokens=30, min_tokens=12, ignore_eos=True, top_k=5))  # top_k matters here
    num_wanted = []
    while llm.has_unfinished_requests():
        llm.step()
        num_wanted.append(len(llm.engine.ranks.runner.steps.logits_processors.wanted))
    assert num_wanted[:8] == [3] * 4 + [2] * 4
    assert set(num_wanted[8:]) == {1}


def test_no_setting_is_too_large(make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    params = [
        greedy(2**40, min_tokens=2**40),
        greedy(8, top_k=2**40, n=2),
        SamplingParams(temperature=1e30, max_tokens=8, top_p=0.5, repetition_penalty=1e30, logit_bias={3: 1e30}),
        SamplingParams(temperature=2e-6, max_tokens=8, top_p=1e-30, min_p=1.0, logit_bias={3: -1e30}, seed=2**63 - 1),
    ]
    outputs = make_llm(max_model_len=100).generate([[30, 31]] * 4, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [98, 8, 8, 8]
    assert outputs[1]["token_ids"] == outputs[3]["token_ids"] == oracle.greedy([30, 31], 8)


class TestSeeds:
    def test_alone_and_among_255_others(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        mine = SamplingParams(temperature=1.0, max_tokens=8, seed=5, top_p=0.9)
        others = [SamplingParams(temperature=1.0, max_tokens=1 + i % 8, top_k=i % 3) for i in range(255)]
        prompts = [[40 + i] * (1 + i % 5) for i in range(255)]
        among = token_ids(llm, [*prompts[:100], [30, 31], *prompts[100:]], [*others[:100], mine, *others[100:]])
        assert among[100] == token_ids(llm, [[30, 31]], mine)[0]


@pytest.mark.parametrize("stop", of_each_kind(["the", " fri", "e th", "\n"], 0, 2))
def test_stop_strings_end_where_transformers_ends(stop: str, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    llm = make_llm()
    prompt = llm.tokenizer.encode("ROMEO:\nBut, soft!")
    (output,) = llm.generate([prompt], greedy(64, stop=stop), use_tqdm=False)
    out = oracle.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=64,
        do_sample=False,
        pad_token_id=0,
        stop_strings=[stop],
        tokenizer=llm.tokenizer,
    )
    assert output["token_ids"] == out[0, len(prompt) :].tolist()
    assert output["finish_reason"] == "stop"
    assert output["stop_reason"] == stop
    whole = llm.tokenizer.decode(output["token_ids"])
    assert output["text"] == whole[: whole.index(stop)]
