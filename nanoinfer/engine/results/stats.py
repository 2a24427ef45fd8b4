"""Stats: what an engine, or several replicas, have done."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.engine.sequence import FinishReason


@dataclass(frozen=True)
class Stats:
    """What an LLM has done since it started, or since llm.reset_stats(). print(llm.stats()) shows it in a few lines.

    seconds: the time that has passed since then
    num_requests: requests that have ended, however they did; each prompt of a beam search is one
    finish_reasons: how many samples have ended for each finish_reason. A sample that Ctrl-C or an error of the engine
        dropped counts as "abort". Beams do not count
    num_prompt_tokens: tokens of the prompts that have begun; a prompt counts once for all its samples
    num_cached_tokens: those of num_prompt_tokens that came from the KV cache
    num_generated_tokens: tokens that samples got; in a beam search, one for each beam and step
    num_preemptions: how often a sequence lost its blocks of the KV cache to others
    num_recomputed_tokens: tokens that were computed again, after a preemption or for new weights; those of prompts
        without a first token do not count
    num_saved_blocks: blocks of the KV cache whose content was copied to host memory; states, and snapshots of them,
        count as the blocks that they fill there
    num_restored_blocks: blocks whose content was copied back, so that nobody computed it again
    num_prefill_steps: steps that computed prompts, parts of them, or tokens again
    num_prefill_tokens: tokens that the model computed in these steps
    prefill_seconds: the time of these steps; with several replicas, the sum over all
    prefill_tokens_per_second: num_prefill_tokens by that time; with several replicas, the sum of their rates
    num_decode_steps: steps that computed one more token for each running sequence, or several that were guessed
    num_decode_tokens: tokens that samples got in these steps
    decode_seconds: the time of these steps; with several replicas, the sum over all
    decode_tokens_per_second: num_decode_tokens by that time; with several replicas, the sum of their rates
    num_proposed_tokens: guesses that these steps verified, where the LLM has speculation
    num_accepted_tokens: those of num_decode_tokens that had been guessed

    With several replicas, what another computes anew after one has died counts again: prompts, tokens and steps.

    A step's time begins when the step before ends, so that it holds what the host does in between. Time without
    requests counts for no step.

    Stats has these attributes too:

    cached_share: num_cached_tokens by num_prompt_tokens, from 0 to 1
    rows_per_decode_step: sequences that got tokens in a decode step, on average
    tokens_per_decode_row: tokens that each of these got; 1.0 without speculation
    """

    seconds: float
    num_requests: int
    finish_reasons: dict[FinishReason, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_saved_blocks: int
    num_restored_blocks: int
    num_prefill_steps: int
    num_prefill_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    num_decode_steps: int
    num_decode_tokens: int
    decode_seconds: float
    decode_tokens_per_second: float
    num_proposed_tokens: int
    num_accepted_tokens: int

    @property
    def cached_share(self) -> float:
        """num_cached_tokens by num_prompt_tokens; 0.0 without prompts."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def rows_per_decode_step(self) -> float:
        """The sequences that got tokens in a decode step, on average; 0.0 without steps."""
        return self._num_decode_rows / max(self.num_decode_steps, 1)

    @property
    def tokens_per_decode_row(self) -> float:
        """The tokens that a sequence got in a decode step, on average; 0.0 without steps."""
        return self.num_decode_tokens / max(self._num_decode_rows, 1)

    @property
    def _num_decode_rows(self) -> int:
        return self.num_decode_tokens - self.num_accepted_tokens

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.finish_reasons.items())
        return "\n".join(
            [
                f"requests: {self.num_requests:,} in {self.seconds:,.1f} s{f'; samples: {reasons}' * bool(reasons)}",
                f"prompts: {self.num_prompt_tokens:,} tokens, {self.cached_share:.0%} from the KV cache",
                f"outputs: {self.num_generated_tokens:,} tokens",
                f"prefill: {self.num_prefill_tokens:,} tokens in {self.prefill_seconds:,.2f} s,"
                f" {self.prefill_tokens_per_second:,.0f} tok/s; steps: {self.num_prefill_steps:,}",
                f"decode: {self.num_decode_tokens:,} tokens in {self.decode_seconds:,.2f} s,"
                f" {self.decode_tokens_per_second:,.0f} tok/s; steps: {self.num_decode_steps:,},"
                f" with {self.rows_per_decode_step:,.1f} rows each",
                f"preemptions: {self.num_preemptions:,}; tokens computed again: {self.num_recomputed_tokens:,}",
                *self._guesses(),
                *self._host_memory(),
            ]
        )

    def _guesses(self) -> list[str]:
        if not self.num_proposed_tokens:
            return []
        return [
            f"guesses: {self.num_accepted_tokens:,} of {self.num_proposed_tokens:,} held;"
            f" {self.tokens_per_decode_row:,.2f} tokens a row and step"
        ]

    def _host_memory(self) -> list[str]:
        if not (self.num_saved_blocks or self.num_restored_blocks):
            return []
        return [f"blocks in host memory: {self.num_saved_blocks:,} saved, {self.num_restored_blocks:,} restored"]


