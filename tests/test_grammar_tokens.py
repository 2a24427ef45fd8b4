"""The text of a form is text, whichever tokens a tokenizer has for it; a token is asked for by its name alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
from cases.drafters import Prophet
from conftest import assert_equal, whole_only

pytest.importorskip("llguidance", reason="structured outputs need the llguidance package")

import numpy as np
from test_spelling import byte_level, sentencepiece
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.grammar.grammar import Grammars, names_tokens
from nanoinfer.requests.text.spelling import TokenDecoder

SHOWN = ["<tool_call>", "</tool_call>", "\n\n"]  # added tokens, as Qwen2.5 and Gemma 3 have them
MISREAD = "é"  # an added token that a byte-level decoder takes for a byte
MERGED = "Answer"  # an added token that merges make, too, as those of Gemma 3's line breaks
HIDDEN = ["<|quote|>"]
END = "<|im_end|>"  # the bundled model's
PIECES = [*SHOWN, MISREAD, MERGED, *HIDDEN, END, "<", "|>", "tool", "a", " ", "\n", '"']


def with_added(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*SHOWN, MISREAD, MERGED]])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in [*HIDDEN, END]])
    return tokenizer


TOKENIZERS = {
    "bundled": with_added(AutoTokenizer.from_pretrained(BUNDLED_MODEL)),
    "byte level": with_added(PreTrainedTokenizerFast(tokenizer_object=byte_level())),
    "sentencepiece": with_added(PreTrainedTokenizerFast(tokenizer_object=sentencepiece())),
    "metaspace": with_added(PreTrainedTokenizerFast(tokenizer_object=sentencepiece(metaspace=True))),
}
TOKENIZER = TOKENIZERS["bundled"]
TOOL, TOOL_END, QUOTE, EOS = TOKENIZER.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "<|quote|>", END])


def lark(text: str) -> str:
    return f"start: {json.dumps(text)}"


def of_object(properties: dict[str, Any]) -> dict[str, Any]:
    required, options = list(properties), {"x-guidance": {"whitespace_pattern": ""}}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **options}


FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "choice": lambda text: {"choice": [text]},
    "choices": lambda text: {"choice": [text, f"{text}!"]},
    "regex": lambda text: {"regex": re.escape(text)},
    "regex of letters": lambda text: {"regex": f"[{re.escape(text)}]{{5}}" + re.escape(text)},
    "grammar": lambda text: {"grammar": lark(text)},
    "grammar of letters": lambda text: {"grammar": "start: " + " ".join(map(json.dumps, text))},
    "grammar with names": lambda text: {"grammar": f"{lark(text)} (<tool_call> {json.dumps(text)})?"},
    "GBNF": lambda text: {"grammar": "root ::= " + json.dumps(text, ensure_ascii=False)},
    "const": lambda text: {"json": {"const": text}},
    "enum": lambda text: {"json": {"enum": [text, f"{text}!"]}},
    "pattern": lambda text: {"json": {"type": "string", "pattern": f"^{re.escape(text)}$"}},
    "property": lambda text: {"json": of_object({text: {"const": text}})},
}
"""The kinds of forms: of each, one that asks for a text."""


def is_of(kind: str, text: str, output: str) -> bool:
    """Whether an output is one that the kind's form of a text allows."""
    if kind == "regex of letters":
        return re.fullmatch(f"[{re.escape(text)}]{{5}}{re.escape(text)}", output) is not None
    if kind == "grammar with names":
        return output in (text, f"{text}<tool_call>{text}")
    if kind == "property":
        return json.loads(output) == {text: text}
    read = json.loads if kind in ("const", "enum", "pattern") else str
    return read(output) in ([text, f"{text}!"] if kind in ("choices", "enum") else [text])


def random_texts(count: int) -> list[str]:
    rand = random.Random(0)
    return ["".join(rand.choices(PIECES, k=rand.randint(1, 4))) for _ in range(count)]


@cache
def grammars_of(name: str, end: str) -> Grammars:
    tokenizer = TOKENIZERS[name]
    spell = TokenDecoder(tokenizer, skip_special_tokens=True).bytes_of
    return Grammars(tokenizer, len(tokenizer), [tokenizer.convert_tokens_to_ids(end)], spell)


