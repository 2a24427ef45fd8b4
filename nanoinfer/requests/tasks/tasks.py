"""Tasks: those that one engine computes, and the samples that have not ended."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from nanoinfer.engine.client import InFlightPolicy
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.engine.sequence import Sequence
from nanoinfer.requests.tasks.messages import Task, TaskProgress
from nanoinfer.requests.tasks.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tasks:
    """The tasks of one engine."""

    def __init__(self, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._samples: dict[Sequence, Sample] = {}  # that have not ended
        self._watched: dict[Sequence, Sample] = {}  # those of them to update after each of their steps
        self._by_request: defaultdict[int, list[Sample]] = defaultdict(list)  # the same samples, by request number
        self._forget_progress()

    def _forget_progress(self) -> None:
        self._steps: list[StepResult] = []
        self._changed: dict[Sample, None] = {}  # those that have something new to tell

    @property
    def are_left(self) -> bool:
        """Whether samples have not ended."""
        return bool(self._samples)

    @property
    def has_progress(self) -> bool:
        """Whether `take_progress` has more to tell than figures of steps."""
        return bool(self._changed)

    def queue(self, tasks: list[Task], longest_first: bool) -> None:
        """Queue tasks; longest_first: those begin sooner that may get more tokens, if some must wait for others."""
        for task in tasks:
            self.queue_one(task)
        if longest_first:
            self._engine.scheduler.put_longest_first()

    def queue_one(self, task: Task) -> list[Sequence]:
        """Queue a task; returns the sequences of its samples."""
        seqs = self._engine.add_request(task.prompt, task.params, task.grammar, task.seed, task.samples)
        samples = self._by_request[task.number]
        for seq in seqs:
            sample = self._samples[seq] = Sample(task.number, seq, self._engine, self._tokenizer, task.streams)
            samples.append(sample)
            if sample.is_watched:
                self._watched[seq] = sample
        return seqs

    def step(self) -> None:
        """Run one step of the engine."""
        self._update(self._engine.step())

    def take_progress(self) -> TaskProgress:
        """Return what has become of tasks since the last call."""
        progress = TaskProgress(self._steps, [], [(sample.number, sample.result()) for sample in self._changed])
        self._forget_progress()
        return progress

    def _update(self, result: StepResult) -> None:
        """Update the texts of the samples that a step advanced, and end those that ended."""
        self._steps.append(result)
        ended = result.finished
        if self._watched:
            watched = [self._watched[seq] for seq in result.advanced if seq in self._watched]
            running = [sample for sample in watched if not sample.seq.is_finished]
            for sample in watched:
                sample.update()
            self._changed.update((sample, None) for sample in watched if sample.streams)
            ended = ended + [sample.seq for sample in running if sample.seq.is_finished]
        self._end(ended)

    def abort(self, number: int) -> None:
        """End the tasks of a request."""
        self._abort(list(self._by_request.get(number, ())))

    def _abort(self, samples: list[Sample]) -> None:
        samples = [sample for sample in samples if not sample.seq.is_finished]  # a step may be about to end some
        for sample in samples:
            self._engine.finish(sample.seq, "abort")
            sample.update()
        self._end([sample.seq for sample in samples])

    def _end(self, seqs: list[Sequence]) -> None:
        """Note samples that have ended."""
        for seq in seqs:
            sample = self._samples.pop(seq)
            self._watched.pop(seq, None)
            samples = self._by_request[sample.number]
            samples.remove(sample)
            if not samples:
                del self._by_request[sample.number]
            self._changed[sample] = None
        if not self._samples:
            self._steps += self._engine.drain()  # a stop string ends a sequence whose next token is still in flight

    def drop(self) -> None:
        """Forget all tasks."""
        self._engine.abort_all()
        self._samples.clear()
        self._watched.clear()
        self._by_request.clear()
        self._forget_progress()

    def prepare_for_weights(self, in_flight: InFlightPolicy, adapter: str | None) -> None:
        """Prepare tasks for new weights: those of the model, or those of an adapter, which only its tasks feel."""
        if not self._affected(adapter):
            return  # the others need not wait for a step in flight
        for result in self._engine.drain():
            self._update(result)
        affected = self._affected(adapter)
        if in_flight == "recompute":
            self._engine.scheduler.restart({sample.seq for sample in affected})
        elif in_flight == "abort":
            self._abort(affected)

    def _affected(self, adapter: str | None) -> list[Sample]:
        """Return the samples that new weights change, or those of an adapter."""
        samples = self._samples.values()
        return [sample for sample in samples if adapter is None or sample.seq.params.adapter == adapter]
