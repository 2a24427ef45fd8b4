"""A batch file's job: what its lines mean, what its results are, and that nothing that happens to it loses a line."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.tuned import Tuned
from conftest import whole_only
from safetensors.torch import load

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SampleOutput, SamplingParams, __version__
from nanoinfer.batch import Summary, job, run
from nanoinfer.batch import progress as batch_progress
from nanoinfer.batch.cli import main
from nanoinfer.batch.ledger import Ledger
from nanoinfer.batch.lines.adapters import Models, with_slots
from nanoinfer.batch.lines.requests import PROMPTS, LineError, complete, read_job, read_line, take_prompt
from nanoinfer.batch.progress import Progress

SMALL = {"dtype": "float32", "kvcache_block_size": 16, "max_model_len": 64, "num_kvcache_blocks": 256, "device": "cpu"}
FORK = multiprocessing.get_context("fork")  # a new interpreter would take seconds to import torch
CHAT = [{"role": "user", "content": "Good morrow"}]


class NullLLM:
    """Answers at once what the prompt and the seed say, and not in the order in which it was asked."""

    step_seconds = 0.0

    def __init__(self, model: str, **options: Any) -> None:
        if model == "no model":
            raise ValueError("model='no model': no such folder")
        self.config = SimpleNamespace(max_num_seqs=options.get("max_num_seqs", 8), data_parallel_size=1)
        self.engine = SimpleNamespace(on_step=None)
        self._asked: list[tuple[int, Any, SamplingParams]] = []
        self._count = 0

    def prepare(self, prompt: Any, params: SamplingParams) -> SimpleNamespace:
        return SimpleNamespace(prompt=prompt, params=params, is_ready=random.random() < 0.5, cancel=lambda: None)

    def add_request(self, coming: SimpleNamespace) -> int:
        prompt, params = coming.prompt, coming.params
        if prompt == "refused":
            raise ValueError("prompt is refused")
        self._asked.append((self._count, prompt, params))
        self._count += 1
        return self._count - 1

    def stats(self) -> str:
        return f"{self._count} requests so far"

    def step(self) -> list[RequestOutput]:
        time.sleep(self.step_seconds)
        random.shuffle(self._asked)
        ended, self._asked = self._asked[:4], self._asked[4:]
        return [self._answer(*asked) for asked in ended]

    def _answer(self, request_id: int, prompt: Any, params: SamplingParams) -> RequestOutput:
        reason = "error" if prompt == "fails" else "length"
        text, ids = f"{prompt} é\u2028{params.seed}", [1, 2, 3]
        sample = SampleOutput(
            index=0, text=text, reasoning=None, answer=text, token_ids=ids, finish_reason=reason,
            stop_reason="it failed", logprobs=None, kept_tokens=None, entropies=None, routed_experts=None,
            hidden_states=None,
        )  # fmt: skip
        return RequestOutput(
            sample, request_id=request_id, prompt_token_ids=[5], prompt_logprobs=None, samples=[sample]
        )

    def __enter__(self) -> NullLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "LLM", NullLLM)


def write(file: Path, rows: Iterable[Any]) -> Path:
    """Write rows as lines of JSON, and texts as they are."""
    with file.open("w") as opened:
        opened.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return file


def read(file: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def openai(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


class TestPlainLines:
    def test_a_result_is_that_of_the_library(self, tmp_path: Path) -> None:
        """Prompts, token ids and chats, with a line's own settings before the job's."""
        rows: list[dict[str, Any]] = [
            {"id": "text", "prompt": "ROMEO:\n", "seed": 1},
            {"id": 2, "token_ids": [30, 31], "temperature": 0, "max_tokens": 3, "logit_bias": {"14": -5}},
            {"id": "chat", "messages": CHAT, "chat_template_kwargs": {"add_generation_prompt": False}, "seed": 2},
            {
                "id": "all",
                "prompt": "JULIET:",
                "n": 2,
                "logprobs": 1,
                "prompt_logprobs": 0,
                "kept_tokens": True,
                "seed": 3,
            },
        ]
        output = tmp_path / "out.jsonl"
        assert run(write(tmp_path / "in.jsonl", rows), output, BUNDLED_MODEL, max_tokens=5, **SMALL) == Summary(4, 0)
        results = {row["id"]: row for row in read(output)}
        with LLM(BUNDLED_MODEL, **SMALL) as llm:
            prompts = [
                "ROMEO:\n",
                [30, 31],
                {"messages": CHAT, "chat_template_kwargs": {"add_generation_prompt": False}},
            ]
            params = [
                SamplingParams(seed=1, max_tokens=5),
                SamplingParams(temperature=0, max_tokens=3, logit_bias={14: -5}),
                SamplingParams(seed=2, max_tokens=5),
            ]
            for row, expected in zip(rows, llm.generate(prompts, params, use_tqdm=False), strict=False):
                assert results[row["id"]] == {
                    "id": row["id"],
                    "text": expected.text,
                    "token_ids": expected.token_ids,
                    "finish_reason": expected.finish_reason,
                    "stop_reason": expected.stop_reason,
                    "num_prompt_tokens": len(expected.prompt_token_ids),
                }
        row = results["all"]
        assert len(row["samples"]) == 2
        assert all(row[key] == value for key, value in row["samples"][0].items())
        for sample in row["samples"]:
            assert len(sample["token_ids"]) == len(sample["logprobs"]) == len(sample["kept_tokens"])
            for token_id, place in zip(sample["token_ids"], sample["logprobs"], strict=True):
                assert place[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
        assert row["prompt_logprobs"][0] is None
        assert len(row["prompt_logprobs"]) == row["num_prompt_tokens"]

    def test_hidden_states_are_safetensors_in_base64(self, tmp_path: Path) -> None:
        rows = [{"id": 1, "prompt": "ROMEO:\n", "seed": 1, "max_tokens": 4, "n": 2, "hidden_states": [1, -1]}]
        output, options = tmp_path / "out.jsonl", {**SMALL, "hidden_state_layers": (1, -1)}
        assert run(write(tmp_path / "in.jsonl", rows), output, BUNDLED_MODEL, **options) == Summary(1, 0)
        (row,) = read(output)
        with LLM(BUNDLED_MODEL, **options) as llm:
            params = SamplingParams(seed=1, max_tokens=4, n=2, hidden_states=[1, -1])
            (expected,) = llm.generate(["ROMEO:\n"], params, use_tqdm=False)
        for ours, sample in zip(row["samples"], expected.samples, strict=True):
            states = load(b64decode(ours["hidden_states"]))
            assert states.keys() == {"1", "-1"}
            assert all(torch.equal(states[str(layer)], own) for layer, own in sample.hidden_states.items())

    def test_a_prompt_that_is_null_is_none(self) -> None:
        for own in ({"prompt": "x"}, {"token_ids": [1]}, {"messages": CHAT}):
            settings = {**dict.fromkeys([*PROMPTS["plain"], "chat_template_kwargs"]), "n": 2, **own}
            assert take_prompt(settings, PROMPTS["plain"]) == take_prompt(dict(own), PROMPTS["plain"])
            assert settings == {"n": 2}

    def test_settings_of_the_job_are_those_of_the_lines(self, tmp_path: Path, null: None) -> None:
        """A seed comes from the line's id and the job's seed, whatever stands around the line."""
        texts = []
        for name, rows, seed in (("a", "xyz", 0), ("b", "zyx", 0), ("c", "xyz", 1)):
            file = write(tmp_path / f"{name}.jsonl", [{"id": i, "prompt": "same"} for i in rows])
            run(file, tmp_path / f"{name}.out", "model", seed=seed)
            texts.append({row["id"]: row["text"] for row in read(tmp_path / f"{name}.out")})
        assert texts[0] == texts[1]
        assert len({*texts[0].values(), *texts[2].values()}) == 6
        assert complete({"seed": -1}, {}, 0, "x") == complete({}, {}, 0, "x") != complete({"seed": 1}, {}, 0, "x")


class TestOpenAI:
    def test_results_have_its_format(self, tmp_path: Path) -> None:
        rows = [
            openai("chat", model="gpt", messages=CHAT, max_completion_tokens=4, logprobs=True, top_logprobs=2, n=2,
                seed=5, user="me", stream=False, tools=None, ignore_eos=True),
            openai("text", "/v1/completions", prompt="JULIET:", max_tokens=4, logprobs=1, seed=6),
            openai("json", messages=CHAT, max_tokens=3, response_format={"type": "json_object"}),
            openai("all", messages=CHAT, max_tokens=1, logprobs=True, top_logprobs=-1),
        ]  # fmt: skip
        output = tmp_path / "out.jsonl"
        run(write(tmp_path / "in.jsonl", rows), output, BUNDLED_MODEL, **SMALL)
        results = {row["custom_id"]: row for row in read(output)}
        for row in results.values():
            assert row["error"] is None
            assert row["id"].startswith("batch_req_")
            assert row["response"]["status_code"] == 200
        bodies = {name: row["response"]["body"] for name, row in results.items()}
        with LLM(BUNDLED_MODEL, **SMALL) as llm:
            params = SamplingParams(max_tokens=4, logprobs=2, n=2, seed=5, ignore_eos=True)
            (chat,) = llm.chat(CHAT, params, use_tqdm=False)
            (text,) = llm.generate("JULIET:", SamplingParams(max_tokens=4, logprobs=1, seed=6), use_tqdm=False)
        (place,) = bodies["all"]["choices"][0]["logprobs"]["content"]
        assert len(place["top_logprobs"]) == 2048  # the model has no more tokens
        body = bodies["chat"]
        assert (body["object"], body["model"]) == ("chat.completion", "gpt")
        used = len(chat.prompt_token_ids)
        assert body["usage"] == {"prompt_tokens": used, "completion_tokens": 8, "total_tokens": used + 8}
        for choice, sample in zip(body["choices"], chat.samples, strict=True):
            assert choice["index"] == sample.index
            assert choice["message"] == {"role": "assistant", "content": sample.text, "refusal": None}
            assert choice["finish_reason"] == "length"
            for place, token_id, entry in zip(
                choice["logprobs"]["content"], sample.token_ids, sample.logprobs or [], strict=True
            ):
                assert place["token"] == entry[token_id].decoded_token
                assert place["logprob"] == pytest.approx(entry[token_id], abs=1e-4)
                assert bytes(place["bytes"]).decode() == place["token"]
                assert [likely["token"] for likely in place["top_logprobs"]] == [
                    value.decoded_token for value in sorted(entry.values(), reverse=True)[:2]
                ]
        body = bodies["text"]
        assert (body["object"], body["model"]) == ("text_completion", BUNDLED_MODEL)
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text.text, text.finish_reason)
        assert "".join(choice["logprobs"]["tokens"]) == text.text
        assert choice["logprobs"]["text_offset"][:2] == [0, len(choice["logprobs"]["tokens"][0])]
        assert bodies["json"]["choices"][0]["message"]["content"].lstrip().startswith("{")

    def test_an_error_has_its_format(self, tmp_path: Path, null: None) -> None:
        rows = [openai("a", "/v1/completions", prompt="refused"), openai("b", "/v1/completions", prompt="fails")]
        assert run(write(tmp_path / "in", rows), tmp_path / "out", "model") == Summary(0, 2)
        first, second = sorted(read(tmp_path / "out"), key=lambda row: row["custom_id"])
        assert first["response"] is None
        assert first["error"] == {"code": "failed", "line": 1, "message": "prompt is refused"}
        assert second["error"] == {"code": "failed", "line": 2, "message": "it failed"}


BAD = [
    ("{", "is no JSON: "),
    ("[" * 100_000, "is no JSON: "),
    ("[1]", r"is \[1\]: must be a JSON object"),
    ({"prompt": "x"}, "id=None: must be a string or an integer"),
    ({"id": True, "prompt": "x"}, "id=True: must be"),
    ({"id": "first", "prompt": "x"}, "an earlier line has its id 'first'"),
    ({"id": "b"}, "has no prompt: must have 'prompt' or 'token_ids' or 'messages'"),
    ({"id": "c", "prompt": "x", "token_ids": [1]}, "has prompt and token_ids: must have"),
    ({"id": "d", "prompt": "x", "max_new_tokens": 5}, "unknown argument 'max_new_tokens': did you mean 'max_tokens'"),
    ({"id": "e", "prompt": "x", "temperature": -1}, "temperature=-1: must be"),
    ({"id": "f", "prompt": "refused"}, "prompt is refused"),
    ({"id": "g", "prompt": "fails"}, "it failed"),
    ({"custom_id": "h", "method": "GET", "url": "/v1/completions", "body": {}}, "method='GET': must be 'POST'"),
    (openai("i", "/v1/images", input="x"), "url='/v1/images': must be '/v1/chat/completions' or"),
    ({"custom_id": "j", "method": "POST", "url": "/v1/completions"}, "body=None: must be a JSON object"),
    (openai("k", messages=CHAT, stream=True), "stream=True: a batch file's results come whole"),
    (openai("l", messages=CHAT, tools=[{}]), r"tools=\[\{\}\]: nobody reads tool calls"),
    (openai("q", messages=CHAT, logprobs=2), "logprobs=2: must be True or False"),
    (openai("m", messages=CHAT, top_logprobs=2), "top_logprobs=2: needs logprobs=true beside it"),
    (
        openai("n", messages=CHAT, response_format={"type": "xml"}),
        "response_format={'type': 'xml'}: must have the type",
    ),
    (openai("o", "/v1/completions", prompt="x", prompt_logprobs=1), "prompt_logprobs=1: OpenAI's results have no"),
    (openai("p", messages="hi", frequency=2), "unknown argument 'frequency'"),
]


class TestAdapters:
    def test_a_line_names_its_own(self, tmp_path: Path) -> None:
        folder = Tuned(BUNDLED_MODEL, seed=1).save(tmp_path / "mine")
        prompt = {"prompt": "ROMEO:\n"}
        rows = [
            {"id": "plain", **prompt},
            {"id": "adapter", **prompt, "adapter": "mine"},
            {"id": "null", **prompt, "adapter": None},
            openai("model", "/v1/completions", **prompt, model="mine"),
            openai("base", "/v1/completions", **prompt, model=f"elsewhere/{Path(BUNDLED_MODEL).name}"),
            openai("none", "/v1/completions", **prompt),
        ]
        output, asked = tmp_path / "out", {"temperature": 0, "max_tokens": 8}
        file = write(tmp_path / "in", rows)
        assert run(file, output, BUNDLED_MODEL, adapters={"mine": folder}, **asked, **SMALL) == Summary(6, 0)
        with LLM(BUNDLED_MODEL, max_adapters=1, **SMALL) as llm:
            llm.load_adapter("mine", folder)
            params = [SamplingParams(adapter=name, **asked) for name in (None, "mine")]
            base, mine = (output.text for output in llm.generate([prompt] * 2, params, use_tqdm=False))
        assert base != mine
        texts = {}
        for row in read(output):
            body = row.get("response", {}).get("body")
            texts[row.get("custom_id", row["id"])] = body["choices"][0]["text"] if body else row["text"]
        of_mine = {"adapter", "model"}
        assert texts == {name: mine if name in of_mine else base for name in texts}
        assert len(texts) == len(rows)

    def test_lines_that_name_none_have_the_jobs(self) -> None:
        models = Models("org/base", ("a", "b"))

        def adapter_of(row: dict[str, Any]) -> str | None:
            line = read_line(json.dumps(row).encode(), 1)
            return read_job(line, {"adapter": "a"}, 0, models).params.adapter

        body = {"prompt": "x"}
        assert adapter_of({"id": 1, **body}) == adapter_of(openai("c", "/v1/completions", **body)) == "a"
        assert adapter_of({"id": 1, **body, "adapter": "b"}) == "b"
        assert adapter_of({"id": 1, **body, "adapter": None}) is None
        assert adapter_of(openai("c", "/v1/completions", **body, model="base")) is None

    @pytest.mark.parametrize(
        ("row", "adapters", "message"),
        [
            (
                {"adapter": "mime"},
                ["mine", "other"],
                "adapter='mime': must be an adapter of the job: did you mean 'mine'",
            ),
            (
                {"adapter": "mine"},
                [],
                "must be an adapter of the job: it has none; give it some by --load-adapter NAME",
            ),
            ({"adapter": 3}, ["mine"], "adapter=3: must be None, or the name"),
            (
                {"model": "mime"},
                ["mine"],
                "model='mime': must be 'base', or an adapter of the job: did you mean 'mine'",
            ),
            ({"model": "gpt"}, ["mine"], "model='gpt': must be 'base', .*: known: mine, base"),
        ],
        ids=str,
    )
    def test_a_line_that_names_another(self, row: dict[str, Any], adapters: list[str], message: str) -> None:
        entry = openai("c", "/v1/completions", prompt="x", **row) if "model" in row else {"id": 1, "prompt": "x", **row}
        with pytest.raises(LineError, match=message):
            read_job(read_line(json.dumps(entry).encode(), 1), {}, 0, Models("base", tuple(adapters)))

    def test_without_adapters_a_model_may_have_any_name(self) -> None:
        line = read_line(json.dumps(openai("c", "/v1/completions", prompt="x", model="gpt")).encode(), 1)
        assert read_job(line, {}, 0, Models("base")).params.adapter is None

    def test_there_is_room_for_all_of_them_if_options_say_nothing_else(self) -> None:
        folders = {"mine": "a", "other": "b"}
        assert with_slots({}, {}) == {}
        assert with_slots({}, folders) == {"max_adapters": 2}
        assert with_slots({"max_adapters": 3}, folders) == {"max_adapters": 3}
        assert with_slots({"enable_lora": True}, folders) == {"enable_lora": True, "max_loras": 2}
        assert with_slots({"enable_lora": True, "max_loras": 3}, folders) == {"enable_lora": True, "max_loras": 3}

    @pytest.mark.parametrize("wrong", ["mine", 3, {"": "folder"}, {"mine": ""}, {"mine": 3}, {3: "folder"}], ids=str)
    def test_what_is_no_mapping_to_folders(self, wrong: Any, tmp_path: Path, null: None) -> None:
        with pytest.raises(ValueError, match=r"^adapters=.*: must be a mapping from names to folders, or to Hub ids$"):
            run(write(tmp_path / "in", []), tmp_path / "out", "m", adapters=wrong)


class TestBadLines:
    @pytest.mark.parametrize(("bad", "message"), BAD)
    def test_a_bad_line_has_an_error_row_and_the_job_goes_on(
        self, bad: Any, message: str, tmp_path: Path, null: None
    ) -> None:
        rows = [{"id": "first", "prompt": "x"}, "", bad, {"id": "last", "prompt": "x"}]
        assert run(write(tmp_path / "in", rows), tmp_path / "out", "model") == Summary(2, 1)
        (error,) = [row["error"] for row in read(tmp_path / "out") if row.get("error")]
        assert error["line"] == 3
        assert re.match(message, error["message"])

    def test_a_prompt_that_is_too_long_has_one(self, tmp_path: Path) -> None:
        rows = [{"id": 1, "token_ids": [5] * 100}, {"id": 2, "prompt": "x", "max_tokens": 2}]
        assert run(write(tmp_path / "in", rows), tmp_path / "out", BUNDLED_MODEL, **SMALL) == Summary(1, 1)
        (error,) = [row["error"] for row in read(tmp_path / "out") if row.get("error")]
        assert error == {"line": 1, "message": f"prompt has 100 tokens: {error['message'].split(': ', 1)[1]}"}

    def test_status_and_last_line_say_how_many(
        self, tmp_path: Path, null: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        good, bad = {"id": "good", "prompt": "x"}, {"id": "bad", "prompt": "refused"}
        assert main([str(write(tmp_path / "in", [good, bad])), str(tmp_path / "out"), "--model", "m"]) == 1
        *_, kinds, last = capsys.readouterr().err.splitlines()
        assert kinds == "errors by kind: 1 prompt is refused"
        assert last == (
            "nanoinfer-batch: 1 of 2 lines have results, 1 have errors; run the same command again to try these again"
        )
        write(tmp_path / "in", [good, {"id": "bad", "prompt": "y"}])
        assert main([str(tmp_path / "in"), str(tmp_path / "out"), "--model", "m"]) == 0
        assert capsys.readouterr().err.splitlines()[-1] == "nanoinfer-batch: 2 of 2 lines have results"
        assert [(row["id"], "error" in row) for row in read(tmp_path / "out")] == [("good", False), ("bad", False)]

    def test_what_cannot_run_is_named_before_the_model_loads(
        self, tmp_path: Path, null: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [{"id": i % 7, "prompt": "x"} for i in range(14)]
        with pytest.raises(ValueError, match="no model"):
            run(write(tmp_path / "in", rows), tmp_path / "out", "no model")
        said = capsys.readouterr().err
        assert f"{tmp_path}/in: line 8: an earlier line has its id 0" in said
        assert "2 more lines cannot run" in said

    def test_max_errors_ends_the_job(self, tmp_path: Path, null: None) -> None:
        file = write(tmp_path / "in", [{"id": i, "prompt": "refused" if i % 2 else "x"} for i in range(100)])
        with pytest.raises(RuntimeError, match="max_errors=2: 3 lines have failed; line 6: prompt is refused"):
            run(file, tmp_path / "out", "model", max_errors=2)
        assert len(read(tmp_path / "out")) >= 3
        file = write(tmp_path / "in", [{"id": i} for i in range(3)])
        with pytest.raises(ValueError, match=r"max_errors=2: 3 lines of .*/in cannot run"):  # before the model loads
            run(file, tmp_path / "other", "no model", max_errors=2)


OUTPUTS = {"plain": "", "gzip": ".gz", "zstd": ".zst"}


@pytest.fixture(params=OUTPUTS)
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An output that is not there yet, of each kind."""
    if request.param == "zstd":
        pytest.importorskip("zstandard", reason="needs zstandard: pip install -e '.[zstd]'")
    return tmp_path / f"out.jsonl{OUTPUTS[request.param]}"


