"""Serve a model at http://127.0.0.1:8000/v1, where OpenAI's clients find completions and chats.

pip install starlette uvicorn && python examples/openai_server.py --model Qwen/Qwen3-0.6B
"""

import argparse
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanoinfer import AsyncLLM, SamplingParams

SETTINGS = ("n", "temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty", "frequency_penalty")


def read(body: dict[str, Any], is_chat: bool) -> tuple[Any, SamplingParams]:
    """Return the prompt of a request and its settings. Raises ValueError for what this server does not know."""
    rest = {name: value for name, value in body.items() if value is not None and name not in ("user", "stream_options")}
    settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": None if is_chat else 16}  # OpenAI's defaults
    settings["max_tokens"] = rest.pop("max_completion_tokens", settings["max_tokens"])
    settings |= {name: rest.pop(name) for name in SETTINGS if name in rest}
    form = rest.pop("response_format", {"type": "text"})
    if form["type"] == "json_schema":
        settings["structured_outputs"] = {"json": form["json_schema"]["schema"]}
    elif form["type"] != "text":
        raise ValueError(f"response_format={form}: must be of type text or json_schema")
    prompt = {"messages": rest.pop("messages")} if is_chat else rest.pop("prompt")
    if rest:
        raise ValueError(f"{', '.join(rest)}: unknown to this server, must be left out")
    return prompt, SamplingParams(**settings)


async def answer(request: Request) -> Response:
    """Answer a request, by a stream if it asks for one."""
    llm, name, is_chat = request.app.state.llm, request.app.state.name, "chat" in request.url.path
    try:
        body = await request.json()
        if (model := body.pop("model", name)) != name:
            raise ValueError(f"model={model!r}: this server has {name!r}")
        streams, (prompt, params) = body.pop("stream", False), read(body, is_chat)
        if streams:
            pieces = llm.stream(prompt, params)
            first = await anext(pieces)  # a bad prompt raises its error before the answer begins
            return StreamingResponse(events(name, first, pieces, is_chat), media_type="text/event-stream")
        output = await llm.generate(prompt, params)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, status_code=400)
    choices = [choice(one.index, one, "message" if is_chat else None) for one in output.samples]
    asked, given = len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.samples)
    usage = {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}
    return JSONResponse({**head(name, is_chat), "choices": choices, "usage": usage})


async def events(name: str, new: Any, pieces: Any, is_chat: bool) -> AsyncIterator[str]:
    """Yield the lines of a stream."""
    first = head(name, is_chat, ".chunk")
    while new is not None:
        yield f"data: {json.dumps({**first, 'choices': [choice(new.sample, new, 'delta' if is_chat else None)]})}\n\n"
        new = await anext(pieces, None)
    yield "data: [DONE]\n\n"


def head(name: str, is_chat: bool, chunk: str = "") -> dict[str, Any]:
    """Return what every answer begins with."""
    kind = f"chat.completion{chunk}" if is_chat else "text_completion"
    return {"id": f"cmpl-{time.time_ns():x}", "object": kind, "created": int(time.time()), "model": name}


def choice(index: int, new: Any, key: str | None) -> dict[str, Any]:
    """Return a sample, or what is new of it. key: of a chat's message"""
    if new.finish_reason == "error":
        raise RuntimeError(new.stop_reason)
    text = {"text": new.text} if key is None else {key: {"role": "assistant", "content": new.text}}
    return {"index": index, "finish_reason": new.finish_reason, "logprobs": None, **text}


@asynccontextmanager
async def start(app: Starlette) -> AsyncIterator[None]:
    """Have the model while the server runs."""
    async with AsyncLLM(app.state.name) as app.state.llm:
        yield


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="folder or Hub id (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    routes = [Route(f"/v1/{path}", answer, methods=["POST"]) for path in ("completions", "chat/completions")]
    app = Starlette(routes=routes, lifespan=start)
    app.state.name = args.model
    uvicorn.run(app, host="127.0.0.1", port=args.port)