def written(name: str, form: dict[str, Any], seed: int, end: str = END) -> str:
    """Return a text that a form allows, of tokens that are drawn at random from its masks."""
    rng, tokenizer = np.random.default_rng(seed), TOKENIZERS[name]
    matcher, _ = grammars_of(name, end).compile(SamplingParams(structured_outputs=form).structured_outputs).matcher()
    tokens: list[int] = []
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        tokens.append(int(rng.choice(bits.nonzero()[0])))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    ended = tokens[-1] == tokenizer.convert_tokens_to_ids(end)
    assert tokenizer.convert_tokens_to_ids(end) not in tokens[:-1]
    return TokenDecoder(tokenizer, True)(tokens[:-1] if ended else tokens)


@pytest.mark.parametrize("kind", FORMS)
def test_any_text_can_be_asked_for(kind: str) -> None:
    """Added tokens' texts, parts of these, and letters, in any order."""
    for seed, (name, text) in enumerate(product(TOKENIZERS, random_texts(8))):
        output = written(name, FORMS[kind](text), seed)
        assert is_of(kind, text, output), (name, text, output)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_merges_make_is_text_beside_named_tokens(name: str) -> None:
    assert written(name, {"grammar": f"start: <tool_call> {json.dumps(MERGED)}"}, 0) == f"<tool_call>{MERGED}"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["<tool_call>", "<tool_call>a"])
def test_a_token_that_is_shown_and_ends_texts_spells_none(text: str, name: str) -> None:
    for kind in ("regex", "grammar", "choices"):
        assert is_of(kind, text, written(name, FORMS[kind](text), 0, end="<tool_call>"))


