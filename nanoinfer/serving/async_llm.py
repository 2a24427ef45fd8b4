"""AsyncLLM: an LLM for asyncio, which runs the requests of all tasks together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, TypeVar, cast

from nanoinfer.llm import LLM
from nanoinfer.requests.inputs import Prompt
from nanoinfer.requests.outputs import RequestOutput, StreamOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serving.llm_thread import LLMThread, Told

T = TypeVar("T")
Answers = asyncio.Queue[Any]  # outputs of a request, or an error


class AsyncLLM:
    """A Hugging Face language model for the tasks of an event loop: `async with AsyncLLM(model) as llm`.

    model: a folder, a Hub id or "bundled", as for LLM
    options: see Options of LLM

    Requests of all tasks run together. A task that is cancelled, or that leaves a stream, aborts its request alone. The
    end of `async with` ends all requests with a RuntimeError, and gives memory and processes back.

    The methods raise the errors of LLM's, each in the task that called. `async with` itself raises those of LLM(...).
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._make = partial(LLM, model, **options)
        self._thread: LLMThread | None = None

    async def __aenter__(self) -> AsyncLLM:
        loop = asyncio.get_running_loop()

        def tell(told: Told) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(_hand_out, told)

        self._thread = LLMThread(self._make, tell)
        try:
            await self.call(lambda llm: None)  # when it has started
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests with a RuntimeError, and give memory and processes back. A second call does nothing."""
        await asyncio.to_thread(self._entered().close)

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Generate for one prompt; returns its output when all of its samples have ended.

        prompt: a string, a list of token ids, or a mapping, as for LLM.generate; {"messages": [...]} is a chat
        sampling_params: the request's settings; None: SamplingParams()

        Raises ValueError as LLM.generate does.
        """
        answers = self._submit(prompt, _snapshot(sampling_params), streams=False)
        try:
            return cast(RequestOutput, await _next(answers))
        except BaseException:
            self._entered().abort(answers)
            raise

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[StreamOutput, None]:
        """Generate for one prompt; yields a StreamOutput whenever one of its samples has something new.

        A sample's last StreamOutput has a finish_reason. Who leaves the loop aborts the request, when nothing holds the
        stream any more, or by its aclose().

        prompt: as for generate
        sampling_params: the request's settings; None: SamplingParams()

        Raises ValueError as LLM.generate does.
        """
        params = _snapshot(sampling_params)
        answers, num_left = self._submit(prompt, params, streams=True), getattr(params, "n", 1)
        try:
            while num_left:
                new = cast(StreamOutput, await _next(answers))
                num_left -= new.finish_reason is not None
                yield new
        finally:
            if num_left:
                self._entered().abort(answers)

    async def call(self, function: Callable[[LLM], T]) -> T:
        """Let a function use the LLM between two steps, while requests run; returns what it returns.

        function: such as `lambda llm: llm.load_adapter("mine", folder)` or `lambda llm: llm.stats()`
        """
        answers: Answers = asyncio.Queue()
        self._entered().call(answers, function)
        return cast(T, await _next(answers))

    def _submit(self, prompt: Prompt, params: SamplingParams | None, streams: bool) -> Answers:
        answers: Answers = asyncio.Queue()
        max_tokens = SamplingParams.max_tokens if params is None else getattr(params, "max_tokens", None)
        given = _snapshot(prompt)
        self._entered().submit(answers, lambda llm: llm.prepare(given, params), max_tokens, streams)
        return answers

    def _entered(self) -> LLMThread:
        """Return the LLM's thread. Raises RuntimeError if there is none."""
        if self._thread is None:
            raise RuntimeError("this AsyncLLM has not started: use `async with AsyncLLM(model) as llm`")
        return self._thread


def _snapshot(given: T) -> T:
    """Return what a task has given as it is now: the LLM's thread reads it later."""
    if isinstance(given, Mapping):
        return cast(T, {key: _snapshot(value) for key, value in given.items()})
    if isinstance(given, SamplingParams):
        return cast(T, given.clone())
    return copy(given) if isinstance(given, list) else given


def _hand_out(told: Told) -> None:
    for answers, answer in told:
        answers.put_nowait(answer)


async def _next(answers: Answers) -> Any:
    """Return the next answer, or raise it if it is an error."""
    answer = await answers.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer
