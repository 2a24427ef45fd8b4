"""Guesses for rows with structured outputs: the grammar says which may hold, and no token changes."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
from cases.drafters import DRAFTERS, VOCAB, Prophet
from conftest import assert_equal, whole_only

pytest.importorskip("llguidance", reason="structured outputs need the llguidance package")
pytest.importorskip("jsonschema", reason="the tests of structured outputs do, too")

import llguidance
import numpy as np
from test_guesses_of_an_llm import assert_counts, assert_same, make, run
from test_structured import COMPANY, PERSON, guided
from transformers import AutoTokenizer

from nanoinfer import BUNDLED_MODEL, RequestOutput, SamplingParams
from nanoinfer.engine.guided.matchers import Matchers
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.speculation.budget import Budget
from nanoinfer.grammar.grammar import Grammars
from nanoinfer.requests.text.spelling import TokenDecoder
from nanoinfer.runner.drafting import verifier
from nanoinfer.runner.logits.lines import StepLines

FORMS = [
    {"regex": "[a-z ]{5,30}"},
    {"choice": ["aye", "nay, nay, nay"]},
    {"grammar": 'start: "a" "b"+ "c"'},
    {"json": PERSON},
    {"json": {"const": {"says": ["Good morrow", "to you"]}}},
]
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"logprobs": 2, "n": 2},
    {"min_tokens": 12, "kept_tokens": True},
    {"max_tokens": 7, "top_p": 0.9},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 0},
    {"bad_words": ["the", " a", "or"], "top_k": 40},
    {"stop": ["e", "red"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(20, 60)), "min_tokens": 3, "ignore_eos": True},
]
GUIDED = [
    guided(**{"seed": i, "max_tokens": 20, "structured_outputs": FORMS[i % len(FORMS)], **WISHES[i % len(WISHES)]})
    for i in range(len(WISHES))
]
PARAMS = [*GUIDED, *[replace(params, max_tokens=20, n=1) for params in COMPANY[:9]]]
PROMPTS = ["ROMEO:\n"] * len(PARAMS)
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
VOCABULARY = TOKENIZER.get_vocab()
SPELL = TokenDecoder(TOKENIZER, skip_special_tokens=True).bytes_of
GRAMMARS = Grammars(TOKENIZER, VOCAB, [VOCABULARY["<|im_end|>"]], SPELL)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with make() as llm:
        return run(llm, PROMPTS, PARAMS)


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + sample.token_ids for output in outputs for sample in output.samples]


@pytest.fixture(scope="module")
def known(expected: list[RequestOutput]) -> list[list[int]]:
    return texts_of(expected)


SPREAD: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 40},
    "few rows": {"max_num_seqs": 3, "max_guesses": 15},
    "tight": {"num_kvcache_blocks": 10, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    "two ranks": {"tensor_parallel_size": 2, "max_guesses": 3},
    "all lines": {"max_num_seqs": 8},  # of plain rows are drawn again, as on a GPU, which does not wait for them
}
TOGETHER = [
    *[("random", "few rows"), ("wrong", "roomy"), ("right", "tight"), ("alternating", "all lines")],
    ("suffix", "two ranks"),
]
TOGETHER += whole_only([both for both in product(DRAFTERS, SPREAD) if both not in TOGETHER])


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize(("drafter", "spread"), TOGETHER)
def test_results_are_those_without(
    drafter: str,
    spread: str,
    expected: list[RequestOutput],
    known: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if spread == "all lines":
        monkeypatch.setattr(verifier, "StepLines", lambda *args: StepLines(*args[:-1], has_all=True))
    with make(speculation=DRAFTERS[drafter](known), **SPREAD[spread]) as llm:
        outputs = run(llm, PROMPTS, PARAMS)
        assert_same(outputs, expected)
        assert_counts(llm, outputs)
        assert spread != "tight" or llm.engine.scheduler.num_preemptions > 0
        assert not llm.engine.matchers._followed


@pytest.mark.parametrize("mode", [*whole_only(["raw_logprobs"]), "processed_logprobs"])
def test_bits_are_those_without_if_sums_have_one_order(mode: str) -> None:
    options = {"deterministic": True, "logprobs_mode": mode, "max_num_seqs": 4}
    params = [replace(own, max_tokens=6, min_tokens=min(own.min_tokens, 4)) for own in GUIDED[:9]]
    with make(**options) as alone:
        wanted = run(alone, PROMPTS[:9], params)
    with make(speculation=Prophet(texts_of(wanted)), **options) as llm:
        outputs = run(llm, PROMPTS[:9], params)
    for output, own in zip(outputs, wanted, strict=True):
        for sample, plain in zip(output.samples, own.samples, strict=True):
            assert sample.num_accepted_tokens > 0 or len(sample.token_ids) < 3
            assert (sample.token_ids, sample.logprobs) == (plain.token_ids, plain.logprobs)
            assert sample.kept_tokens == plain.kept_tokens


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_guess_beside_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, texts of the first are guesses."""
    monkeypatch.setattr(Budget, "note_host", lambda *args: None)  # for so small a model they may not pay
    results = []
    for speculation in (None, "suffix"):
        with make(device=device, speculation=speculation, max_num_seqs=12) as llm:
            results.append([run(llm, PROMPTS, PARAMS) for _ in range(2)])
    for outputs, wanted in zip(*results[::-1], strict=True):
        assert_equal(outputs, wanted)
    assert sum(sample.num_accepted_tokens for output in results[1][1][:9] for sample in output.samples) > 20


