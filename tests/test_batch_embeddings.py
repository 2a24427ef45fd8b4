"""Lines of OpenAI's /v1/embeddings give the embeddings of LLM.embed."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.batch import run

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 32, "max_model_len": 200}
TEXTS = ["To be", "or not to be", "that is the question"]


def line(number: int, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/embeddings", "body": body}


def run_lines(folder: Path, lines: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Run lines; returns the rows by their ids."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(entry) + "\n" for entry in lines), "utf-8")
    run(source, target, BUNDLED_MODEL, **OPTIONS, **options)
    rows = map(json.loads, target.read_text("utf-8").splitlines())
    return {row["custom_id"]: row for row in rows}


@pytest.fixture
def expected(make_llm: Callable[..., LLM]) -> np.ndarray:
    return np.stack([output.embedding for output in make_llm(device="cpu").embed(TEXTS, use_tqdm=False)])


@pytest.mark.parametrize("runner", ["pooling", "generate"])
def test_lines_of_texts_and_of_lists(runner: str, tmp_path: Path, expected: np.ndarray) -> None:
    rows = run_lines(
        tmp_path,
        [
            line(0, input=TEXTS[0], model="a model", encoding_format="float", user="me"),
            line(1, input=TEXTS),
            line(2, input=TEXTS[1], encoding_format="base64"),
            line(3, input=[[5, 6], [7]], dimensions=8),
            line(4, input=[5, 6], dimensions=8),
        ],
        runner=runner,
    )
    body = rows["line 0"]["response"]["body"]
    assert (rows["line 0"]["error"], body["object"], body["model"]) == (None, "list", "a model")
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    np.testing.assert_allclose(body["data"][0]["embedding"], expected[0], atol=1e-6)
    listed = rows["line 1"]["response"]["body"]["data"]
    assert [entry["index"] for entry in listed] == [0, 1, 2]
    np.testing.assert_allclose([entry["embedding"] for entry in listed], expected, atol=1e-6)
    coded = rows["line 2"]["response"]["body"]["data"][0]["embedding"]
    assert len(coded) == len(b64encode(expected[1].tobytes()))
    of_two, of_one = (rows[f"line {number}"]["response"]["body"]["data"] for number in (3, 4))
    assert len(of_two) == 2
    np.testing.assert_allclose(of_two[0]["embedding"], of_one[0]["embedding"], atol=1e-6)
    assert len(of_one[0]["embedding"]) == 8


def test_lines_that_cannot_run_fail_alone(tmp_path: Path) -> None:
    rows = run_lines(
        tmp_path,
        [
            line(0, input=[]),
            line(1, input="a", encoding_format="int8"),
            line(2, input="a", temperature=1),
            line(3, input="a", dimensions=10**6),
            line(4, input=["a", [], []]),
            line(5, input=["a", 5]),
            line(6, input="good"),
        ],
    )
    starts = "input=[]", "encoding_format=", "unknown argument", "dimensions=", "prompt is empty", "prompt is 5", ""
    said = [(row["error"] or {}).get("message", "") for _, row in sorted(rows.items())]
    assert all(message.startswith(start) for message, start in zip(said, starts, strict=True)), said
    assert rows["line 6"]["response"]["status_code"] == 200


def test_embeddings_beside_generation(make_llm: Callable[..., LLM], expected: np.ndarray) -> None:
    """What batch and Ray build on: one queue for both."""
    llm = make_llm(device="cpu")
    texts = [llm.add_request(llm.prepare_to_embed(text)) for text in TEXTS]
    generated = llm.add_request(TEXTS[0], SamplingParams(max_tokens=5, temperature=0))
    outputs = {}
    while llm.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in llm.step())
    np.testing.assert_allclose([outputs[number].embedding for number in texts], expected, atol=1e-4)
    assert (
        outputs[generated].token_ids == llm.generate(TEXTS[0], SamplingParams(max_tokens=5, temperature=0))[0].token_ids
    )
    aborted = llm.add_request(llm.prepare_to_embed("a"))
    llm.abort(aborted)
    (output,) = llm.step()
    assert (output.embedding, output.error) == (None, "the request has ended: abort")
