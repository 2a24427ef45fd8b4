"""The timed runs of bench.py."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from nanoinfer.benchmark.status_line import StatusLine
from nanoinfer.benchmark.workloads import Workload
from nanoinfer.engine.step_result import StepResult
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams


@dataclass
class Repeat:
    """One timed run: when it began on time.perf_counter's clock, how long it took, and the engine's steps."""

    start: float
    seconds: float
    steps: list[StepResult]


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


def time_repeat(llm: LLM, work: Workload, index: int, sampling: SamplingParams, status: StatusLine) -> Repeat:
    """Generate all that the workload asks for, with the tokens of repeat `index`; `status` shows how far it is."""
    prompts = work.repeat(index, llm.config.description.vocab_size)
    params = [replace(sampling, max_tokens=out, n=work.samples) for out in work.output_lens]
    watch = Watch(work.tokens_out, status)
    llm.engine.on_step = watch.add
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lens = [len(sample.token_ids) for output in outputs for sample in output.samples]
    assert lens == [out for out in work.output_lens for _ in range(work.samples)]
    return Repeat(start, seconds, watch.steps)
