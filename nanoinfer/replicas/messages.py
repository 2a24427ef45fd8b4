"""Messages: what a replica's process tells the LLM's, pickled: plain data, many requests at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

from nanoinfer.requests.tasks.messages import TaskProgress
from nanoinfer.runner.memory.plan import MemoryPlan


class StepFigures(NamedTuple):
    """The figures of a step, as StepResult has them, and in its order."""

    num_prefill_tokens: int
    num_decode_tokens: int
    ready_at: float
    num_running: int
    num_waiting: int
    blocks_used: float
    seconds: float
    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    num_saved_blocks: int
    num_restored_blocks: int
    num_proposed_tokens: int
    num_accepted_tokens: int


class Report(NamedTuple):
    """What a replica has done since its last report.

    round: that of the tasks; a report of an earlier round tells of requests that were dropped
    begun: so many more samples have begun, in the order of their tasks
    figures: of steps, of which `progress` has none until they have crossed
    """

    round: int
    begun: int
    figures: list[StepFigures]
    progress: TaskProgress


class Placed(NamedTuple):
    """A replica that Ray keeps has a place, and has connected."""


class Ready(NamedTuple):
    """A replica has started. hardware: what each of its ranks computes with"""

    memory: MemoryPlan
    hardware: str


class Reply(NamedTuple):
    """What a call of a replica's method returned or raised; call: its number."""

    call: int
    value: Any
    error: Exception | None


class Failed(NamedTuple):
    """A replica ends by an error. error: one that tells the user what to change, if it is such a one."""

    error: ValueError | None
    told: str


Message = Report | Placed | Ready | Reply | Failed
