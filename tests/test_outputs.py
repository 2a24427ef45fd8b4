"""A result is a dictionary, as in nano-vLLM, and answers by attributes, as in vLLM."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import greedy

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SampleOutput, SamplingParams, StreamOutput, Timings
from nanoinfer.outputs import Output

TEXT = "ROMEO:\nBut, soft!"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def output(llm: LLM) -> RequestOutput:
    (output,) = llm.generate(TEXT, SamplingParams(max_tokens=6, n=2, seed=1, logprobs=2), use_tqdm=False)
    return output


def results(output: RequestOutput, llm: LLM) -> list[Output]:
    """One result of each kind."""
    return [output, output.samples[1], output.timings, next(llm.stream(TEXT, greedy(1)))]


def annotated(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name in inspect.get_annotations(base)}


class TestAttributes:
    def test_every_annotated_name_is_a_key_and_an_attribute(self, output: RequestOutput, llm: LLM) -> None:
        kinds = [RequestOutput, SampleOutput, Timings, StreamOutput]
        for result, kind in zip(results(output, llm), kinds, strict=True):
            assert type(result) is kind
            assert result.keys() == annotated(kind)
            for name in result:
                assert getattr(result, name) is result[name]

    def test_no_key_hides_a_method_of_a_dictionary(self) -> None:
        for kind in (RequestOutput, SampleOutput, Timings, StreamOutput):
            assert not annotated(kind) & set(dir(dict))

    def test_vllms_names(self, output: RequestOutput) -> None:
        assert output.outputs is output["samples"]
        assert output.finished
        assert [sample.index for sample in output.outputs] == [0, 1]
        first = output.outputs[0]
        assert (first.text, first.token_ids) == (output["text"], output["token_ids"])
        assert (first.finish_reason, first.stop_reason) == ("length", None)
        assert output.request_id == output["request_id"]

    def test_the_prompt(self, llm: LLM) -> None:
        ids = llm.tokenizer.encode(TEXT)
        text, tokens = llm.generate([TEXT, ids], greedy(1), use_tqdm=False)
        assert (text.prompt, text.prompt_token_ids) == (TEXT, ids)
        assert (tokens.prompt, tokens.prompt_token_ids) == (None, ids)

    def test_a_chats_prompt_is_what_its_template_wrote(self, llm: LLM) -> None:
        chat = [{"role": "user", "content": "But, soft!"}]
        (output,) = llm.chat(chat, greedy(1), use_tqdm=False)
        assert output.prompt == llm.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)

    def test_the_cumulative_logprob(self, output: RequestOutput, llm: LLM) -> None:
        for sample in output.outputs:
            told = [entry[token_id] for entry, token_id in zip(sample.logprobs, sample.token_ids, strict=True)]
            assert sample.cumulative_logprob == sum(told) < 0
        assert llm.generate(TEXT, greedy(1), use_tqdm=False)[0].cumulative_logprob is None

    def test_a_wrong_name_is_told_the_right_ones(self, output: RequestOutput) -> None:
        message = "RequestOutput has no 'txet'; known: index, text, .*samples, cumulative_logprob, finished, outputs$"
        with pytest.raises(AttributeError, match=message):
            output.txet  # noqa: B018
        assert not hasattr(output, "txet")
        with pytest.raises(KeyError):
            output["outputs"]


class TestDictionary:
    def test_it_is_equal_to_a_plain_one(self, output: RequestOutput, llm: LLM) -> None:
        for result in results(output, llm):
            assert result == dict(result)
            assert {**result} == result
            assert isinstance(result, dict)

    @pytest.mark.parametrize(
        "copied",
        [copy.copy, copy.deepcopy, *(lambda it, p=p: pickle.loads(pickle.dumps(it, p)) for p in range(6))],
    )
    def test_a_copy_is_equal_and_of_the_same_kind(
        self, copied: Callable[[Any], Any], output: RequestOutput, llm: LLM
    ) -> None:
        for result in results(output, llm):
            other = copied(result)
            assert other == result
            assert type(other) is type(result)
            assert [getattr(other, name) for name in other] == [result[name] for name in result]

    def test_it_is_json(self, output: RequestOutput, llm: LLM) -> None:
        for result in results(output, llm):
            assert json.loads(json.dumps(result)).keys() == result.keys()
        loaded = json.loads(json.dumps(output))
        assert loaded["samples"][0]["text"] == output.text
        assert loaded["prompt"] == TEXT

    def test_it_has_no_room_beside_its_keys(self, output: RequestOutput, llm: LLM) -> None:
        assert not any(hasattr(result, "__dict__") for result in results(output, llm))
