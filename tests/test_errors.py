"""Every mistake of a user raises a ValueError that names the argument and what would work, before anything runs."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import alike, greedy
from safetensors.torch import load_file, save_file

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, SamplingParams
from nanoinfer.attention import choose_backend
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import Config
from nanoinfer.integrations.words import ELSEWHERE
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.memory.kv_cache import KVCacheSpec
from nanoinfer.runner.memory.plan import plan_memory
from nanoinfer.runner.memory.state_pool import StateSpec
from nanoinfer.runner.model_runner import ModelRunner

(END,) = Config(BUNDLED_MODEL).eos_token_ids


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, max_model_len=64, num_kvcache_blocks=8) as llm:
        yield llm


def copy_of(model: str, folder: Path, **changes: object) -> str:
    """Copy a model, with some settings of its config.json changed."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", r"prompts\[1\] is empty"),
            ([], r"prompts\[1\] is empty"),
            ([5, 2048], r"prompts\[1\] has token id 2048: must be from 0 to 2047"),
            ([-1], r"prompts\[1\] has token id -1"),
            ([5] * 64, r"prompts\[1\] has 64 tokens: must be fewer than max_model_len=64"),
            ([1.5], r"prompts\[1\] is \[1.5\]: must be a string or a list of token ids"),
            (7, r"prompts\[1\] is 7"),
            (None, r"prompts\[1\] is None"),
            ([2**70], r"prompts\[1\] has token id 1180591620717411303424: must be from 0 to 2047"),
            (["a"], r"prompts\[1\] is \['a'\]"),
            ({5, 6}, r"prompts\[1\] is {5, 6}"),
            (
                "half a pair \udc80",
                r"prompts\[1\] is .*: must have no half of a surrogate pair, as '\\udc80' at \[12\]",
            ),
            (b"bytes", r"prompts\[1\] is b'bytes'"),
            ({1: 2}, r"prompts\[1\] is {1: 2}"),
        ],
        ids=repr,
    )
    def test_a_bad_prompt_is_found_by_its_index_before_the_first_token(
        self, llm: LLM, prompt: object, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            llm.generate([[5], prompt], greedy(1), use_tqdm=False)
        assert llm.engine.is_finished

    @pytest.mark.parametrize(
        ("ask", "where"),
        [
            (lambda llm, text: llm.generate([text]), "prompts[0]"),
            (lambda llm, text: llm.generate({"prompt": text}), "prompts[0]['prompt']"),
            (lambda llm, text: llm.stream(["a", text]), "prompts[1]"),
            (lambda llm, text: llm.add_request(text), "prompt"),
            (lambda llm, text: llm.beam_search([text], BeamSearchParams(2, 2)), "prompts[0]"),
            (lambda llm, text: llm.embed([text]), "prompts[0]"),
            (lambda llm, text: list(llm.embed(iter(["a", text]))), "prompts[1]"),
            (lambda llm, text: llm.tokenize(["a", text]), "texts[1]"),
            (lambda llm, text: llm.score(text, "a"), "prompt"),
            (lambda llm, text: llm.score({"prompt": text}, [5]), "prompt['prompt']"),
            (lambda llm, text: llm.score("a", [" b", text]), "continuations[1]"),
            (lambda llm, text: llm.score([5], text), "continuations[0]"),
            (lambda llm, text: llm.generate("a", SamplingParams(bad_words=[text])), "sampling_params.bad_words"),
        ],
    )
    @pytest.mark.parametrize("half", [chr(0xD83D), chr(0xDE00)], ids=ascii)
    def test_half_a_surrogate_pair_is_found_where_it_is(
        self, llm: LLM, ask: Callable[[LLM, str], object], where: str, half: str
    ) -> None:
        told = f"{where} is {'a' + half!r}: must have no half of a surrogate pair, as {half!r} at [1] is; text.en"
        with pytest.raises(ValueError, match=re.escape(told)):
            ask(llm, f"a{half}")

    def test_what_the_error_says_of_halves_mends_them(self, llm: LLM) -> None:
        """JSON of another program cuts pairs; a score's prompt and continuation may have one half each."""
        with pytest.raises(ValueError, match="half of a surrogate pair") as caught:
            llm.tokenize("\ud83d\ude00 \ud83d")
        remedy = re.search(r"text\.encode\(.*?\)\.decode\(.*?\)", str(caught.value))
        assert eval(remedy[0], {"text": "\ud83d\ude00 \ud83d"}) == "\N{GRINNING FACE} \N{REPLACEMENT CHARACTER}"
        with pytest.raises(ValueError, match=r"^continuations\[0\] is"):
            llm.score("a\ud83d", "\ude00")

    def test_no_prompts_give_no_outputs(self, llm: LLM) -> None:
        assert llm.generate([], greedy(1)) == []

    @pytest.mark.parametrize("prompts", [None, 5, {"text": "prompt"}])
    def test_prompts_that_are_no_list(self, llm: LLM, prompts: object) -> None:
        with pytest.raises(ValueError, match=f"prompts={prompts}: must be a string or a list of prompts"):
            llm.generate(prompts, greedy(1))

    def test_one_prompt_of_token_ids_is_not_taken_for_many(self, llm: LLM) -> None:
        for prompts in ([5, 6], np.array([5, 6])):
            with pytest.raises(ValueError, match=r"must be a list of prompts; pass one prompt's ids as \[\[...\]\]"):
                llm.generate(prompts, greedy(1))

    def test_add_request_takes_one(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="prompt is None: must be a string or a list of token ids"):
            llm.add_request(None)
        for params in ([greedy(1)], [greedy(1), greedy(2)], []):
            with pytest.raises(ValueError, match=r"sampling_params=\[.*: must be a SamplingParams, .*generate and str"):
                llm.add_request([5], params)
        assert llm.engine.is_finished

    def test_a_lone_string_is_a_list_of_one(self, llm: LLM) -> None:
        assert len(llm.generate("ROMEO:", greedy(1), use_tqdm=False)) == 1

    def test_integers_of_any_library_are_token_ids(self, llm: LLM) -> None:
        tensor = torch.tensor([30, 31, 32])
        array = tensor.numpy()
        lists = [
            list(tensor),
            list(array),
            [30, np.uint8(31), tensor[2]],
            array.astype(object),
            array.astype(np.uint16),
        ]
        prompts = [tensor, array, (30, 31, 32), range(30, 33), tensor.tolist(), *lists]
        for many in (prompts, tensor.expand(3, 3), np.stack([array, array])):
            outputs = llm.generate(many, greedy(4), use_tqdm=False)
            assert {tuple(output["token_ids"]) for output in outputs} == {tuple(outputs[0]["token_ids"])}
        for token_ids in prompts:
            assert llm._inputs.check_one(token_ids, None).token_ids == [30, 31, 32]

    @pytest.mark.parametrize(
        "prompt",
        [[5, True], [np.True_, 5], [torch.tensor(True)], torch.tensor([True]), np.array([False, True])],
        ids=repr,
    )
    def test_booleans_are_no_token_ids(self, llm: LLM, prompt: object) -> None:
        message = r"prompts\[0\] is .*: must be a string or a list of token ids, and .*(True|False).* is none"
        with pytest.raises(ValueError, match=message):
            llm.generate([prompt])

    @pytest.mark.parametrize("prompt", [[torch.tensor([5])], torch.tensor(5), np.array([[5, 6]]), [5.0]], ids=repr)
    def test_other_shapes_and_fractions_are_no_token_ids(self, llm: LLM, prompt: object) -> None:
        with pytest.raises(ValueError, match=r"prompt is .*: must be a string or a list of token ids"):
            llm.add_request(prompt)

    def test_a_set_has_no_order_and_a_mapping_no_prompts(self, llm: LLM) -> None:
        for prompts in ({"a", "b"}, {"a": 1}.keys(), {"a": 1}):
            with pytest.raises(ValueError, match=r"prompts=.*: must be a string or a list of prompts"):
                llm.generate(prompts)

    def test_request_ids_are_integers_of_any_library(self, llm: LLM) -> None:
        number = llm.add_request([30], greedy(1))
        for wrong in (number + 1, -1, True, 0.0, "0", None, np.True_, torch.tensor([number])):
            with pytest.raises(ValueError, match=re.escape(f"request_id={wrong!r}: no request has it")):
                llm.abort(wrong)
        llm.abort(np.int64(number))
        assert [output["finish_reason"] for output in llm.step()] == ["abort"]
        llm.abort(torch.tensor(number))  # the request has ended

    def test_a_bar_is_shown_or_not(self, llm: LLM) -> None:
        for call in (llm.generate, llm.chat):
            with pytest.raises(ValueError, match="use_tqdm='no': must be True or False"):
                call(["a"], use_tqdm="no")

    def test_text_needs_a_tokenizer_and_token_ids_do_not(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        folder = Path(copy_of(BUNDLED_MODEL, tmp_path / "bare"))
        for file in folder.glob("tokenizer*"):
            file.unlink()
        bare = make_llm(str(folder))
        (output,) = bare.generate([[30, 31]], greedy(4), use_tqdm=False)
        assert len(output["token_ids"]) == 4
        assert output["text"] == ""
        with pytest.raises(ValueError, match=r"prompts\[0\] is text.*has no tokenizer: pass a list of token ids"):
            bare.generate(["text"], greedy(4))
        with pytest.raises(ValueError, match=r"sampling_params.stop=\['a'\] needs text, but .* has no tokenizer"):
            bare.generate([[30]], greedy(4, stop="a"))
        assert [new["text"] for new in bare.stream([[30, 31]], greedy(2))] == ["", ""]


class TestSamplingParams:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"temperature": -0.1},
            {"temperature": float("nan")},
            {"temperature": float("inf")},
            {"temperature": "hot"},
            {"max_tokens": 0},
            {"max_tokens": 1.5},
            {"max_tokens": -1},
            {"max_tokens": True},
            {"temperature": 10**400},
            {"temperature": 1e39},
            {"ignore_eos": "no"},
            {"seed": -2},
            {"seed": 2**63},
            {"seed": 0.5},
            {"n": 0},
            {"n": True},
            {"n": 10**6 + 1},
            {"top_k": -2},
            {"top_k": 1.5},
            {"top_p": 0},
            {"top_p": 1.1},
            {"top_p": float("nan")},
            {"min_p": -0.1},
            {"min_p": 1.5},
            {"repetition_penalty": 0},
            {"repetition_penalty": float("inf")},
            {"repetition_penalty": 1e-300},
            {"presence_penalty": 2.5},
            {"frequency_penalty": -3},
            {"frequency_penalty": "some"},
            {"logit_bias": 3},
            {"stop_token_ids": 5},
            {"stop_token_ids": {5: 6}},
            {"stop": {"a": "b"}},
            {"include_stop_str_in_output": 1},
            {"min_tokens": -1},
            {"min_tokens": 65},
            {"logprobs": -2},
            {"logprobs": False},
            {"prompt_logprobs": -2},
            {"prompt_logprobs": False},
            {"allowed_token_ids": []},
            {"allowed_token_ids": 5},
            {"bad_words": "a word"},
            {"bad_words": 5},
            {"prompt_logprobs_start": -1},
            {"prompt_logprobs_start": 3},
            {"skip_special_tokens": None},
            {"detokenize": "yes"},
            {"adapter": ""},
            {"adapter": 1},
        ],
        ids=repr,
    )
    def test_a_setting_out_of_range_is_named_with_its_value(self, wrong: dict) -> None:
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: must be")):
            SamplingParams(**wrong)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"logit_bias": {-1: 2.0}}, r"logit_bias has -1: 2.0: must map token ids to numbers from -1e\+30"),
            ({"logit_bias": {1: float("nan")}}, "logit_bias has 1: nan"),
            ({"logit_bias": {1: 10**400}}, "logit_bias has 1: 1000"),
            ({"stop": ["a", ""]}, "stop has '': must be a list of non-empty strings"),
            ({"stop": 5}, "stop=5: must be a list"),
            ({"stop_token_ids": [3, "x"]}, "stop_token_ids has 'x': must be a list of token ids"),
            ({"stop": "a", "detokenize": False}, r"stop=\['a'\] needs detokenize=True"),
            ({"allowed_token_ids": [3, -1]}, "allowed_token_ids has -1: must be a list of token ids"),
            ({"allowed_token_ids": [True]}, "allowed_token_ids has True: must be a list of token ids"),
            ({"bad_words": ["a", ""]}, "bad_words has '': must be a list of non-empty strings"),
            ({"bad_words": [5]}, "bad_words has 5: must be a list of non-empty strings"),
            ({"max_tokens": 0}, "must be at least 1 with prompt_logprobs=None.*; prompt_logprobs=0 scores the prompt"),
            ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n=2: must be 1 with max_tokens=0"),
            ({"max_tokens": 0, "prompt_logprobs": 0, "min_tokens": 1}, "min_tokens=1: must be at most max_tokens=0"),
            ({"prompt_logprobs_start": 3}, "must be 0 without prompt_logprobs; pass prompt_logprobs=0"),
        ],
        ids=repr,
    )
    def test_an_entry_that_does_not_fit_is_named(self, wrong: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**wrong)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"logit_bias": {2048: 1.0}}, r"sampling_params\[1\].logit_bias has token id 2048: must be from 0 to 2047"),
            (
                {"allowed_token_ids": [1, 2**70]},
                r"sampling_params\[1\].allowed_token_ids has token id 1180591620717411303424: must",
            ),
            ({"stop_token_ids": [9999]}, r"sampling_params\[1\].stop_token_ids has token id 9999"),
            (
                {"allowed_token_ids": [5, 2048]},
                r"sampling_params\[1\].allowed_token_ids has token id 2048: must be from",
            ),
            ({"bad_words": ["a", " "]}, r"sampling_params\[1\].bad_words has ' ': must have a character that"),
            (
                {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1},
                r"sampling_params\[1\]: allowed_token_ids, min_tokens and stop_token_ids leave no token",
            ),
            (
                {"allowed_token_ids": [END], "stop_token_ids": [9], "min_tokens": 1},
                r"sampling_params\[1\]: allowed_token_ids and min_tokens leave no token",
            ),
            (
                {"allowed_token_ids": [9, 67], "bad_words": ["a"], "stop_token_ids": [9], "min_tokens": 1},
                "allowed_token_ids, bad_words, min_tokens and stop_token_ids leave no token",
            ),
            (
                {"bad_words": ["a", "b"], "allowed_token_ids": [67, 68]},
                "allowed_token_ids and bad_words leave no token",
            ),
            (
                {"stop_token_ids": range(2048), "min_tokens": 1},
                "min_tokens and stop_token_ids leave no token",
            ),
            ({"logprobs": 2049}, r"sampling_params\[1\].logprobs=2049: the model has 2048 tokens"),
        ],
        ids=repr,
    )
    def test_what_the_model_does_not_have_is_found_before_anything_runs(
        self, llm: LLM, wrong: dict, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            llm.generate([[5], [6]], [greedy(1), SamplingParams(**wrong)])
        assert llm.engine.is_finished

    def test_what_does_not_fit_a_prompt_is_found_before_anything_runs(self, llm: LLM) -> None:
        scored = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=2)
        with pytest.raises(ValueError, match=r"prompt_logprobs_start=2: must be less than 2, the tokens of prompts\[1"):
            llm.generate([[5] * 3, [5] * 2], scored)
        with pytest.raises(ValueError, match=r"prompts\[0\] has 65 tokens: must be at most max_model_len=64"):
            llm.generate([[5] * 65], scored)
        assert llm.engine.is_finished

    def test_lists_of_different_lengths(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
            llm.generate([[5], [6]], [greedy(1)])

    def test_something_else(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match=r"sampling_params\[1\] is 3: must be a SamplingParams"):
            llm.generate([[5], [6]], [greedy(1), 3])
        with pytest.raises(ValueError, match=r"sampling_params={'n': 2}: must be a SamplingParams, or a list of them"):
            llm.generate([[5]], {"n": 2})

    @pytest.mark.parametrize("library", [np.array, torch.tensor])
    def test_numbers_of_any_library_are_numbers(self, library: Callable[..., Any]) -> None:
        params = SamplingParams(
            temperature=library(0.5),
            max_tokens=library(9),
            seed=library(3),
            top_p=library([0.25])[0],
            ignore_eos=library(True),
            logit_bias={library([4])[0].item(): library(2.0), library([5])[0]: library(3)},
            stop_token_ids=library([7, 8]),
            logprobs=library(0),
        )
        assert params == SamplingParams(
            temperature=0.5,
            max_tokens=9,
            seed=3,
            top_p=0.25,
            ignore_eos=True,
            logit_bias={4: 2.0, 5: 3},
            stop_token_ids=[7, 8],
            logprobs=0,
        )
        settings = [getattr(params, field.name) for field in fields(params)]
        for value in (*settings, *params.logit_bias, *params.logit_bias.values(), *params.stop_token_ids):
            assert type(value) in (int, float, bool, dict, list, type(None))

    @pytest.mark.parametrize("wrong", [True, np.True_, torch.tensor(True), np.array([5]), torch.tensor([5])], ids=repr)
    def test_booleans_and_lists_of_one_are_no_numbers(self, wrong: object) -> None:
        for name in ("max_tokens", "n", "min_tokens", "seed", "top_k", "logprobs", "temperature", "min_p"):
            if name == "logprobs" and wrong is True:
                continue  # as 1, in vLLM
            with pytest.raises(ValueError, match=re.escape(f"{name}={wrong!r}: must be")):
                SamplingParams(**{name: wrong})
        with pytest.raises(ValueError, match=r"stop_token_ids has .*: must be a list of token ids"):
            SamplingParams(stop_token_ids=[wrong])
        if isinstance(wrong, Hashable):
            with pytest.raises(ValueError, match=r"logit_bias has .*: must map token ids"):
                SamplingParams(logit_bias={wrong: 1.0})

    def test_integers_without_end(self) -> None:
        for name in ("temperature", "seed", "n"):
            with pytest.raises(ValueError, match=f"{name}=<int>: must be"):
                SamplingParams(**{name: 10**5000})

    def test_a_setting_can_be_a_key(self) -> None:
        assert {SamplingParams(logit_bias={4: 2.0}): 1}[SamplingParams(logit_bias={4: 2.0})] == 1


class TestNames:
    """If an argument does not exist, the error says what to write instead."""

    @pytest.mark.parametrize(
        ("wrong", "hint"),
        [
            ({"max_seq_len": 10}, "did you mean 'max_model_len'"),
            ({"max_modellen": 10}, "did you mean 'max_model_len'"),
            ({"page_size": 16}, "did you mean 'kvcache_block_size'"),
            ({"torch_dtype": "float16"}, "did you mean 'dtype'"),
            ({"model_path": "here"}, "did you mean 'model'"),
            ({"mem_fraction_static": 0.9}, "did you mean 'gpu_memory_utilization'"),
            ({"chunked_prefill_size": 2048}, "did you mean 'max_num_batched_tokens'"),
            ({"random_seed": 5}, "did you mean 'seed'"),
            ({"disable_radix_cache": True}, "leave it out: prompts always share what is computed"),
            ({"max_new_tokens": 5}, r"write SamplingParams\(max_tokens=...\)"),
            ({"temperature": 1}, r"write SamplingParams\(temperature=...\)"),
            ({"use_cache": True}, "leave it out: it is always so"),
            (
                {"lora_modules": {"a": "b"}},
                r"llm.load_adapter\(name, folder\); SamplingParams\(adapter=name\) names it",
            ),
            ({"description": None}, "known: model, max_num_batched_tokens, .*use_tqdm$"),
        ],
        ids=repr,
    )
    def test_of_llm(self, wrong: dict, hint: str) -> None:
        (name,) = wrong
        with pytest.raises(ValueError, match=f"unknown argument '{name}': {hint}"):
            LLM(BUNDLED_MODEL, **wrong)

    @pytest.mark.parametrize(
        ("wrong", "hint"),
        [
            ({"max_new_tokens": 5}, "did you mean 'max_tokens'"),
            ({"stop_strings": "a"}, "did you mean 'stop'"),
            ({"num_return_sequences": 2}, "did you mean 'n'"),
            ({"tempreature": 1}, "did you mean 'temperature'"),
            ({"max_length": 5}, r"SamplingParams\(max_tokens=..., min_tokens=...\) counts generated tokens alone"),
            ({"num_beams": 4}, r"write BeamSearchParams\(beam_width=...\)"),
            ({"max_num_seqs": 4}, r"write LLM\(max_num_seqs=...\)"),
            ({"response_format": None}, "did you mean 'structured_outputs'"),
            ({"json_schema": "{}"}, r"write SamplingParams\(structured_outputs={\"json\": schema}\)"),
            ({"ebnf": "a"}, r"write SamplingParams\(structured_outputs={\"grammar\": text}\)"),
            ({"return_logprob": True}, "did you mean 'logprobs'"),
            ({"colour": 4}, "known: temperature, .*, adapter$"),
        ],
        ids=repr,
    )
    def test_of_sampling_params(self, wrong: dict, hint: str) -> None:
        (name,) = wrong
        for call in (lambda: SamplingParams(**wrong), lambda: replace(SamplingParams(), **wrong)):
            with pytest.raises(ValueError, match=f"unknown argument '{name}': {hint}"):
                call()

    @pytest.mark.parametrize(
        ("call", "wrong", "hint"),
        [
            ("generate", {"prompt_token_ids": [[5]]}, "did you mean 'prompts'"),
            ("generate", {"input_ids": [[5]]}, "did you mean 'prompts'"),
            ("generate", {"sampling_param": None}, "did you mean 'sampling_params'"),
            ("generate", {"max_new_tokens": 5}, r"write SamplingParams\(max_tokens=...\)"),
            ("generate", {"seed": 5}, r"write LLM\(seed=...\) or SamplingParams\(seed=...\)"),
            ("generate", {"messages": []}, r"write chat\(messages=...\)"),
            ("generate", {"enable_lora": True}, r"write LLM\(max_adapters=...\)"),
            ("generate", {"adapter": "mine"}, r"write SamplingParams\(adapter=...\)"),
            ("add_request", {"lora_name": "mine"}, r"write SamplingParams\(adapter=...\)"),
            (
                "stream",
                {"use_tqdm": False},
                r"write LLM\(use_tqdm=...\) or score\(use_tqdm=...\) or generate\(use_tqdm=...\) or chat\(",
            ),
            ("stream", {"prompt": "a"}, "did you mean 'prompts'"),
            ("chat", {"prompts": []}, r"write generate\(prompts=...\) or stream\(prompts=...\)"),
            ("chat", {"message": []}, "did you mean 'messages'"),
            ("chat", {"template_kwargs": {}}, "did you mean 'chat_template_kwargs'"),
            ("chat", {"truncation": True, "max_length": 3}, "a prompt that is too long is refused: cut it before"),
            ("add_request", {"prompts": [5]}, "did you mean 'prompt'"),
            ("add_request", {"prompt_token_ids": [5]}, "did you mean 'prompt'"),
            ("add_request", {"params": None}, "did you mean 'sampling_params'"),
            ("abort", {"id": 5}, "known: request_id"),
        ],
        ids=str,
    )
    def test_of_calls(self, llm: LLM, call: str, wrong: dict, hint: str) -> None:
        name = next(iter(wrong))
        with pytest.raises(ValueError, match=f"unknown argument '{name}': {hint}"):
            getattr(llm, call)(**wrong)

    def test_whatever_others_write_has_a_hint_and_is_no_name_of_ours(self) -> None:
        ours = {*inspect.signature(SamplingParams).parameters, *inspect.signature(Config).parameters}
        for call in (BeamSearchParams, LLM.generate, LLM.chat, LLM.stream, LLM.embed, LLM.add_request, LLM.abort):
            ours |= inspect.signature(call).parameters.keys()
        assert not ours & ELSEWHERE.keys()
        for name, meant in ELSEWHERE.items():
            assert meant in ours or " " in meant, name

    def test_signatures_are_those_that_were_written(self) -> None:
        assert list(inspect.signature(SamplingParams).parameters) == [field.name for field in fields(SamplingParams)]
        names = ["self", "prompts", "sampling_params", "use_tqdm", "lora_request"]
        assert list(inspect.signature(LLM.generate).parameters) == names
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'prompts'"):
            LLM.generate(None)


class TestConfig:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"max_num_batched_tokens": 0},
            {"max_num_seqs": 0},
            {"max_model_len": 1},
            {"gpu_memory_utilization": 0},
            {"gpu_memory_utilization": 1.5},
            {"tensor_parallel_size": 0},
            {"tensor_parallel_size": 9},
            {"kvcache_block_size": 40},
            {"kvcache_block_size": 0},
            {"num_kvcache_blocks": 0},
            {"attention_backend": "flash"},
            {"dtype": "int8"},
            {"device": "tpu"},
            {"seed": -1},
            {"load_format": "gguf"},
            {"worker_timeout": 0.5},
            {"worker_timeout": "never"},
            {"max_num_seqs": "many"},
            {"max_num_seqs": True},
            {"max_num_seqs": np.True_},
            {"kvcache_block_size": 2**31 + 16},
            {"max_adapters": -1},
            {"max_adapters": 1025},
            {"max_adapter_rank": 0},
            {"max_adapter_rank": 513},
            {"num_kvcache_blocks": 2**23 + 1},  # of 256 tokens
            {"max_num_seqs": 10**7},
            {"enforce_eager": "yes"},
            {"use_tqdm": print},
            {"device": "cuda:1"},
        ],
        ids=repr,
    )
    def test_a_knob_out_of_range_is_named_with_its_value(self, wrong: dict) -> None:
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=rf"{name}={value!r}: "):
            LLM(BUNDLED_MODEL, **wrong)

    def test_a_knob_that_is_no_list_is_named_with_its_type(self) -> None:
        with pytest.raises(ValueError, match="device='meta': must be one of 'auto', 'cuda', 'cpu'"):
            LLM(BUNDLED_MODEL, device=torch.device("meta"))
        with pytest.raises(ValueError, match="dtype='int8': must be one of 'auto', 'float32'"):
            LLM(BUNDLED_MODEL, dtype=torch.int8)

    @pytest.mark.parametrize("library", [np.array, torch.tensor])
    def test_numbers_of_any_library_are_numbers(self, library: Callable[..., Any]) -> None:
        wanted = Config(BUNDLED_MODEL, 256, 8, 512, 0.5, 1, True, 32, 64, device="cpu", seed=3, worker_timeout=60)
        config = Config(
            BUNDLED_MODEL,
            max_num_batched_tokens=library(256),
            max_num_seqs=library(8),
            max_model_len=library(512),
            gpu_memory_utilization=library(0.5),
            tensor_parallel_size=library(1),
            enforce_eager=library(True),
            kvcache_block_size=library(32),
            num_kvcache_blocks=library(64),
            device=torch.device("cpu"),
            seed=library(3),
            worker_timeout=library(60),
        )
        assert config == wanted
        for field in fields(Config):
            assert type(getattr(config, field.name)) is type(getattr(wanted, field.name))

    def test_more_rows_than_the_memory_holds(self) -> None:
        message = r"max_num_seqs=1000000: must be at most (\d+), as rows of max_model_len=64 may take 50% of 4.0 GiB"
        with pytest.raises(ValueError, match=message) as error:
            LLM(BUNDLED_MODEL, device="cpu", max_num_seqs=10**6, max_model_len=64)
        most = int(re.search(message, str(error.value))[1])
        with pytest.raises(ValueError, match=f"max_num_seqs={most + 1}: must be at most {most}"):
            LLM(BUNDLED_MODEL, device="cpu", max_num_seqs=most + 1, max_model_len=64)
        with LLM(BUNDLED_MODEL, device="cpu", max_num_seqs=most, max_model_len=64, num_kvcache_blocks=8) as llm:
            (output,) = llm.generate([[30]], greedy(2, presence_penalty=1.0), use_tqdm=False)
        assert len(output["token_ids"]) == 2

    def test_a_step_that_the_gpus_memory_does_not_hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run_out(runner: ModelRunner) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 GiB.")

        monkeypatch.setattr(ModelRunner, "_measure", run_out)
        message = "max_num_batched_tokens=1000000, max_num_seqs=64: .* lower them, .*: CUDA out of memory. Tried"
        with pytest.raises(ValueError, match=message):
            LLM(BUNDLED_MODEL, max_num_batched_tokens=10**6, max_num_seqs=64)
        with pytest.raises(ValueError, match="max_num_seqs=64, max_adapters=9: the GPU's memory does not hold"):
            LLM(BUNDLED_MODEL, max_num_seqs=64, max_adapters=9)

    def test_every_slot_of_the_cache_has_a_number(self, make_qwen3: Callable[..., str]) -> None:
        with pytest.raises(ValueError, match="num_kvcache_blocks=134217729: must be at most 134217728: with kvcache_b"):
            Config(BUNDLED_MODEL, kvcache_block_size=16, num_kvcache_blocks=2**27 + 1)
        assert Config(BUNDLED_MODEL, kvcache_block_size=16, num_kvcache_blocks=2**27).num_kvcache_blocks == 2**27
        spec = KVCacheSpec(alike(16), torch.float16, by_head=False)
        config = Config(BUNDLED_MODEL, kvcache_block_size=16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nanoinfer.runner.memory.plan.CPU_BUDGET", 1 << 40)
            plan = plan_memory(
                config,
                spec,
                StateSpec(alike(16), torch.float16, torch.float32),
                torch.device("cpu"),
                TensorParallel(),
                held=0,
                steps=0,
                graphs=0,
            )
        assert plan.blocks == 2**27 < plan.limit // spec.block_bytes

    def test_a_backend_that_cannot_run_says_why(self) -> None:
        with pytest.raises(ValueError, match="attention_backend='flash_attn': needs device='cuda'"):
            LLM(BUNDLED_MODEL, attention_backend="flash_attn", device="cpu")

    def test_heads_that_flash_attn_cannot_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
        with pytest.raises(ValueError, match="at most 256 numbers, a multiple of 8, not 512; 'triton' and 'torch' do"):
            choose_backend("flash_attn", "cuda", torch.bfloat16, 256, head_dim=512)

    @pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
    def test_a_cache_in_fp8_on_a_gpu_that_lacks_it(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
        with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8': needs a GPU of .* 8.9 or more, not 8.6; 'auto'"):
            choose_backend(backend, "cuda", torch.bfloat16, 256, 64, in_fp8=True)
        assert choose_backend(backend, "cuda", torch.bfloat16, 256, 64) in ("triton", "torch")

    def test_more_ranks_than_gpus(self) -> None:
        if (count := torch.cuda.device_count()) >= 8:
            pytest.skip("this machine has GPUs enough")
        with pytest.raises(ValueError, match="tensor_parallel_size=8: this machine has" if count else "no CUDA device"):
            LLM(BUNDLED_MODEL, tensor_parallel_size=8, device="cuda")

    @pytest.mark.parametrize(
        ("ranks", "shape", "reason"),
        [
            (3, {}, "num_attention_heads=4 is not divisible"),
            (4, {"intermediate_size": 90}, "intermediate_size=90 is not divisible"),
            (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "num_key_value_heads=6 neither divides it nor"),
            (4, {"vocab_size": 15}, "vocab_size=15 is too small"),
        ],
    )
    def test_what_the_ranks_cannot_share(
        self, ranks: int, shape: dict[str, int], reason: str, make_qwen3: Callable[..., str]
    ) -> None:
        with pytest.raises(ValueError, match=f"tensor_parallel_size={ranks}: {reason}"):
            LLM(make_qwen3(**shape), tensor_parallel_size=ranks, device="cpu")

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_more_blocks_than_the_memory_holds(self, device: str, make_qwen3: Callable[..., str]) -> None:
        """16 TiB; 2 TiB on a GPU, by the usual shape, for which other tests have compiled."""
        if device == "cpu" and Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
            pytest.skip("this machine promises any memory")
        with pytest.raises(ValueError, match=r"num_kvcache_blocks=8000000: a KV cache of .* GiB does not fit"):
            LLM(
                make_qwen3(**({} if device == "cuda" else {"head_dim": 256})),
                device=device,
                num_kvcache_blocks=8 * 10**6,
            )

    def test_torchs_own_dtype(self) -> None:
        assert Config(BUNDLED_MODEL, dtype=torch.bfloat16).dtype == "bfloat16"

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    @pytest.mark.parametrize("can", [True, False])
    def test_a_cpu_that_cannot_multiply_bfloat16_is_told_of(
        self, can: bool, machine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: can)
        Config(BUNDLED_MODEL, device="cpu", dtype="bfloat16")
        assert ("faster in float32" in caplog.text) == (machine == "x86_64" and not can)

    def test_a_cache_that_does_not_fit_the_cpus_budget(self) -> None:
        with pytest.raises(ValueError, match=r"MiB.*max_model_len=.*needs.*MiB.*num_kvcache_blocks"):
            LLM(BUNDLED_MODEL, device="cpu", kvcache_block_size=1 << 20)


class TestModel:
    @pytest.mark.parametrize("path", ["x" * 5000, "\0", "~nobody-here/model", "a\nb", "..../", " "], ids=ascii)
    def test_a_path_that_can_be_nothing(self, path: str) -> None:
        with pytest.raises(ValueError, match=r"^model=.*: no such folder"):
            LLM(path)

    def test_a_path_that_is_nothing(self) -> None:
        with pytest.raises(ValueError, match="model='/no/such/folder': no such folder"):
            LLM("/no/such/folder")

    def test_a_file_of_the_model(self) -> None:
        with pytest.raises(ValueError, match=r"config.json': is a file; give the folder"):
            LLM(f"{BUNDLED_MODEL}/config.json")

    def test_a_hub_id_that_cannot_be_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match="model='nobody/nothing-here': no such folder, and the Hugging Face Hub"):
            LLM("nobody/nothing-here")

    def test_a_folder_that_is_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"has no config\.json"):
            LLM(str(tmp_path))

    def test_a_config_that_is_no_json(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"cannot read its config\.json"):
            LLM(str(tmp_path))

    @pytest.mark.parametrize(
        ("architecture", "model_type"),
        [("MambaForCausalLM", "mamba"), ("T5ForConditionalGeneration", "t5"), ("FutureForCausalLM", "future")],
    )
    def test_an_unsupported_architecture_names_those_that_are(
        self, architecture: str, model_type: str, tmp_path: Path
    ) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m", architectures=[architecture], model_type=model_type)
        with pytest.raises(ValueError, match=rf"'{architecture}' is not supported; supported: .*Qwen3ForCausalLM"):
            LLM(folder)

    def test_a_config_that_names_no_architecture(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match=r"without 'architectures' is not supported; supported: .*Qwen3ForCausalLM"
        ):
            LLM(copy_of(BUNDLED_MODEL, tmp_path / "m", architectures=None))
        with pytest.raises(ValueError, match=r"architectures='Qwen3ForCausalLM' .*must be a list of names"):
            LLM(copy_of(BUNDLED_MODEL, tmp_path / "m", architectures="Qwen3ForCausalLM"))

    def test_a_broken_generation_config(self, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        (Path(folder) / "generation_config.json").write_text("[")
        with pytest.raises(ValueError, match=r"cannot read its generation_config\.json"):
            LLM(folder)

    @pytest.mark.parametrize("eos", ["2", 2.0, [[2]], {"a": 1}], ids=repr)
    def test_an_end_of_sequence_id_that_is_no_integer(self, eos: object, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        with pytest.raises(ValueError, match=r"eos_token_id|generation_config"):
            LLM(folder)

    def test_an_end_of_sequence_id_that_is_no_tokens_ends_nothing(self, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m", eos_token_id=-1)
        (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 10**9]}))
        with LLM(folder, num_kvcache_blocks=16) as llm:
            assert llm.config.eos_token_ids == {2}
            (output,) = llm.generate([[30]], greedy(4, min_tokens=4), use_tqdm=False)
        assert len(output["token_ids"]) == 4

    def test_a_dtype_that_we_lack(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.open(copy_of(BUNDLED_MODEL, tmp_path / "m", dtype="float64"))
        with pytest.raises(ValueError, match="dtype='auto': the checkpoint's is float64; choose one of float32"):
            checkpoint.resolve_dtype("auto", "cuda")

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
            {"quantization_config": {"quant_method": "hqq"}},
            {"layer_types": ["sliding_attention"] * 4},  # without use_sliding_window
            {"hidden_act": "tanh"},
            {"is_causal": False},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_what_a_config_asks_for_and_we_lack_is_named(self, changes: dict, tmp_path: Path) -> None:
        name = "rope_type" if "rope_parameters" in changes else next(iter(changes))
        with pytest.raises(ValueError, match=f"{name}=.*is not supported"):
            LLM(copy_of(BUNDLED_MODEL, tmp_path / "m", **changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_key_value_heads": 3}, r"num_key_value_heads=3 .* must be a divisor of num_attention_heads="),
            ({"num_key_value_heads": 0}, "num_key_value_heads=0 .* must be an integer of at least 1"),
            ({"num_attention_heads": 0}, "num_attention_heads=0 .* must be"),
            ({"head_dim": 0}, "head_dim=0 .* must be"),
            ({"intermediate_size": 0}, "intermediate_size=0 .* must be"),
            ({"num_hidden_layers": 0, "layer_types": None}, "num_hidden_layers=0 .* must be"),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0 .* must be"),
            ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "8"}}, "factor='8' .* must be"),
        ],
        ids=str,
    )
    def test_a_number_in_a_config_that_makes_no_model_is_named(
        self, changes: dict, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=message):
            LLM(copy_of(BUNDLED_MODEL, tmp_path / "m", **changes))

    def test_no_weights(self, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        (Path(folder) / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
            LLM(folder)

    def test_a_broken_weights_file(self, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        file = Path(folder) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
            LLM(folder)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda w: w.pop("model.norm.weight"), r"missing: model\.norm\.weight\."),
            (lambda w: w.update(extra=torch.zeros(1)), r"unknown: extra\."),
            (
                lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
                r"model\.norm\.weight has shape \[3\], but the model needs \[192\]",
            ),
        ],
        ids=["missing", "extra", "mis-shaped"],
    )
    def test_a_weight_that_does_not_fit_is_named(self, edit: Callable, message: str, tmp_path: Path) -> None:
        folder = copy_of(BUNDLED_MODEL, tmp_path / "m")
        file = Path(folder) / "model.safetensors"
        weights = load_file(file)
        edit(weights)
        save_file(weights, file)
        with pytest.raises(ValueError, match=message):
            LLM(folder)


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


