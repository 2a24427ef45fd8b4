"""A result is a dictionary, as in nano-vLLM, and answers by attributes, as in vLLM."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import DEVICE, Oracle, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import BUNDLED_MODEL, LLM, LogProb, RequestOutput, SampleOutput, SamplingParams, StreamOutput, Timings
from nanoinfer.logprob import Candidates
from nanoinfer.requests.outputs import Later, Output
from nanoinfer.runner.logits.logprobs import LogProbs

TEXT = "ROMEO:\nBut, soft!"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=128) as llm:
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

    @pytest.mark.parametrize(
        "read",
        [
            lambda output: output["logprobs"],
            lambda output: output.logprobs,
            lambda output: dict(output)["logprobs"],
            lambda output: {**output}["logprobs"],
            lambda output: (output | {})["logprobs"],
            lambda output: ({} | output)["logprobs"],
            lambda output: output.get("logprobs"),
            lambda output: output.pop("logprobs"),
            lambda output: output.setdefault("logprobs"),
            lambda output: output.copy()["logprobs"],
            lambda output: copy.copy(output).logprobs,
            lambda output: pickle.loads(pickle.dumps(output)).logprobs,
            lambda output: dict(output.items())["logprobs"],
            lambda output: list(output.values())[1],
            lambda output: output.popitem()[1],
            lambda output: dict(ChainMap(output))["logprobs"],
        ],
    )
    def test_a_value_that_is_made_when_it_is_read_is_like_any_other(self, read: Callable[[Output], object]) -> None:
        def fresh() -> Output:
            return Output(text="Soft!", logprobs=Later(lambda: [{7: -1.0}]))

        assert read(fresh()) == [{7: -1.0}]
        plain = {"text": "Soft!", "logprobs": [{7: -1.0}]}
        assert fresh() == fresh() == plain
        assert plain == fresh()
        assert not fresh() != fresh()  # noqa: SIM202 - it has an operator of its own
        assert repr(fresh()) == repr(plain)

    def test_log_probabilities_are_made_once_and_for_those_who_read_them(self, output: RequestOutput, llm: LLM) -> None:
        (output,) = llm.generate(TEXT, SamplingParams(max_tokens=3, n=2, logprobs=1, prompt_logprobs=0), use_tqdm=False)
        assert isinstance(dict.__getitem__(output, "logprobs"), Later)
        assert isinstance(dict.__getitem__(output, "prompt_logprobs"), Later)
        assert output.logprobs is output.samples[0].logprobs is output["logprobs"]
        assert type(output.logprobs) is type(output.prompt_logprobs) is list
        assert isinstance(dict.__getitem__(output.samples[1], "logprobs"), Later)

    def test_it_is_json(self, output: RequestOutput, llm: LLM) -> None:
        for result in results(output, llm):
            assert json.loads(json.dumps(result)).keys() == result.keys()
        loaded = json.loads(json.dumps(output))
        assert loaded["samples"][0]["text"] == output.text
        assert loaded["prompt"] == TEXT

    def test_it_has_no_room_beside_its_keys(self, output: RequestOutput, llm: LLM) -> None:
        assert not any(hasattr(result, "__dict__") for result in results(output, llm))


class TestLogProbs:
    def test_each_is_a_float(self, output: RequestOutput) -> None:
        for entry in output.logprobs:
            for value in entry.values():
                assert isinstance(value, float)
                assert value.logprob == value == float(value) <= 0
                assert (value + 1.0, repr(value)) == (float(value) + 1.0, repr(float(value)))
        assert json.loads(json.dumps(output.logprobs[0])) == {str(key): v for key, v in output.logprobs[0].items()}

    def test_a_rank_counts_the_likelier_tokens_of_the_whole_vocabulary(self, llm: LLM, oracle: Oracle) -> None:
        prompt = llm.tokenizer.encode(TEXT)
        params = SamplingParams(temperature=9.0, max_tokens=20, seed=1, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        tokens = [*prompt, *output.token_ids]
        places = [*output.prompt_logprobs[1:], *output.logprobs]
        ranks = []
        for row, token_id, entry in zip(oracle.logits(tokens), tokens[1:], places, strict=False):
            for told, value in entry.items():
                assert value.rank == 1 + (row > row[told]).sum()
            ranks.append(entry[token_id].rank)
        assert min(ranks) == 1
        assert max(ranks) > 100  # far outside of the top ones

    @settings(deadline=None)
    @given(logits=st.lists(st.sampled_from([-2.5, -1.0, -0.0, 0.0, 1.0, 3.0]), min_size=4, max_size=12))
    def test_equally_likely_tokens_share_a_rank(self, logits: list[float]) -> None:
        vocabulary = range(len(logits))
        counts = [1 + token_id % 4 for token_id in vocabulary]
        rows, token_ids = (torch.tensor(values, device=DEVICE) for values in ([logits] * len(logits), vocabulary))
        logprobs = LogProbs.of(rows, token_ids, counts, list(vocabulary))
        for token_id, *fields in logprobs.entries():
            candidates = Candidates(*fields)
            own, *top = candidates.token_ids
            assert own == token_id
            assert [logits[told] for told in top] == sorted(logits, reverse=True)[: counts[token_id]]
            ranks = {told: value.rank for told, value in candidates.logprobs(None).items()}
            assert ranks == {told: 1 + sum(other > logits[told] for other in logits) for told in (own, *top)}

    def test_tokens_with_few_likely_ones_do_not_pay_for_those_with_all(self) -> None:
        torch.manual_seed(0)
        rows, token_ids = torch.randn((6, 200), device=DEVICE), torch.arange(6, device=DEVICE)
        counts, keys = [1, 200, 0, 5, 100, 200], [5, 4, 3, 2, 1, 0]
        parts, whole = (make(rows, token_ids, counts, keys) for make in (LogProbs.by_count, LogProbs.of))
        assert [part.values.shape[1] - 1 for part in parts] == [5, 200, 100]
        told = [{key: fields for part in each for key, *fields in part.entries()} for each in (parts, [whole])]
        assert told[0] == told[1]

    def test_the_text_of_each_token(self, output: RequestOutput, llm: LLM) -> None:
        for entry in output.logprobs:
            for token_id, value in entry.items():
                assert value.decoded_token == llm.tokenizer.decode([token_id])
        (ended,) = llm.generate(TEXT, greedy(1, logprobs=0, logit_bias={2: 1000.0}), use_tqdm=False)
        assert (ended.text, ended.logprobs[0][2].decoded_token) == ("", llm.tokenizer.eos_token)

    def test_there_is_no_text_where_none_is_made(self, llm: LLM) -> None:
        (output,) = llm.generate(TEXT, greedy(2, logprobs=1, detokenize=False), use_tqdm=False)
        assert all(value.decoded_token is None for entry in output.logprobs for value in entry.values())

    def test_the_text_is_made_when_it_is_asked_for(self) -> None:
        decoded = []
        entry = Candidates([7, 5], [-2.0, -1.0], 3).logprobs(lambda token_ids: f"<{decoded.append(token_ids)}>")
        assert sum(entry.values()) == -3
        assert decoded == []
        assert entry[5].decoded_token == "<None>"
        assert decoded == [[5]]

    @pytest.mark.parametrize("protocol", range(6))
    def test_a_pickle_has_the_text_and_no_tokenizer(self, protocol: int, output: RequestOutput) -> None:
        data = pickle.dumps(output.logprobs, protocol)
        assert b"okenizer" not in data
        for loaded, entry in zip(pickle.loads(data), output.logprobs, strict=True):
            assert loaded == entry
            for token_id, value in loaded.items():
                assert type(value) is LogProb
                assert (value.rank, value.decoded_token) == (entry[token_id].rank, entry[token_id].decoded_token)

    def test_a_stream_has_them_too(self, llm: LLM) -> None:
        params = greedy(4, logprobs=1, prompt_logprobs=0, ignore_eos=True)
        first, *rest = llm.stream(TEXT, params)
        assert first.prompt_logprobs[1:]
        values = [value for new in (first, *rest) for entry in new.logprobs for value in entry.values()]
        assert [value.rank for value in values] == [1] * 4
