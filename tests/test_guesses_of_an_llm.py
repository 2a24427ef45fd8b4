"""An LLM whose guesses are verified returns what it returns without, whatever is asked for and however it guesses."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.drafters import DRAFTERS as KINDS
from cases.drafters import Moody, Prophet
from conftest import assert_equal, different_settings, greedy, whole_only
from test_not_finite import BAD, GOOD, OPTIONS, folder  # noqa: F401 - a fixture

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.config import Config
from nanoinfer.engine.ranks.workers import WorkerError
from nanoinfer.runner.drafting import verifier
from nanoinfer.runner.logits.lines import StepLines

SPEECHES = [
    "ROMEO:\n",
    "JULIET:\nO Romeo, Romeo!",
    "the sea, the sea, the sea, the",
    "GLOUCESTER:\nNow",
    "A",
    "PAULINA:\n",
]
SETTINGS = [
    SamplingParams(temperature=[0, 0.7, 1.0][i % 3], seed=i, max_tokens=[1, 2, 12, 20][i % 4], n=1 + i % 3, **wish)
    for i, wish in enumerate(
        [
            {},
            {"stop": ["the", " and"]},
            {"stop": "e", "include_stop_str_in_output": True, "min_tokens": 6},
            {"stop_token_ids": list(range(20, 60)), "min_tokens": 3},
            {"ignore_eos": True},
            {"structured_outputs": {"regex": "[a-z ]{5,30}"}},
            {"structured_outputs": {"choice": ["aye", "nay, nay, nay"]}, "stop": "a"},
            {"logprobs": 2, "prompt_logprobs": 1},
            {"stop": "o"},
            {"detokenize": False},
            {"kept_tokens": True, "top_p": 0.9},
            {"kept_tokens": True, "logprobs": 1, "frequency_penalty": 0.4, "top_k": 30},
            {"allowed_token_ids": list(range(3, 1200)), "logprobs": 70},
            {"bad_words": ["the", " of", " my lord"], "top_p": 0.8},
            {"min_tokens": 9, "logit_bias": {2: 4.0, 14: -2.0}, "logprobs": 0},
        ]
    )
]
PARAMS = [*(replace(params, max_tokens=min(params.max_tokens, 16)) for params in different_settings(12)), *SETTINGS]
PROMPTS = [SPEECHES[i % len(SPEECHES)] for i in range(len(PARAMS))]
SOME = slice(None, None, 5)  # of them, where all would take long


def make(**options: Any) -> LLM:
    shape = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kvcache_block_size": 16, "use_tqdm": False}
    return LLM(BUNDLED_MODEL, **{**shape, "num_kvcache_blocks": 300, **options})


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Check that outputs are equal, up to rounding, the tokens that could be drawn included."""
    assert_equal(outputs, expected)
    for output, wanted in zip(outputs, expected, strict=True):
        for sample, own in zip(output.samples, wanted.samples, strict=True):
            assert (sample.kept_tokens is None) == (own.kept_tokens is None)
            kept, wanted_kept = sample.kept_tokens or [], own.kept_tokens or []
            assert [count for count, _ in kept] == [count for count, _ in wanted_kept]
            assert [mass for _, mass in kept] == pytest.approx([mass for _, mass in wanted_kept], abs=1e-4)


def run(llm: LLM, prompts: list[Any] = PROMPTS, params: Any = PARAMS) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with make() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[RequestOutput]:
    return run(plain)


@pytest.fixture(scope="module")
def known(expected: list[RequestOutput]) -> list[list[int]]:
    """The texts that come out."""
    return [output.prompt_token_ids + sample.token_ids for output in expected for sample in output.samples]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make(speculation="suffix") as llm:
        yield llm


DRAFTERS = {**KINDS, "auto": lambda known: "auto"}
SPREAD: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"num_kvcache_blocks": 10, "max_num_batched_tokens": 16, "max_num_seqs": 8, "max_guesses": 15},
    "one row": {"max_num_seqs": 1, "max_guesses": 1},
    "two ranks": {"tensor_parallel_size": 2, "max_guesses": 3},
    "all lines": {},  # are drawn again, as on a GPU, which does not wait for their number
    "two replicas": {"data_parallel_size": 2, "max_num_seqs": 4},
}
TOGETHER = [
    *[(drafter, "roomy") for drafter in DRAFTERS],
    *[("right", spread) for spread in ("tight", "all lines")],
    *[("suffix", spread) for spread in ("one row", "two ranks", "two replicas")],
    *whole_only([("auto", spread) for spread in SPREAD if spread != "roomy"]),
    *whole_only(
        [
            ("alternating", "tight"),
            ("suffix", "tight"),
            ("right", "one row"),
            ("random", "two ranks"),
            ("right", "two replicas"),
        ]
    ),
]


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
        some = SOME if spread == "one row" else slice(None)
        outputs = run(llm, PROMPTS[some], PARAMS[some])
        assert_same(outputs, expected[some])
        assert_counts(llm, outputs)
        assert spread != "tight" or llm.engine.scheduler.num_preemptions > 0


