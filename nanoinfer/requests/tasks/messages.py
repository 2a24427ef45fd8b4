"""Messages of requests: tasks that engines compute, and what becomes of them. They may cross to another process."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from nanoinfer.engine.client import InFlightPolicy
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.grammar.grammar import Grammar
from nanoinfer.requests.prompts.stages import PackedTokens
from nanoinfer.requests.tasks.results import SampleResult
from nanoinfer.sampling_params import SamplingParams


class Task(NamedTuple):
    """Samples of a request that are to be computed.

    number: the request's
    prompt: its tokens, with images if there are some
    seed: the request's, from which each sample's is made
    samples: their numbers among the request's
    streams: each step's tokens are told; otherwise a sample has one result, when it ends
    grammar: that of params.structured_outputs; another process compiles its own
    """

    number: int
    prompt: PackedTokens
    params: SamplingParams
    seed: int
    samples: range
    streams: bool
    grammar: Grammar | None


class TaskProgress(NamedTuple):
    """What has become of tasks.

    steps: the figures of steps that have been read back
    again: numbers of requests, and of their samples that stream, whose results come again from the beginning
    results: request numbers, and what their samples have new
    """

    steps: list[StepResult]
    again: list[tuple[int, int]]
    results: list[tuple[int, SampleResult]]


class TaskRunner(Protocol):
    """Runs tasks: by one engine in this process (Tasks), or by replicas in others (SharedTasks)."""

    def queue(self, tasks: list[Task], longest_first: bool) -> None:
        """Queue tasks; longest_first: those begin sooner that may get more tokens, if some must wait for others."""
        ...

    def step(self) -> None:
        """Go on until a step has ended, or several."""
        ...

    def take_progress(self) -> TaskProgress:
        """Return what has become of tasks since the last call."""
        ...

    def abort(self, number: int) -> None:
        """End the tasks of a request, at once or by a later step."""
        ...

    def drop(self) -> None:
        """Forget all tasks."""
        ...

    def prepare_for_weights(self, in_flight: InFlightPolicy, adapter: str | None) -> None:
        """Prepare tasks for new weights: those of the model, or those of an adapter, which only its tasks feel."""
        ...