def lines_of(file: Path) -> list[bytes]:
    """The lines of a file that is whole."""
    data = file.read_bytes()
    if file.suffix == ".gz":
        data = gzip.decompress(data)
    elif file.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    assert data == b"" or data.endswith(b"\n")
    return data.splitlines()


def many(file: Path, count: int) -> Path:
    """Write lines of which some have errors: refused at once, or failed in the end."""
    prompts = {7: "refused", 11: "fails"}
    return write(file, ({"id": f"line {i}", "prompt": prompts.get(i % 23, f"prompt {i}")} for i in range(count)))


def start(file: Path, output: Path, *arguments: str, before: Callable[[], None] = lambda: None) -> Any:
    """Run the command in a process of its own; `before` runs there first."""

    def command() -> None:
        before()
        os._exit(main([str(file), str(output), "--model", "m", *arguments]))

    process = FORK.Process(target=command)
    process.start()
    return process


class TestResume:
    def test_what_is_done_is_skipped(self, output: Path, tmp_path: Path, null: None) -> None:
        """Errors are tried again, and new lines of the input come behind."""
        file = many(tmp_path / "in", 50)
        assert run(file, output, "model") == Summary(46, 4)
        before = [line for line in lines_of(output) if b'"error"' not in line]
        file = many(tmp_path / "in", 100)
        assert run(file, output, "model") == Summary(91, 9)
        assert lines_of(output)[:46] == before
        assert len(lines_of(output)) == 100

    @pytest.mark.parametrize("is_piped", [False, True])
    def test_nothing_to_do_loads_no_model(
        self, is_piped: bool, tmp_path: Path, null: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All lines are done, none is there, or none that is left can run."""
        file, output = tmp_path / "in", tmp_path / "out"
        if is_piped:
            monkeypatch.setattr(sys, "stdin", file.open("w+"))

        def again(rows: list[Any], **how: Any) -> Summary:
            write(file, rows)
            if is_piped:
                os.lseek(sys.stdin.fileno(), 0, os.SEEK_SET)
            return run("-" if is_piped else file, output, "no model", **how)

        good, bad = [{"id": i, "prompt": "x"} for i in range(3)], [{"id": 3}, {"id": "4", "n": 0, "prompt": "x"}]
        assert again([], report=tmp_path / "page.html", stats=True) == Summary(0, 0)
        with monkeypatch.context() as patch:
            patch.setattr(job, "LLM", lambda model, **options: NullLLM("m"))
            assert again(good) == Summary(3, 0)
        before = output.read_bytes()
        assert again(good) == Summary(3, 0)
        assert output.read_bytes() == before
        if not is_piped:  # of a pipe, nobody knows what comes behind a line that cannot run
            for _ in range(2):
                assert again([bad[0], *good, bad[1]]) == Summary(3, 2)
                assert [row["id"] for row in read(output)[3:]] == [3, "4"]
        with pytest.raises(ValueError, match="no such folder"):
            again([*good, bad[0], {"id": "new", "prompt": "x"}])

    @pytest.mark.parametrize("cut", [1, 20, 1000])
    def test_a_torn_end_is_cut_off(self, cut: int, output: Path, tmp_path: Path, null: None) -> None:
        file = many(tmp_path / "in", 200)
        run(file, output, "model")
        expected = sorted(lines_of(output))
        os.truncate(output, output.stat().st_size - cut)
        run(file, output, "model")
        assert sorted(lines_of(output)) == expected

    def test_the_model_draws_the_tokens_of_a_job_that_was_not_broken_off(self, tmp_path: Path) -> None:
        rows = [{"id": i, "prompt": f"{name}:", "max_tokens": 5 + i} for i, name in enumerate(["ROMEO", "JULIET"] * 4)]
        whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
        run(write(tmp_path / "in", rows), whole, BUNDLED_MODEL, **SMALL)
        run(write(tmp_path / "in", rows[:3]), broken, BUNDLED_MODEL, **SMALL)
        run(write(tmp_path / "in", rows), broken, BUNDLED_MODEL, **SMALL, max_num_seqs=2)
        assert sorted(lines_of(broken)) == sorted(lines_of(whole))

    def test_the_bundled_model_has_a_name_that_holds_for_each_installation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        options = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = ["in", "out", "--model", "bundled", "--max-tokens", "2", *options]
        for count in (1, 2):
            write(tmp_path / "in", [{"id": i, "prompt": "ROMEO:"} for i in range(count)])
            assert main(command) == 0
            assert [row["id"] for row in read(tmp_path / "out")] == [*range(count)]
        assert json.loads((tmp_path / "out.manifest.json").read_text(encoding="utf-8"))["model"] == "bundled"

    def test_rows_may_keep_the_order_of_their_lines(self, output: Path, tmp_path: Path, null: None) -> None:
        run(many(tmp_path / "in", 300), output, "model", keep_order=True)
        ids = [json.loads(line)["id"] for line in lines_of(output)]
        assert ids == [f"line {i}" for i in range(300)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of a job that nothing happens to."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "LLM", NullLLM)
        run(many(folder / "in", 2000), folder / "out.jsonl", "m")
    return sorted(lines_of(folder / "out.jsonl"))


class TestWhateverHappens:
    """After each of these, the same command gives the very lines that it gives alone."""

    @pytest.fixture(autouse=True)
    def without_a_model(self, null: None) -> None:
        """The processes that tests start have none either."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return many(tmp_path / "in", 2000)

    @pytest.mark.parametrize("seed", [1, *whole_only(range(2, 6))])
    def test_kill_9_at_random_moments(
        self, seed: int, output: Path, file: Path, expected: list[bytes], tmp_path: Path
    ) -> None:
        begin, process = time.monotonic(), start(file, output)
        process.join()
        seconds = time.monotonic() - begin
        assert sorted(lines_of(output)) == expected
        output.unlink()
        kills, chance = 0, random.Random(seed)
        while kills < 2:
            process = start(file, output)
            process.join(chance.uniform(0, seconds))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                kills += 1
            else:
                assert process.exitcode == 1  # some lines have errors
                assert sorted(lines_of(output)) == expected
                output.unlink()
        run(file, output, "m")
        assert sorted(lines_of(output)) == expected
        assert not list(tmp_path.glob("*.part"))

    @pytest.mark.parametrize(
        ("output", "most"),
        [
            *((kind, 20_000) for kind in OUTPUTS),
            *(("plain", most) for most in (1000, 50_001)),
            *whole_only((kind, most) for kind in ("gzip", "zstd") for most in (1000, 50_001)),
        ],
        indirect=["output"],
    )
    def test_a_full_disk(
        self, most: int, output: Path, file: Path, expected: list[bytes], capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A file may have so many bytes, and the rest of a write fails as on a full disk."""
        limits = (most, most)
        process = start(file, output, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
        process.join()
        said = capfd.readouterr().err.splitlines()[-1]
        assert f"{output}" in said
        assert "File too large" in said
        assert process.exitcode == 1
        assert said.endswith("all lines in it are whole; run the same command again to go on")
        if output.suffix == ".jsonl":
            assert set(lines_of(output)) < set(expected)
        run(file, output, "m")
        assert sorted(lines_of(output)) == expected

    @pytest.mark.parametrize(
        ("output", "order"),
        [
            *((kind, "") for kind in OUTPUTS),
            ("plain", "--keep-order"),
            *whole_only((kind, "--keep-order") for kind in ("gzip", "zstd")),
        ],
        indirect=["output"],
    )
    def test_ctrl_c(
        self,
        order: str,
        output: Path,
        file: Path,
        expected: list[bytes],
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        def slow_down() -> None:
            NullLLM.step_seconds = 0.005

        process = start(file, output, *order.split(), before=slow_down)
        while not output.exists() or output.stat().st_size < 1000:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGINT)
        process.join()
        assert process.exitcode == 130
        assert 0 < len(lines_of(output)) < 2000
        said = capfd.readouterr().err.splitlines()[-1]
        assert re.fullmatch(
            r"nanoinfer-batch: interrupted: \d+ lines have results; run the same command again to go on", said
        )
        run(file, output, "m")
        assert sorted(lines_of(output)) == expected

    @pytest.mark.parametrize("stderr", ["closed", "full"])
    def test_messages_that_nobody_can_hear_end_nothing(
        self,
        stderr: str,
        tmp_path: Path,
        null: None,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """Nor do they come among the results on standard output."""
        rows = [{"id": 1, "prompt": "a"}, {"id": 2}]
        with open("/dev/full", "wb", buffering=0) as full:
            monkeypatch.setattr(
                sys, "stderr", None if stderr == "closed" else io.TextIOWrapper(full, write_through=True)
            )
            assert main([str(write(tmp_path / "in", rows)), "-", "--model", "m", "--stats"]) == 1
        assert {json.loads(line)["id"] for line in capfd.readouterr().out.split("\n")[:-1]} == {1, 2}

    def test_a_narrow_terminal_has_one_line_until_the_end(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "10")
        progress = Progress(20)
        progress.show()
        progress.show(is_last=True)
        assert capsys.readouterr().err == "\r\x1b[K0 of 20 l\r\x1b[K0 of 20 lines, 0 tok/s, 0 errors\n"

    @pytest.mark.whole
    def test_many_lines_take_little_memory(self, tmp_path: Path, null: None) -> None:
        many(tmp_path / "in", 100_000)

        def resident(name: str) -> int:
            (kib,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
            return int(kib) << 10

        def command() -> None:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = resident("VmRSS")
            run(tmp_path / "in", tmp_path / "out", "m")
            os._exit(resident("VmHWM") - before > 64 << 20)

        process = FORK.Process(target=command)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert len(lines_of(tmp_path / "out")) == 100_000


def test_no_numbers_of_lines_are_said_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many lines may wait for the first result for minutes."""
    monkeypatch.setattr(batch_progress, "ELSEWHERE", 0.0)
    progress = Progress(2000)
    for _ in range(3):
        progress.show()
    progress.add(tokens=5)
    for is_last in (False, False, True):
        progress.show(is_last)
    assert [line.split(", ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "0 of 2,000 lines",
        "1 of 2,000 lines",
    ]


def test_the_time_left_is_told_until_nothing_is_left() -> None:
    progress = Progress(2)
    progress.add(tokens=5)
    assert str(progress).endswith(" left")
    progress.add(tokens=5)
    assert str(progress).startswith("2 of 2 lines")
    assert "left" not in str(progress)


class TestRefused:
    """Each is named before the model loads."""

    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path, null: None) -> Path:
        return write(tmp_path / "in", [{"id": 1, "prompt": "x"}])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["{}", "{}/out"], "{}: is a folder; give a file"),
            (["{}/in", "{}"], "{}: is a folder; give a file"),
            (["{}/none", "{}/out"], "{}/none: No such file or directory"),
            (["{}/in", "{}/in"], "{}/in: is the input too; give another output"),
            (["{}/in", "{}/none/out"], "{}/none/out.manifest.json: No such file or directory"),
            (["{}/in", "{}/out", "--max-errors", "-1"], "max_errors=-1: must be"),
            (["{}/in", "{}/out", "--temperature", "hot"], "temperature='hot': must be"),
            (["{}/in", "{}/theirs"], "{}/theirs: has lines, but {}/theirs.manifest.json names no job of theirs"),
            (["{}/cut.gz", "{}/out"], "{}/cut.gz: is broken off"),
            (["{}/plain.gz", "{}/out"], "{}/plain.gz: is damaged"),
        ],
    )
    def test_files_and_settings(
        self, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path / "theirs", [{"id": 1}])
        write(tmp_path / "plain.gz", [{"id": 1}])
        (tmp_path / "cut.gz").write_bytes(gzip.compress((tmp_path / "in").read_bytes())[:-4])
        arguments, message = ([text.replace("{}", str(tmp_path)) for text in texts] for texts in (arguments, [message]))
        assert main([*arguments, "--model", "no model"]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"nanoinfer-batch: error: {message[0]}")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": "b"}, "model was 'a', and is 'b'"),
            ({"temperature": 0.5}, "temperature was None, and is 0.5"),
            ({"input": "other"}, "input was '.*/in', and is '.*/other'"),
            ({"seed": 1}, "seed was None, and is 1"),
            ({"adapters": {"mine": "here"}}, "adapters was None, and is {'mine': 'here'}"),
        ],
    )
    def test_another_job(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        write(tmp_path / "other", [])
        arguments = {"input": "in", "model": "a"}
        run(tmp_path / arguments["input"], tmp_path / "out", arguments["model"])
        before = (tmp_path / "out").read_bytes()
        arguments |= change
        with pytest.raises(ValueError, match=f"/out: is another job's: {message}: give another output, or move"):
            run(tmp_path / arguments.pop("input"), tmp_path / "out", **arguments)
        assert (tmp_path / "out").read_bytes() == before

    def test_how_fast_a_job_runs_may_change(self, file: Path, tmp_path: Path) -> None:
        for rows in (8, 2):
            assert run(file, tmp_path / "out", "a", max_num_seqs=rows) == Summary(1, 0)

    def test_options_that_change_nothing_may_change(self, file: Path, tmp_path: Path) -> None:
        """None is an option's default."""
        run(file, tmp_path / "out", "a")
        line = (tmp_path / "out").read_bytes()
        for options in ({"enable_lora": False, "trust_remote_code": True}, {"seed": None, "max_model_len": None}):
            assert run(file, tmp_path / "out", "a", **options) == Summary(1, 0)
            (tmp_path / "again").unlink(missing_ok=True)
            run(file, tmp_path / "again", "a", **options)
            assert (tmp_path / "again").read_bytes() == line

    def test_an_output_that_is_in_use(self, file: Path, tmp_path: Path) -> None:
        ledger = Ledger(str(tmp_path / "out"), {"model": "a"})
        with pytest.raises(ValueError, match="another process writes this output"):
            run(file, tmp_path / "out", "a")
        ledger.close()
        run(file, tmp_path / "out", "a")

    def test_lines_that_are_no_results(self, file: Path, tmp_path: Path) -> None:
        run(file, tmp_path / "out", "a")
        write(tmp_path / "out", ["nothing", "of ours"])
        with pytest.raises(ValueError, match="/out: line 1 is no result of a batch"):
            run(file, tmp_path / "out", "a")

    def test_settings_of_a_job_that_has_no_lines_yet_may_change(self, file: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no model"):
            run(file, tmp_path / "out", "no model")
        assert run(file, tmp_path / "out", "a") == Summary(1, 0)

    def test_a_report_that_cannot_be_written(self, file: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"report='.*/none/page.html': No such file"):
            run(file, tmp_path / "out", "no model", report=tmp_path / "none" / "page.html")

    @pytest.mark.parametrize("name", ["in.jsonl", "link", "out", "out.manifest.json", "-"])
    def test_a_report_in_the_place_of_a_file_of_the_job(self, name: str, tmp_path: Path, null: None) -> None:
        source = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "a"}])
        (tmp_path / "link").symlink_to(source)
        run(source, tmp_path / "out", "m")
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}
        report = name if name == "-" else tmp_path / name
        with pytest.raises(
            ValueError, match=r"report='.*': (is the (input|output|output's manifest) too|must be a file)"
        ):
            run(source, tmp_path / "out", "m", report=report)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


