"""A SamplingParams may be assigned to and copied, and takes what vLLM's takes; requests keep copies of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from cases.processors import ban_newest
from conftest import greedy

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams

EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "max_tokens": 9,
    "ignore_eos": True,
    "seed": 3,
    "n": 2,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["a"],
    "stop": ["b", "c"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "min_tokens": 2,
    "logprobs": 1,
    "prompt_logprobs": 2,
    "prompt_logprobs_start": 1,
    "kept_tokens": True,
    "entropy": True,
    "hidden_states": [0, -1],
    "prompt_hidden_states": False,
    "skip_special_tokens": False,
    "detokenize": True,
    "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": 7,
    "logits_processors": (ban_newest,),
    "extra_args": {"target": 5},
    "steering": ("mine", 0.5),
    "adapter": "mine",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, dtype="float32", max_model_len=32, num_kvcache_blocks=8) as made:
        yield made


class TestAssignment:
    def test_every_setting(self) -> None:
        params = SamplingParams()
        assert EVERYTHING.keys() == {field.name for field in fields(params)}
        for name, value in EVERYTHING.items():
            setattr(params, name, value)
            assert getattr(params, name) == value
        assert params == SamplingParams(**EVERYTHING)

    def test_an_assigned_value_is_converted_as_a_given_one(self) -> None:
        params = SamplingParams(stop=["a"], stop_token_ids=[5], bad_words=["b"], seed=4)
        params.stop = "x"
        assert params.stop == ["x"]
        params.stop = params.stop_token_ids = params.bad_words = None
        params.seed = -1
        assert params == SamplingParams()

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("n", 0, "n=0: must be an integer from 1"),
            ("min_tokens", 65, "min_tokens=65: must be at most max_tokens=64"),
            ("detokenize", False, r"stop=\['a'\] needs detokenize=True"),
            ("max_tokens", 0, "max_tokens=0: must be at least 1 with prompt_logprobs=None"),
            ("bans", 3, "unknown argument 'bans'"),
            ("temprature", 0, "unknown argument 'temprature': did you mean 'temperature'"),
            ("max_num_seqs", 4, r"unknown argument 'max_num_seqs': write LLM\(max_num_seqs=...\)"),
        ],
    )
    def test_what_is_refused_changes_nothing(self, name: str, value: object, message: str) -> None:
        params = SamplingParams(stop="a")
        with pytest.raises(ValueError, match=message):
            setattr(params, name, value)
        assert vars(params) == vars(SamplingParams(stop="a"))

    def test_a_request_has_the_settings_that_were_there_when_it_was_added(self, llm: LLM) -> None:
        params = greedy(6, ignore_eos=True, logit_bias={5: 99.0}, stop_token_ids=[9])
        numbers = [llm.add_request([30], params)]
        params.max_tokens = 3
        params.logit_bias = {9: 99.0}
        numbers.append(llm.add_request([30], params))
        params.stop_token_ids.clear()
        outputs = {}
        while llm.has_unfinished_requests():
            outputs.update((output.request_id, output) for output in llm.step())
        assert [outputs[number].token_ids for number in numbers] == [[5] * 6, [9]]

    def test_an_entry_that_was_put_into_a_list_is_checked_with_the_request(self, llm: LLM) -> None:
        params = SamplingParams(stop=["a"])
        params.stop.append("")
        with pytest.raises(ValueError, match="stop has ''"):
            llm.generate([[30]], params)


class TestCopies:
    @pytest.mark.parametrize(
        "duplicate",
        [
            copy.copy,
            copy.deepcopy,
            replace,
            SamplingParams.clone,
            lambda params: pickle.loads(pickle.dumps(params)),
            lambda params: SamplingParams(**vars(params)),
        ],
        ids=["copy", "deepcopy", "replace", "clone", "pickle", "vars"],
    )
    def test_a_copy_is_equal_and_may_change(self, duplicate: Callable[[SamplingParams], SamplingParams]) -> None:
        params = SamplingParams(**EVERYTHING)
        other = duplicate(params)
        assert other == params
        assert hash(other) == hash(params)
        other.n, other.stop = 4, "x"
        assert other != params
        assert params == SamplingParams(**EVERYTHING)

    def test_a_clone_shares_nothing(self) -> None:
        params = SamplingParams(**EVERYTHING)
        other = params.clone()
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "structured_outputs"):
            getattr(other, name).clear()
        assert params == SamplingParams(**EVERYTHING)

    def test_a_variant_is_checked(self) -> None:
        assert replace(SamplingParams(**EVERYTHING), n=3) == SamplingParams(**{**EVERYTHING, "n": 3})
        with pytest.raises(ValueError, match="top_p=2: must be"):
            replace(SamplingParams(), top_p=2)


class TestNames:
    def test_lists_are_equal_to_those_that_were_given(self) -> None:
        params = SamplingParams(stop=["b", "a", "b"], stop_token_ids=[4, 3, 4], bad_words=["a", "a"])
        assert params.stop == ["b", "a", "b"]
        assert params.stop_token_ids == [4, 3, 4]
        assert params.bad_words == ["a", "a"]
        assert SamplingParams(stop="a").stop == ["a"]
        assert SamplingParams().stop == SamplingParams().stop_token_ids == SamplingParams().bad_words == []
        assert SamplingParams().allowed_token_ids is None

    def test_none_is_a_default_in_from_optional(self) -> None:
        of_none = SamplingParams.from_optional(**dict.fromkeys(EVERYTHING))
        assert of_none == SamplingParams(max_tokens=None)
        assert SamplingParams.from_optional() == SamplingParams()
        assert SamplingParams.from_optional(**EVERYTHING) == SamplingParams(**EVERYTHING)

    def test_from_optional_takes_the_biases_of_openai(self) -> None:
        made = SamplingParams.from_optional(logit_bias={"5": 1000, 6: -100.5, "7": 2.5})
        assert made.logit_bias == {5: 100, 6: -100, 7: 2.5}
        with pytest.raises(ValueError, match="logit_bias has 'x': 3: must map token ids"):
            SamplingParams.from_optional(logit_bias={"x": 3})
        with pytest.raises(ValueError, match="logit_bias has 5: nan"):
            SamplingParams.from_optional(logit_bias={5: float("nan")})
        with pytest.raises(ValueError, match="logit_bias=5: must be a mapping"):
            SamplingParams.from_optional(logit_bias=5)

    def test_from_optional_refuses_what_the_constructor_refuses(self) -> None:
        for wrong, message in (({"n": 0}, "n=0"), ({"colour": None}, "unknown argument 'colour'")):
            with pytest.raises(ValueError, match=message):
                SamplingParams.from_optional(**wrong)

    def test_true_asks_for_the_likeliest_and_minus_one_for_a_seed_of_the_engine(self) -> None:
        params = SamplingParams(logprobs=True, prompt_logprobs=True, seed=-1)
        assert params == SamplingParams(logprobs=1, prompt_logprobs=1, seed=None)
        assert type(params.logprobs) is type(params.prompt_logprobs) is int

    def test_no_max_tokens_ends_at_max_model_len(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, min_tokens=100)
        (output,) = llm.generate([[30, 31, 32]], params, use_tqdm=False)
        assert len(output.token_ids) == 29
        assert output.finish_reason == "length"
        with pytest.raises(ValueError, match="has 32 tokens: must be fewer than max_model_len=32"):
            llm.generate([[30] * 32], params)

    def test_minus_one_asks_for_the_log_probabilities_of_all_tokens(self, llm: LLM) -> None:
        params = greedy(2, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
        (output,) = llm.generate([[30, 31]], params, use_tqdm=False)
        for entry in (*output.logprobs, output.prompt_logprobs[1]):
            assert sorted(entry) == list(range(2048))
        assert params.logprobs == -1  # the user's own stays as it is

    def test_samples_at_temperature_0_are_alike(self, llm: LLM) -> None:
        (output,) = llm.generate([[30]], greedy(4, n=3), use_tqdm=False)
        assert len({tuple(sample.token_ids) for sample in output.samples}) == 1
