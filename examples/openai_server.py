"""Serve a model at http://127.0.0.1:8000/v1, where OpenAI's clients find completions and chats.

pip install starlette uvicorn
python examples/openai_server.py --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanoinfer import AsyncLLM, SamplingParams

SETTINGS = ("n", "temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty", "frequency_penalty")
IGNORED = ("user", "store", "metadata", "stream_options")  # they change no token


def read(body: dict[str, Any], is_chat: bool) -> tuple[Any, SamplingParams, bool]:
    """Return what a request asks for: a prompt, its settings, and whether to stream. Raises ValueError for the rest."""
    rest = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    key = "messages" if is_chat else "prompt"
    prompt, streams = rest.pop(key, None), rest.pop("stream", False)
    settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": None if is_chat else 16}  # OpenAI's defaults
    if "max_completion_tokens" in rest:
        settings["max_tokens"] = rest.pop("max_completion_tokens")
    settings |= {name: rest.pop(name) for name in SETTINGS if name in rest}
    if (form := rest.pop("response_format", {"type": "text"}))["type"] == "json_schema":
        settings["structured_outputs"] = {"json": form["json_schema"]["schema"]}
    elif form["type"] != "text":
        raise ValueError(f"response_format={form}: must be of type text or json_schema")
    if rest or prompt is None:
        raise ValueError(f"{key}: must be there" if prompt is None else f"{', '.join(rest)}: this server knows no such")
    return {"messages": prompt} if is_chat else prompt, SamplingParams(**settings), streams


class Server:
    """Answers requests by an AsyncLLM. name: the model's, as clients call it"""

    def __init__(self, name: str, llm: AsyncLLM) -> None:
        self.name, self.llm = name, llm

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "created": 0}]})

    async def answer(self, request: Request) -> Response:
        is_chat, body = request.url.path.endswith("chat/completions"), await request.json()
        try:
            if (model := body.pop("model", self.name)) != self.name:
                raise ValueError(f"model={model!r}: this server has {self.name!r}")
            prompt, params, streams = read(body, is_chat)
            if streams:
                pieces = self.llm.stream(prompt, params)
                first = await anext(pieces)  # a bad prompt raises its error before the answer begins
                return StreamingResponse(self.events(first, pieces, is_chat), media_type="text/event-stream")
            output = await self.llm.generate(prompt, params)
        except (ValueError, TypeError, KeyError) as error:
            told = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": told}, status_code=400)
        samples = [{"text": one.text, "finish_reason": one.finish_reason, "index": one.index} for one in output.samples]
        if is_chat:
            samples = [{**one, "message": {"role": "assistant", "content": one.pop("text")}} for one in samples]
        asked, given = len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.samples)
        usage = {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}
        return JSONResponse({**self.head(is_chat, ""), "choices": samples, "usage": usage})

    def head(self, is_chat: bool, chunk: str) -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if is_chat else "text_completion"
        return {"id": f"cmpl-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}

    async def events(self, first: Any, pieces: Any, is_chat: bool) -> AsyncIterator[str]:
        head, new = self.head(is_chat, ".chunk"), first
        while new is not None:
            text = {"delta": {"role": "assistant", "content": new.text}} if is_chat else {"text": new.text}
            choice = {"index": new.sample, "finish_reason": new.finish_reason, "logprobs": None, **text}
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
            new = await anext(pieces, None)
        yield "data: [DONE]\n\n"


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="folder or Hub id (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()

    @asynccontextmanager
    async def start(app: Starlette) -> AsyncIterator[None]:
        async with AsyncLLM(args.model) as llm:
            server = Server(args.model, llm)
            app.router.routes += [Route("/v1/models", server.models)]
            paths = ("/v1/completions", "/v1/chat/completions")
            app.router.routes += [Route(path, server.answer, methods=["POST"]) for path in paths]
            yield

    uvicorn.run(Starlette(lifespan=start), host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
