"""examples/openai_server.py answers OpenAI's own client as the LLM would."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from conftest import greedy, wait_until

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams

SERVER = Path(__file__).parents[1] / "examples" / "openai_server.py"
CHAT = [{"role": "user", "content": "Good morrow"}]
PROMPT = "ROMEO:"

pytestmark = pytest.mark.whole  # a server imports for seconds, as its client does


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, SERVER, "--port", str(port)]) as server:
        try:
            assert wait_until(lambda: server.poll() is not None or listens(port), 90)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        finally:
            server.terminate()
        assert server.wait(20) in (0, -15)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL) as llm:
        yield llm


def test_completions(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1.0, max_tokens=12, seed=3)
    (expected,) = llm.generate([PROMPT], params, use_tqdm=False)
    given = client.completions.create(model="bundled", prompt=PROMPT, n=2, max_tokens=12, seed=3)
    assert [choice.text for choice in given.choices] == [sample.text for sample in expected.samples]
    assert [choice.finish_reason for choice in given.choices] == [one.finish_reason for one in expected.samples]
    assert given.usage.completion_tokens == sum(len(sample.token_ids) for sample in expected.samples)
    assert given.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_chats(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat([CHAT], greedy(30), use_tqdm=False)
    create = client.chat.completions.create
    given = create(model="bundled", messages=CHAT, temperature=0, max_completion_tokens=30)
    assert given.choices[0].message.content == expected.samples[0].text
    pieces = list(create(model="bundled", messages=CHAT, temperature=0, max_tokens=30, stream=True))
    assert "".join(piece.choices[0].delta.content for piece in pieces) == expected.samples[0].text
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == expected.samples[0].finish_reason


def test_a_stream_comes_in_pieces(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate([PROMPT], greedy(12, ignore_eos=True), use_tqdm=False)
    pieces = list(client.completions.create(model="bundled", prompt=PROMPT, temperature=0, max_tokens=12, stream=True))
    assert len(pieces) > 3
    assert expected.samples[0].text.startswith("".join(piece.choices[0].text for piece in pieces))


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    given = client.chat.completions.create(
        model="bundled", messages=CHAT, temperature=0, max_tokens=60, response_format=form
    )
    if given.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(given.choices[0].message.content)["age"], int)
    assert given.choices[0].message.content.lstrip().startswith("{")


def test_many_at_once_and_those_that_leave(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [f"{name}:" for name in ("ROMEO", "JULIET", "DUKE", "ISABELLA", "CLAUDIO", "LUCIO")]
    expected = [output.samples[0].text for output in llm.generate(prompts, greedy(20), use_tqdm=False)]

    def ask(prompt: str) -> str:
        with client.completions.create(model="bundled", prompt=prompt, max_tokens=1500, stream=True) as left:
            next(left)
        given = client.completions.create(model="bundled", prompt=prompt, max_tokens=20, temperature=0)
        return str(given.choices[0].text)

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == expected


@pytest.mark.parametrize("streams", [False, True])
def test_bad_input(client: openai.OpenAI, streams: bool) -> None:
    for bad, told in (
        ({"temperature": -1}, "temperature=-1"),
        ({"model": "another"}, "model='another': this server has 'bundled'"),
        ({"logprobs": 3}, "logprobs: unknown to this server"),
        ({"prompt": [10**9]}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            client.completions.create(**{"model": "bundled", "prompt": PROMPT, "stream": streams, **bad})
