"""Results: a request's output, or a line's error, as a line of the output file.

A result has no time and nothing by chance, so that a job that was broken off gives the lines of one that was not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isnan
from typing import Any

from nanoinfer.batch.lines.hidden_states import as_text
from nanoinfer.batch.lines.requests import Job, Line, LineError, digest
from nanoinfer.llm import LLM
from nanoinfer.logprob import LogProb
from nanoinfer.requests.outputs import RequestOutput, SampleOutput
from nanoinfer.requests.text.spelling import text_offsets
from nanoinfer.sampling_params import SamplingParams

LEAST = -9999.0  # stands for a log-probability of -inf, for which JSON has no word; null stands for NaN

Entry = Mapping[int, LogProb]  # of one place: token id -> log-probability
Place = tuple[int, Entry]  # a generated token, and what could have stood in its place


def encode(row: Mapping[str, Any]) -> bytes:
    """Return a row, whose numbers are finite, as a line of JSON in UTF-8."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # an id has half a surrogate pair, which UTF-8 cannot hold
        return json.dumps(row, allow_nan=False).encode() + b"\n"


def error_row(error: LineError) -> dict[str, Any]:
    """Return the row of a line that failed, in the line's own format."""
    line, shown = error.line, {"line": error.line.number, "message": error.reason}
    if line.kind == "plain":
        return {"id": line.id, "error": shown}
    return {**_envelope(line), "response": None, "error": {"code": "failed", **shown}}


def result_row(job: Job, outputs: list[Any], model: str, llm: LLM) -> dict[str, Any]:
    """Return the row of a line whose requests have ended. Raises LineError if one has ended with an error.

    outputs: those of its requests: a RequestOutput, or EmbeddingOutputs
    model: the name that results in OpenAI's format have, if the line names none
    llm: the one that the requests ran in
    """
    line = job.line
    named = line.body.get("model")
    told = named if named and isinstance(named, str) else model
    if job.embedding is not None:
        try:
            return _response(line, job.embedding.body(outputs, told))
        except ValueError as error:
            raise LineError(line, str(error)) from None
    output: RequestOutput = outputs[0]
    for sample in output.samples:
        if sample.finish_reason == "error":
            raise LineError(line, str(sample.stop_reason))
    if line.kind == "plain":
        return {"id": line.id, **_plain(output)}
    return _response(line, _completion(job, output, told, llm))


def _response(line: Line, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": 200, "request_id": _name("req", line), "body": body}
    return {**_envelope(line), "response": response, "error": None}


def _plain(output: RequestOutput) -> dict[str, Any]:
    row = {**_plain_sample(output.samples[0]), "num_prompt_tokens": len(output.prompt_token_ids)}
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [None if entry is None else _plain_entry(entry) for entry in output.prompt_logprobs]
    if len(output.samples) > 1:
        row["samples"] = [_plain_sample(sample) for sample in output.samples]
    return row


def _plain_sample(sample: SampleOutput) -> dict[str, Any]:
    """Return a sample's keys as SampleOutput has them; those that nobody asked for are left out."""
    row: dict[str, Any] = {key: sample[key] for key in ("text", "token_ids", "finish_reason", "stop_reason")}
    if sample.reasoning is not None:
        row |= {"reasoning": sample.reasoning, "answer": sample.answer}
    if sample.logprobs is not None:
        row["logprobs"] = [_plain_entry(entry) for entry in sample.logprobs]
    if sample.kept_tokens is not None:
        row["kept_tokens"] = [(count, _finite(log_mass)) for count, log_mass in sample.kept_tokens]
    if sample.entropies is not None:
        row["entropies"] = list(map(_finite, sample.entropies))
    if sample.routed_experts is not None:
        row["routed_experts"] = sample.routed_experts.tolist()
    if sample.hidden_states is not None:
        row["hidden_states"] = as_text(sample.hidden_states)
    return row


def _plain_entry(entry: Entry) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _finite(value), "rank": value.rank, "decoded_token": value.decoded_token}
        for token_id, value in entry.items()
    }


