"""Text token by token: streams, stop strings, chats, and the results of requests that end in unusual ways."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from conftest import Oracle, assert_close, greedy, whole_only
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams, StreamOutput
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.requests.text.detokenizer import Detokenizer, decode
from nanoinfer.requests.text.stop_strings import StopStrings

TOKENIZER: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
PROMPTS = ["ROMEO:\nBut, soft!", "JULIET:\nO Romeo", "GLOUCESTER:\nNow is", "KING:\n"]


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


def is_empty(llm: LLM) -> bool:
    manager = llm.engine.scheduler.block_manager
    return llm.engine.is_finished and not llm.has_unfinished_requests() and manager.num_free == len(manager.blocks)


def make_tokenizer(tokens: list[str], decoder: decoders.Decoder) -> PreTrainedTokenizerBase:
    vocab = {token: index for index, token in enumerate(["<unk>", *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


STRADDLING = [  # tokens of a byte-level tokenizer that begin or end inside characters
    *(bytes([byte]) for byte in b"\xe2\x82\xac\xf0\x9f\x98\x80\xff\xedA "),
    *(b"STOP\xe2", b"\x82\xac\xe2", b"\x98\x80a\xf0\x9f", b" the", "\ufffd".encode(), b"x\xef", b"\xbf\xbd"),
]
LETTERS = bytes_to_unicode()
BYTES = [f"<0x{byte:02X}>" for byte in b"\xe2\x82\xac\xf0\x9f\x98\x80\xffA \n"]
PIECES = [*BYTES, "▁", "▁▁", "▁a", "a", "STOP", "\ufffd", "▁\ufffd"]
SPACES = decoders.Replace("▁", " ")
TOKENIZERS = {
    "bundled": TOKENIZER,
    "byte level": make_tokenizer(["".join(LETTERS[byte] for byte in t) for t in STRADDLING], decoders.ByteLevel()),
    "byte fallback, first space stripped": make_tokenizer(
        PIECES,
        decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ),
    "byte fallback": make_tokenizer(PIECES, decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()])),
    "metaspace": make_tokenizer(PIECES, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "word pieces": make_tokenizer(["a", "##b", "c", ".", "n't", "'"], decoders.WordPiece(cleanup=True)),
}


def behind_text(token_ids: list[int], tokenizer: PreTrainedTokenizerBase, skipped: bool) -> str:
    """Return what transformers adds to a text of one letter for these tokens."""
    letter = "a" if "a" in tokenizer.get_vocab() else "A"
    whole = [tokenizer.convert_tokens_to_ids(letter), *token_ids]
    text = tokenizer.decode(whole, skip_special_tokens=skipped, clean_up_tokenization_spaces=False)
    assert text.startswith(letter)
    return text[1:]


def read(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase = TOKENIZER, **params: Any
) -> tuple[list[str], Detokenizer]:
    """Return the texts that a stream takes after each token and at the end, and the detokenizer."""
    seq = Sequence([30], SamplingParams(**params), 0, 4096)
    detokenizer, taken = Detokenizer(tokenizer, seq), []
    for token_id in token_ids:
        seq.token_ids.append(token_id)
        if detokenizer.update() is not None:
            break
        taken.append(detokenizer.take_text())
    seq.status, seq.finish_reason = SequenceStatus.FINISHED, "length"
    detokenizer.update()
    return [*taken, detokenizer.take_text()], detokenizer


def spell(text: str, **params: Any) -> tuple[list[str], Detokenizer]:
    """Call `read` with the tokens of a text."""
    return read(TOKENIZER.encode(text), **params)


class TestDetokenizer:
    def test_no_half_of_a_character_is_taken(self) -> None:
        taken, detokenizer = spell("soft é日本 🤗🏽 light")
        assert "".join(taken) == detokenizer.text == "soft é日本 🤗🏽 light"
        assert len(taken) > 12
        assert not any("\ufffd" in text for text in taken)

    def test_bytes_that_never_become_a_character_are_there_in_the_end(self) -> None:
        seq = Sequence([30], SamplingParams(), 0, 4096)
        tokens = TOKENIZER.encode("soft 🤗")[:-1]
        detokenizer = Detokenizer(TOKENIZER, seq)
        seq.token_ids.extend(tokens)
        detokenizer.update()
        assert detokenizer.take_text() == "soft "
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, "length"
        detokenizer.update()
        assert detokenizer.text == TOKENIZER.decode(tokens)
        assert detokenizer.take_text() == detokenizer.text.removeprefix("soft ")

    @pytest.mark.parametrize("skipped", [True, False])
    def test_any_tokens_are_what_the_tokenizer_makes_of_them_all(self, skipped: bool) -> None:
        """The tokens include halves of characters and special tokens."""
        rand = random.Random(1)
        halves = [token for token in range(len(TOKENIZER)) if TOKENIZER.decode([token]) == "\ufffd"]
        for _ in range(100):
            tokens = [rand.choice((2, rand.choice(halves), rand.randrange(len(TOKENIZER)))) for _ in range(40)]
            seq = Sequence([30], SamplingParams(skip_special_tokens=skipped), 0, 4096)
            detokenizer, text = Detokenizer(TOKENIZER, seq), ""
            for token in tokens:
                seq.token_ids.append(token)
                detokenizer.update()
                text += detokenizer.take_text()
            seq.status, seq.finish_reason = SequenceStatus.FINISHED, "length"
            detokenizer.update()
            assert text + detokenizer.take_text() == detokenizer.text
            assert detokenizer.text == TOKENIZER.decode(tokens, skip_special_tokens=skipped)

    @pytest.mark.parametrize("name", TOKENIZERS)
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_the_taken_texts_are_the_whole_text_of_any_tokens(self, name: str, data: st.DataObject) -> None:
        """Tokens straddle characters, hold bytes that are no character, are special, have no entry, or repeat.

        The test reads each text without a stop string, and with one that is longer than the text.
        """
        tokenizer = TOKENIZERS[name]
        some = st.lists(st.integers(0, len(tokenizer) + 2), max_size=8)
        repeated = st.builds(lambda ids, times: ids[:4] * times, some, st.integers(1, 40))
        tokens = list(chain.from_iterable(data.draw(st.lists(some | repeated, max_size=6))))
        skipped = data.draw(st.booleans())
        expected = behind_text(tokens, tokenizer, skipped)
        for stop in (None, expected[-3:] + "." * len(expected) + "!"):
            taken, detokenizer = read(tokens, tokenizer, skip_special_tokens=skipped, stop=stop)
            assert "".join(taken) == detokenizer.text == decode(tokenizer, detokenizer.seq) == expected

    def test_only_the_bytes_of_an_unfinished_character_wait(self) -> None:
        tokenizer = TOKENIZERS["byte level"]
        tokens = [
            STRADDLING.index(token) + 1 for token in (b"STOP\xe2", b"\x82\xac\xe2", b"\xff", b"\x82", b"\x82", b"A")
        ]
        assert read(tokens, tokenizer)[0] == ["STOP", "€", "\ufffd", "\ufffd", "\ufffd", "\ufffdA", ""]
        tokenizer = TOKENIZERS["byte fallback"]
        tokens = tokenizer.convert_tokens_to_ids(["a", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>", "a", "<0xE2>", "a"])
        assert read(tokens, tokenizer)[0] == ["a", "", "", "", "", "€\na", "", "\ufffda", ""]

    def test_a_tokenizer_in_plain_python_makes_whole_texts(self) -> None:
        tokenizer = ByT5Tokenizer()
        seq = Sequence([30], SamplingParams(), 0, 4096)
        seq.token_ids.extend(tokenizer.encode("soft é , light"))
        assert decode(tokenizer, seq) == "soft é , light"

    @pytest.mark.parametrize(
        ("name", "tokens", "stop", "text"),
        [
            ("byte level", [b"STOP\xe2"], "STOP", ""),
            ("byte level", [b" the", b"STOP\xe2", b"A"], "STOP", " the"),
            ("byte level", [b" the", b"\xe2"], "\ufffd", " the"),
            ("byte fallback", ["a", "<0x0A>", "<0xE2>"], "a\n", ""),
            ("byte fallback", ["a", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "a"], "€", "a\n"),
        ],
    )
    def test_what_precedes_an_unfinished_character_is_searched_at_once(
        self, name: str, tokens: list, stop: str, text: str
    ) -> None:
        tokenizer = TOKENIZERS[name]
        spelled = [token if isinstance(token, str) else "".join(LETTERS[byte] for byte in token) for token in tokens]
        taken, detokenizer = read(tokenizer.convert_tokens_to_ids(spelled), tokenizer, stop=stop)
        assert detokenizer.update() == stop
        assert "".join(taken) == detokenizer.text == text
        num_read = len(detokenizer.seq) - 1
        assert num_read == len(tokens) - (tokens[-1] in (b"A", "a", "<0xE2>"))

    @pytest.mark.parametrize(
        ("name", "token", "mean", "most"),
        [
            ("bundled", 30, 12, 10),
            ("bundled", 2, 12, 10),
            ("bundled", 97, 12, 10),
            ("byte level", 1 + STRADDLING.index(b"\x82\xac\xe2"), 12, 10),
            ("byte fallback", 1 + PIECES.index("<0x0A>"), 70, 1000),
        ],
        ids=["text", "no text", "half a character", "halves of two", "a byte"],
    )
    def test_a_tokens_cost_does_not_grow(self, name: str, token: int, mean: int, most: int) -> None:
        """For each token, the tokenizer is asked to decode a few tokens only."""
        tokenizer, decoded = TOKENIZERS[name], []

        class Counting:
            id_to_token = tokenizer.backend_tokenizer.id_to_token
            is_fast = True
            convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

            @property
            def backend_tokenizer(self) -> Counting:
                return self

            def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
                decoded.append(len(tokens))
                return tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

        seq = Sequence([30], SamplingParams(stop="never"), 0, 4096)
        detokenizer = Detokenizer(Counting(), seq)
        for _ in range(1000):
            seq.token_ids.append(token)
            detokenizer.update()
        assert sum(decoded) <= mean * 1000
        assert max(decoded) <= most

    @settings(max_examples=100, deadline=None)
    @given(
        text=st.text(alphabet="abé日 \n", max_size=40),
        stops=st.lists(st.text(alphabet="abé日 \n", min_size=1, max_size=5), max_size=3),
        included=st.booleans(),
    )
    def test_the_text_ends_at_the_first_stop_string_and_nothing_of_one_is_taken(
        self, text: str, stops: list[str], included: bool
    ) -> None:
        taken, detokenizer = spell(text, stop=stops, include_stop_str_in_output=included)
        kept = "".join(taken)
        assert detokenizer.text == kept
        if not any(stop in text for stop in stops):
            assert kept == text
            return
        stop = detokenizer.update()
        assert stop in stops
        body = kept.removesuffix(stop) if included else kept
        assert text.startswith(body + stop)
        assert kept == (body + stop if included else body)
        assert not any(other in body for other in stops)

    @settings(max_examples=70, deadline=None)
    @given(
        tokens=st.lists(st.integers(1, len(STRADDLING)), min_size=1, max_size=30),
        stops=st.lists(st.text(alphabet="TOP he€a\ufffd", min_size=1, max_size=3), min_size=1, max_size=4),
        least=st.integers(0, 5),
    )
    def test_the_first_token_to_complete_a_stop_string_is_the_last(
        self, tokens: list[int], stops: list[str], least: int
    ) -> None:
        """If a token completes several stop strings, the one that begins first counts; of those, the shortest."""
        tokenizer = TOKENIZERS["byte level"]
        taken, detokenizer = read(tokens, tokenizer, stop=stops, min_tokens=least)
        texts = [tokenizer.decode(tokens[: count + 1]) for count in range(len(tokens))]
        whole = [0, *(len(text.removesuffix("\ufffd")) for text in texts), len(texts[-1])]
        text = texts[-1]
        for number, (old, new) in zip([*range(1, len(tokens) + 1), len(tokens)], pairwise(whole), strict=True):
            ends = [(at, stop) for stop in stops for at in range(new) if text.startswith(stop, at, new)]
            completed = [(at, stop) for at, stop in ends if at + len(stop) > old]
            if completed and number > least:
                at, stop = min(completed)
                assert ("".join(taken), detokenizer.update()) == (text[:at], stop)
                assert detokenizer.seq.num_output_tokens == number
                return
        assert ("".join(taken), detokenizer.update()) == (text, None)

    def test_stop_strings_do_not_count_before_the_least_length(self) -> None:
        text = "the friar and the king and the queen"
        at = TOKENIZER.encode(text)
        assert spell(text, stop="the")[1].text == ""
        assert spell(text, stop="the", min_tokens=3, max_tokens=len(at))[1].text == "the friar and "


class TestStopStrings:
    @settings(max_examples=150, deadline=None)
    @given(
        stops=st.lists(st.text(alphabet="ab🤗", min_size=1, max_size=5), min_size=1, max_size=6).map(tuple),
        texts=st.lists(st.text(alphabet="ab🤗", max_size=6), max_size=6),
    )
    def test_the_first_and_the_shortest_that_ends_in_a_new_text_is_found(
        self, stops: tuple[str, ...], texts: list[str]
    ) -> None:
        search, state, text = StopStrings(stops), 0, ""
        for new in texts:
            old, text = len(text), text + new
            state, found = search.find(state, new)
            ends = [(at, at + len(stop)) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
            expected = min(((start - old, end - old) for start, end in ends if end > old), default=None)
            assert found == expected
            begun = [length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])]
            assert search.num_open(state) == max(begun)

    def test_fifty_thousand_cost_as_much_as_one(self) -> None:
        """One automaton finds all stop strings, and requests with the same ones share it."""
        tokens = TOKENIZER.encode("But, soft! what light through yonder window breaks? " * 20)
        stops = [f"what number {number} says" for number in range(50_000)]
        built = read(tokens[:1], stop=stops)[1]._stops
        start = time.process_time()
        taken, detokenizer = read(tokens, stop=list(stops))
        assert time.process_time() - start < 1  # a search for each stop string would take a minute
        assert "".join(taken) == TOKENIZER.decode(tokens)
        assert detokenizer._stops is built
        assert read(TOKENIZER.encode("so what number 4999 says"), stop=stops)[1].text == "so "


class TestStream:
    @pytest.mark.parametrize("options", [{}, *whole_only([{"max_num_seqs": 2}]), {"tensor_parallel_size": 2}], ids=str)
    def test_the_texts_of_a_stream_are_the_outputs(self, options: dict, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(device="cpu", **options)
        params = [
            greedy(20),
            SamplingParams(seed=1, max_tokens=30, stop=["the", "."]),
            SamplingParams(seed=2, max_tokens=9, n=3, top_k=5),
            SamplingParams(seed=3, max_tokens=6, detokenize=False, n=2, logprobs=1, prompt_logprobs=0),
        ]
        logprobs: dict[tuple[int, int], list] = {}
        prompt_logprobs: list[list] = []
        texts: dict[tuple[int, int], str] = {}
        tokens: dict[tuple[int, int], list[int]] = {}
        ends: dict[tuple[int, int], StreamOutput] = {}
        for new in llm.stream(PROMPTS, params):
            key = new["index"], new["sample"]
            assert key not in ends
            texts[key] = texts.get(key, "") + new["text"]
            tokens[key] = tokens.get(key, []) + new["token_ids"]
            logprobs[key] = logprobs.get(key, []) + (new["logprobs"] or [])
            if new["prompt_logprobs"] is not None:
                assert key == (3, 0)
                prompt_logprobs.append(new["prompt_logprobs"])
            if new["finish_reason"] is not None:
                ends[key] = new
        for index, output in enumerate(llm.generate(PROMPTS, params, use_tqdm=False)):
            for number, sample in enumerate(output["samples"]):
                key = index, number
                assert texts[key] == sample["text"]
                assert tokens[key] == sample["token_ids"]
                assert ends[key]["finish_reason"] == sample["finish_reason"]
                assert ends[key]["stop_reason"] == sample["stop_reason"]
                assert_close(logprobs[key], sample["logprobs"] or [])
        (only,) = prompt_logprobs
        assert_close(only, output["prompt_logprobs"])
        assert len(ends) == 7

    def test_the_first_text_comes_long_before_the_last(self, llm: LLM) -> None:
        stream = llm.stream(PROMPTS[:1], greedy(60, ignore_eos=True))
        assert next(stream)["token_ids"]
        assert llm.engine.scheduler.running
        assert sum(len(new["token_ids"]) for new in stream) == 59

    def test_leaving_the_loop_leaves_the_engine_empty(self, llm: LLM) -> None:
        for new in llm.stream(PROMPTS, greedy(100, ignore_eos=True)):
            if len(new["token_ids"]) and new["index"] == 2:
                break
        assert is_empty(llm)
        with pytest.raises(ZeroDivisionError):
            [new["index"] / 0 for new in llm.stream(PROMPTS, greedy(100))]
        assert is_empty(llm)
        assert len(llm.generate(PROMPTS, greedy(3), use_tqdm=False)) == 4

    def test_an_open_stream_has_the_engine_for_itself(self, llm: LLM) -> None:
        stream = llm.stream(PROMPTS, greedy(10))
        next(stream)
        for call in (lambda: llm.generate("a"), lambda: llm.add_request("a"), llm.step, lambda: list(llm.stream("a"))):
            with pytest.raises(RuntimeError, match="a stream is open"):
                call()
        assert sum(new["finish_reason"] is not None for new in stream) == 4  # and the refused calls lost nothing

    def test_a_stream_that_was_refused_never_looks_complete(self, llm: LLM) -> None:
        first, refused = llm.stream(PROMPTS, greedy(10)), llm.stream(PROMPTS, greedy(10))
        next(first)
        with pytest.raises(RuntimeError, match="a stream is open"):
            list(refused)
        assert sum(new["finish_reason"] is not None for new in first) == 4
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"this stream has ended, make another: .*a stream is open"):
                list(refused)

    def test_a_stream_that_broke_off_never_looks_complete(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = llm.stream(PROMPTS, greedy(10))
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "step", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                list(stream)
        with pytest.raises(RuntimeError, match="this stream has ended, make another: division by zero"):
            list(stream)
        assert is_empty(llm)

    def test_an_interrupt_between_two_outputs_ends_the_stream(self, llm: LLM) -> None:
        stream = llm.stream(PROMPTS, greedy(10))
        next(stream)

        def interrupt(frame: FrameType, event: str, arg: object) -> None:
            if event == "c_return" and arg is next and frame.f_code.co_name == "__next__":
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        finally:
            sys.setprofile(None)
        assert len(llm.generate(PROMPTS, greedy(2), use_tqdm=False)) == len(PROMPTS)
        with pytest.raises(RuntimeError, match="this stream has ended, make another: KeyboardInterrupt"):
            list(stream)

    def test_closing_the_llm_ends_it(self, llm: LLM) -> None:
        stream, late = llm.stream(PROMPTS, greedy(10)), llm.stream(PROMPTS, greedy(10))
        next(stream)
        llm.close()
        assert not llm.has_unfinished_requests()
        for left in (stream, late):
            with pytest.raises(ValueError, match="this LLM is closed"):
                list(left)

    def test_mistakes_are_found_before_the_loop(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
            llm.stream(["a", []])

    def test_one_request_is_aborted_and_the_others_go_on(self, llm: LLM) -> None:
        ends = {}
        for new in llm.stream(PROMPTS, greedy(30, ignore_eos=True, stop="never")):
            if new["index"] == 1 and len(ends) == 0:
                llm.abort(new["request_id"])
            if new["finish_reason"] is not None:
                ends[new["index"]] = new["finish_reason"]
        assert ends == {0: "length", 1: "abort", 2: "length", 3: "length"}
        assert is_empty(llm)


class TestText:
    """A request's text is the same from a stream, with stop strings, and when it is made at the end."""

    def test_a_stop_string_ends_a_request_with_its_last_token(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """The token may also hold the beginning of a character after the stop string."""
        monkeypatch.setattr(llm._requests._tasks, "_tokenizer", TOKENIZERS["byte level"])
        token = 1 + STRADDLING.index(b"STOP\xe2")
        params = [greedy(1, logit_bias={token: 1000.0}, stop=stop) for stop in ("STOP", None)]
        stopped, whole = llm.generate([[30], [30]], params, use_tqdm=False)
        assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", "STOP")
        assert (whole["text"], whole["finish_reason"]) == ("STOP\ufffd", "length")

    def test_no_spaces_are_cleaned_up(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        """Spaces stay, even if the checkpoint says otherwise: to clean them up could take back a stream's text."""
        shutil.copytree(BUNDLED_MODEL, tmp_path / "m")
        file = tmp_path / "m" / "tokenizer_config.json"
        names = ("", "_for_bpe_even_though_it_will_corrupt_output")
        flags = {f"clean_up_tokenization_spaces{name}": True for name in names}
        file.write_text(json.dumps({**json.loads(file.read_text()), **flags}))
        llm = make_llm(str(tmp_path / "m"))
        (token,) = TOKENIZER.encode(" '")
        settings = {"logit_bias": {token: 1000.0}}
        assert llm.tokenizer.decode([token] * 2) != " ' '"
        for stop in (None, "never"):
            (output,) = llm.generate(PROMPTS[:1], greedy(5, stop=stop, **settings), use_tqdm=False)
            assert output["text"] == " ' ' ' ' '"
        assert "".join(new["text"] for new in llm.stream(PROMPTS[:1], greedy(5, **settings))) == output["text"]


class TestLoop:
    def test_requests_come_and_go_while_others_run(self, llm: LLM, oracle: Oracle) -> None:
        prompts = [[30], [31, 32], [5] * 20]
        ids, outputs = [llm.add_request(prompts[0], greedy(20))], {}
        while llm.has_unfinished_requests():
            for output in llm.step():
                outputs[output["request_id"]] = output["token_ids"]
            if len(ids) < len(prompts):
                ids.append(llm.add_request(prompts[len(ids)], greedy(20)))
        assert [outputs[request] for request in ids] == [oracle.greedy(prompt, 20) for prompt in prompts]
        assert is_empty(llm)

    def test_an_aborted_request_gives_what_it_came_to(self, llm: LLM, oracle: Oracle) -> None:
        running, waiting = (llm.add_request([30], greedy(50, ignore_eos=True, n=n)) for n in (1, 2))
        for _ in range(6):
            assert llm.step() == []
        llm.abort(running)
        llm.abort(waiting)
        llm.abort(waiting)  # a second abort does nothing
        outputs = {output["request_id"]: output for output in llm.step()}
        assert outputs[running]["finish_reason"] == outputs[waiting]["finish_reason"] == "abort"
        tokens = outputs[running]["token_ids"]
        assert 0 < len(tokens) < 10
        assert tokens == oracle.greedy([30], 50, ignore_eos=True)[: len(tokens)]
        assert outputs[running]["text"] == llm.tokenizer.decode(tokens)
        assert len(llm.generate("a", greedy(2), use_tqdm=False)) == 1
        assert is_empty(llm)

    def test_one_that_never_started(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(max_num_seqs=1)
        first, second = (llm.add_request([30], greedy(8)) for _ in range(2))
        llm.step()
        llm.abort(second)
        (output,) = llm.step()
        assert output["request_id"] == second
        assert output["token_ids"] == []
        assert output["timings"]["first_token"] is None
        llm.abort(first)
        assert llm.step()[0]["timings"]["first_token"] is None  # its token was not read yet

    @pytest.mark.parametrize("samples", [1, 3])
    def test_each_output_is_given_once(self, samples: int, llm: LLM) -> None:
        """Samples may end in the same step."""
        ids = [llm.add_request([30], greedy(4, n=samples, ignore_eos=True)) for _ in range(3)]
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
            if len(outputs) == 0:
                llm.abort(ids[1])
        assert sorted(output["request_id"] for output in outputs) == ids

    @pytest.mark.parametrize("request_id", [7, "0", 0.0, True, *whole_only([-1, None])])
    def test_an_unknown_id(self, request_id: Any, llm: LLM) -> None:
        running = [llm.add_request([30], greedy(4)) for _ in range(2)]
        with pytest.raises(ValueError, match=f"request_id={request_id!r}: no request has it"):
            llm.abort(request_id)
        while llm.has_unfinished_requests():
            assert all(output["finish_reason"] != "abort" for output in llm.step())
        llm.abort(running[0])  # the request has ended, so this does nothing

    def test_generate_does_not_run_other_peoples_requests(self, llm: LLM) -> None:
        request = llm.add_request([30], greedy(4))
        with pytest.raises(RuntimeError, match="requests of add_request have not ended"):
            llm.generate("a")
        while not (outputs := llm.step()):
            pass
        assert outputs[0]["request_id"] == request


class TestResults:
    def test_why_each_ended(self, llm: LLM, oracle: Oracle) -> None:
        tokens = oracle.greedy([30, 31], 12, ignore_eos=True)
        params = [
            greedy(12, ignore_eos=True),
            greedy(12, stop_token_ids=[tokens[5]]),
            greedy(12, stop_token_ids=[tokens[5]], include_stop_str_in_output=True),
            greedy(12, logit_bias={2: 1000.0}),
            greedy(12, logit_bias={2: 1000.0}, skip_special_tokens=False, include_stop_str_in_output=True),
        ]
        outputs = llm.generate([[30, 31]] * 5, params, use_tqdm=False)
        assert is_empty(llm)
        end = tokens.index(tokens[5]) + 1
        assert [output["finish_reason"] for output in outputs] == ["length", *["stop"] * 4]
        assert [output["stop_reason"] for output in outputs] == [None, tokens[5], tokens[5], None, None]
        assert [output["token_ids"] for output in outputs] == [tokens, tokens[:end], tokens[:end], [2], [2]]
        texts = [llm.tokenizer.decode(some) for some in (tokens, tokens[: end - 1], tokens[:end], [], [2])]
        assert [output["text"] for output in outputs] == texts
        assert texts[4]

    def test_what_follows_a_stop_string_is_neither_returned_nor_left(self, llm: LLM) -> None:
        """The token after the stop string is already computed when the host finds the string."""
        results: list[StepResult] = []
        llm.engine.on_step = results.append
        (output,) = llm.generate(PROMPTS[:1], greedy(50, stop="the"), use_tqdm=False)
        assert is_empty(llm)
        assert sum(result.num_decode_tokens for result in results) == len(output["token_ids"]) - 1

    def test_timings_and_cached_tokens(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(kvcache_block_size=16)
        for cached in (0, 32):
            (output,) = llm.generate([[30] * 40], greedy(8, ignore_eos=True), use_tqdm=False)
            timings = output["timings"]
            assert timings["queued"] < timings["first_token"] < timings["finished"]
            assert output["num_cached_tokens"] == cached

    @pytest.mark.parametrize("stop", ["never", None], ids=["on its way", "at its end"])
    def test_a_text_that_cannot_be_made_ends_its_request_alone(
        self, stop: str | None, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = [greedy(8, stop=stop, skip_special_tokens=index != 1, ignore_eos=True) for index in range(4)]
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
        if stop is None:

            def fail(tokenizer: PreTrainedTokenizerBase, seq: Sequence) -> str:
                if not seq.params.skip_special_tokens:
                    raise LookupError("no such token")
                return decode(tokenizer, seq)

            monkeypatch.setattr("nanoinfer.requests.tasks.sample.decode", fail)
        else:
            update = Detokenizer.update

            def fail_late(detokenizer: Detokenizer) -> str | None:
                if not detokenizer.seq.params.skip_special_tokens and len(detokenizer.seq) > 12:
                    raise LookupError("no such token")
                return update(detokenizer)

            monkeypatch.setattr(Detokenizer, "update", fail_late)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert outputs[1]["finish_reason"] == "error"
        assert outputs[1]["stop_reason"] == "LookupError: no such token"
        for index in (0, 2, 3):
            assert outputs[index]["text"] == expected[index]["text"]
            assert outputs[index]["finish_reason"] == "length"
        assert is_empty(llm)


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, dtype="float32", num_kvcache_blocks=129) as llm:
        yield llm


class TestChat:
    CHAT = [{"role": "user", "content": "But, soft!"}]  # noqa: RUF012

    @pytest.fixture
    def llm(self, shared_llm: LLM) -> Iterator[LLM]:
        """An LLM whose template a test may replace."""
        template = shared_llm.tokenizer.chat_template
        yield shared_llm
        shared_llm.tokenizer.chat_template = template

    def test_a_chat_is_its_template(self, llm: LLM) -> None:
        text = llm.tokenizer.apply_chat_template(self.CHAT, tokenize=False, add_generation_prompt=True)
        (expected,) = llm.generate([llm.tokenizer.encode(text, add_special_tokens=False)], greedy(8), use_tqdm=False)
        for chats in (self.CHAT, [self.CHAT]):
            (output,) = llm.chat(chats, greedy(8), use_tqdm=False)
            assert output["token_ids"] == expected["token_ids"]
        assert len(llm.chat([self.CHAT, self.CHAT], greedy(1), use_tqdm=False)) == 2
        (output,) = llm.chat(iter([iter(self.CHAT)]), greedy(8), use_tqdm=False)
        assert output["token_ids"] == expected["token_ids"]

    def test_template_arguments_are_passed_on(self, llm: LLM) -> None:
        llm.tokenizer.chat_template = "{{ messages[0].content }}{% if loud %}!!!{% endif %}"
        for kwargs, text in (({}, "But, soft!"), ({"loud": True}, "But, soft!!!!")):
            (chat,) = llm._inputs.check_chats(self.CHAT, None, kwargs).take_prompts()
            assert (chat.text, chat.token_ids) == (text, llm.tokenizer.encode(text))

    def test_a_prompt_may_be_a_chat(self, llm: LLM) -> None:
        """generate, stream and add_request take a chat among their prompts, as `chat` takes it alone."""
        llm.tokenizer.chat_template = "{{ messages[0].content }}{% if loud %}!!!{% endif %}"
        chat = {"messages": self.CHAT, "chat_template_kwargs": {"loud": True}}
        expected, plain = llm.chat(self.CHAT, greedy(8), use_tqdm=False, loud=True)[0], {"messages": self.CHAT}
        for prompts in (chat, [chat, "ROMEO:", plain]):
            first, *rest = llm.generate(prompts, greedy(8), use_tqdm=False)
            assert (first.prompt, first.text) == ("But, soft!!!!", expected.text)
            assert [output.prompt for output in rest] == ["ROMEO:", "But, soft!"][: len(rest)]
        assert "".join(new.text for new in llm.stream(chat, greedy(8))) == expected.text
        llm.add_request(chat, greedy(8))
        outputs: list[RequestOutput] = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert [output.text for output in outputs] == [expected.text]

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ({"messages": "hi"}, r"prompt\['messages'\]='hi': must be a list of messages"),
            ({"messages": [], "prompt": "x"}, "prompt has 'prompt': must have 'messages' alone"),
            (
                {"messages": [], "chat_template_kwargs": ["loud"]},
                r"prompt\['chat_template_kwargs'\] is \['loud'\]: must be a mapping",
            ),
        ],
    )
    def test_a_prompt_that_is_no_chat_is_refused(self, prompt: dict, message: str, llm: LLM) -> None:
        with pytest.raises(ValueError, match=message):
            llm.add_request(prompt)

    @pytest.mark.parametrize("kind", ["image", "image_url", "video"])
    def test_images_are_refused(self, kind: str, llm: LLM) -> None:
        content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: "cat.png"}]
        with pytest.raises(ValueError, match=rf"messages\[0\] has content of type '{kind}': .* run as text only"):
            llm.chat([{"role": "user", "content": content}])

    @pytest.mark.parametrize(
        ("message", "key"),
        [
            ({"content": [{"image": "cat.png"}, {"type": "text", "text": "What is this?"}]}, "image"),
            ({"content": [{"image_url": {"url": "cat.png"}}]}, "image_url"),
            ({"content": {"type": "image"}}, "image"),
            ({"content": ({"type": "input_audio"},)}, "input_audio"),
            ({"content": "What is this?", "images": ["cat.png"]}, "images"),
            ({"content": [{"image": np.zeros((2, 2))}]}, "image"),
        ],
        ids=str,
    )
    def test_images_are_refused_where_no_type_says_so(self, message: dict, key: str, llm: LLM) -> None:
        with pytest.raises(ValueError, match=rf"messages\[0\] has content of type '{key}': .* run as text only"):
            llm.chat([{"role": "user", **message}])

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ("hello", "messages='hello': must be a list of messages"),
            ([{"role": "user", "contnet": "x"}], r"messages\[0\] has .*: must be mappings with a role and content"),
            ([{"role": "user", "content": None}], r"messages\[0\] has .*: must be mappings with a role and content"),
            (
                [[{"role": "user", "content": "\ud800"}]],
                r"messages\[0\] is .*: must have no half of a surrogate pair, as '\\ud800'",
            ),
            ([[{"role": "user", "content": "a" * 9000}]], r"messages\[0\] has \d+ tokens: must be fewer"),
            ([["hello"]], r"messages\[0\] has 'hello': must be mappings with a role and content"),
            ([[{"content": "x"}]], r"messages\[0\] has {'content': 'x'}: must be mappings with a role"),
        ],
        ids=str,
    )
    def test_what_is_no_chat(self, messages: Any, message: str, llm: LLM) -> None:
        with pytest.raises(ValueError, match=message):
            llm.chat(messages)

    def test_what_the_template_would_ignore(self, llm: LLM) -> None:
        with pytest.raises(
            ValueError, match=r"unknown argument 'temperature': write SamplingParams\(temperature=...\)"
        ):
            llm.chat(self.CHAT, temperature=0)
        with pytest.raises(ValueError, match="unknown argument 'sampling_parms': did you mean 'sampling_params'"):
            llm.chat(self.CHAT, sampling_parms=greedy(1))

    def test_a_model_without_a_template(self, llm: LLM) -> None:
        llm.tokenizer.chat_template = None
        with pytest.raises(ValueError, match="has no chat template: use generate"):
            llm.chat(self.CHAT)
        (output,) = llm.chat(self.CHAT, greedy(4), use_tqdm=False, chat_template="{{ messages[0].content }}")
        (expected,) = llm.generate("But, soft!", greedy(4), use_tqdm=False)
        assert output["token_ids"] == expected["token_ids"]


def test_the_checkpoints_own_settings(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    shutil.copytree(BUNDLED_MODEL, tmp_path / "m")
    file = tmp_path / "m" / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 7}')
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    assert make_llm(str(tmp_path / "m")).default_sampling_params() == expected
    file.write_text('{"max_new_tokens": 9, "min_new_tokens": 3, "stop_strings": ["the"]}')
    expected = SamplingParams(max_tokens=9, min_tokens=3, stop=["the"])
    assert make_llm(str(tmp_path / "m")).default_sampling_params() == expected
    file.write_text('{"top_k": 2.5}')
    with pytest.raises(ValueError, match=r"its generation_config.json: top_k=2.5: must be"):
        make_llm(str(tmp_path / "m")).default_sampling_params()
    file.write_text('{"do_sample": false}')
    assert make_llm(str(tmp_path / "m")).default_sampling_params() == SamplingParams(temperature=0)
    assert make_llm().default_sampling_params() == SamplingParams()