def test_a_step_is_charged_with_its_own_reading_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verifying step brought is read while the next one runs, which may be a plain one."""
    noted: list[tuple[int, float]] = []
    with make(speculation="suffix", max_num_seqs=4) as llm:
        engine = llm.engine
        read = engine.matchers.read

        def slow(seqs: list[Sequence], tokens: list[Any]) -> int:
            time.sleep(0.1 if isinstance(tokens[0], list) else 0)
            return read(seqs, tokens)

        monkeypatch.setattr(engine.matchers, "read", slow)
        monkeypatch.setattr(engine.config, "device", "cuda")  # only there does the host count
        monkeypatch.setattr(
            engine.scheduler.speculation, "note_host", lambda step, _, busy: noted.append((step.guesses, busy))
        )
        choices = cycle([4, 0, 0])
        monkeypatch.setattr(engine.scheduler.speculation.budget, "choose", lambda rows, num_guided=0: next(choices))
        llm.generate(PROMPTS[:1], guided(structured_outputs=FORMS[3], max_tokens=20), use_tqdm=False)
        monkeypatch.undo()
    assert all((busy > 0.1) == bool(guesses) for guesses, busy in noted), noted
    assert len({bool(guesses) for guesses, _ in noted}) == 2


def test_guesses_that_hold_save_steps() -> None:
    params = guided(structured_outputs=FORMS[4])
    with make() as alone:
        (wanted,) = run(alone, PROMPTS[:1], params)
    with make(speculation=Prophet(texts_of([wanted]))) as llm:
        (output,) = run(llm, PROMPTS[:1], params)
        stats = llm.stats()
    assert_equal([output], [wanted])
    rows = len(wanted.token_ids) - 1 - output.num_accepted_tokens
    assert rows <= len(wanted.token_ids) / 3
    assert rows <= stats.num_decode_steps <= rows + 1  # the host learns of the end one step late


BEHIND = {"nothing": [], "text": [5] * 6, "ends": [2] * 6}
ENDS = [(form, "ends") for form in range(len(FORMS))] + [(0, "nothing"), (0, "text")]


@pytest.mark.parametrize(
    ("form", "behind"), ENDS + whole_only([both for both in product(range(len(FORMS)), BEHIND) if both not in ENDS])
)
def test_a_text_ends_within_a_step(form: int, behind: str) -> None:
    """Whatever is guessed behind the end is none of its tokens."""
    params = [guided(seed, structured_outputs=FORMS[form], max_tokens=100, logprobs=1) for seed in range(4)]
    with make() as alone:
        wanted = run(alone, PROMPTS[:4], params)
    assert any(output.finish_reason == "stop" for output in wanted)
    with make(speculation=Prophet([text + BEHIND[behind] for text in texts_of(wanted)])) as llm:
        outputs = run(llm, PROMPTS[:4], params)
        assert_equal(outputs, wanted)
        assert_counts(llm, outputs)


def test_streams_have_the_same_tokens(expected: list[RequestOutput], known: list[list[int]]) -> None:
    texts: dict[tuple[int, int], list[Any]] = {}
    with make(speculation=Prophet(known, (True, True, False)), max_num_seqs=6) as llm:
        for new in llm.stream(PROMPTS, PARAMS):
            old = texts.setdefault((new.index, new.sample), ["", []])
            texts[new.index, new.sample] = [old[0] + new.text, old[1] + new.token_ids]
    for (index, number), (text, token_ids) in texts.items():
        sample = expected[index].samples[number]
        assert (text, token_ids) == (sample.text, sample.token_ids)


def test_a_grammar_that_grows_too_complex_ends_its_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes where it comes without guesses, though the host has looked behind it."""
    limits = partial(llguidance.LLParserLimits, step_max_items=20)
    monkeypatch.setattr(llguidance, "LLParserLimits", limits)
    ambiguous = 'start: "Q" (x | y | z)\nx: "a"* y*\ny: "a" z* | x\nz: "ab" x* "b"?'
    params = [guided(seed, structured_outputs={"grammar": ambiguous}) for seed in range(6)] + [SamplingParams(seed=1)]
    with make() as alone:
        wanted = run(alone, PROMPTS[:7], params)
    assert "error" in {output.finish_reason for output in wanted}
    for right in ((True,), (True, False)):
        with make(speculation=Prophet(texts_of(wanted), right)) as llm:
            assert_equal(run(llm, PROMPTS[:7], params), wanted)


