"""What an LLM counts, and what it tells of one request, as vLLM's programs read it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nanoinfer.engine.results.stats import Stats
from nanoinfer.requests.outputs import Timings


@dataclass
class Metric:
    """Something that an LLM measures. labels: which of several of a name it is"""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int = 0


@dataclass
class Gauge(Metric):
    """A number that grows and shrinks."""

    value: float = 0.0


@dataclass
class Vector(Metric):
    """Several numbers that only grow."""

    values: list[int] = field(default_factory=list)


@dataclass
class Histogram(Metric):
    """How often a number was at most so large. buckets: by the largest number, as a string"""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


COUNTERS = {
    "vllm:prompt_tokens": "num_prompt_tokens",
    "vllm:generation_tokens": "num_generated_tokens",
    "vllm:num_preemptions": "num_preemptions",
    "vllm:prefix_cache_queries": "num_prompt_tokens",
    "vllm:prefix_cache_hits": "num_cached_tokens",
    "vllm:spec_decode_num_draft_tokens": "num_proposed_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
"""Maps vLLM's counters to Stats."""


def metrics_of(stats: Stats) -> list[Metric]:
    """Return an LLM's counters."""
    counters: list[Metric] = [Counter(name, value=getattr(stats, own)) for name, own in COUNTERS.items()]
    ended = stats.finish_reasons.items()
    return counters + [Counter("vllm:request_success", {"finished_reason": reason}, count) for reason, count in ended]


@dataclass
class RequestStateStats:
    """When things happened to a request.

    arrival_time: on time.time's clock, in seconds; the others on time.perf_counter's; 0.0: it did not happen
    first_token_latency: seconds from its arrival to its first token
    """

    num_generation_tokens: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float


def times_of(timings: Timings, num_generation_tokens: int) -> RequestStateStats:
    """Return a request's timings by vLLM's names."""
    return RequestStateStats(
        num_generation_tokens,
        time.time() - (time.perf_counter() - timings.queued),
        timings.queued,
        timings.started or 0.0,
        timings.first_token or 0.0,
        timings.finished,
        timings.first_token_seconds or 0.0,
    )
