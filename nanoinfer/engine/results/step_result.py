"""A step on its way: launched, then read back."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.speculation.draws import Draws
from nanoinfer.engine.step import DecodeStep, PrefillStep, Step
from nanoinfer.runner.memory.transfers import Transfers
from nanoinfer.runner.steps.pending_tokens import PendingTokens


@dataclass
class InFlight:
    """A launched step whose tokens have not been read back."""

    step: Step
    seqs: list[Sequence]  # in the order of the tokens
    guided: list[Sequence]  # the guided ones among seqs
    tokens: PendingTokens | None  # None until guided rows have their masks
    guesses: PendingTokens | None  # those of all seqs; None: there are none, or no row is guided
    result: StepResult  # with the figures of the plan
    began: float | None  # on time.perf_counter's clock; None: when the device was done with the step before
    busy: float = 0.0  # seconds that the host was, if some row is guided

    def note_load(self, scheduler: Scheduler) -> None:
        """Note what runs and waits, and how much of the KV cache is held, before the step's tokens are read back."""
        self.result.num_running, self.result.num_waiting = len(scheduler.running), len(scheduler.waiting)
        self.result.blocks_used = scheduler.block_manager.share_used

    def note_times(self, previous: float) -> float:
        """Note when the device was done with the step, and return it; previous: when it was with the step before."""
        assert self.tokens is not None
        ready_at = self.result.ready_at = self.tokens.ready_at
        self.result.seconds = ready_at - (self.began or previous)
        if isinstance(self.step, PrefillStep):
            for seq in self.seqs:
                if not seq.is_finished:
                    seq.first_token_at = seq.first_token_at or ready_at
        return ready_at

    def note_ends(self, finished: list[Sequence], draws: Draws, num_dropped: int) -> None:
        """Note the sequences that ended with the step, and how many of the drawn tokens all got."""
        assert self.tokens is not None
        result = self.result
        result.finished = finished
        for seq in finished:
            seq.finished_at = self.tokens.ready_at
        result.advanced = self.seqs
        result.num_generated_tokens = draws.num_tokens - num_dropped
        if isinstance(self.step, DecodeStep):
            result.num_decode_tokens = result.num_generated_tokens
            if self.step.guesses:
                result.num_proposed_tokens = draws.num_proposed
                result.num_accepted_tokens = result.num_generated_tokens - draws.num_first


@dataclass
class StepResult:
    """The step that one call of LLMEngine.step read back; without one, all is empty or 0.

    num_running and blocks_used still count the sequences that ended with the step. With several replicas, finished and
    advanced stay empty here: the sequences are in the replicas' processes. num_waiting counts those that the replica
    holds then, not the LLM's queue.
    """

    finished: list[Sequence] = field(default_factory=list)
    advanced: list[Sequence] = field(default_factory=list)  # those that the step computed a token for
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0  # a token after an end-of-sequence token does not count
    ready_at: float | None = None  # when the device was done with the step, on time.perf_counter's clock
    num_running: int = 0  # sequences whose prompts are scheduled whole and whose last token is not read back yet
    num_waiting: int = 0  # sequences that wait for a row or for blocks, or whose prompts are scheduled in part
    blocks_used: float = 0.0  # the share of the KV cache's blocks that sequences hold
    seconds: float = 0.0  # since the step before was done; since its launch, if no step was in flight then
    num_generated_tokens: int = 0  # that sequences got
    num_prompt_tokens: int = 0  # of the prompts that began with the step, each once for all samples
    num_cached_tokens: int = 0  # those of them that came from the KV cache
    num_recomputed_tokens: int = 0  # that had been computed before their sequences lost their blocks
    num_preemptions: int = 0  # just before the step
    num_saved_blocks: int = 0  # copied to host memory beside the step; states count as the blocks that they fill there
    num_restored_blocks: int = 0  # copied back
    num_proposed_tokens: int = 0  # guesses that were verified
    num_accepted_tokens: int = 0  # tokens among num_decode_tokens that had been guessed
    replica: int = 0  # which of data_parallel_size made it

    def note_transfers(self, transfers: Transfers | None) -> None:
        """Note what is copied beside the step."""
        if transfers is not None:
            self.num_saved_blocks, self.num_restored_blocks = transfers.num_saved, transfers.num_restored


def planned(step: Step, now: float) -> StepResult:
    """Return the figures of a step that is to be launched `now`, and note that in the sequences that begin with it."""
    if not isinstance(step, PrefillStep):
        return StepResult(num_decode_tokens=step.num_tokens)
    result = StepResult(num_prefill_tokens=step.num_tokens)
    for chunk in step.chunks:
        if not chunk.seq.is_fresh:  # the newest token is the only one that is computed for the first time
            result.num_recomputed_tokens += min(chunk.end, len(chunk.seq) - 1) - chunk.start
    for seq in [*(chunk.seq for chunk in step.chunks), *(fork.seq for fork in step.forks)]:
        if seq.is_fresh and not seq.started_at:
            seq.started_at = now
            if seq.sample_index == 0:
                result.num_prompt_tokens += seq.num_prompt_tokens
                result.num_cached_tokens += seq.num_cached_tokens
    return result
