"""allowed_token_ids and bad_words: no other tokens are drawn, and no such word is spelled, alone and in company."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import DEVICE, Oracle, assert_equal, greedy, whole_only
from transformers import NoBadWordsLogitsProcessor

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.bans import Bans
from nanoinfer.kernels.sampling.cutoff import find_cutoff_reference, find_cutoff_triton
from nanoinfer.kernels.sampling.draw import draw_reference, draw_triton
from nanoinfer.kernels.sampling.masks import apply_masks_reference, apply_masks_triton
from nanoinfer.kernels.sampling.sequences import ban_sequences, ban_sequences_reference, ban_sequences_triton

VOCABULARY = 2048  # the bundled model's
PROMPTS = [[30, 31], [324, 16], list(range(40, 60)), [5]]
FREQUENT = [43, 14, 270, 261, 382, 330, 16, 201]  # tokens that the model likes
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=200, **OPTIONS) as made:
        yield made


def words_of(params: SamplingParams, llm: LLM) -> list[list[int]]:
    """Return the token sequences that bad_words forbid, as vLLM finds them."""
    sequences = []
    for word in params.bad_words:
        bare, spaced = (llm.tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        sequences += [bare, spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]
    return sequences


def allowed(params: SamplingParams, sequences: list[list[int]], output: list[int]) -> set[int]:
    """Return the tokens that may follow an output."""
    banned = {s[-1] for s in sequences if len(s) <= len(output) + 1 and output[len(output) - len(s) + 1 :] == s[:-1]}
    return set(params.allowed_token_ids or range(VOCABULARY)) - banned


def random_settings(rand: random.Random, llm: LLM, **settings: Any) -> SamplingParams:
    """Return settings with bans, among whose words are tokens of the vocabulary and pieces of what the model says."""
    text = llm.tokenizer.decode([43, 387, 485, 1766, 299, 1345, 16, 201, 54, 270])
    starts = [rand.randrange(len(text) - 4) for _ in range(rand.randint(0, 12))]
    words = [text[start : start + rand.randint(1, 5)] for start in starts]
    words += [llm.tokenizer.decode([token]) for token in rand.sample(FREQUENT, rand.randint(0, 4))]
    some = rand.sample(range(VOCABULARY), 60) + FREQUENT * 2
    return SamplingParams(
        max_tokens=rand.randint(4, 8),
        ignore_eos=True,
        bad_words=[word for word in words if word.strip()],
        allowed_token_ids=rand.choice([None, some]),
        **settings,
    )


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


class TestKernels:
    @pytest.mark.parametrize("apply_masks", [apply_masks_reference, apply_masks_triton])
    def test_a_mask_lets_the_allowed_tokens_pass(self, apply_masks: Callable) -> None:
        logits = torch.randn(3, 45)
        lists = [[3], [44, 0, 31, 32, 0], list(range(45))]
        words = torch.stack([torch.from_numpy(Bans.of(ids, [], 45).mask) for ids in lists])
        passed = apply_masks(logits.to(DEVICE), words.to(DEVICE)).cpu()
        for row, ids in enumerate(lists):
            assert passed[row].isfinite().nonzero().flatten().tolist() == sorted(set(ids))
            assert torch.equal(passed[row, ids], logits[row, ids])

    @pytest.mark.parametrize("ban_sequences", [ban_sequences_reference, ban_sequences_triton])
    def test_the_last_token_of_a_sequence_may_not_follow_the_others(self, ban_sequences: Callable) -> None:
        """Few tokens, so that sequences occur; each row has its own; the plain loop is the reference."""
        rand = random.Random(1)
        for _ in range(30):
            prompts = [[rand.randrange(4) for _ in range(rand.randint(1, 5))] for _ in range(5)]
            outputs = [[rand.randrange(4) for _ in range(rand.randint(0, 6))] for _ in prompts]
            own = [
                [[rand.randrange(4) for _ in range(rand.randint(1, 3))] for _ in range(rand.randint(0, 4))]
                for _ in prompts
            ]
            tokens = torch.zeros(5, 12, dtype=torch.int32)
            for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                tokens[row, : len(prompt) + len(output)] = torch.tensor(prompt + output)
            most = max(1, *map(len, own))
            flat = [sequence for sequences in own for sequence in (*sequences, *[[]] * (most - len(sequences)))]
            starts = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
            positions = starts + torch.tensor([len(output) for output in outputs], dtype=torch.int32)
            sequences = torch.from_numpy(Bans.of(None, flat, 4).sequences).long().view(5, most, -1)
            args = torch.zeros(5, 4), tokens, positions, starts, sequences
            changed = ban_sequences(*(arg.to(DEVICE) for arg in args)).cpu()
            for row, (here, output) in enumerate(zip(own, outputs, strict=True)):
                expected = {s[-1] for s in here if (output[-len(s) + 1 :] if len(s) > 1 else []) == s[:-1]}
                assert set(changed[row].isneginf().nonzero().flatten().tolist()) == expected

    @pytest.mark.parametrize(
        ("find_cutoff", "draw"), [(find_cutoff_reference, draw_reference), (find_cutoff_triton, draw_triton)]
    )
    @pytest.mark.parametrize("filters", [None, (5, 1.0, 0.0), (50, 0.5, 0.0), (3, 0.9, 0.2)], ids=str)
    def test_the_best_of_no_tokens_is_minus_infinity(
        self, filters: tuple | None, find_cutoff: Callable, draw: Callable
    ) -> None:
        """So the second draw finds rows without a token, and no others, whatever their filters."""
        device = DEVICE if draw is draw_triton else "cpu"
        logits = torch.randn(3, 50, device=device)
        logits[1] = float("-inf")
        ones, seeds, positions = (torch.ones(3, dtype=kind, device=device) for kind in (None, torch.int64, torch.int32))
        settings = [torch.full((3,), value, device=device) for value in filters or ()]
        cutoff = find_cutoff(logits, ones, *settings) if filters else None
        for temperatures in (ones, ones * 0):
            best, ids = draw(logits, temperatures, seeds, positions, cutoff=cutoff)
            assert best.isneginf().tolist() == [False, True, False]
            assert ((ids >= 0) & (ids < 50)).all()

    def test_as_transformers_where_the_prompt_does_not_matter(self) -> None:
        tokens, logits = torch.randint(6, (8, 7)), torch.randn(8, 6)
        sequences = [[2], [1, 3], [4, 4, 5], [0, 1, 2, 3]]
        expected = NoBadWordsLogitsProcessor(sequences, eos_token_id=7)(tokens, logits)
        packed = torch.from_numpy(Bans.of(None, sequences, 6).sequences).long().repeat(8, 1, 1)
        full, none = torch.full((8,), 7, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        assert torch.equal(ban_sequences(logits, tokens.int(), full, none, packed), expected)


class TestDraws:
    def test_greedy_rows_take_the_likeliest_of_what_is_left(self, llm: LLM, oracle: Oracle) -> None:
        rand = random.Random(2)
        params = [random_settings(rand, llm, temperature=0) for _ in range(6)]
        prompts = [rand.choice(PROMPTS) for _ in params]
        outputs = generate(llm, [*prompts, PROMPTS[0]], [*params, greedy(12)])
        for prompt, own, output in zip(prompts, params, outputs, strict=False):
            sequences, tokens = words_of(own, llm), output.token_ids
            assert len(tokens) == own.max_tokens
            logits = oracle.logits(prompt + tokens)[len(prompt) - 1 : -1]
            for place, row in enumerate(logits):
                left = sorted(allowed(own, sequences, tokens[:place]))
                assert row[tokens[place]] == pytest.approx(row[left].max().item(), abs=1e-4)
                assert tokens[place] in left
        assert outputs[-1].token_ids == oracle.greedy(PROMPTS[0], 12)  # the row without bans did not notice

    @pytest.mark.parametrize("mode", [*whole_only(["raw_logprobs"]), "processed_logprobs"])
    def test_samples_tell_what_could_have_been_drawn(
        self, mode: str, make_llm: Callable[..., LLM], oracle: Oracle
    ) -> None:
        """Forks of one prompt have words of their own behind them."""
        llm, rand = make_llm(logprobs_mode=mode, **OPTIONS), random.Random(3)
        settings = {"n": 2, "logprobs": -1, "kept_tokens": True, "logit_bias": {14: 1.5}}
        params = [random_settings(rand, llm, seed=seed, **settings) for seed in range(2)]
        for own, output in zip(params, generate(llm, [PROMPTS[2]] * 2, params), strict=True):
            sequences = words_of(own, llm)
            for sample in output.samples:
                self.check(sample, own, sequences, oracle.logits(PROMPTS[2] + sample.token_ids)[19:-1], mode)

    @staticmethod
    def check(sample: Any, params: SamplingParams, sequences: list, logits: torch.Tensor, mode: str) -> None:
        places = zip(logits, sample.token_ids, sample.kept_tokens, sample.logprobs, strict=True)
        for place, (row, token, (count, log_mass), entry) in enumerate(places):
            left = sorted(allowed(params, sequences, sample.token_ids[:place]))
            assert token in left
            assert count == len(left)
            biased = row.double()
            biased[14] += 1.5
            assert log_mass == pytest.approx(biased.log_softmax(0)[left].logsumexp(0).item(), abs=1e-4)
            if mode == "processed_logprobs":
                assert sorted(entry) == left
                assert sum(map(math.exp, entry.values())) == pytest.approx(1, abs=1e-5)
            else:
                assert len(entry) == VOCABULARY
                assert entry[token] == pytest.approx(row.log_softmax(0)[token].item(), abs=1e-4)

    @pytest.mark.parametrize(
        "options",
        whole_only(
            [
                {"max_num_batched_tokens": 7, "num_kvcache_blocks": 16, "max_model_len": 100},
                {"deterministic": True},
                {"tensor_parallel_size": 2},
                {"data_parallel_size": 2},
            ]
        ),
        ids=["chunks, preempted", "deterministic", "two ranks", "two replicas"],
    )
    def test_in_any_company_what_each_is_alone(self, options: dict, llm: LLM, make_llm: Callable[..., LLM]) -> None:
        rand = random.Random(4)
        params = [random_settings(rand, llm, seed=seed, n=1 + seed % 3, min_tokens=2) for seed in range(12)]
        params[1::4] = [SamplingParams(seed=1, max_tokens=40, top_k=40, ignore_eos=True)] * 3
        prompts = [PROMPTS[i % 4] * 3 for i in range(12)]
        expected = [generate(llm, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
        together = make_llm(**{**OPTIONS, **options})
        assert_equal(generate(together, prompts, params), expected)
        if "num_kvcache_blocks" in options:
            assert together.engine.scheduler.num_preemptions > 0

    def test_the_prompt_does_not_count(self, llm: LLM) -> None:
        """The second token of a word may follow the first where the prompt has that."""
        first, second = llm.tokenizer.encode("weep", add_special_tokens=False)
        forced = {"logit_bias": {second: 1000.0, first: 500.0}, "max_tokens": 3, "bad_words": ["weep"]}
        (output,) = generate(llm, [[30, first]], SamplingParams(temperature=0, **forced))
        assert output.token_ids == [second, second, second]
        (output,) = generate(llm, [[30]], SamplingParams(temperature=0, **{**forced, "logit_bias": {first: 500.0}}))
        assert output.token_ids == [first] * 3

    def test_an_end_of_sequence_comes_only_if_it_is_allowed(self, llm: LLM) -> None:
        (eos,) = llm.config.eos_token_ids
        outputs = generate(llm, [[30]] * 2, [greedy(5, allowed_token_ids=ids) for ids in ([9], [eos])])
        assert [output.finish_reason for output in outputs] == ["length", "stop"]
        (output,) = generate(llm, [[30]], greedy(5, allowed_token_ids=[9, eos], logit_bias={eos: 99.0}, min_tokens=2))
        assert output.token_ids == [9, 9, eos]

    def test_words_are_forbidden_behind_a_space_too(self, llm: LLM) -> None:
        """As "the", a single token with a space and without."""
        bare, spaced = (llm.tokenizer.encode(text, add_special_tokens=False) for text in ("the", " the"))
        assert len(bare) == len(spaced) == 1
        params = greedy(4, logit_bias={bare[0]: 99.0, spaced[0]: 99.0}, ignore_eos=True)
        (plain,) = generate(llm, [[30]], params)
        assert set(plain.token_ids) <= {*bare, *spaced}
        for words in (["the"], [" the"], {"the"}):
            params.bad_words = words
            assert not {*bare, *spaced}.intersection(generate(llm, [[30]], params)[0].token_ids)


class TestNothingLeft:
    """A sample that can get no token ends with an error that names its settings; the others go on."""

    @pytest.mark.parametrize(
        ("settings", "names", "tokens"),
        [
            ({"allowed_token_ids": [67, 68], "bad_words": ["a", "bb"]}, "allowed_token_ids and bad_words", [68]),
            (
                {"allowed_token_ids": [67, 68], "bad_words": ["a", "bb"], "top_k": 5, "top_p": 0.5, "logprobs": 2},
                "allowed_token_ids and bad_words",
                [68],
            ),
            (
                {"allowed_token_ids": [67, 9], "stop_token_ids": [9], "min_tokens": 2, "bad_words": ["aa"]},
                "allowed_token_ids and bad_words and min_tokens",
                [67],
            ),
        ],
        ids=["words", "filters", "a least length"],
    )
    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_the_error(self, settings: dict, names: str, tokens: list[int], temperature: float, llm: LLM) -> None:
        assert llm.tokenizer.encode("bb", add_special_tokens=False) == [68, 68]
        params = SamplingParams(temperature=temperature, kept_tokens=True, repetition_penalty=1.2, **settings)
        bad, other = generate(llm, [[30, 31]] * 2, [params, greedy(9, ignore_eos=True)])
        assert bad.finish_reason == "error"
        assert bad.stop_reason.startswith(f"no token may be drawn: {names} leave none")
        assert bad.token_ids == tokens
        assert len(bad.kept_tokens) == len(tokens)
        assert other.finish_reason == "length"
        assert other.token_ids == generate(llm, [[30, 31]], greedy(9, ignore_eos=True))[0].token_ids

    def test_a_form_that_no_allowed_token_begins(self, llm: LLM) -> None:
        pytest.importorskip("llguidance")
        form = {"structured_outputs": {"choice": ["yes", "no"]}}
        settings = [{**form, "allowed_token_ids": [9], "top_p": 0.9}, {**form, "bad_words": ["y", "yes", "ye"]}, form]
        params = [SamplingParams(seed=1, **own) for own in settings]
        bad, other, free = generate(llm, [[30]] * 3, params)
        assert bad.finish_reason == "error"
        assert bad.stop_reason.startswith("no token may be drawn: allowed_token_ids and structured_outputs leave none")
        assert other.text == "no"
        assert free.text in ("yes", "no")

    def test_in_a_stream(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, allowed_token_ids=[67, 68], bad_words=["a", "bb"])
        *_, last = llm.stream([[30]], params)
        assert last.finish_reason == "error"


def test_words_need_a_tokenizer(make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
    llm = make_llm(make_qwen3())
    with pytest.raises(ValueError, match=r"sampling_params.bad_words=\['a'\] needs text, but .* has no tokenizer"):
        generate(llm, [[30]], SamplingParams(bad_words=["a"]))
    (output,) = generate(llm, [[30]], SamplingParams(allowed_token_ids=[7, 8], max_tokens=4))
    assert set(output.token_ids) <= {7, 8}


def test_a_word_is_looked_up_once_for_all_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    monkeypatch.setattr(llm._inputs.texts, "tokenize", lambda name, text, **how: encoded.append(text) or [5])
    params = SamplingParams(bad_words=["the"])
    for settings in (params, [params] * 50):
        prepared = llm._inputs.check_prompts([[30]] * 50, settings).take_prompts()
        assert encoded == ["the", " the"]
        assert len({id(prompt.params) for prompt in prepared}) == 1
        encoded.clear()
