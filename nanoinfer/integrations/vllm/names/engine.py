"""EngineArgs, and an engine for asyncio: what vLLM's servers and chat programs make of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from nanoinfer.config import Config
from nanoinfer.integrations.vllm.lora import LoRARequest, loras_of
from nanoinfer.integrations.vllm.methods import ModelConfig
from nanoinfer.integrations.vllm.names.llm import LLM
from nanoinfer.integrations.vllm.names.outputs import RequestOutput, renamed
from nanoinfer.requests import outputs

T = TypeVar("T")


class EngineArgs:
    """The options of an LLM, each an attribute."""

    def __init__(self, model: str, **options: Any) -> None:
        self.__dict__.update(model=model, **options)

    def create_model_config(self) -> ModelConfig:
        """Return the model's settings, without its weights. Raises ValueError for an option that cannot work."""
        return ModelConfig(Config(**vars(self)))


class AsyncEngineArgs(EngineArgs):
    """The options of an AsyncLLMEngine, each an attribute."""


class AsyncLLMEngine:
    """An LLM whose requests wait in asyncio, and run together. One thread calls the LLM.

    model_config: the model's settings, by vLLM's names
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanoinfer-async")
        self._numbers: dict[str, int] = {}  # of requests that somebody waits for
        self._outputs: dict[int, outputs.RequestOutput | None] = {}  # of these
        self.model_config = ModelConfig(llm.config)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> AsyncLLMEngine:
        """Make an engine with the options of an EngineArgs; options: those of vLLM's servers, not used."""
        return cls(LLM.from_engine_args(engine_args))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; yields its whole output once, at its end. Who leaves the loop aborts the request.

        prompt, sampling_params: as for LLM.generate, for one prompt
        request_id: a name for `abort`, which no running request has
        lora_request: the LoRARequest of an adapter, which the LLM loads first; None: the model alone

        Raises ValueError for an argument that cannot work, and RuntimeError if the engine has dropped the request.
        """
        if request_id in self._numbers:
            raise ValueError(f"request_id={request_id!r}: a request of this name runs: must be another name")
        try:
            number = await self._call(self._add, request_id, prompt, sampling_params, lora_request)
            while (output := await self._call(self._advance, number)) is None:
                pass
            yield renamed(output, lora_request)
        finally:
            self._thread.submit(self._forget, request_id)

    async def abort(self, request_id: str) -> None:
        """End a request now: its output has the tokens so far, and finish_reason "abort"."""
        if request_id in self._numbers:
            await self._call(self._llm.abort, self._numbers[request_id])

    def shutdown(self) -> None:
        """Close the LLM. A second call does nothing."""
        self._thread.submit(self._llm.close).result()

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Let the LLM's thread call a function, after those before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _add(self, request_id: str, prompt: Any, sampling_params: Any, lora_request: LoRARequest | None) -> int:
        llm = self._llm
        params = llm.default_sampling_params() if sampling_params is None else sampling_params
        if lora_request is not None:
            params = params.clone()
            params.adapter = lora_request.lora_name
        loras = None if lora_request is None else loras_of(llm).check_requests(llm, lora_request)
        coming = llm.prepare(prompt, params)
        if loras is not None:
            llm._inputs.finish(coming)  # no adapter goes for a prompt that cannot work
            loras.load()
        number = llm.add_request(coming)
        self._numbers[request_id], self._outputs[number] = number, None
        return number

    def _advance(self, number: int) -> outputs.RequestOutput | None:
        """Run a step, unless the request has ended before; returns its output if it has ended."""
        if self._outputs[number] is None:
            if not self._llm.has_unfinished_requests():
                raise RuntimeError("the engine has dropped the request, because a step before raised an error")
            for output in self._llm.step():
                if output.request_id in self._outputs:
                    self._outputs[output.request_id] = output
        return self._outputs[number]

    def _forget(self, request_id: str) -> None:
        if (number := self._numbers.pop(request_id, None)) is not None:
            del self._outputs[number]
            self._llm.abort(number)
