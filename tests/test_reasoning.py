"""Reasoning apart from the answer, in outputs and streams; budgets of thoughts, and forms that begin behind them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.processors import ban_newest
from cases.thinkers import GEMMA, HARMONY, THINK, write_thinker
from conftest import assert_equal, different_settings
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.batch.__main__ import main as run_batch
from nanoinfer.config import Config
from nanoinfer.kernels.sampling.thoughts import Forced, Thoughts, forced_tokens
from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.requests.text.spelling import TokenDecoder

OPEN, CLOSE = 2047, 2046  # the tokens of THINK
PROMPTS = ["ROMEO:\n<think>\n", "ROMEO:\n", "JULIET:\n<think>"]
CHAT = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}BOT:\n<think>\n{% endif %}"
FORMS = [{"regex": "[0-9]{4}x"}, {"choice": ["aye", "nay, nay"]}, {"json": {"const": {"says": ["you"]}}}]
TEXTS = ["[0-9]{4}x", "aye|nay, nay", r'\{ ?"says": ?\[ ?"you" ?\] ?\}']  # of these forms
SPECIAL = {"skip_special_tokens": False}

Split = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_thinker(tmp_path_factory.mktemp("thinker"), THINK, template=CHAT)


@pytest.fixture(scope="module")
def llm(thinker: str) -> Iterator[LLM]:
    with LLM(thinker, max_num_seqs=16) as own:
        yield own


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def by_text(text: str, is_open: bool, markers: tuple[str, str] = THINK) -> tuple[str, str]:
    """The oracle: reasoning and answer of a text that shows its markers."""
    before, begun, rest = ("", True, text) if is_open else text.partition(markers[0])
    reasoning, _, answer = rest.partition(markers[1]) if begun else ("", "", "")
    return reasoning, before + answer


class TestParts:
    """Texts of our own, which write each family's published markers, are divided as they are meant."""

    @staticmethod
    def reader(folder: Path, names: tuple[str, ...], is_special: bool, given: Any = None) -> Split:
        model = write_thinker(folder, names, is_special)
        tokenizer = AutoTokenizer.from_pretrained(model)
        reasoning = Reasoning.find(Config(model, reasoning_markers=given), tokenizer)
        assert reasoning is not None
        return lambda prompt, text, **settings: read_all(reasoning, tokenizer, prompt, text, **settings)

    @pytest.mark.parametrize("is_special", [False, True])
    @pytest.mark.parametrize(
        ("prompt", "text", "parts"),
        [
            ("Hm", "<think>\nso\n</think>\n\nYes", ("\nso\n", "\n\nYes")),  # Qwen3, GLM
            ("Hm<think>\n", "so</think>Yes", ("so", "Yes")),  # DeepSeek-R1, MiniMax, Qwen3's thinking models
            ("Hm<think>\n\n</think>\n\n", "Yes", ("", "Yes")),  # Qwen3 with enable_thinking=False
            ("Hm<think>\n", "so it goes on", ("so it goes on", "")),
            ("Hm", "Yes, no thought", ("", "Yes, no thought")),
            ("Hm", "<think></think>", ("", "")),
            ("Hm", "<think>a</think>b<think>c</think>", ("a", "b<think>c</think>")),
            ("Hm<think>", "né 日本 🤗</think>日本 🤗", ("né 日本 🤗", "日本 🤗")),
            ("<think> is a tag", "Yes", ("", "Yes")),
        ],
    )
    def test_pairs(self, tmp_path: Path, is_special: bool, prompt: str, text: str, parts: tuple[str, str]) -> None:
        expected = parts[0], parts[1].replace("<think>", "").replace("</think>", "") if is_special else parts[1]
        assert self.reader(tmp_path, THINK, is_special)(prompt, text) == expected

    @pytest.mark.parametrize("spelled", ["hm, aa<|b", "xxaay<|b|>z", "aaaay<|b|>"])
    def test_markers_that_are_no_tokens(self, tmp_path: Path, spelled: str) -> None:
        """Tokens may end in the midst of a marker, and text may look like its beginning."""
        own = self.reader(tmp_path, (), False, ("aay", "<|b|>"))
        assert own("Hm", spelled) == by_text(spelled, False, ("aay", "<|b|>"))

    @pytest.mark.parametrize("settings", [{}, SPECIAL])
    @pytest.mark.parametrize(
        ("prompt", "text", "parts"),
        [
            (
                "<|start|>assistant",
                "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes",
                ("so", "Yes"),
            ),
            ("<|start|>assistant", "<|channel|>final<|message|>Yes", ("", "Yes")),
            ("<|start|>assistant", "<|channel|>analysis<|message|>so", ("so", "")),
            (
                "<|start|>assistant<|channel|>analysis<|message|>",
                "so<|end|><|start|>assistant<|channel|>final<|message|>Yes",
                ("so", "Yes"),
            ),
            (
                "<|start|>assistant",
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
                "<|start|>assistant<|channel|>analysis<|message|>final<|end|>"
                "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}",
                ("abfinal", "{}"),
            ),
            ("no chat", "Yes", ("", "Yes")),
        ],
    )
    def test_channels(
        self, tmp_path: Path, settings: dict[str, Any], prompt: str, text: str, parts: tuple[str, str]
    ) -> None:
        assert self.reader(tmp_path, HARMONY, True)(prompt, text, **settings) == parts

    @pytest.mark.parametrize("settings", [{}, SPECIAL])
    def test_gemma_4(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        own = self.reader(tmp_path, GEMMA, True)
        assert own("model\n", "<|channel>thought\nso\n<channel|>Yes", **settings) == ("so\n", "Yes")
        assert own("model\n<|channel>thought\n<channel|>", "Yes", **settings) == ("", "Yes")
        assert own("model\n<|channel>thought\n", "so", **settings) == ("so", "")

    def test_random_texts(self, tmp_path: Path) -> None:
        own, rand = self.reader(tmp_path, THINK, False), random.Random(1)
        pieces = [*THINK, "<", "think", ">", "</", "</th", " ", "日", "a", "\n", "Romeo"]
        for _ in range(200):
            text = "".join(rand.choices(pieces, k=rand.randint(0, 12)))
            prompt, is_open = rand.choice([("Hm", False), ("Hm<think>\n", True)])
            assert own(prompt, text) == by_text(text, is_open), text


def read_all(
    reasoning: Reasoning, tokenizer: PreTrainedTokenizerBase, prompt: str, text: str, **settings: Any
) -> tuple[str, str]:
    """Return a text's parts, which are the same when it comes in pieces that lag behind its tokens."""
    params = SamplingParams(**settings)
    asked, token_ids = (tokenizer.encode(part, add_special_tokens=False) for part in (prompt, text))
    decode = TokenDecoder(tokenizer, params.skip_special_tokens)
    shown = decode(token_ids)
    whole = reasoning.split(asked, params, token_ids, shown)
    parts, rand, told, found = reasoning.parts(asked, params), random.Random(text), 0, ["", ""]
    for place, token_id in enumerate(token_ids):
        known = len(decode(token_ids[: place + 1]).rstrip("\ufffd"))
        until = max(told, known - rand.choice([0, 0, 1, 3]))
        new = parts.read([token_id], shown[told:until], is_finished=False)
        found = [found[0] + new["reasoning"], found[1] + new["answer"]]
        told = until
    new = parts.read([], shown[told:], is_finished=True)
    assert (found[0] + new["reasoning"], found[1] + new["answer"]) == whole
    return whole


class TestMarkers:
    @pytest.mark.parametrize(
        ("template", "markers"),
        [
            ("{{ '<think>\\n' }} </think>", THINK),
            ("[THINK] [/THINK]", ("[THINK]", "[/THINK]")),
            ("<mm:think></mm:think>", ("<mm:think>", "</mm:think>")),
            ("{{ messages }}", None),
        ],
    )
    def test_a_template_tells_them(self, template: str, markers: tuple[str, str] | None) -> None:
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
        tokenizer.chat_template = template
        found = Reasoning.find(Config(BUNDLED_MODEL), tokenizer)
        assert (None if found is None else found.markers[:2]) == markers

    def test_an_option_goes_before_them(self, thinker: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(thinker)
        found = Reasoning.find(Config(thinker, reasoning_markers=["a", "b"]), tokenizer)
        assert found is not None
        assert found.markers[:2] == ("a", "b")
        assert Reasoning.find(Config(thinker, reasoning_markers=()), tokenizer) is None

    @pytest.mark.parametrize("wrong", ["<think>", ["a"], ["a", ""], ["a", 5], 7])
    def test_an_option_that_is_no_pair(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match=r"reasoning_markers=.*: must be None, \(\), or 2 non-empty strings"):
            Config(BUNDLED_MODEL, reasoning_markers=wrong)

    def test_vllm_names(self) -> None:
        for given, markers in [
            ({"reasoning_parser": "qwen3"}, THINK),
            ({"reasoning_parser": "mistral"}, ("[THINK]", "[/THINK]")),
            ({"reasoning_parser": "openai_gptoss"}, None),
            ({"reasoning_parser": ""}, None),
            ({"reasoning_config": {"reasoning_start_str": "a", "reasoning_end_str": "b"}}, ("a", "b")),
            ({"reasoning_config": {"reasoning_parser": "deepseek_r1"}}, THINK),
        ]:
            assert Config(BUNDLED_MODEL, **given).reasoning_markers == markers
        with pytest.raises(ValueError, match=r"reasoning_parser='x': must be one of deepseek_r1, .*reasoning_markers="):
            Config(BUNDLED_MODEL, reasoning_parser="x")
        with pytest.raises(ValueError, match=r"reasoning_config=.*must have reasoning_start_str and"):
            Config(BUNDLED_MODEL, reasoning_config={"reasoning_start_str": "a"})
        with pytest.raises(ValueError, match="'thinking_budget': did you mean 'thinking_token_budget'"):
            SamplingParams(thinking_budget=3)


class TestOutputs:
    def test_without_markers_all_is_the_answer(self, make_llm: Callable[..., LLM]) -> None:
        (output,) = run(make_llm(), "ROMEO:\n", SamplingParams(max_tokens=4))
        assert (output.reasoning, output.answer) == (None, output.text)

    def test_a_template_that_opens_a_thought(self, llm: LLM) -> None:
        chat = [{"role": "user", "content": "ROMEO:"}]
        params = SamplingParams(max_tokens=9, thinking_token_budget=3, seed=1)
        (output,) = llm.chat(chat, params, use_tqdm=False)
        assert (output.reasoning, output.answer) == by_text(output.text, is_open=True)
        assert output.answer
        assert output.token_ids[3] == CLOSE

    @pytest.mark.parametrize(
        "settings", [{"stop": ["e"]}, {"stop_token_ids": [CLOSE]}, {"detokenize": False}, {"n": 3}]
    )
    def test_streams_tell_each_part(self, llm: LLM, settings: dict[str, Any]) -> None:
        params = SamplingParams(**{"max_tokens": 20, "thinking_token_budget": 4, "seed": 3, **settings})
        told: dict[tuple[int, int], list[str]] = {}
        for new in llm.stream(PROMPTS, params):
            parts = told.setdefault((new.index, new.sample), ["", ""])
            parts[0] += new.reasoning
            parts[1] += new.answer
        outputs = run(llm, PROMPTS, params)
        whole = {(i, s.index): [s.reasoning, s.answer] for i, output in enumerate(outputs) for s in output.samples}
        assert told == whole
        for i, output in enumerate(outputs):
            for sample in output.samples:
                assert (sample.reasoning, sample.answer) == by_text(sample.text, "<think>" in PROMPTS[i])

    def test_batch_files(self, thinker: str, tmp_path: Path) -> None:
        plain = {"id": 1, "prompt": PROMPTS[0], "thinking_token_budget": 2, "max_tokens": 5}
        body = {"messages": [{"role": "user", "content": "ROMEO:"}], "thinking_token_budget": 2, "max_tokens": 5}
        chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, (plain, chat))))
        run_batch([str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--model", thinker])
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        by_id = {row.get("custom_id", row["id"]): row for row in rows}
        message = by_id["a"]["response"]["body"]["choices"][0]["message"]
        assert message["reasoning"]
        assert message["content"]
        assert "</think>" not in message["content"]
        assert (by_id[1]["reasoning"], by_id[1]["answer"]) == by_text(by_id[1]["text"], is_open=True)


class TestBudget:
    @pytest.mark.parametrize("budget", [0, 1, 5])
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"temperature": 0},
            {"n": 3, "logprobs": 2, "kept_tokens": True},
            {"logit_bias": {CLOSE: -1e30, 70: 50.0}, "logprobs": 0},
            {"allowed_token_ids": list(range(60, 400)), "logprobs": 1, "kept_tokens": True},
            {"bad_words": ["</think>", "the"], "repetition_penalty": 1.5, "frequency_penalty": 2.0},
            {"top_k": 3, "top_p": 0.5, "min_p": 0.2, "min_tokens": 3},
        ],
    )
    def test_it_closes_the_thought_exactly(self, llm: LLM, settings: dict[str, Any], budget: int) -> None:
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=5, thinking_token_budget=budget, **settings)
        opened, unopened, _ = run(llm, PROMPTS, params)
        for sample in opened.samples:
            assert sample.token_ids.index(CLOSE) == budget
            assert len(sample.token_ids) == 12
            if params.logprobs is not None:
                assert -100 < sample.logprobs[budget][CLOSE] < 0 or params.logit_bias
            if params.kept_tokens:
                assert sample.kept_tokens[budget][0] == 1
        assert all(CLOSE not in sample.token_ids for sample in unopened.samples)

    def test_tokens_before_it_and_a_thought_that_ends_sooner_stay(self, llm: LLM) -> None:
        """A budget that is not spent changes nothing."""
        params = SamplingParams(max_tokens=14, seed=2, logit_bias={CLOSE: 40.0}, logprobs=1)
        (free,) = run(llm, PROMPTS[0], params)
        assert CLOSE in free.token_ids
        params.thinking_token_budget = 14
        assert_equal(run(llm, PROMPTS[0], params), [free])

    def test_it_counts_from_the_marker_in_the_output(self, llm: LLM) -> None:
        """The model opens the thought where nothing else may be drawn."""
        form = {"grammar": 'start: /[a-z]{1,3}/ <think> /[a-z ]{20}/ </think> "x"'}
        assert "</think>" in run(llm, "A", SamplingParams(structured_outputs=form, max_tokens=40))[0].text
        bias = {OPEN: 100.0}
        params = SamplingParams(max_tokens=9, seed=1, logit_bias=bias, frequency_penalty=2.0, thinking_token_budget=3)
        (output,) = run(llm, "ROMEO:\n", params)
        first = output.token_ids.index(OPEN)
        assert output.token_ids.index(CLOSE) == first + 4

    def test_processed_logprobs(self, thinker: str, make_llm: Callable[..., LLM]) -> None:
        """Where a token is put in, no other could have been drawn."""
        own = make_llm(thinker, logprobs_mode="processed_logprobs")
        params = SamplingParams(max_tokens=6, logprobs=2, thinking_token_budget=2, allowed_token_ids=[70, 71, 72])
        (output,) = run(own, PROMPTS[0], params)
        assert output.logprobs[2] == {CLOSE: 0.0}
        assert CLOSE not in output.logprobs[1]

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_guesses_preemption_and_ranks_change_nothing(
        self, thinker: str, llm: LLM, make_llm: Callable[..., LLM], ranks: int
    ) -> None:
        params = [
            SamplingParams(max_tokens=24, seed=i, thinking_token_budget=i, n=1 + i % 2, logprobs=1, **settings)
            for i, settings in enumerate(
                [{}, {"temperature": 0}, {"bad_words": ["the"]}, {"structured_outputs": FORMS[1]}]
            )
        ]
        prompts = [PROMPTS[0]] * len(params)
        expected = run(llm, prompts, params)
        options = {"speculation": "suffix"} if ranks == 1 else {"tensor_parallel_size": ranks}
        own = make_llm(thinker, num_kvcache_blocks=12, max_model_len=96, max_num_seqs=4, **options)
        assert_equal(run(own, prompts, params), expected)

    def test_replicas(self, thinker: str, llm: LLM, make_llm: Callable[..., LLM]) -> None:
        params = SamplingParams(max_tokens=8, seed=4, thinking_token_budget=2, structured_outputs=FORMS[0])
        own = make_llm(thinker, data_parallel_size=2)
        outputs, expected = run(own, PROMPTS, params), run(llm, PROMPTS, params)
        assert [(o.reasoning, o.answer) for o in outputs] == [(o.reasoning, o.answer) for o in expected]

    @pytest.mark.parametrize(
        "settings", [{"thinking_token_budget": 3}, {"structured_outputs": {"regex": "a", "reasoning": True}}]
    )
    def test_without_markers(self, make_llm: Callable[..., LLM], settings: dict[str, Any]) -> None:
        with pytest.raises(
            ValueError, match=r"needs the markers of a thought, and there are none: pass LLM\(reasoning_"
        ):
            run(make_llm(), "a", SamplingParams(**settings))

    @pytest.mark.parametrize("wrong", [-2, 1.5, "a", True])
    def test_no_number(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match=r"thinking_token_budget=.*: must be None or -1 for no end, or an integer"):
            SamplingParams(thinking_token_budget=wrong)
        assert SamplingParams(thinking_token_budget=-1) == SamplingParams()

    def test_markers_of_several_tokens(self, make_llm: Callable[..., LLM]) -> None:
        own = make_llm(reasoning_markers=("<open>", "<close>"))
        (output,) = run(own, "ROMEO:\n<open>\n", SamplingParams(max_tokens=16, thinking_token_budget=3, seed=1))
        assert own.tokenizer.decode(output.token_ids[:3]) == output.reasoning
        assert output.text == f"{output.reasoning}<close>{output.answer}"
        assert output.answer


