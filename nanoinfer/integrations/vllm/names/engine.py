"""LLMEngine, whose caller runs the steps, and AsyncLLMEngine, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nanoinfer.checks import as_list, short
from nanoinfer.integrations.vllm.lora import LoRARequest, NoRoomError, loras_of
from nanoinfer.integrations.vllm.methods import EngineNames, ModelConfig, tokenizer_of
from nanoinfer.integrations.vllm.names.command_line import Options
from nanoinfer.integrations.vllm.names.llm import LLM
from nanoinfer.integrations.vllm.names.outputs import Growing, RequestOutput, renamed
from nanoinfer.integrations.vllm.names.params import RequestOutputKind
from nanoinfer.requests import outputs
from nanoinfer.requests.outputs import StreamOutput
from nanoinfer.requests.prompts.stages import ComingRequest, Prepared
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serving.llm_thread import LLMThread, Told

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOON = 0.02  # seconds, until a request asks again whether there is room for its adapter

T = TypeVar("T")


class Asked(NamedTuple):
    """A request of an engine. growing: makes its outputs while it runs; None: it has one, at its end"""

    request_id: str
    lora: LoRARequest | None
    growing: Growing | None

    @property
    def is_finished(self) -> bool:
        """Whether its last output has been taken."""
        return self.growing is None or self.growing.is_finished

    def take(self, output: StreamOutput | outputs.RequestOutput) -> RequestOutput:
        """Return an output under vLLM's names."""
        if isinstance(output, StreamOutput):
            assert self.growing is not None
            return self.growing.take(output)
        own = renamed(output, self.lora)
        own["request_id"] = self.request_id
        return own


def ask(llm: LLM, request_id: str, prompt: Any, params: Any, lora: LoRARequest | None) -> tuple[ComingRequest, Asked]:
    """Check a request, and load its adapter, unless the prompt cannot work. Raises ValueError for what cannot be."""
    params = llm.params_of(params)
    kind = getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)
    loras = None
    if lora is not None and isinstance(params, SamplingParams):
        loras, params = loras_of(llm).check_requests(llm, lora), params.clone()
        params.adapter = lora.lora_name
    coming = llm.prepare(prompt, params)

    def prepared() -> Prepared:
        return llm._inputs.finish(coming)

    if loras is not None:
        prepared()  # no adapter goes for a prompt that cannot work
        loras.load()
    n = coming.settings.params.n
    growing = None if kind is RequestOutputKind.FINAL_ONLY else Growing(request_id, n, kind, lora, prepared)
    return coming, Asked(request_id, lora, growing)