class TestStats:
    @pytest.mark.parametrize("ends", ["well", "by an error"])
    def test_they_are_printed_however_the_job_ends(
        self, ends: str, tmp_path: Path, null: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [{"id": 1, "prompt": "x"}, {"id": 2, "prompt": "x" if ends == "well" else "refused"}]
        arguments = [str(write(tmp_path / "in", rows)), str(tmp_path / "out"), "--model", "m", "--max-errors", "0"]
        assert main([*arguments, "--stats"]) == (ends != "well")
        said = capsys.readouterr().err.splitlines()
        assert said[-2] == f"{1 + (ends == 'well')} requests so far"
        assert main(arguments) == (ends != "well")
        assert "requests so far" not in capsys.readouterr().err

    def test_a_wrong_value_is_refused(self, tmp_path: Path, null: None) -> None:
        with pytest.raises(ValueError, match="stats='yes': must be True or False"):
            run(write(tmp_path / "in", []), tmp_path / "out", "m", stats="yes")


class TestPipes:
    @pytest.mark.whole
    def test_the_command_reads_standard_input_and_writes_standard_output(self) -> None:
        rows = [{"id": i, "prompt": "ROMEO:", "max_tokens": 2} for i in range(3)]
        options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        done = subprocess.run(
            [sys.executable, "-m", "nanoinfer.batch", "-", "-", "--model", BUNDLED_MODEL, "--keep-order", *options],
            input="".join(json.dumps(row) + "\n" for row in rows),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [0, 1, 2]
        assert done.stderr.splitlines()[-1] == "nanoinfer-batch: 3 of 3 lines have results"

    def test_a_result_does_not_wait_for_the_next_line(self, tmp_path: Path, null: None) -> None:
        os.mkfifo(tmp_path / "in")
        os.mkfifo(tmp_path / "out")
        thread = threading.Thread(target=run, args=(tmp_path / "in", tmp_path / "out", "m"))
        thread.start()
        with (tmp_path / "in").open("w", buffering=1) as asks, (tmp_path / "out").open() as answers:
            for i in range(3):
                asks.write(json.dumps({"id": i, "prompt": "x"}) + "\n")
                assert json.loads(answers.readline())["id"] == i
        thread.join()

    def test_ctrl_c_ends_a_job_that_waits_for_its_input(self, tmp_path: Path, null: None) -> None:
        os.mkfifo(tmp_path / "in")
        process = start(tmp_path / "in", tmp_path / "out")
        with (tmp_path / "in").open("w", buffering=1) as asks:
            asks.write('{"id": 1, "prompt": "x"}\n')
            while not (tmp_path / "out").exists() or not (tmp_path / "out").stat().st_size:
                time.sleep(0.001)
            time.sleep(0.1)  # by now it waits for the second line
            os.kill(process.pid, signal.SIGINT)
            process.join()
        assert process.exitcode == 130
        assert len(lines_of(tmp_path / "out")) == 1


class TestCommandLine:
    @pytest.fixture
    def passed(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What `run` gets."""
        passed: dict[str, Any] = {}

        def take(**arguments: Any) -> Summary:
            passed.update(arguments)
            return Summary(0, 0)

        monkeypatch.setattr("nanoinfer.batch.cli.run", take)
        return passed

    def test_options_and_settings_have_their_types(self, passed: dict[str, Any]) -> None:
        arguments = {
            "--max-model-len": ("128", 128),
            "--dtype": ("float32", "float32"),
            "--revision": ("12e4567", "12e4567"),
            "--temperature": ("0.5", 0.5),
            "--stop": ('["a", "b"]', ["a", "b"]),
            "--structured-outputs": ('{"choice": ["yes"]}', {"choice": ["yes"]}),
            "--max-errors": ("3", 3),
            "--image-options": ('{"max_pixels": 4096}', {"max_pixels": 4096}),
            "--limit-images-per-prompt": ("3", 3),
            "--adapter": ("mine", "mine"),
        }
        given = [text for name, (value, _) in arguments.items() for text in (name, value)]
        assert (
            main(
                [
                    "in",
                    "out",
                    "--model",
                    "m",
                    "--enforce-eager",
                    "--no-detokenize",
                    "--no-images",
                    "--load-adapter",
                    "mine=adapters/mine",
                    "--load-adapter",
                    "other=a=b",
                    *given,
                    "--keep-order",
                ]
            )
            == 0
        )
        assert passed == {
            **{name[2:].replace("-", "_"): value for name, (_, value) in arguments.items()},
            **{"input": "in", "output": "out", "model": "m"},
            **{"enforce_eager": True, "detokenize": False, "images": False, "keep_order": True},
            "adapters": {"mine": "adapters/mine", "other": "a=b"},
        }

    @pytest.mark.parametrize("text", ["###", "5", "\n"])
    def test_a_stop_string_is_text(self, text: str, passed: dict[str, Any]) -> None:
        main(["in", "out", "--model", "m", "--stop", text])
        assert passed["stop"] == text

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (["sql"], "--load-adapter sql: must be NAME=FOLDER"),
            (["=folder"], "--load-adapter =folder: must be NAME=FOLDER"),
            (["sql=a", "sql=b"], "--load-adapter sql=b: must have another name, as sql=a has this one"),
        ],
    )
    def test_an_adapter_has_a_folder_and_a_name_of_its_own(
        self, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = [text for pair in given for text in ("--load-adapter", pair)]
        with pytest.raises(SystemExit, match="2"):
            main(["in", "out", "--model", "m", *options])
        assert message in capsys.readouterr().err

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            main(["--version"])
        assert capsys.readouterr().out == f"nanoinfer {__version__}\n"

    def test_help_names_every_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        said = capsys.readouterr().out
        assert all(name in said for name in ("--max-model-len", "--min-p", "--keep-order", "130"))
