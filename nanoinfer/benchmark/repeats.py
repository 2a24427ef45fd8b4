"""The timed runs of bench.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from itertools import cycle

from nanoinfer.benchmark.output.status_line import StatusLine
from nanoinfer.benchmark.workloads import Workload
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams


@dataclass
class Repeat:
    """One timed run: when it began on time.perf_counter's clock, how long it took, and the engine's steps.

    output_lens: of the samples, those of a prompt one after another
    """

    start: float
    seconds: float
    steps: list[StepResult]
    output_lens: list[int]

    @property
    def tokens_per_second(self) -> float:
        """The tokens that it generated, by its time."""
        return sum(self.output_lens) / self.seconds

    def sum(self, name: str) -> int:
        """Add up a figure of the steps."""
        return sum(getattr(step, name) for step in self.steps)

    @property
    def decode_steps(self) -> int:
        """How many steps computed no prompt; with several replicas, those of all."""
        return sum(not step.num_prefill_tokens for step in self.steps)


def count_steps(repeats: list[Repeat], tokens_in: int) -> dict[str, float]:
    """Return the repeats' medians of decode steps, preemptions and tokens computed again; tokens_in: of a repeat."""
    recomputed = statistics.median_low(repeat.sum("num_recomputed_tokens") for repeat in repeats)
    return {
        "decode_steps": statistics.median_low(repeat.decode_steps for repeat in repeats),
        "preemptions": statistics.median_low(repeat.sum("num_preemptions") for repeat in repeats),
        "recomputed_tokens": recomputed,
        "recomputed_share": recomputed / tokens_in,
    }


class Watch:
    """Keeps the steps of a repeat, and tells now and then how many tokens they computed.

    tokens_out: of the whole repeat
    """

    def __init__(self, tokens_out: int, status: StatusLine) -> None:
        self.steps: list[StepResult] = []
        self._tokens_out = tokens_out
        self._status = status
        self._prefill = self._generated = 0

    def add(self, step: StepResult) -> None:
        """Keep a step."""
        self.steps.append(step)
        self._prefill += step.num_prefill_tokens
        self._generated += step.num_generated_tokens
        if self._status.is_due:
            generated = f"{self._generated:,} of {self._tokens_out:,}"
            self._status.tell(f"{self._prefill:,} tokens of prefill, {generated} generated")


def time_repeat(
    llm: LLM,
    work: Workload,
    index: int,
    sampling: SamplingParams,
    status: StatusLine,
    adapters: ListLike[str] = (),
) -> Repeat:
    """Generate, or embed, all that the workload asks for, with repeat `index`'s tokens; `status` shows how far it is.

    adapters: the requests name these in turn
    """
    prompts = work.repeat(index, llm.config.description.vocab_size)
    watch = Watch(work.tokens_out, status)
    llm.engine.on_step = watch.add
    if not work.tokens_out:
        start = time.perf_counter()
        read = llm.embed(prompts, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(output.embedding is not None for output in read)
        return Repeat(start, seconds, watch.steps, work.output_lens)
    named = cycle(adapters or [None])
    params = [
        replace(sampling, max_tokens=out, n=work.samples, adapter=adapter, stop_token_ids=work.stop_ids or None)
        for out, adapter in zip(work.output_lens, named, strict=False)
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lens = [len(sample.token_ids) for output in outputs for sample in output.samples]
    most = [out for out in work.output_lens for _ in range(work.samples)]
    assert lens == most or (work.stop_ids and max(lens) <= max(most))
    return Repeat(start, seconds, watch.steps, lens)