class LLMEngine(EngineNames):
    """An LLM whose caller adds requests, and runs step after step. It has the names of llm.llm_engine, too."""

    _llm: LLM

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._asked: dict[int, Asked] = {}  # by the LLM's numbers
        self._waiting: list[tuple[str, Any, Any, LoRARequest]] = []  # until there is room for their adapters

    @classmethod
    def from_engine_args(cls, engine_args: Options, **options: Any) -> LLMEngine:
        """Make an engine with the options of an EngineArgs; options: those of vLLM's servers, not used."""
        return cls(LLM.from_engine_args(engine_args))

    def add_request(
        self, request_id: str, prompt: Any, params: Any, arrival_time: Any = None, lora_request: Any = None, **more: Any
    ) -> None:
        """Queue a request for `step`.

        request_id: a name that no running request has
        prompt, params: as for LLM.generate, for one prompt
        lora_request: the LoRARequest of an adapter, which the LLM loads first; None: the model alone
        arrival_time, more: of no effect here

        Raises ValueError as LLM.generate does.
        """
        if request_id in self._names():
            raise ValueError(f"request_id={short(request_id)}: a request of this name runs: must be another name")
        try:
            self._begin(request_id, prompt, params, lora_request)
        except NoRoomError:
            if not self._asked:
                raise
            self._waiting.append((request_id, prompt, params, lora_request))

    def step(self) -> list[RequestOutput]:
        """Run a step; returns an output of each sample that has something new, or that has ended."""
        found = []
        for one in list(self._waiting):
            self._waiting.remove(one)
            self.add_request(*one[:3], lora_request=one[3])
        try:
            for output in self._llm.step():
                if (asked := self._asked.get(output.request_id)) is not None:
                    found.append(asked.take(output))
                    if asked.is_finished:
                        del self._asked[output.request_id]
        finally:
            if not self._llm.has_unfinished_requests():  # an error has dropped them
                self._asked.clear()
        return found

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests now: their outputs have the tokens so far, and finish_reason "abort"."""
        listed = as_list(request_ids)
        names = [request_ids] if listed is None or isinstance(request_ids, str) else listed
        self._waiting = [one for one in self._waiting if one[0] not in names]
        for number in [number for number, asked in self._asked.items() if asked.request_id in names]:
            self._llm.abort(number)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has outputs to give."""
        return bool(self._waiting) or self._llm.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests have not ended."""
        return len(self._asked) + len(self._waiting)

    def _begin(self, request_id: str, prompt: Any, params: Any, lora: LoRARequest | None) -> None:
        coming, asked = ask(self._llm, request_id, prompt, params, lora)
        self._asked[self._llm.add_request(coming, streams=asked.growing is not None)] = asked

    def _names(self) -> set[str]:
        """The names of requests that run or wait."""
        return {asked.request_id for asked in self._asked.values()} | {one[0] for one in self._waiting}


class Line(NamedTuple):
    """Where a task waits for what becomes of its request."""

    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[Any]

    def __hash__(self) -> int:
        return id(self.answers)


class AsyncLLMEngine:
    """An LLM whose requests come from the tasks of event loops, and run together. One thread calls the LLM.

    model_config: the model's settings, by vLLM's names
    """

    def __init__(self, make: Callable[[], LLM]) -> None:
        """make: makes the LLM. Raises what it raises."""
        self._lines: dict[str, Line] = {}  # of requests that somebody waits for
        self._held: set[str] = set()  # of these, those for whose adapters there was no room
        self._num_ended = 0  # requests
        self._thread = LLMThread(make, _tell)
        try:
            self._llm = self._call(lambda llm: llm)
        except BaseException:
            self._thread.close()
            raise
        self.model_config = ModelConfig(self._llm.config)

    @classmethod
    def from_engine_args(cls, engine_args: Options, **options: Any) -> AsyncLLMEngine:
        """Make an engine with the options of an EngineArgs; options: those of vLLM's servers, not used."""
        return cls(lambda: LLM.from_engine_args(engine_args))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any = None, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; yields outputs as samples have something new, as their output_kind says.

        The last one is finished. Who leaves the loop aborts the request.

        prompt, sampling_params: as for LLM.generate, for one prompt
        request_id: a name for `abort`, which no running request has
        lora_request: the LoRARequest of an adapter, which the LLM loads first; None: the model alone
        more: of no effect here

        Raises ValueError for an argument that cannot work, and RuntimeError if the engine has dropped the request.
        """
        if request_id in self._lines:
            raise ValueError(f"request_id={short(request_id)}: a request of this name runs: must be another name")
        line = self._lines[request_id] = Line(asyncio.get_running_loop(), asyncio.Queue())
        known: list[Asked] = []

        def prepare(llm: Any) -> ComingRequest:
            coming, asked = ask(llm, request_id, prompt, sampling_params, lora_request)
            known.append(asked)
            self._held.discard(request_id)
            return coming

        def submit() -> None:
            streams = getattr(sampling_params, "output_kind", None) is not RequestOutputKind.FINAL_ONLY
            max_tokens = getattr(sampling_params, "max_tokens", None)
            self._thread.submit(line, prepare, max_tokens, streams, at_once=lora_request is not None)

        is_finished, num_ended = False, self._num_ended
        try:
            submit()
            while not is_finished:
                answer = await line.answers.get()
                makes_room = len(self._held | {request_id}) < len(self._lines) or self._num_ended > num_ended
                if isinstance(answer, NoRoomError) and makes_room:  # who runs, or has ended since
                    self._held.add(request_id)
                    await asyncio.sleep(SOON)
                    num_ended = self._num_ended
                    submit()
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                (asked,) = known
                output = asked.take(answer)
                is_finished = asked.is_finished
                yield output
        finally:
            del self._lines[request_id]
            self._num_ended += 1
            self._held.discard(request_id)
            if not is_finished:
                self._thread.abort(line)

    async def abort(self, request_id: str) -> None:
        """End a request now: its output has the tokens so far, and finish_reason "abort"."""
        if (line := self._lines.get(request_id)) is not None:
            self._thread.finish(line)

    async def get_tokenizer(self, lora_request: Any = None) -> PreTrainedTokenizerBase:
        """Return the tokenizer of transformers. Raises ValueError if there is none."""
        return tokenizer_of(self._llm)

    async def get_model_config(self) -> ModelConfig:
        """Return model_config."""
        return self.model_config

    def shutdown(self) -> None:
        """Close the LLM. A second call does nothing."""
        self._thread.close()

    def _call(self, function: Callable[[Any], T]) -> T:
        """Let the LLM's thread call a function; returns what it returns."""
        answer: Future[T] = Future()
        self._thread.call(answer, function)
        return answer.result()


def _tell(told: Told) -> None:
    """Hand out what the LLM's thread tells."""
    for key, answer in told:
        if isinstance(key, Line):
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                key.loop.call_soon_threadsafe(key.answers.put_nowait, answer)
        elif isinstance(answer, BaseException):
            key.set_exception(answer)
        else:
            key.set_result(answer)