class TestMatchers:
    """The host looks behind guesses as far as they may hold, and forgets those that did not."""

    A, B, C, END = (VOCABULARY[text] for text in ("a", "b", "c", "<|im_end|>"))

    @pytest.fixture
    def follow(self) -> Iterator[Callable[..., tuple[Matchers, Sequence]]]:
        all_of_them: list[Matchers] = []

        def follow(regex: str, **settings: Any) -> tuple[Matchers, Sequence]:
            grammar = GRAMMARS.compile({"regex": regex})
            seq = Sequence([1], guided(structured_outputs={"regex": regex}, **settings), 0, 128, grammar.eos_token_ids)
            all_of_them.append(Matchers())
            all_of_them[-1].add(seq, grammar)
            return all_of_them[-1], seq

        yield follow
        for matchers in all_of_them:
            matchers.close()

    def allowed(self, matchers: Matchers, seq: Sequence, guesses: list[int]) -> list[str]:
        """Of each of the next tokens, the ones of a, b, c and the end that may be drawn; "" stands for any token."""
        message = matchers.masks([seq], lambda: [guesses])
        assert message.guesses == [len(guesses)]
        masks = np.array(message.words + message.behind, dtype=np.int32).view(np.uint32).reshape(1 + len(guesses), -1)
        names = dict(zip((self.A, self.B, self.C, self.END), "abc.", strict=True))
        told = ["".join(name for t, name in names.items() if mask[t // 32] >> t % 32 & 1) for mask in masks]
        return ["" if (mask == 2**32 - 1).all() else own for mask, own in zip(masks, told, strict=True)]

    def test_masks_stand_behind_guesses_that_may_hold(self, follow: Callable[..., Any]) -> None:
        matchers, seq = follow("a?b{2}c?")
        assert self.allowed(matchers, seq, []) == ["ab"]
        assert self.allowed(matchers, seq, [self.A, self.B, self.B]) == ["ab", "b", "b", "c."]
        assert self.allowed(matchers, seq, [self.B, self.A, self.B]) == ["ab", "b", "", ""]  # a is refused
        assert self.allowed(matchers, seq, [self.C, self.B]) == ["ab", "", ""]
        assert self.allowed(matchers, seq, [self.B, self.B, self.END, self.A]) == ["ab", "b", "c.", "", ""]
        assert self.allowed(matchers, seq, [self.B, self.B, self.C, self.A]) == ["ab", "b", "c.", "", ""]  # complete

    def test_min_tokens_count_guesses(self, follow: Callable[..., Any]) -> None:
        matchers, seq = follow("b*", min_tokens=2)
        assert self.allowed(matchers, seq, [self.B, self.B]) == ["b", "b", "b."]

    def test_rows_together_have_the_masks_that_each_has_alone(self) -> None:
        rng, forms = random.Random(0), ["a?b{2}c?", "b*", "(abc|cab){2}"]
        together, ids = Matchers(), (self.A, self.B, self.C, self.END)
        seqs, alone = [], []
        for row in range(30):  # more than one thread takes
            regex = forms[row % len(forms)]
            grammar, params = GRAMMARS.compile({"regex": regex}), guided(structured_outputs={"regex": regex})
            seqs.append(Sequence([1], replace(params, min_tokens=row % 4), 0, 128, grammar.eos_token_ids))
            alone.append(Matchers())
            for matchers in (together, alone[-1]):
                matchers.add(seqs[-1], grammar)
        for _ in range(4):
            guesses = [rng.choices(ids, k=rng.randrange(4)) for _ in seqs]
            message = together.masks(seqs, lambda guesses=guesses: guesses)
            own = [m.masks([seq], lambda g=g: [g]) for m, seq, g in zip(alone, seqs, guesses, strict=True)]
            assert message.guesses == [count for each in own for count in each.guesses]
            assert message.words == sum((each.words for each in own), array("i"))
            assert message.behind == sum((each.behind for each in own), array("i"))
            for matchers, seq, guess in zip(alone, seqs, guesses, strict=True):
                drawn = [*guess, rng.choice(ids)]
                for both in (together, matchers):
                    both.read([seq], [list(drawn)])
                if together.end_of(seq) is not None:
                    together.drop(seq)
                    matchers.drop(seq)
        for matchers in (together, *alone):
            matchers.close()

    @pytest.mark.parametrize(
        ("guesses", "drawn", "taken"),
        [
            ("abb", "abbc", 4),
            ("bbc", "bb.", 3),
            ("abb", "b", 1),
            ("bbca", "bbcab", 3),
            ("bb.a", "bb.ab", 3),
            ("", "a", 1),
        ],
    )
    def test_it_reads_what_holds_up_to_the_end(
        self, guesses: str, drawn: str, taken: int, follow: Callable[..., Any]
    ) -> None:
        numbers = dict(zip("abc.", (self.A, self.B, self.C, self.END), strict=True))
        matchers, seq = follow("a?b{2}c?")
        self.allowed(matchers, seq, [numbers[name] for name in guesses])
        tokens = [[numbers[name] for name in drawn]]
        assert matchers.read([seq], tokens) == len(drawn) - taken
        assert tokens == [[numbers[name] for name in drawn[:taken]]]
        seq.token_ids.extend(tokens[0])
        is_complete = drawn[:taken].endswith("c")
        assert matchers.end_of(seq) == (("stop", None) if is_complete else None)
        if drawn[:taken] in ("a", "b"):
            assert self.allowed(matchers, seq, []) == ["b"]