def assert_counts(llm: LLM, outputs: list[RequestOutput]) -> None:
    """The figures of an LLM are the sums of its outputs'."""
    samples, stats = [sample for output in outputs for sample in output.samples], llm.stats()
    assert stats.num_generated_tokens == sum(len(sample.token_ids) for sample in samples)
    assert stats.num_proposed_tokens >= sum(sample.num_proposed_tokens for sample in samples)
    assert stats.num_accepted_tokens == sum(sample.num_accepted_tokens for sample in samples)
    assert all(sample.num_accepted_tokens <= sample.num_proposed_tokens for sample in samples)
    rows = stats.num_decode_tokens - stats.num_accepted_tokens
    assert stats.tokens_per_decode_row == pytest.approx(stats.num_decode_tokens / rows)


WISHES = [
    {"logprobs": 0},
    {"logprobs": 3, "top_p": 0.9},
    {"top_k": 5, "min_p": 0.01},
    {"logit_bias": {14: 1.0}, "allowed_token_ids": list(range(1500))},
    {"bad_words": ["Rom"]},
    {"min_tokens": 30},
    {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"kept_tokens": True, "top_p": 0.9},
]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_rows_that_want_more_than_a_temperature_guess(mode: str) -> None:
    params = [SamplingParams(seed=i, max_tokens=30, ignore_eos=True, **wish) for i, wish in enumerate(WISHES)]
    prompts = SPEECHES[:1] * len(params)
    with make(logprobs_mode=mode) as alone:
        wanted = run(alone, prompts, params)
    known = [output.prompt_token_ids + output.token_ids for output in wanted]
    with make(logprobs_mode=mode, speculation=Prophet(known)) as llm:
        outputs = run(llm, prompts, params)
    assert_same(outputs, wanted)
    assert min(output.num_accepted_tokens for output in outputs) >= 20


def test_guesses_that_hold_save_steps(plain: LLM) -> None:
    prompt, params = SPEECHES[:1], greedy(40, ignore_eos=True)
    (wanted,) = run(plain, prompt, params)
    with make(speculation=Prophet([wanted.prompt_token_ids + wanted.token_ids])) as llm:
        (output,) = run(llm, prompt, params)
        stats = llm.stats()
    assert output.token_ids == wanted.token_ids
    assert output.num_accepted_tokens >= 31  # places for four guesses bring so many, for eight some more
    rows = 39 - output.num_accepted_tokens
    assert rows <= stats.num_decode_steps <= rows + 1  # the host learns of the end one step late
    assert stats.tokens_per_decode_row == 39 / rows
    assert f"guesses: {output.num_accepted_tokens} of {output.num_accepted_tokens} held" in str(stats)


def test_a_stop_string_ends_a_sample_within_a_step(plain: LLM) -> None:
    prompt = SPEECHES[:1]
    (whole,) = run(plain, prompt, greedy(40, ignore_eos=True))
    params = greedy(40, ignore_eos=True, stop=whole.text[12:15])
    wanted = run(plain, prompt, params)
    with make(speculation=Prophet([whole.prompt_token_ids + whole.token_ids])) as llm:
        outputs = run(llm, prompt, params)
        assert_equal(outputs, wanted)
        assert_counts(llm, outputs)
        assert llm.stats().num_generated_tokens == len(wanted[0].token_ids) < 40


def test_streams_have_the_same_tokens(llm: LLM, expected: list[RequestOutput]) -> None:
    texts: dict[tuple[int, int], list[Any]] = {}
    for new in llm.stream(PROMPTS, PARAMS):
        old = texts.setdefault((new.index, new.sample), ["", []])
        texts[new.index, new.sample] = [old[0] + new.text, old[1] + new.token_ids]
    for (index, number), (text, token_ids) in texts.items():
        sample = expected[index].samples[number]
        assert (text, token_ids) == (sample.text, sample.token_ids)


def test_samples_of_a_prompt_guess_from_each_other(plain: LLM, llm: LLM) -> None:
    """Of one seed all samples would be equal: here those of a low temperature nearly are."""
    params = SamplingParams(temperature=0.2, seed=3, n=8, max_tokens=60, ignore_eos=True)
    (wanted,), (output,) = run(plain, SPEECHES[:1], params), run(llm, SPEECHES[:1], params)
    assert_equal([output], [wanted])
    assert sum(sample.num_accepted_tokens for sample in output.samples) > 0