ANYTHING = [
    None, True, 0, 1, -1, 5, 64, 2**31, 2**63, 10**400, 10**5000, 0.5, 1e31, float("inf"), float("nan"), 1j,
    "", "a", "\0", "\ud800", b"a", memoryview(b"ab"), [], [5], [[5]], [True], ["a"], [None], [5, "a"], [10**5000], (5,),
    {}, {5: 6}, {"a": 1}, {5: None}, {10**5000: 1}, {True: 1.0}, {5}, range(3), np.int8(5), np.float16(0.5), np.True_,
    np.timedelta64(5, "ns"), np.array(5), np.array("a"), np.array([5, 6]), np.array([[5]]), np.array([]),
    torch.tensor(5), torch.tensor(True), torch.tensor([5]), torch.tensor(1.5), torch.ones(2, device="meta"),
    torch.tensor(True, device="meta"), torch.float16, torch.device("meta"), Fraction(10**400), int, object(),
    np.array([None]), Unshowable(), [Unshowable()], MagicMock(), SamplingParams(), [SamplingParams()], SamplingParams,
]  # fmt: skip


class TestAnything:
    """Every value that a user passes works, or a ValueError names it."""

    @pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
    def test_in_sampling_params(self, name: str) -> None:
        for value in ANYTHING:
            with named_errors(name):
                SamplingParams(**{name: value})

    @pytest.mark.parametrize("name", [field.name for field in fields(Config) if field.init and field.name != "model"])
    def test_in_options(self, name: str) -> None:
        for value in ANYTHING:
            with named_errors(name):
                Config(BUNDLED_MODEL, **{name: value})

    def test_in_models(self) -> None:
        for value in ANYTHING:
            with named_errors("model="):
                Config(value)

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            ("generate", "prompts"),
            ("generate", "sampling_params"),
            ("generate", "use_tqdm"),
            ("stream", "prompts"),
            ("stream", "sampling_params"),
            ("chat", "messages"),
            ("chat", "sampling_params"),
            ("chat", "use_tqdm"),
            ("add_request", "prompt"),
            ("add_request", "sampling_params"),
            ("abort", "request_id"),
        ],
    )
    def test_in_calls(self, llm: LLM, call: str, name: str) -> None:
        others = {
            "generate": {"prompts": [[5]], "sampling_params": greedy(2), "use_tqdm": False},
            "stream": {"prompts": [[5]], "sampling_params": greedy(2)},
            "chat": {"messages": [{"role": "user", "content": "a"}], "sampling_params": greedy(2), "use_tqdm": False},
            "add_request": {"prompt": [5], "sampling_params": greedy(2)},
            "abort": {},
        }[call]
        for value in ANYTHING:
            with named_errors(name):
                result = getattr(llm, call)(**{**others, name: value})
                if call == "stream":
                    list(result)
                while llm.has_unfinished_requests():
                    llm.step()
        assert llm.engine.is_finished


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if name not in str(error):
            raise


def test_two_threads_at_once(make_llm: Callable[..., LLM]) -> None:
    """The second thread's call is refused, and the first thread gets its tokens."""
    llm, outputs = make_llm(), []
    first = threading.Thread(target=lambda: outputs.extend(llm.generate([[5]], greedy(100, ignore_eos=True))))
    first.start()
    while not llm.engine.scheduler.running:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="another thread is generating"):
        llm.generate([[5]])
    first.join()
    assert len(outputs[0]["token_ids"]) == 100


def test_generate_after_close(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate([[5]])
