"""Outputs have the form that structured_outputs asks for, whatever else a request asks for, alone and in company."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Oracle, assert_equal, whole_only

pytest.importorskip("llguidance", reason="structured outputs need the llguidance package")
jsonschema = pytest.importorskip("jsonschema", reason="the tests validate outputs by the jsonschema package")

import llguidance
import llguidance.hf

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.grammar.grammar import Grammars
from nanoinfer.kernels.sampling.masks import apply_masks
from nanoinfer.structured_outputs import KINDS

NUM_SCHEMAS = int(os.environ.get("NANOINFER_TEST_SCHEMAS", "100"))
PROMPT = "ROMEO:\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def guided(seed: int = 0, max_tokens: int = 200, **settings: Any) -> SamplingParams:
    """SamplingParams of a request for a PERSON, unless `settings` ask for another form."""
    return SamplingParams(seed=seed, max_tokens=max_tokens, **{"structured_outputs": {"json": PERSON}, **settings})


def generate(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    count = len(params) if isinstance(params, list) else 1
    return llm.generate([PROMPT] * count, params, use_tqdm=False)


def random_schema(rand: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema that bounds its texts, so that a sample comes to its end."""

    def string() -> dict[str, Any]:
        return {"type": "string", "minLength": rand.randint(0, 2), "maxLength": rand.randint(2, 8)}

    def integer() -> dict[str, Any]:
        low = rand.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rand.randint(0, 500)}

    def array() -> dict[str, Any]:
        least = rand.randint(0, 2)
        items = random_schema(rand, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rand.randint(0, 2)}

    def an_object() -> dict[str, Any]:
        names = rand.sample(["name", "age", "née", "a b", 'x"y', "id", "\n"], rand.randint(1, 3))
        required = [name for name in names if rand.random() < 0.7]
        properties = {name: random_schema(rand, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    leaves = [
        string,
        integer,
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": rand.sample(["red", "grün", 3, 1.5, None, True, '\\"', [1], {"a": 2}], 3)},
        lambda: {"const": rand.choice(["yes", 7, {"k": [None]}])},
        lambda: {"type": "string", "pattern": rand.choice(["^[a-f]{1,4}$", "^(ab|c)[0-9]{2}$", "^x?y{0,3}$"])},
        lambda: {"type": "string", "format": rand.choice(["date", "ipv4"])},
    ]
    branches = [array, an_object, an_object, lambda: {"anyOf": [random_schema(rand, depth - 1) for _ in range(2)]}]
    return rand.choice(branches if depth == 2 else leaves + branches if depth else leaves)()


def random_settings(index: int, schema: dict[str, Any]) -> SamplingParams:
    rand = random.Random(index)
    return SamplingParams(
        temperature=1.0,
        seed=rand.choice([None, index]),
        n=rand.choice([1, 1, 2, 3]),
        max_tokens=1000,
        min_tokens=rand.choice([0, 0, 4, 20, 1000]),
        ignore_eos=rand.random() < 0.2,
        logprobs=rand.choice([None, None, 0, 2]),
        top_k=rand.choice([0, 0, 5]),
        top_p=rand.choice([1.0, 0.7]),
        min_p=rand.choice([0.0, 0.1]),
        repetition_penalty=rand.choice([1.0, 1.0, 1.3]),
        presence_penalty=rand.choice([0.0, 1.5]),
        logit_bias=rand.choice([None, {2: 20.0, 95: -9.0}]),  # towards an early end
        stop=rand.choice([None, "never to be found"]),
        structured_outputs={"json": rand.choice([schema, json.dumps(schema)])},
    )


def assert_valid(output: RequestOutput, schema: dict[str, Any]) -> None:
    for sample in output["samples"]:
        assert sample["finish_reason"] == "stop", sample
        jsonschema.validate(json.loads(sample["text"]), schema)


@pytest.mark.parametrize("first", [0, *whole_only([1, 2])])
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_every_output_is_valid_by_its_schema(options: dict, first: int, make_llm: Callable[..., LLM]) -> None:
    """Of every third schema. NANOINFER_TEST_SCHEMAS=1000 tries more."""
    seeds = range(first, NUM_SCHEMAS if not options else 30, 3)
    schemas = [random_schema(random.Random(seed)) for seed in seeds]
    params = [random_settings(index, schema) for index, schema in zip(seeds, schemas, strict=True)]
    llm = make_llm(device="cpu", max_num_seqs=64, **options)
    for output, schema in zip(generate(llm, params), schemas, strict=True):
        assert_valid(output, schema)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_processed_logprobs_are_those_of_the_tokens_that_the_form_allows(
    options: dict, make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(device="cpu", logprobs_mode="processed_logprobs", **options)
    params = [guided(seed, logprobs=2048, top_p=top_p, max_tokens=40) for seed in range(3) for top_p in (1.0, 0.9)]
    for output in generate(llm, params):
        for entry, token in zip(output["logprobs"], output["token_ids"], strict=True):
            assert sum(map(math.exp, entry.values())) == pytest.approx(1, abs=1e-5)
            assert token in entry
            assert len(entry) < 2000  # no place of a person allows every token


def test_kept_tokens_lead_from_the_models_logprobs_to_the_processed_ones(make_llm: Callable[..., LLM]) -> None:
    raw, processed = (
        generate(make_llm(logprobs_mode=mode), guided(5, logprobs=0, top_p=0.9, max_tokens=40, kept_tokens=True))[0]
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert raw["token_ids"] == processed["token_ids"]
    assert raw["kept_tokens"] == processed["kept_tokens"]
    log_mass = sum(mass for _, mass in raw["kept_tokens"])
    assert processed.cumulative_logprob == pytest.approx(raw.cumulative_logprob - log_mass, abs=1e-3)
    assert min(count for count, _ in raw["kept_tokens"]) == 1  # a form leaves no choice in some places


class TestForms:
    @pytest.mark.parametrize(
        ("wanted", "pattern"),
        [
            ({"regex": r"[0-9]{3}-[a-f]{2,4}"}, r"[0-9]{3}-[a-f]{2,4}"),
            ({"choice": ["to be", "not to be", "to"]}, "to be|not to be|to"),
            ({"choice": ['a "quoted" \\ one\n', "née 😀"]}, 'a "quoted" \\\\ one\n|née 😀'),
            ({"grammar": 'start: "x" DIGIT+ "!" | "y"\nDIGIT: /[0-9]/'}, r"x[0-9]+!|y"),
            ({"grammar": 'root ::= item ("," item){2}\nitem ::= [a-c] | "no"'}, r"([a-c]|no)(,([a-c]|no)){2}"),
            ({"json": {"enum": ["Verona", 4]}}, '"Verona"|4'),
        ],
        ids=str,
    )
    def test_a_text_matches_its_form(self, wanted: dict, pattern: str, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        outputs = generate(llm, [guided(seed, temperature=3.0, structured_outputs=wanted) for seed in range(20)])
        assert all(re.fullmatch(pattern, output["text"]) for output in outputs)
        assert {output["finish_reason"] for output in outputs} == {"stop"}
        assert len({output["text"] for output in outputs}) > 1

    def test_there_may_be_thousands_of_choices(self, make_llm: Callable[..., LLM]) -> None:
        choices = [f"{number:x}" for number in range(20000)]
        outputs = generate(make_llm(), [guided(seed, structured_outputs={"choice": choices}) for seed in range(5)])
        assert {output["text"] for output in outputs} <= set(choices)

    def test_json_object_is_any_object(self, make_llm: Callable[..., LLM]) -> None:
        params = guided(structured_outputs={"json_object": True}, logit_bias={95: 100.0}, n=4)  # } where it may be
        (output,) = generate(make_llm(), params)
        assert all(isinstance(json.loads(sample["text"]), dict) for sample in output["samples"])

    def test_a_class_with_a_schema_stands_for_it(self, make_llm: Callable[..., LLM]) -> None:
        class Person:
            @classmethod
            def model_json_schema(cls) -> dict[str, Any]:
                return PERSON

        llm = make_llm()
        of_class, of_schema = generate(llm, [guided(structured_outputs={"json": form}) for form in (Person, PERSON)])
        assert of_class["text"] == of_schema["text"]

    def test_greedy_tokens_are_the_likeliest_that_are_allowed(
        self, make_llm: Callable[..., LLM], oracle: Oracle
    ) -> None:
        """transformers generates with a function that says which tokens are allowed."""
        llm = make_llm()
        tokenizer = llguidance.hf.from_tokenizer(llm.tokenizer)
        schema = llguidance.LLMatcher.grammar_from_json_schema(PERSON, defaults={"whitespace_pattern": "[ ]?"})
        prompt = llm.tokenizer.encode(PROMPT)

        def allowed(batch: int, tokens: torch.Tensor) -> list[int]:
            matcher = llguidance.LLMatcher(tokenizer, schema)
            assert matcher.consume_tokens(tokens[len(prompt) :].tolist())
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            return np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()

        out = oracle.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=100,
            do_sample=False,
            pad_token_id=0,
            prefix_allowed_tokens_fn=allowed,
        )
        (output,) = generate(llm, guided(temperature=0))
        eos = [2]  # transformers draws it where the text can only end
        assert [*output["token_ids"], *eos] == out[0, len(prompt) :].tolist()

    def test_logprobs_are_the_models_own(self, make_llm: Callable[..., LLM], oracle: Oracle) -> None:
        llm = make_llm()
        (output,) = generate(llm, guided(logprobs=2))
        prompt = output["prompt_token_ids"]
        expected = oracle.logits([*prompt, *output["token_ids"]]).log_softmax(-1)[len(prompt) - 1 :]
        for entry, token_id, row in zip(output["logprobs"], output["token_ids"], expected, strict=False):
            assert entry.keys() == {token_id, *row.topk(2).indices.tolist()}
            assert entry[token_id] == pytest.approx(row[token_id].item(), abs=1e-4)


class TestEnds:
    """A text that can only end, ends; one that may go on ends with an end-of-sequence token."""

    @pytest.mark.parametrize("settings", [{}, {"ignore_eos": True}, {"min_tokens": 30}, {"max_tokens": 3}], ids=str)
    def test_without_a_further_token(self, settings: dict, make_llm: Callable[..., LLM]) -> None:
        (output,) = generate(make_llm(), guided(**{"structured_outputs": {"regex": "[qz]{3}"}, **settings}))
        assert len(output["text"]) == len(output["token_ids"]) == 3
        assert (output["finish_reason"], output["stop_reason"]) == ("stop", None)

    def test_an_empty_text_is_an_end_of_sequence_token(self, make_llm: Callable[..., LLM]) -> None:
        (output,) = generate(make_llm(), guided(structured_outputs={"regex": "()"}, min_tokens=9, ignore_eos=True))
        assert (output["text"], output["token_ids"], output["finish_reason"]) == ("", [2], "stop")

    def test_min_tokens_let_it_go_on(self, make_llm: Callable[..., LLM]) -> None:
        wanted, eager = {"regex": "[qz]{1,9}"}, {2: 100.0}  # to end
        early, late = generate(
            make_llm(),
            [guided(structured_outputs=wanted, logit_bias=eager, min_tokens=least) for least in (0, 5)],
        )
        assert (len(early["text"]), len(late["text"])) == (1, 5)
        assert [output["token_ids"][-1] for output in (early, late)] == [2, 2]

    def test_stop_strings_and_stop_tokens_cut_it(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        whole, stopped, by_token = generate(
            llm, [guided(), guided(stop='"age"'), guided(stop_token_ids=llm.tokenizer.encode(":"))]
        )
        assert stopped["text"] == whole["text"][: whole["text"].index('"age"')]
        assert by_token["text"] == whole["text"][: whole["text"].index(":")]
        assert stopped["stop_reason"] == '"age"'
        assert by_token["finish_reason"] == "stop"

    def test_max_tokens_cut_it(self, make_llm: Callable[..., LLM]) -> None:
        (output,) = generate(make_llm(), guided(max_tokens=5))
        assert (len(output["token_ids"]), output["finish_reason"]) == (5, "length")

    def test_a_grammar_that_grows_too_complex_ends_its_sample_alone(
        self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(llguidance, "LLParserLimits", partial(llguidance.LLParserLimits, step_max_items=20))
        ambiguous = 'start: "Q" (x | y | z)\nx: "a"* y*\ny: "a" z* | x\nz: "ab" x* "b"?'
        llm = make_llm()
        failed, fine = generate(llm, [guided(structured_outputs={"grammar": ambiguous}), SamplingParams(seed=1)])
        assert failed["finish_reason"] == "error"
        assert "structured_outputs: the grammar grew too complex to follow: write it" in failed["stop_reason"]
        assert fine["text"] == generate(llm, SamplingParams(seed=1))[0]["text"]


COMPANY = [
    guided(seed, **settings)
    for seed, settings in enumerate(
        [
            {},
            {"top_k": 5},
            {"structured_outputs": None},
            {"n": 2},
            {"structured_outputs": {"regex": "[a-z ]{20}"}, "logprobs": 1},
            {"structured_outputs": None, "top_p": 0.8, "max_tokens": 30},
            {"repetition_penalty": 1.2, "min_tokens": 12},
            {"stop": '"likes"'},
            {"structured_outputs": {"choice": ["yes", "no"]}},
        ]
    )
]


@pytest.fixture(scope="module")
def expected_alone() -> list[RequestOutput]:
    with LLM(BUNDLED_MODEL, device="cpu", kvcache_block_size=16, num_kvcache_blocks=200) as llm:
        return [generate(llm, params)[0] for params in COMPANY]


class TestCompany:
    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize(
        "options",
        [
            *whole_only([{}, {"max_num_batched_tokens": 5}]),
            *whole_only([{"kvcache_block_size": 16, "num_kvcache_blocks": 13, "max_model_len": 208}]),
            *whole_only([{"max_num_seqs": 3}]),
            {"tensor_parallel_size": 2},
        ],
        ids=["roomy", "chunked", "preempted", "few rows", "two ranks"],
    )
    def test_each_request_is_what_it_is_alone(
        self, options: dict, expected_alone: list[RequestOutput], make_llm: Callable[..., LLM]
    ) -> None:
        together = make_llm(device="cpu", **options)
        own = slice(4, 6) if "tensor_parallel_size" in options else slice(None)  # short ones, for two ranks take long
        assert_equal(generate(together, COMPANY[own]), expected_alone[own])
        assert (together.engine.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in options)
        assert not together.engine.matchers._followed

    def test_more_guided_rows_than_are_drawn_at_once(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(max_num_seqs=160)
        short = {"type": "string", "minLength": 1, "maxLength": 6}
        (output,) = generate(llm, guided(n=150, structured_outputs={"json": short}))
        assert_valid(output, short)
        assert len({sample["text"] for sample in output["samples"]}) > 20

    def test_streams_give_the_same_text(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        params = [guided(seed, n=2) for seed in range(2)]
        texts: dict[tuple[int, int], str] = {}
        for new in llm.stream([PROMPT] * 2, params):
            place = new["index"], new["sample"]
            texts[place] = texts.get(place, "") + new["text"]
        expected = generate(llm, params)
        assert texts == {(i, j): expected[i]["samples"][j]["text"] for i in range(2) for j in range(2)}

    def test_an_aborted_request_leaves_the_others_alone(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        expected = generate(llm, guided(1, 30))[0]
        aborted, kept = (llm.add_request(PROMPT, guided(seed, 30)) for seed in (0, 1))
        outputs: dict[int, RequestOutput] = {}
        for step in range(1000):
            if step == 4:
                llm.abort(aborted)
            outputs |= {output["request_id"]: output for output in llm.step()}
            if not llm.has_unfinished_requests():
                break
        assert outputs[aborted]["finish_reason"] == "abort"
        assert outputs[kept]["text"] == expected["text"]
        assert not llm.engine.matchers._followed

    def test_a_failed_step_frees_the_matchers(
        self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_llm()
        monkeypatch.setattr(llm.engine.matchers, "masks", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(llm, guided())
        monkeypatch.undo()
        assert not llm.engine.matchers._followed
        assert_valid(generate(llm, guided())[0], PERSON)

    def test_masks_are_made_while_the_next_step_runs(
        self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, calls = make_llm(), []
        call, read_back = llm.engine.ranks.runner.call, llm.engine._read_back
        monkeypatch.setattr(llm.engine.ranks.runner, "call", lambda *args: calls.append(args[0]) or call(*args))
        monkeypatch.setattr(llm.engine, "_read_back", lambda done: calls.append("read") or read_back(done))
        generate(llm, guided(structured_outputs={"regex": "[qz]{3}"}))
        assert calls == ["launch", "draw_guided", *["launch", "read", "draw_guided"] * 3, "read"]
        calls.clear()
        generate(llm, SamplingParams(max_tokens=3, ignore_eos=True))
        assert calls == ["run", *["run", "read"] * 2, "read"]


@pytest.mark.parametrize(("vocab_size", "eos"), [(2100, [2, 1]), (900, [1]), (2048, None)])
def test_the_model_may_differ_from_its_tokenizer(
    vocab_size: int, eos: list[int] | None, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    """It has more tokens or fewer, and other ends of sequence, beside the tokenizer's, or none."""
    llm = make_llm(make_qwen3(vocab_size=vocab_size, eos_token_id=eos), tokenizer=BUNDLED_MODEL)
    prompts = [[30]] * 8
    for output in llm.generate(prompts, [guided(seed) for seed in range(8)], use_tqdm=False):
        assert_valid(output, PERSON)
        assert max(output["token_ids"]) < min(vocab_size, 2048)
    outputs = llm.generate(prompts, guided(structured_outputs={"regex": "[0-9]{1,3}"}, n=5), use_tqdm=False)
    ends = {sample["token_ids"][-1] for output in outputs for sample in output["samples"] if len(sample["text"]) < 3}
    assert ends <= {2, *(eos or [])}
    assert all(re.fullmatch("[0-9]{1,3}", sample["text"]) for output in outputs for sample in output["samples"])


def test_a_schema_is_compiled_once(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, compiled = make_llm(), []
    compile_anew = Grammars._compile_anew
    monkeypatch.setattr(
        Grammars, "_compile_anew", lambda self, *wanted: compiled.append(wanted) or compile_anew(self, *wanted)
    )
    generate(llm, [guided(seed, 3) for seed in range(5)])
    generate(llm, guided(max_tokens=3, structured_outputs={"json": json.dumps(PERSON)}))
    assert len(compiled) == 1


class TestObjects:
    """Forms come as objects and as mappings with entries of None, too, as vLLM and its clients write them."""

    @staticmethod
    def params(**given: Any) -> SimpleNamespace:
        """Return an object with the attributes of vLLM's StructuredOutputsParams and of its older namesake."""
        names = ["json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern", "backend"]
        flags = ["disable_any_whitespace", "disable_additional_properties", "backend_was_auto", "disable_fallback"]
        private = {"_backend": None, "_backend_was_auto": False}
        return SimpleNamespace(**{**dict.fromkeys(names), **dict.fromkeys(flags, False), **private, **given})

    @pytest.mark.parametrize(
        "form",
        [{"json": PERSON}, {"json_object": True}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}],
        ids=str,
    )
    def test_mean_what_a_mapping_of_one_kind_means(self, form: dict) -> None:
        expected = SamplingParams(structured_outputs=form)
        for given in (self.params(**form), vars(self.params(**form)), {**dict.fromkeys(KINDS), **form}):
            assert SamplingParams(structured_outputs=given) == expected
        assert SamplingParams(structured_outputs=self.params(**form, backend="auto", disable_fallback=True)) == expected

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({}, "must be a mapping with one of"),
            ({"json": PERSON, "regex": "a"}, "must be a mapping with one of"),
            ({"structural_tag": "{}"}, "structural_tag='{}': there are no structural tags: write a grammar"),
            ({"regex": "a", "structural_tag": "{}"}, "structural_tag='{}': there are no structural tags"),
            ({"json": PERSON, "disable_additional_properties": True}, "disable_additional_properties=True: write"),
            ({"json": PERSON, "disable_any_whitespace": 1}, "disable_any_whitespace=1: must be True or False"),
            ({"json": PERSON, "whitespace_pattern": 5}, "whitespace_pattern=5: must be a regular expression"),
            ({"regex": "a", "backend": "outlines"}, "backend='outlines': leave it out"),
        ],
        ids=str,
    )
    def test_what_they_cannot_have_is_named(self, wrong: dict, message: str) -> None:
        for given in (self.params(**wrong), vars(self.params(**wrong))):
            with pytest.raises(ValueError, match=f"(?s)structured_outputs=.*{message}"):
                SamplingParams(structured_outputs=given)

    def test_say_which_white_space_json_has(self, make_llm: Callable[..., LLM]) -> None:
        eager = {"temperature": 0, "logit_bias": {201: 30.0, 221: 30.0}}  # a line break and a space, where they may be
        forms = [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": "\\n{0,2}"}]
        texts = [
            output.text
            for output in generate(
                make_llm(), [guided(structured_outputs=self.params(json=PERSON, **form), **eager) for form in forms]
            )
        ]
        outside = [re.sub('"[^"]*"', "", text) for text in texts]
        assert [sorted(set(re.findall(r"\s", text))) for text in outside] == [[" "], [], ["\n"]]

    def test_an_object_of_any_shape_has_its_white_space_too(self) -> None:
        form = {"json_object": True, "whitespace_pattern": "x"}
        expected = {"type": "object", "x-guidance": {"whitespace_pattern": "x"}}
        assert json.loads(SamplingParams(structured_outputs=form).structured_outputs["json"]) == expected
        for_all = {"json": {**expected, "x-guidance": {"item_separator": ";"}}, "disable_any_whitespace": True}
        own = json.loads(SamplingParams(structured_outputs=for_all).structured_outputs["json"])["x-guidance"]
        assert own == {"item_separator": ";", "whitespace_pattern": ""}


def test_masks_say_which_logits_stay() -> None:
    logits = torch.randn(5, 70)
    words = torch.randint(-(2**31), 2**31, (5, 4), dtype=torch.int32)
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")[:, :70]
    expected = logits.masked_fill(torch.from_numpy(bits) == 0, float("-inf"))
    assert torch.equal(apply_masks(logits, words), expected)


class TestErrors:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("json", "must be a mapping with one of 'json', 'json_object', 'regex', 'choice', 'grammar'"),
            ({}, "must be a mapping with one of"),
            ({"jsn": PERSON}, "must be a mapping with one of"),
            ({"json": PERSON, "regex": "a"}, "must be a mapping with one of"),
            ({"json": "{"}, "'json' must be a JSON Schema: a mapping, a JSON text, or a class .*: Expecting"),
            ({"json": 5}, "'json' must be a JSON Schema"),
            ({"json": {"a": {1, 2}}}, "'json' must be a JSON Schema.*not JSON serializable"),
            ({"json": {"const": float("nan")}}, "'json' must be a JSON Schema"),
            ({"json_object": 1}, "'json_object' must be True"),
            ({"regex": ""}, "'regex' must be a non-empty string"),
            ({"regex": 5}, "'regex' must be a non-empty string"),
            ({"choice": []}, "'choice' must be a list of non-empty strings"),
            ({"choice": "yes"}, "'choice' must be a list of non-empty strings"),
            ({"choice": ["yes", ""]}, "'choice' must be a list of non-empty strings"),
            ({"grammar": None}, "'grammar' must be a grammar's text"),
            ({"grammar": 'start: "\ud800"'}, r"'grammar' must be .*: it has '.ud800', half a surrogate pair"),
            ({"choice": ["\udc00"]}, "'choice' must be .*: it has '.udc00', half a surrogate pair"),
            ({"json": {"const": "\ud800"}}, "'json' must be .*: it has '.ud800', half a surrogate pair"),
            ({"json": '{"const": "\\ud800"}'}, "'json' must be .*: it has '.ud800', half a surrogate pair"),
        ],
        ids=str,
    )
    def test_a_form_that_nothing_can_have(self, wrong: object, message: str) -> None:
        with pytest.raises(ValueError, match=f"(?s)structured_outputs=.*{message}"):
            SamplingParams(structured_outputs=wrong)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"json": {"type": "strin"}}, 'json.: "type": "strin" must be "string", "number"'),
            ({"json": {"not": {"type": "string"}}}, 'no grammar can follow "not": leave it out, or .*"lenient": true'),
            ({"json": {"type": "object", "minProperties": 2, "maxProperties": 1}}, "must allow a value, and .* > max"),
            ({"json": {"$ref": "#/$defs/nowhere"}}, '"#/.defs/nowhere" must be a place in the schema'),
            (
                {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
                'write "anyOf", or .*"coerce_one_of": true',
            ),
            ({"regex": "(a"}, "regex.: .* no regular expression of Rust's syntax: unclosed group"),
            ({"regex": "a(?=b)"}, "there are no look-arounds"),
            ({"regex": r"[^\s\S]"}, "no token can begin or go on with the text: let the form allow one"),
            ({"grammar": "start: nowhere"}, 'grammar.: line 1, column 8: "nowhere" must be a rule: define it'),
            ({"grammar": "root ::= nowhere"}, '"nowhere" must be a rule: define it'),
            ({"grammar": 'root ::= "a'}, "must be Lark, .*, or GBNF, .* line 1, behind 'root ::= \"a': Unexpected end"),
        ],
        ids=str,
    )
    def test_a_grammar_that_is_refused_before_anything_runs(
        self, wrong: dict, message: str, make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm(num_kvcache_blocks=16)
        params = [SamplingParams(), SamplingParams(structured_outputs=wrong)]
        with pytest.raises(ValueError, match=rf"(?s)sampling_params\[1\].structured_outputs=.*: .*{message}"):
            generate(llm, params)
        assert llm.engine.is_finished
        assert llm.engine.num_requests == 0

    def test_without_a_tokenizer(self, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
        with pytest.raises(ValueError, match=r"sampling_params.structured_outputs=.* needs text, but .* no tokenizer"):
            make_llm(make_qwen3()).generate([[30]], guided(), use_tqdm=False)

    def test_without_the_extra(self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
        with pytest.raises(ValueError, match=r"needs the llguidance package: pip install 'nanoinfer\[structured\]'"):
            generate(make_llm(), guided())