@pytest.fixture(scope="module")
def options(make_qwen3: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    TOKENIZER.save_pretrained(folder)
    model = make_qwen3(vocab_size=2080, eos_token_id=EOS, num_hidden_layers=1)
    return {"model": model, "tokenizer": folder, "device": "cpu", "dtype": "float32", "num_kvcache_blocks": 100}


@pytest.fixture(scope="module")
def llm(options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**options, kvcache_block_size=16) as made:
        yield made


def run(llm: LLM, forms: list[dict[str, Any]], **settings: Any) -> list[RequestOutput]:
    wanted = {"max_tokens": 200, "temperature": 0, **settings}
    params = [SamplingParams(seed=i, structured_outputs=form, **wanted) for i, form in enumerate(forms)]
    return llm.generate([[30]] * len(forms), params, use_tqdm=False)


ASKED = [(kind, f"<tool_call>{END}") for kind in FORMS]


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[RequestOutput]:
    return run(llm, [FORMS[kind](text) for kind, text in ASKED])


class TestOutputs:
    """A text with the finish_reason "stop" is one of its form's, whole."""

    def check(self, outputs: list[RequestOutput]) -> None:
        for (kind, text), output in zip(ASKED, outputs, strict=True):
            assert (output.finish_reason, output.stop_reason) == ("stop", None), (kind, text)
            assert is_of(kind, text, output.text), (kind, text)

    def test_are_whole(self, outputs: list[RequestOutput]) -> None:
        self.check(outputs)

    @pytest.mark.parametrize("ranks", [1, *whole_only([2])])
    @pytest.mark.parametrize("drafter", ["of the tokenizer", "of the outputs"])
    def test_are_the_same_with_guesses(
        self, drafter: str, ranks: int, outputs: list[RequestOutput], options: dict[str, Any]
    ) -> None:
        """The tokenizer's own tokens of a text are ones that its form may not have."""
        of_outputs = [[30, *output.token_ids] for output in outputs]
        of_tokenizer = [[30, *TOKENIZER.encode(output.text)] for output in outputs]
        known = {"of the outputs": of_outputs, "of the tokenizer": of_tokenizer}
        guesser = Prophet(known[drafter])
        with LLM(**options, kvcache_block_size=16, speculation=guesser, tensor_parallel_size=ranks) as guessing:
            guessed = run(guessing, [FORMS[kind](text) for kind, text in ASKED])
        assert_equal(guessed, outputs)
        self.check(guessed)
        assert sum(output.num_accepted_tokens for output in guessed) > 0


class TestTokens:
    """Which tokens write a text, where one alone is allowed."""

    def drawn(self, llm: LLM, form: dict[str, Any], **settings: Any) -> tuple[list[int], str, str | None]:
        (output,) = run(llm, [form], **settings)
        return list(output.token_ids), output.text, output.finish_reason

    def test_one_that_is_shown_is_what_the_tokenizer_makes_of_it(self, llm: LLM) -> None:
        text = "<tool_call>\n\n</tool_call>"
        for kind in ("choice", "regex", "grammar", "grammar of letters", "GBNF"):
            assert self.drawn(llm, FORMS[kind](text)) == (TOKENIZER.encode(text), text, "stop")

    @pytest.mark.parametrize("text", [*HIDDEN, END, MISREAD])
    def test_others_are_spelled_by_ordinary_ones(self, text: str, llm: LLM) -> None:
        tokens, output, reason = self.drawn(llm, {"choice": [text]})
        assert (output, reason) == (text, "stop")
        assert set(tokens).isdisjoint(TOKENIZER.get_added_vocab().values())

    def test_a_grammar_names_tokens_beside_texts(self, llm: LLM) -> None:
        named = {"grammar": 'start: <tool_call> "<tool_call>" <|quote|> "<|quote|>" </tool_call>'}
        tokens, text, reason = self.drawn(llm, named)
        assert (text, reason) == ("<tool_call><tool_call><|quote|></tool_call>", "stop")
        assert [token for token in tokens if token in (TOOL, TOOL_END, QUOTE)] == [TOOL, QUOTE, TOOL_END]
        _, text, _ = self.drawn(llm, named, skip_special_tokens=False)
        assert text == "<tool_call><tool_call><|quote|><|quote|></tool_call>"

    @pytest.mark.parametrize("grammar", ['start: /<a>/ "<b>" // <c>', 'start: "<a><b>" # <c>', 'start: "\\"<a><b>"'])
    def test_names_stand_outside_of_texts_and_comments(self, grammar: str) -> None:
        assert not names_tokens(grammar)
        assert names_tokens(grammar.replace("start:", "start: <a>"))

    def test_a_named_end_of_sequence_ends_the_text(self, llm: LLM) -> None:
        assert self.drawn(llm, {"grammar": f'start: "a" <{END[1:-1]}>'}) == ([*TOKENIZER.encode("a"), EOS], "a", "stop")
        (whole,) = run(llm, [{"grammar": f'start: "a" ({END} "b")?'}], logit_bias={EOS: 100})
        assert (whole.text, whole.finish_reason) == ("a", "stop")

    def test_an_end_of_sequence_that_is_named_before_the_end_is_an_error(self, llm: LLM) -> None:
        (output,) = run(llm, [{"grammar": f'start: "a" {END} "b"'}])
        assert (output.text, output.finish_reason) == ("a", "error")
        assert re.search("names an end-of-sequence token, .* before its end: name it last", str(output.stop_reason))


def test_a_tokenizer_of_words_has_no_forms() -> None:
    """Its tokens are not made of bytes, so that it cannot spell any text."""
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"yes": 0, "?": 1}, unk_token="?")))
    grammars = Grammars(words, 2, [1], TokenDecoder(words, skip_special_tokens=True).bytes_of)
    with pytest.raises(ValueError, match="needs a tokenizer whose decoder is ByteLevel or has ByteFallback"):
        grammars.compile({"choice": ("yes",)})


@pytest.mark.parametrize("grammar", ["start: /.+/", 'start: "a" | <tool_call>', "start: /.+/ | <tool_call>"])
def test_ids_without_text_are_never_allowed(grammar: str) -> None:
    """A model may have more ids than its tokenizer, and one token is a byte that no text has."""
    spell = TokenDecoder(TOKENIZER, skip_special_tokens=True).bytes_of
    without = [len(TOKENIZER), TOKENIZER.convert_tokens_to_ids(bytes_to_unicode()[255])]
    matcher, _ = Grammars(TOKENIZER, len(TOKENIZER) + 1, [EOS], spell).compile({"grammar": grammar}).matcher()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert bits[TOKENIZER.encode("a")].all()
    assert not bits[without].any()


def test_where_no_token_ends_a_text_it_ends_where_nothing_can_follow() -> None:
    spell = TokenDecoder(TOKENIZER, skip_special_tokens=True).bytes_of
    matcher, _ = Grammars(TOKENIZER, len(TOKENIZER), [], spell).compile({"regex": "a{1,2}"}).matcher()
    (a,) = TOKENIZER.encode("a")
    assert matcher.consume_token(a)
    assert np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0] == [a]
    assert matcher.consume_token(a)
    assert matcher.is_stopped()
