"""Lines: one line of a batch file, in OpenAI's format or in a plain one, as a prompt and its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from nanoinfer.batch.lines.adapters import Models
from nanoinfer.batch.lines.embeddings import Embedding
from nanoinfer.checks import check_flag, short
from nanoinfer.llm import LLM
from nanoinfer.requests.inputs import Prompt
from nanoinfer.requests.prompts.stages import ComingRequest
from nanoinfer.sampling_params import SamplingParams, with_integer_keys

Kind = Literal["plain", "chat", "completion", "embedding"]

URLS: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
}
PROMPTS: dict[Kind, tuple[str, ...]] = {
    "plain": ("prompt", "token_ids", "messages"),
    "chat": ("messages",),
    "completion": ("prompt",),
}
TEMPLATE = "chat_template_kwargs"  # may stand beside messages
MEDIA = ("image", "video")  # may stand beside other prompts: an image or a video, or a list of them
NO_SETTINGS = ("model", "user", "metadata", "store")  # of OpenAI's bodies
REFUSED = {
    "stream": "a batch file's results come whole",
    "tools": "nobody reads tool calls out of a text here; a template takes tools as chat_template_kwargs",
    "prompt_logprobs": "OpenAI's results have no place for it: write a plain line",
    "entropy": "OpenAI's results have no place for it: write a plain line",
    "kept_tokens": "OpenAI's results have no place for it: write a plain line",
    "hidden_states": "OpenAI's results have no place for it: write a plain line",
}
ONE_MODEL = Models()
ID_BYTES = 12  # of a digest: among a billion ids, two share one with a probability of 1e-11
MOST_SHOWN = 60  # characters of a value in an error message
MOST_OF_REASON = 1000  # characters that an error's message has


class Line(NamedTuple):
    """A line of the input that says what it wants.

    number: the line's, from 1
    id: None if the line has none
    body: prompt and settings, as the line names them
    """

    number: int
    id: str | int | None
    kind: Kind
    body: dict[str, Any]


class Job(NamedTuple):
    """A line, and what it asks of LLM.add_request.

    embedding: what it asks of LLM.embed in place of that; None: it generates
    """

    line: Line
    prompt: Prompt
    params: SamplingParams
    embedding: Embedding | None = None

    def prepare(self, llm: LLM) -> list[ComingRequest]:
        """Return its requests. Raises ValueError as LLM does."""
        return [llm.prepare(self.prompt, self.params)] if self.embedding is None else self.embedding.prepare(llm)


class LineError(ValueError):
    """A line that cannot run, or that failed, and the reason, of which the message has the beginning."""

    def __init__(self, line: Line, reason: str) -> None:
        shown = reason if len(reason) <= MOST_OF_REASON else f"{reason[:MOST_OF_REASON]}..."
        super().__init__(f"line {line.number}: {shown}")
        self.line = line
        self.reason = reason


def digest(line_id: str | int) -> bytes:
    """Return the ID_BYTES bytes that stand for an id: a job remembers these, not the id."""
    return blake2b(json.dumps(line_id).encode(), digest_size=ID_BYTES).digest()


def read_line(data: bytes, number: int) -> Line:
    """Read a line as far as its id and format. Raises LineError if there is none."""
    unread = Line(number, None, "plain", {})
    try:
        entry = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LineError(unread, f"is no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise LineError(unread, f"is {short(entry, MOST_SHOWN)}: must be a JSON object")
    is_openai = "custom_id" in entry or "body" in entry
    name = "custom_id" if is_openai else "id"
    line_id = entry.pop(name, None)
    if not isinstance(line_id, (str, int)) or isinstance(line_id, bool):
        shown = f"{name}={short(line_id, MOST_SHOWN)}"
        raise LineError(unread, f"{shown}: must be a string or an integer, by which you find its result")
    if not is_openai:
        return Line(number, line_id, "plain", entry)
    line = Line(number, line_id, URLS.get(str(entry.get("url")), "chat"), {})
    for name, known in (("method", ["POST"]), ("url", list(URLS))):
        if entry.get(name) not in known:
            shown = f"{name}={short(entry.get(name), MOST_SHOWN)}"
            raise LineError(line, f"{shown}: must be {' or '.join(map(repr, known))}")
    if not isinstance(entry.get("body"), dict):
        raise LineError(line, f"body={short(entry.get('body'), MOST_SHOWN)}: must be a JSON object")
    return line._replace(body=entry["body"])


def read_job(line: Line, defaults: Mapping[str, Any], seed: int, models: Models = ONE_MODEL) -> Job:
    """Return the prompt and the settings that a line asks for. Raises LineError for what it cannot have.

    defaults: settings for lines that do not say them
    seed: the job's; a line without a seed of its own draws by this number and its id, in every run
    models: those that a line may name
    """
    settings = dict(line.body)
    try:
        if line.kind == "embedding":
            return Job(line, "", SamplingParams(), Embedding.read(line.body, models))
        prompt = take_prompt(settings, PROMPTS[line.kind])
        if line.kind != "plain":
            settings = _translate(line.kind, {name: value for name, value in settings.items() if value is not None})
            if line.body.get("model") is not None:
                settings.setdefault("adapter", models.find(line.body["model"]))
        settings = complete(settings, defaults, seed, line.id)
        if line.kind != "plain":
            _refuse(settings)
        params = SamplingParams(**settings)
        models.check(params.adapter)
        return Job(line, prompt, params)
    except ValueError as error:
        raise LineError(line, str(error)) from None


def take_prompt(settings: dict[str, Any], known: tuple[str, ...]) -> Prompt:
    """Take the prompt out of what stands beside it, as LLM.add_request takes it.

    known: the names that it may have. Raises ValueError if not exactly one of them is there; None counts as missing
    """
    for name in (*known, TEMPLATE, *MEDIA):
        if settings.get(name) is None:
            settings.pop(name, None)
    given = [name for name in known if name in settings]
    if len(given) != 1:
        had = f"has {' and '.join(given)}" if given else "has no prompt"
        raise ValueError(f"{had}: must have {' or '.join(map(repr, known))}")
    prompt: Prompt = settings.pop(given[0])
    media = {name: settings.pop(name) for name in MEDIA if name in settings}
    if given[0] == "messages":
        if media:
            raise ValueError(f"has {next(iter(media))!r} beside 'messages': must be in a part of a message")
        return {"messages": prompt, TEMPLATE: settings.pop(TEMPLATE, {})}
    if not media:
        return prompt
    kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {kind: prompt, "multi_modal_data": media}


def complete(settings: Mapping[str, Any], defaults: Mapping[str, Any], seed: int, key: Any) -> dict[str, Any]:
    """Return the settings, with defaults for those that are missing, and with a seed.

    seed, key: the job's seed, and what stands for the request in every run; a seed is made from these if none is given
    """
    known = {**defaults, **settings}
    if "logit_bias" in known:
        known["logit_bias"] = with_integer_keys(known["logit_bias"])
    if known.get("seed") in (None, -1):
        own = f"{seed} {json.dumps(key, default=_stand_in)}".encode()
        known["seed"] = int.from_bytes(blake2b(own, digest_size=8).digest(), "big") >> 1
    return known


def _stand_in(value: Any) -> str:
    """Return what stands for a value that JSON lacks; for an image, a digest."""
    data = value.tobytes() if hasattr(value, "tobytes") else value
    return blake2b(data).hexdigest() if isinstance(data, bytes) else str(data)


def _translate(kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of OpenAI's body by the names of SamplingParams."""
    settings = {name: value for name, value in body.items() if name not in NO_SETTINGS}
    if kind == "chat":
        if "max_completion_tokens" in settings:
            settings["max_tokens"] = settings.pop("max_completion_tokens")
        likely = settings.pop("top_logprobs", None)
        if check_flag("logprobs", settings.pop("logprobs", False)):
            settings["logprobs"] = 0 if likely is None else likely
        elif likely is not None:
            raise ValueError(f"top_logprobs={short(likely)}: needs logprobs=true beside it")
    if "response_format" in settings:
        form = _form_of(settings.pop("response_format"))
        if form is not None:
            settings["structured_outputs"] = form
    if settings.get("stream") is False:
        del settings["stream"]
    return settings


def _form_of(response_format: Any) -> dict[str, Any] | None:
    """Return the structured_outputs of a response_format; None for plain text."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json": schema}
    raise ValueError(
        f"response_format={short(response_format)}: must have the type 'text', 'json_object', or 'json_schema' with a"
        " json_schema that has a schema"
    )


def _refuse(settings: Mapping[str, Any]) -> None:
    for name, why in REFUSED.items():
        if settings.get(name) not in (None, False):
            raise ValueError(f"{name}={short(settings[name], MOST_SHOWN)}: {why}")
