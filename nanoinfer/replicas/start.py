"""Start: makes the engine client of an LLM, as the options ask for it, and says in a line what has started."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from nanoinfer.config import Config
from nanoinfer.engine.client import EngineClient
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.ranks.workers import Workers
from nanoinfer.hub import name_of
from nanoinfer.process import first_launch
from nanoinfer.process.compile_once import compile_once
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.replicas.replicas import Replicas
from nanoinfer.replicas.tasks import SharedTasks
from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.requests.requests import Requests
from nanoinfer.requests.tasks.messages import TaskRunner
from nanoinfer.requests.tasks.tasks import Tasks
from nanoinfer.runner.memory.plan import MemoryPlan
from nanoinfer.runner.start.voice import Voice, name_hardware

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Start:
    """Starts other processes early: they import what they need while this one reads the checkpoint.

    It is a context. An error in its block ends the processes.
    """

    def __init__(self) -> None:
        self._others: Replicas | Workers | None = None
        self._voice: Voice | None = None

    def __enter__(self) -> Start:
        return self

    def spawn(self, config: Config) -> None:
        """Start the processes that the options ask for. Let this process's GPU begin, if it computes."""
        self._voice = Voice(config)
        with delayed_interrupt():
            if config.has_replicas:
                self._others = Replicas(config)
            elif config.tensor_parallel_size > 1 and config.starts_ranks:
                self._others = Workers(config)
        if config.device == "cuda" and not config.has_replicas and config.starts_ranks:
            # Now, for the driver reads the environment, in which the other processes start.
            first_launch.prepare(config.device_of(0).index)
            if self._others is not None:
                compile_once()  # as they do

    def begin(self, config: Config) -> None:
        """Let replicas start their engines, which takes them longer than this process needs for the tokenizer."""
        if isinstance(self._others, Replicas):
            self._others.begin(config)

    def finish(
        self, config: Config, tokenizer: PreTrainedTokenizerBase | None, reasoning: Reasoning | None
    ) -> tuple[EngineClient, Requests, str]:
        """Start an engine in this process, or wait for those of the replicas, and introduce it.

        Returns the engine, its requests, and the line that introduces it.
        """
        engine: EngineClient
        tasks: TaskRunner
        if isinstance(self._others, Replicas):
            engine = replicas = self._others
            replicas.wait_until_ready()
            line = _introduce(config, replicas.memory, replicas.hardware, Voice(config))
            tasks = SharedTasks(replicas, config)
        else:
            engine = one = LLMEngine(config, self._others)
            runner = one.ranks.runner
            hardware = name_hardware(runner.device, runner.threads)
            line = _introduce(config, one.memory, hardware, Voice(config, runner.tp.rank))
            tasks = Tasks(one, tokenizer)
        return engine, Requests(tasks, engine.counters, config.seed, tokenizer, reasoning), line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._others is not None:
            with delayed_interrupt():
                self._others.close()
            assert self._voice is not None
            self._voice.clear()


def _introduce(config: Config, memory: MemoryPlan, hardware: str, voice: Voice) -> str:
    """Tell a line that says what has started, and in how many seconds; returns the line."""
    line = f"{_describe(config, memory, hardware)}, ready in {voice.seconds:.1f} s"
    voice.tell(line)
    return line


def _numbers(config: Config) -> str:
    """Say in which formats the weights are."""
    formats = [format.name.lower() for format in config.description.formats.quantized]
    return f"{config.dtype} with matrices in {' and '.join(formats)}" if formats else config.dtype


def _cache(config: Config, memory: MemoryPlan) -> str:
    kept, each = config.kv_cache_dtype, " each" if config.data_parallel_size > 1 else ""
    return f"KV cache of {memory.tokens:,} tokens{'' if kept == 'auto' else f' in {kept}'}{each}"


def _drafts(config: Config) -> str:
    if config.draft is None:
        return ""
    return "guesses by its own heads" if config.draft.are_heads else f"draft by {name_of(config.draft.folder)}"


def _describe(config: Config, memory: MemoryPlan, hardware: str) -> str:
    """Say what has started: model, device, formats, images, processes, cache. hardware: what each rank computes with"""
    replicas, ranks = config.data_parallel_size, config.tensor_parallel_size
    processes = [f"{count} {name}" for count, name in ((replicas, "replicas"), (ranks, "ranks")) if count > 1]
    parts = [
        f"{name_of(config.model)} on {hardware}",
        _numbers(config),
        config.attention_backend,
        ("hears audio" if config.description.hears else "sees images") if config.sees else "",
        _drafts(config),
        " of ".join(processes),
        "" if config.description.is_encoder else _cache(config, memory),
    ]
    return ", ".join(part for part in parts if part)
