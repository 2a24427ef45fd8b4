"""start: whoever computes for an LLM, as the options ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoinfer.config import Config
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.replicas.replicas import Replicas
from nanoinfer.replicas.requests import ReplicaRequests
from nanoinfer.requests.interface import AnyEngine, SomeRequests
from nanoinfer.requests.request import Requests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def start(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> tuple[AnyEngine, SomeRequests]:
    """Start an engine in this process, or replicas in others; returns it, and its requests."""
    if config.data_parallel_size > 1:
        replicas = Replicas(config)
        return replicas, ReplicaRequests(replicas, config, tokenizer)
    engine = LLMEngine(config)
    return engine, Requests(engine, tokenizer)