def test_outputs_of_earlier_calls_are_guesses(plain: LLM) -> None:
    """Twelve texts are more than an LLM of two rows keeps unless it is told to."""
    params = greedy(30, ignore_eos=True)
    prompts = [f"{speaker}:\n" for speaker in "ABCDEFGHIJKL"]
    wanted = run(plain, prompts, params)
    with make(speculation="suffix", max_num_seqs=2, remember_outputs=12) as llm:
        assert_equal(run(llm, prompts, params), wanted)
        outputs = run(llm, prompts, params)
        assert_equal(outputs, wanted)
        assert min(output.num_accepted_tokens for output in outputs) > 15


def test_bits_are_those_without_if_sums_have_one_order() -> None:
    some = [1, 2, 5, 12, 14, 18, 21, 22, 24, 25]
    prompts, params = [PROMPTS[i] for i in some], [replace(PARAMS[i], max_tokens=8) for i in some]
    with make(deterministic=True) as alone:
        wanted = run(alone, prompts, params)
    known = [output.prompt_token_ids + sample.token_ids for output in wanted for sample in output.samples]
    with make(deterministic=True, speculation=Prophet(known)) as llm:
        outputs = run(llm, prompts, params)
    assert sum(output.num_accepted_tokens for output in outputs) > 20
    assert [output.samples for output in map(without_counts, outputs)] == [own.samples for own in wanted]


def without_counts(output: RequestOutput) -> RequestOutput:
    copy = pickle.loads(pickle.dumps(output))
    for sample in copy.samples:
        sample["num_proposed_tokens"] = sample["num_accepted_tokens"] = 0
    return copy


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_that_guess_have_their_own_adapters(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    module = "model.layers.3.mlp.down_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.randn(8, 512, generator=generator) / 10,
        f"{module}.lora_B.weight": torch.randn(192, 8, generator=generator) / 10,
    }
    params = [replace(own, adapter=[None, "mine"][i % 2]) for i, own in enumerate(PARAMS)]
    results = []
    for speculation in (None, "suffix"):
        with make(device=device, speculation=speculation, max_adapters=2) as llm:
            llm.load_adapter("mine", tensors, alpha=16)
            results.append(run(llm, params=params))
    assert_equal(results[1], results[0])


def test_it_sleeps_and_takes_new_weights(llm: LLM, expected: list[RequestOutput]) -> None:
    llm.sleep(level=2)
    llm.wake_up()
    llm.load_weights(BUNDLED_MODEL)
    assert_equal(run(llm), expected)


def test_a_step_that_is_interrupted_leaves_nothing(llm: LLM, expected: list[RequestOutput]) -> None:
    stream = llm.stream(PROMPTS, PARAMS)
    for _ in range(10):
        next(stream)
    stream.close()
    assert llm.engine.is_finished
    assert_equal(run(llm), expected)