class Pace:
    """Steps of one kind on one replica."""

    __slots__ = ("seconds", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.seconds = 0.0


class Paces(defaultdict[int, Pace]):
    """Steps of one kind, by replica."""

    def __init__(self) -> None:
        super().__init__(Pace)

    @property
    def tokens_per_second(self) -> float:
        """The sum of the replicas' rates, each over the time of its own steps."""
        return sum(pace.tokens / max(pace.seconds, 1e-9) for pace in list(self.values()))


class Rates:
    """Tokens per second of prefill and of decode, each over the time that its steps took."""

    def __init__(self) -> None:
        self.prefill, self.decode = Paces(), Paces()

    def add(self, result: StepResult) -> None:
        """Count one step; a StepResult without a step counts for nothing."""
        if result.ready_at is not None:
            pace = (self.prefill if result.num_prefill_tokens else self.decode)[result.replica]
            pace.steps += 1
            pace.tokens += result.num_prefill_tokens + result.num_decode_tokens
            pace.seconds += result.seconds

    def __str__(self) -> str:
        prefill, decode = self.prefill.tokens_per_second, self.decode.tokens_per_second
        return f"decode {decode:,.0f} tok/s, prefill {prefill:,.0f} tok/s"  # a narrow line shows the first alone


class Counters:
    """Counts what an engine, or several replicas, do."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._since = time.perf_counter()
        self._rates = Rates()
        self._reasons: Counter[FinishReason] = Counter()
        self._num_requests = 0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_generated_tokens = 0
        self._num_preemptions = self._num_recomputed_tokens = 0
        self._num_saved_blocks = self._num_restored_blocks = 0
        self._num_proposed_tokens = self._num_accepted_tokens = 0

    def covers(self, result: StepResult) -> bool:
        """Whether a step ended after the last reset; a replica may tell of one much later."""
        return result.ready_at is not None and result.ready_at >= self._since

    def note_step(self, result: StepResult, on_step: Callable[[StepResult], None] | None = None) -> None:
        """Count a step, then call the user's on_step with it."""
        self._rates.add(result)
        self._num_prompt_tokens += result.num_prompt_tokens
        self._num_cached_tokens += result.num_cached_tokens
        self._num_generated_tokens += result.num_generated_tokens
        self._num_preemptions += result.num_preemptions
        self._num_recomputed_tokens += result.num_recomputed_tokens
        self._num_saved_blocks += result.num_saved_blocks
        self._num_restored_blocks += result.num_restored_blocks
        self._num_proposed_tokens += result.num_proposed_tokens
        self._num_accepted_tokens += result.num_accepted_tokens
        if on_step is not None:
            on_step(result)

    def end_sample(self, reason: FinishReason, is_last: bool) -> None:
        """Count a sample that has ended for this reason, and its request if it is the request's last."""
        self._reasons[reason] += 1
        self._num_requests += is_last

    def end_searches(self, count: int) -> None:
        """Count beam searches that have ended."""
        self._num_requests += count

    def drop(self, nums_samples: list[int]) -> None:
        """Count requests that were dropped; nums_samples: how many samples of each had not ended."""
        self._reasons["abort"] += sum(nums_samples)
        self._num_requests += len(nums_samples)

    def stats(self) -> Stats:
        """Return what has been counted."""
        prefill, decode = list(self._rates.prefill.values()), list(self._rates.decode.values())
        return Stats(
            seconds=time.perf_counter() - self._since,
            num_requests=self._num_requests,
            finish_reasons={reason: count for reason, count in sorted(self._reasons.copy().items()) if count > 0},
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_saved_blocks=self._num_saved_blocks,
            num_restored_blocks=self._num_restored_blocks,
            num_prefill_steps=sum(pace.steps for pace in prefill),
            num_prefill_tokens=sum(pace.tokens for pace in prefill),
            prefill_seconds=sum(pace.seconds for pace in prefill),
            prefill_tokens_per_second=self._rates.prefill.tokens_per_second,
            num_decode_steps=sum(pace.steps for pace in decode),
            num_decode_tokens=sum(pace.tokens for pace in decode),
            decode_seconds=sum(pace.seconds for pace in decode),
            decode_tokens_per_second=self._rates.decode.tokens_per_second,
            num_proposed_tokens=self._num_proposed_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )
