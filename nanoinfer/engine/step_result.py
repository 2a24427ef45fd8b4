"""A step on its way: launched, then read back."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.scheduler import Step
from nanoinfer.engine.sequence import Sequence
from nanoinfer.runner.steps.pending_tokens import PendingTokens


@dataclass
class InFlight:
    """A launched step whose tokens have not been read back."""

    step: Step
    seqs: list[Sequence]  # in the order of the tokens
    guided: list[Sequence]  # the guided ones among seqs
    tokens: PendingTokens | None  # None until guided rows have their masks


@dataclass
class StepResult:
    """The step that one call of LLMEngine.step read back; without one, all is empty or 0.

    num_running and blocks_used still count the sequences that ended with the step. With several replicas, finished and
    advanced stay empty here: the sequences are in the replicas' processes.
    """

    finished: list[Sequence]
    advanced: list[Sequence] = field(default_factory=list)  # those that the step computed a token for
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0  # a token after an end-of-sequence token does not count
    ready_at: float | None = None  # when the device was done with the step, on time.perf_counter's clock
    num_running: int = 0  # sequences whose prompts are scheduled whole and whose last token is not read back yet
    blocks_used: float = 0.0  # the share of the KV cache's blocks that sequences hold
    replica: int = 0  # which of data_parallel_size made it