class GuessesBad:
    """Guesses tokens behind which logits are NaN."""

    def propose(self, rows: Any, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(rows.slots[:, None].expand(-1, most), BAD), torch.full_like(rows.slots, most)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_fault_behind_a_guess_is_nobodys(folder: str, rows: int) -> None:  # noqa: F811
    more = SamplingParams(seed=1, max_tokens=20, top_p=0.9, presence_penalty=0.1, logprobs=2)
    params = [greedy(20, ignore_eos=True), more, replace(more, presence_penalty=0.0, kept_tokens=True)]
    with (
        LLM(folder, **OPTIONS) as alone,
        LLM(folder, **OPTIONS | {"max_num_seqs": rows}, speculation=GuessesBad()) as llm,
    ):
        # Another number of rows may add in another order, and numbers are float16: the last bits of logits are 2e-3.
        assert_equal(run(llm, GOOD, params), run(alone, GOOD, params), rounding=0.02)


def test_it_ends_where_no_token_is_left(plain: LLM) -> None:
    """Of a and b, b alone may follow, and not for long."""
    bans = {"allowed_token_ids": [67, 68], "bad_words": ["aa", "ba", "bbbb"]}
    params = [SamplingParams(temperature=t, seed=i, max_tokens=20, **bans) for i, t in enumerate((0, 1.0, 3.0))]
    wanted = run(plain, SPEECHES[:3], params)
    assert {output.finish_reason for output in wanted} == {"error"}
    known = [[*output.prompt_token_ids, *output.token_ids, 68, 68, 68] for output in wanted]
    with make(speculation=Prophet(known)) as llm:
        outputs = run(llm, SPEECHES[:3], params)
    assert_equal(outputs, wanted)
    assert sum(output.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize("options", [{}, {"attention_backend": "triton", "max_guesses": 2}], ids=str)
def test_what_holds_before_a_fault_stays(folder: str, options: dict[str, Any]) -> None:  # noqa: F811
    """BAD is drawn in a step that also verifies what follows; its row ends with it.

    Triton's attention reads the keys and values of guesses for the tokens before them, too.
    """
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={BAD: 1e9})
    with LLM(folder, **OPTIONS | options, speculation=GuessesBad()) as llm:
        good, bad = run(llm, GOOD[:2], [greedy(3, ignore_eos=True), params])
    assert (len(good.token_ids), good.finish_reason) == (3, "length")
    assert (bad.token_ids, bad.finish_reason) == ([BAD], "error")


def test_all_ranks_verify_the_guesses_of_rank_0(plain: LLM) -> None:
    drafter, few = Moody(), (SPEECHES[:3], [greedy(12), SamplingParams(seed=1, max_tokens=12), greedy(5)])
    with make(speculation=drafter, tensor_parallel_size=2, max_num_seqs=4, max_guesses=3) as llm:
        assert_same(run(llm, *few), run(plain, *few))
        assert llm.stats().num_proposed_tokens > 0
        assert drafter.num_calls > 0


class Falling:
    """Guesses nothing; once it has fallen silent, not even that."""

    is_silent = False

    def propose(self, rows: Any, most: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        guesses = torch.zeros(len(rows.slots), most, dtype=torch.int32)
        return None if self.is_silent else (guesses, torch.zeros_like(rows.slots))


def test_a_drafter_that_fails_ends_all_ranks_at_once() -> None:
    told = r"speculation: Falling\.propose must return guesses of .*, not None$"
    drafter = Falling()
    with make(speculation=drafter, tensor_parallel_size=2, max_num_seqs=4) as llm:
        assert len(run(llm, SPEECHES[:1], greedy(4))) == 1
        drafter.is_silent, begin = True, time.monotonic()
        with pytest.raises(ValueError, match=f"^{told}"):
            run(llm, SPEECHES[:1], greedy(4))
        with pytest.raises(WorkerError, match=f"^this LLM is closed, make another: {told}"):
            run(llm, SPEECHES[:1], greedy(4))
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"speculation": "mtp"}, "speculation='mtp': must be left out for this model: its config names no layer that"),
        (
            {"speculation": "ngram"},
            "speculation='ngram': must be one of 'auto', 'suffix', 'draft', 'mtp', None, or an object with",
        ),
        ({"speculation": 3}, "speculation=3: must be one of"),
        ({"speculation": Moody}, r"speculation=<class '.*Moody'>: must be an object of this class: Moody\(\.\.\.\)"),
        (
            {"speculation": Moody(), "data_parallel_size": 2, "device": "cpu"},
            "speculation=<.*>: must be an object that can be pickled, for each of data_parallel_size=2 replicas gets",
        ),
        ({"max_guesses": 0}, "max_guesses=0: must be an integer from 1 to 15"),
        ({"max_guesses": 16}, "max_guesses=16: must be an integer from 1 to 15"),
        (
            {"speculative_config": {"method": "eagle3"}},
            r"speculative_config=.*: its method must be 'ngram', 'suffix', 'mtp' or",
        ),
        ({"speculative_config": "suffix"}, "speculative_config='suffix': must be a mapping"),
    ],
    ids=repr,
)
def test_what_cannot_be_is_said_at_once(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(BUNDLED_MODEL, **wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"deterministic": True, "dtype": "bfloat16"}], ids=repr)
@pytest.mark.parametrize("drafter", ["suffix", "auto"])
def test_a_gpu_gives_the_same_tokens(drafter: str, options: dict[str, Any]) -> None:
    """Rows come and go, so that graphs have empty rows; and there are more guesses than places."""
    prompts = [SPEECHES[i % len(SPEECHES)] for i in range(40)]
    params = [SamplingParams(temperature=0.3 * (i % 2), seed=i, max_tokens=8 + 5 * (i % 17)) for i in range(40)]
    texts = []
    for speculation in (None, drafter):
        with make(**{"device": "cuda", "speculation": speculation, **options}) as llm:
            first, second = (run(llm, prompts, params) for _ in range(2))
            assert [output.samples[0].token_ids for output in first] == [o.samples[0].token_ids for o in second]
            texts.append([output.samples[0].token_ids for output in first])
            if speculation == "suffix":
                assert sum(output.samples[0].num_accepted_tokens for output in second) > 400
    assert texts[0] == texts[1]


def test_vllms_names_work() -> None:
    with make(speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}) as llm:
        assert (llm.config.speculation, llm.config.max_guesses) == ("suffix", 5)
    assert Config(BUNDLED_MODEL).speculation is None