def _envelope(line: Line) -> dict[str, Any]:
    return {"id": _name("batch_req", line), "custom_id": line.id}


def _name(prefix: str, line: Line) -> str:
    """Return a name that follows from the line's id."""
    assert line.id is not None
    return f"{prefix}_{digest(line.id).hex()}"


def _completion(job: Job, output: RequestOutput, model: str, llm: LLM) -> dict[str, Any]:
    """Return the body of OpenAI's response."""
    line, is_chat = job.line, job.line.kind == "chat"
    used, made = len(output.prompt_token_ids), sum(len(sample.token_ids) for sample in output.samples)
    return {
        "id": _name("chatcmpl" if is_chat else "cmpl", line),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [_choice(sample, is_chat, job.params, llm) for sample in output.samples],
        "usage": {"prompt_tokens": used, "completion_tokens": made, "total_tokens": used + made},
    }


def _choice(sample: SampleOutput, is_chat: bool, params: SamplingParams, llm: LLM) -> dict[str, Any]:
    """Return OpenAI's entry for a sample."""
    thought = {} if sample.reasoning is None else {"reasoning": sample.reasoning}
    text = (
        {"message": {"role": "assistant", "content": sample.answer, **thought, "refusal": None}}
        if is_chat
        else {"text": sample.text}
    )
    logprobs = None
    if sample.logprobs is not None:
        told = _LogProbs(params, llm)
        logprobs = told.of_chat(sample) if is_chat else told.of_completion(sample)
    return {"index": sample.index, **text, "logprobs": logprobs, "finish_reason": sample.finish_reason}


class _LogProbs:
    """The log-probabilities of samples, as OpenAI's formats have them."""

    def __init__(self, params: SamplingParams, llm: LLM) -> None:
        self._params = params
        self._tokenizer = llm.tokenizer

    def of_chat(self, sample: SampleOutput) -> dict[str, Any]:
        """Beside each token stand the likeliest in its place, among which it may not be."""
        content = []
        for token_id, entry in _places(sample):
            likely = _likely(entry)[: None if self._params.logprobs == -1 else self._params.logprobs]
            content.append(
                {
                    **self._token(token_id, entry[token_id]),
                    "top_logprobs": [self._token(*candidate) for candidate in likely],
                }
            )
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, value: LogProb) -> dict[str, Any]:
        text = _text(token_id, value)
        own = value.decoded_bytes
        return {"token": text, "logprob": _finite(value), "bytes": list(text.encode() if own is None else own)}

    def of_completion(self, sample: SampleOutput) -> dict[str, Any]:
        """text_offset: the place in the text of the first character that has bytes of the token."""
        places, offsets = _places(sample), [0] * len(sample.token_ids)
        if self._tokenizer is not None:
            offsets = text_offsets(self._tokenizer, sample.token_ids, self._params.skip_special_tokens)
        return {
            "tokens": [_text(token_id, entry[token_id]) for token_id, entry in places],
            "token_logprobs": [_finite(entry[token_id]) for token_id, entry in places],
            "top_logprobs": [{_text(*item): _finite(item[1]) for item in _likely(entry)} for _, entry in places],
            "text_offset": [min(offset, len(sample.text)) for offset in offsets],  # a stop string may have cut the text
        }


def _places(sample: SampleOutput) -> list[Place]:
    assert sample.logprobs is not None
    return list(zip(sample.token_ids, sample.logprobs, strict=True))


def _likely(entry: Entry) -> list[tuple[int, LogProb]]:
    """Return the tokens of a place, the most likely first."""
    return sorted(entry.items(), key=lambda item: -item[1])


def _text(token_id: int, value: LogProb) -> str:
    """Return a token's text, or its id as vLLM writes it where there is no tokenizer."""
    return f"token_id:{token_id}" if value.decoded_token is None else value.decoded_token


def _finite(value: float) -> float | None:
    return None if isnan(value) else max(float(value), LEAST)