@pytest.mark.parametrize(
    ("names", "prompt", "leaving"),
    [
        (
            HARMONY,
            "<|start|>assistant<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
        (GEMMA, "model\n<|channel>thought\n", "<channel|>"),
    ],
)
def test_channels_have_budgets_and_forms(
    tmp_path: Path, make_llm: Callable[..., LLM], names: tuple[str, ...], prompt: str, leaving: str
) -> None:
    own = make_llm(write_thinker(tmp_path, names, is_special=True))
    put = own.tokenize(leaving)
    params = SamplingParams(max_tokens=40, thinking_token_budget=3, structured_outputs=FORMS[0], seed=2, n=2)
    for sample in run(own, prompt, params)[0].samples:
        assert sample.token_ids[3 : 3 + len(put)] == put
        assert sample.reasoning == own.detokenize(sample.token_ids[:3])
        assert re.fullmatch(TEXTS[0], sample.answer)
    params.structured_outputs = {**FORMS[0], "reasoning": True}
    (output,) = run(own, "model\n", params)
    assert output.token_ids[0] == 2047
    assert re.fullmatch(TEXTS[0], output.answer)
    assert output.reasoning


class TestForms:
    @pytest.mark.parametrize(("form", "text"), [*zip(FORMS, TEXTS, strict=True)])
    @pytest.mark.parametrize("guess", [False, True])
    def test_a_form_binds_the_answer_alone(
        self, thinker: str, make_llm: Callable[..., LLM], form: dict[str, Any], text: str, guess: bool
    ) -> None:
        own = make_llm(thinker, speculation="suffix" if guess else None)
        for prompt, asked in [(PROMPTS[0], None), (PROMPTS[0], True), (PROMPTS[1], True)]:
            params = SamplingParams(
                max_tokens=40, n=2, seed=1, thinking_token_budget=4, structured_outputs={**form, "reasoning": asked}
            )
            (output,) = run(own, prompt, params)
            for sample in output.samples:
                assert sample.finish_reason == "stop"
                assert re.fullmatch(text, sample.answer)
                assert sample.token_ids.index(CLOSE) == 4 + (prompt == PROMPTS[1])
                assert (sample.token_ids[0] == OPEN) == (prompt == PROMPTS[1])

    def test_it_binds_the_first_token_without_a_thought(self, llm: LLM) -> None:
        for prompt, asked in [(PROMPTS[1], None), (PROMPTS[1], False), (PROMPTS[0], False)]:
            form = {"regex": "[0-9]{4}x", "reasoning": asked}
            (output,) = run(llm, prompt, SamplingParams(structured_outputs=form, thinking_token_budget=1))
            assert output.text[4:] == "x"
            assert output.text[:4].isdecimal()

    def test_no_end_of_sequence_comes_before_the_answer(self, llm: LLM) -> None:
        bias = dict.fromkeys(llm.config.eos_token_ids, 100.0)
        params = SamplingParams(logit_bias=bias, structured_outputs={"regex": "[0-9]{4}x"}, thinking_token_budget=5)
        (output,) = run(llm, PROMPTS[0], params)
        assert output.token_ids.index(CLOSE) == 5
        assert output.answer[4:] == "x"

    def test_a_thought_that_max_tokens_cuts(self, llm: LLM) -> None:
        (output,) = run(llm, PROMPTS[0], SamplingParams(max_tokens=5, structured_outputs={"regex": "[0-9]{4}x"}))
        assert (output.finish_reason, output.answer) == ("length", "")


@pytest.mark.parametrize(
    "options", [{"speculation": "suffix"}, {"num_kvcache_blocks": 12, "max_num_seqs": 5, "max_model_len": 96}]
)
def test_random_requests_are_what_each_is_alone(
    thinker: str, llm: LLM, make_llm: Callable[..., LLM], options: dict[str, Any]
) -> None:
    rand, prompts, params = random.Random(5), list[str](), list[SamplingParams]()
    for own in different_settings(12):
        form = rand.choice([None, None, *FORMS])
        wishes: dict[str, Any] = {
            "thinking_token_budget": rand.choice([None, 0, 2, 9]),
            "structured_outputs": form and {**form, "reasoning": rand.choice([None, True, False])},
            "entropy": rand.random() < 0.5,
            "logits_processors": rand.choice([None, None, [ban_newest]]),
            "n": rand.choice([1, 1, 3]),
            "max_tokens": 18,
            "prompt_logprobs": None,
        }
        params.append(replace(own, **wishes))
        prompts.append(rand.choice(PROMPTS))
    outputs = run(make_llm(thinker, **options), prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        (alone,) = run(llm, prompt, own)
        assert_equal([output], [alone])
        for sample, single in zip(output.samples, alone.samples, strict=True):
            assert (sample.reasoning, sample.answer) == (single.reasoning, single.answer)
            assert (sample.entropies or []) == pytest.approx(single.entropies or [], abs=1e-3)


class TestForcedTokens:
    def test_random_rows(self) -> None:
        """The kernel equals a search in lists."""
        rand = random.Random(3)
        opening, closing, leaving = (7,), (8, 9), (6, 8, 9)
        for _ in range(100):
            rows = [[rand.choice([1, 2, 6, 7, 8, 9]) for _ in range(rand.randint(3, 14))] for _ in range(4)]
            starts = [rand.randint(0, len(row) - 1) for row in rows]
            are_open, budgets = [rand.random() < 0.5 for _ in rows], [rand.randint(0, 6) for _ in rows]
            tokens = torch.full((4, 16), 8, dtype=torch.int32)
            for row, own in enumerate(rows):
                tokens[row, : len(own)] = torch.tensor(own)
            thoughts = Thoughts(*(torch.tensor(own, dtype=torch.int32) for own in (starts, are_open, budgets)))
            thoughts = thoughts._replace(are_open=thoughts.are_open.bool())
            positions = torch.tensor([len(row) for row in rows], dtype=torch.int32)
            found = forced_tokens(tokens, positions, thoughts, opening, closing, torch.tensor(leaving)).tolist()
            for row, start, is_open, budget, token in zip(rows, starts, are_open, budgets, found, strict=True):
                output = row[start:]
                begun = 0 if is_open else output.index(7) + 1 if 7 in output else len(output) + 1
                thought = output[begun:]
                is_closed = any(thought[i : i + 2] == [8, 9] for i in range(len(thought)))
                spent = len(output) - begun - budget
                due = begun <= len(output) and not is_closed and spent >= 0
                assert token == (leaving[min(spent, 2)] if due else -1)

    def test_a_forced_token_is_alone(self) -> None:
        logits = torch.tensor([[1.0, float("-inf"), 3.0], [1.0, 2.0, float("nan")]])
        put = Forced.of(logits, torch.tensor([1, -1])).put(logits)
        assert put[0].tolist() == [float("-inf"), 0.0, float("-inf")]
        assert torch.equal(put[1, :2], logits[1, :2])


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", [None, "suffix"])
def test_budgets_and_forms_behind_graphs(thinker: str, make_llm: Callable[..., LLM], speculation: str | None) -> None:
    graphs, eager = (make_llm(thinker, enforce_eager=own, speculation=speculation) for own in (False, True))
    others = [{}, {"temperature": 0}, {"bad_words": ["</think>"], "n": 2}, {"structured_outputs": FORMS[0]}]
    params = [SamplingParams(max_tokens=30, seed=i, thinking_token_budget=4 * i, **own) for i, own in enumerate(others)]
    for own in (graphs, eager):
        for i, output in enumerate(run(own, [PROMPTS[0]] * 4, params)):
            assert all(sample.token_ids.index(CLOSE) == 4 * i for sample in output.samples)
    assert_equal(run(graphs, [PROMPTS[0]] * 4, params), run(eager, [PROMPTS[0]] * 4, params))
