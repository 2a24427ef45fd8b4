"""Start: makes whoever computes for an LLM, as the options ask for it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from nanoinfer.config import Config
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.ranks.workers import Workers
from nanoinfer.process import first_launch
from nanoinfer.process.interrupts import delayed_interrupt
from nanoinfer.replicas.replicas import Replicas
from nanoinfer.replicas.requests import ReplicaRequests
from nanoinfer.requests.interface import AnyEngine, SomeRequests
from nanoinfer.requests.request import Requests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Start:
    """Starts other processes early: they import what they need while this one reads the checkpoint.

    It is a context. An error in its block ends the processes.
    """

    def __init__(self) -> None:
        self._others: Replicas | Workers | None = None

    def __enter__(self) -> Start:
        return self

    def spawn(self, config: Config) -> None:
        """Start the processes that the options ask for. Let this process's GPU begin, if it computes."""
        with delayed_interrupt():
            if config.data_parallel_size > 1:
                self._others = Replicas(config)
            elif config.tensor_parallel_size > 1 and config.starts_ranks:
                self._others = Workers(config)
        if config.device == "cuda" and config.data_parallel_size == 1 and config.starts_ranks:
            # Now, for the driver reads the environment, in which the other processes start.
            first_launch.prepare(config.device_of(0).index)

    def begin(self, config: Config) -> None:
        """Let replicas start their engines, which takes them longer than this process needs for the tokenizer."""
        if isinstance(self._others, Replicas):
            self._others.begin(config)

    def finish(self, config: Config, tokenizer: PreTrainedTokenizerBase | None) -> tuple[AnyEngine, SomeRequests]:
        """Start an engine in this process, or wait for those of the replicas; returns it, and its requests."""
        if isinstance(self._others, Replicas):
            self._others.wait_until_ready()
            return self._others, ReplicaRequests(self._others, config, tokenizer)
        engine = LLMEngine(config, self._others)
        return engine, Requests(engine, tokenizer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._others is not None:
            with delayed_interrupt():
                self._others.close()
