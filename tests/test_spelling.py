"""What single tokens stand for: a text begins where its prompt ends, and results have each token's own bytes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoinfer import LLM, RequestOutput
from nanoinfer.batch.lines.requests import read_job, read_line
from nanoinfer.batch.lines.results import result_row
from nanoinfer.requests.text.spelling import TokenDecoder, is_byte, text_offsets

SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["▁yes", "▁no", "Answer", ":", "日本"]
LETTERS = bytes_to_unicode()
END = 2
CHAT = [{"role": "user", "content": "Answer:"}]
TEMPLATE = "{{ messages[0].content }}"


def bpe(words: list[str], alphabet: list[str], **options: Any) -> Tokenizer:
    """A tokenizer that merges letters to these words, from the left."""
    steps = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    vocab = dict.fromkeys([*SPECIAL, *alphabet, *"".join(words), *(first + second for first, second in steps)])
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocab)}, steps, **options))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def sentencepiece(metaspace: bool = False) -> Tokenizer:
    """A tokenizer like Llama 2's; metaspace: as newer files write it."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = bpe(WORDS, [*byte_tokens, "▁", "a"], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def byte_level() -> Tokenizer:
    words = ["".join(LETTERS[byte] for byte in word.replace("▁", " ").encode()) for word in WORDS[:-1]]
    tokenizer = bpe(words, list(LETTERS.values()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZERS = {
    "sentencepiece": PreTrainedTokenizerFast(tokenizer_object=sentencepiece(), eos_token="</s>"),
    "metaspace": PreTrainedTokenizerFast(tokenizer_object=sentencepiece(metaspace=True), eos_token="</s>"),
    "byte level": PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>"),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    TOKENIZERS[request.param].save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, eos_token_id=END, **shape)).save_pretrained(folder)
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=64, num_kvcache_blocks=8) as made:
        yield made


def spelled(llm: LLM, text: str) -> dict[int, float]:
    """The bias by which the model says the only token that spells `text`."""
    found = [
        token
        for token in range(len(llm.tokenizer))
        if TokenDecoder(llm.tokenizer, False).bytes_of(token) == text.encode()
    ]
    return dict.fromkeys(found, 1000.0)


class TestBeginning:
    """A text begins where its prompt ends, spaces included."""

    def test_a_first_space_stays(self, llm: LLM) -> None:
        params = greedy(3, n=2, logit_bias=spelled(llm, " yes"))
        ids = llm.tokenize("Answer:")
        for prompt in ("Answer:", ids):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert [sample.text for sample in output.samples] == [" yes yes yes"] * 2
            assert llm.detokenize(ids + output.token_ids) == "Answer:" + output.text

    @pytest.mark.parametrize(("stop", "text"), [(" yes", ""), ("yes", " "), ("s y", " ye"), ("never", " yes yes yes")])
    def test_a_stop_string_may_hold_it(self, stop: str, text: str, llm: LLM) -> None:
        params = greedy(3, stop=stop, logit_bias=spelled(llm, " yes"))
        assert llm.generate("Answer:", params, use_tqdm=False)[0].text == text
        assert "".join(new.text for new in llm.stream("Answer:", params)) == text

    def test_none_is_added(self, llm: LLM) -> None:
        params = greedy(2, logit_bias=spelled(llm, "Answer"))
        assert llm.generate("Answer:", params, use_tqdm=False)[0].text == "AnswerAnswer"
        assert "".join(new.text for new in llm.stream("Answer:", params)) == "AnswerAnswer"

    @pytest.mark.parametrize("choice", [" yes", "yes", "  yes"])
    def test_a_guided_text_has_it_if_its_form_has(self, choice: str, llm: LLM) -> None:
        pytest.importorskip("llguidance", reason="structured outputs need the llguidance package")
        params = greedy(20, structured_outputs={"choice": [choice]})
        (output,) = llm.generate("Answer:", params, use_tqdm=False)
        assert (output.text, output.finish_reason) == (choice, "stop")
        assert "".join(new.text for new in llm.stream("Answer:", params)) == choice

    def test_a_tokens_text_has_it(self, llm: LLM) -> None:
        (output,) = llm.generate("Answer:", greedy(2, logprobs=0, logit_bias=spelled(llm, " no")), use_tqdm=False)
        assert [value.decoded_token for entry in output.logprobs for value in entry.values()] == [" no"] * 2

    def test_the_bytes_of_a_texts_tokens_are_the_text(self, llm: LLM) -> None:
        """Also of characters of which no token is whole, and from a pickle."""
        text = " 日本 é🙂 a"
        tokens = llm.tokenize("Answer:" + text)[len(llm.tokenize("Answer:")) :]
        for token_id in tokens:
            params = greedy(1, logprobs=0, logit_bias={token_id: 1000.0}, ignore_eos=True)
            (entry,) = llm.generate("Answer:", params, use_tqdm=False)[0].logprobs
            assert entry[token_id].decoded_bytes == TokenDecoder(llm.tokenizer, False).bytes_of(token_id)
            assert pickle.loads(pickle.dumps(entry[token_id])).decoded_bytes == entry[token_id].decoded_bytes
        assert b"".join(map(TokenDecoder(llm.tokenizer, False).bytes_of, tokens)).decode() == text
        (entry,) = llm.generate("Answer:", greedy(1, logprobs=0, detokenize=False), use_tqdm=False)[0].logprobs
        assert [value.decoded_bytes for value in entry.values()] == [None]

    def test_a_whole_text_begins_without_it(self, llm: LLM) -> None:
        """The tokenizer has put it there itself, where it does."""
        for text in ("yes no", "Answer: yes", "日本 a"):
            assert llm.detokenize(llm.tokenize(text)) == text


class TestBytes:
    @pytest.mark.parametrize("name", TOKENIZERS)
    @settings(max_examples=100, deadline=None)
    @given(text=st.text(alphabet="yes no日本é🤗\ufffda:\n", max_size=20))
    def test_those_of_all_tokens_are_the_text(self, name: str, text: str) -> None:
        tokenizer = TOKENIZERS[name]
        own = [TokenDecoder(tokenizer, True).bytes_of(token) for token in tokenizer.encode("a" + text)]
        assert b"".join(own).removeprefix(b" ") == b"a" + text.encode()

    def test_special_tokens_are_spelled_where_they_are_not_left_out(self) -> None:
        for tokenizer in TOKENIZERS.values():
            assert [TokenDecoder(tokenizer, skipped).bytes_of(END) for skipped in (True, False)] == [b"", b"</s>"]

    @pytest.mark.parametrize("name", TOKENIZERS)
    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_places_are_those_of_the_text(self, name: str, data: st.DataObject) -> None:
        """Tokens in any order make broken characters, and one broken byte breaks those beside it."""
        tokenizer = TOKENIZERS[name]
        known = [END, *tokenizer.encode("yes aé日🤗\n", add_special_tokens=False)]
        tokens = data.draw(st.lists(st.sampled_from(known), max_size=12))
        text = TokenDecoder(tokenizer, True)(tokens)
        for token, offset in zip(tokens, text_offsets(tokenizer, tokens, True), strict=True):
            own = TokenDecoder(tokenizer, True)([token])
            if "\ufffd" in own:
                assert offset < len(text)
            else:
                broken = "\ufffd" if is_byte(tokenizer.convert_ids_to_tokens(token)) else own
                assert text.startswith((own, broken), offset)

    def test_results_have_each_tokens_own(self, llm: LLM) -> None:
        """Tokens are parts of characters, and a place in the text is that of the character that a token adds to."""
        pytest.importorskip("llguidance", reason="structured outputs need the llguidance package")
        text = " yesé🤗日本 a"
        row, output = result_of(llm, "/v1/chat/completions", text, logprobs=True, top_logprobs=3)
        places = row["choices"][0]["logprobs"]["content"]
        assert row["choices"][0]["message"]["content"] == text
        assert b"".join(bytes(place["bytes"]) for place in places) == text.encode()
        assert any(place["token"] == "\ufffd" for place in places)
        for place, entry in zip(places, output.logprobs, strict=True):
            likely = sorted(entry, key=lambda token: -entry[token])[:3]
            own = [list(TokenDecoder(llm.tokenizer, False).bytes_of(token)) for token in likely]
            assert [candidate["bytes"] for candidate in place["top_logprobs"]] == own

        row, output = result_of(llm, "/v1/completions", text, logprobs=0)
        assert row["choices"][0]["text"] == text
        told = row["choices"][0]["logprobs"]
        before = b""
        for token_id, token, offset in zip(output.token_ids, told["tokens"], told["text_offset"], strict=True):
            assert offset == len(before.decode(errors="ignore"))
            assert token == "\ufffd" or text.startswith(token, offset)
            before += TokenDecoder(llm.tokenizer, True).bytes_of(token_id)
        assert before == text.encode()

    def test_a_special_token_is_spelled_and_takes_no_place(self, llm: LLM) -> None:
        ends = {"logit_bias": {END: 1000.0}, "ignore_eos": True, "max_tokens": 2}
        row, _ = result_of(llm, "/v1/chat/completions", None, logprobs=True, **ends)
        assert [bytes(place["bytes"]) for place in row["choices"][0]["logprobs"]["content"]] == [b"</s>"] * 2
        for skipped, text, offsets in ((True, "", [0, 0]), (False, "</s></s>", [0, 4])):
            row, _ = result_of(llm, "/v1/completions", None, logprobs=0, skip_special_tokens=skipped, **ends)
            assert row["choices"][0]["text"] == text
            assert row["choices"][0]["logprobs"]["text_offset"] == offsets

    def test_no_place_lies_behind_a_text_that_a_stop_string_ends(self, llm: LLM) -> None:
        row, _ = result_of(llm, "/v1/completions", None, logprobs=0, stop="s y", logit_bias=spelled(llm, " yes"))
        assert row["choices"][0]["text"] == " ye"
        assert row["choices"][0]["logprobs"]["text_offset"] == [0, 3]


def result_of(llm: LLM, url: str, text: str | None, **settings: Any) -> tuple[dict[str, Any], RequestOutput]:
    """Return the body of a result in OpenAI's format, and its request's output; text: what is generated, if guided."""
    prompt = {"messages": CHAT} if "chat" in url else {"prompt": "Answer:"}
    form = {} if text is None else {"structured_outputs": {"choice": [text]}}
    body = {**prompt, **form, "temperature": 0, "max_tokens": 40, **settings}
    line = read_line(json.dumps({"custom_id": "1", "method": "POST", "url": url, "body": body}).encode(), 1)
    job = read_job(line, {}, 0)
    (output,) = llm.generate([job.prompt], job.params, use_tqdm=False)
    return result_row(job, [output], "m", llm)["response"]["body"], output
