"""SharedTasks: the tasks of several replicas, which the LLM's process keeps and hands out."""

from __future__ import annotations

import time
from collections.abc import Hashable
from itertools import groupby
from operator import itemgetter

from nanoinfer.config import Config
from nanoinfer.engine.client import InFlightPolicy
from nanoinfer.engine.sequence import FinishReason
from nanoinfer.logprob import CandidatesLog
from nanoinfer.replicas.messages import Report
from nanoinfer.replicas.replicas import Change, Replicas
from nanoinfer.replicas.sharing import Sharing, Unit
from nanoinfer.requests.prompts.stages import beginning_of
from nanoinfer.requests.tasks.messages import Task, TaskProgress
from nanoinfer.requests.tasks.results import SampleResult

UNBEGUN = 1 / 4  # of its rows, a replica has so many samples that it has not begun: no step waits for the queue
GIVEN_UP = "two replicas died while they computed this sample"


class SharedTasks:
    """The tasks of several replicas."""

    def __init__(self, replicas: Replicas, config: Config) -> None:
        self._replicas = replicas
        self._config = config
        self._share_anew()

    def _share_anew(self) -> None:
        self._replicas.take_events()  # nobody wants it any more: `ready` says which replicas there are
        self.sharing = Sharing(max(1, int(UNBEGUN * self._config.max_num_seqs)), self._replicas.ready)
        self._tasks: dict[int, Task] = {}  # by number, those with samples that have not ended
        self._keys: dict[int, Hashable] = {}  # by number; tasks with equal ones begin alike
        self._nums_left: dict[int, int] = {}  # by number, how many samples have not ended
        self._aborted: set[int] = set()
        self._progress = TaskProgress([], [], [])  # that nobody has taken

    def queue(self, tasks: list[Task], longest_first: bool) -> None:
        """Queue tasks; longest_first: those begin sooner that may get more tokens."""
        for task in sorted(tasks, key=self._most_tokens, reverse=True) if longest_first else tasks:
            self._tasks[task.number], self._nums_left[task.number] = task, len(task.samples)
            key = self._keys[task.number] = self._key_of(task)
            for index in task.samples:
                self.sharing.add((task.number, index), key)

    def _most_tokens(self, task: Task) -> int:
        room = self._config.max_model_len - len(task.prompt)
        return room if task.params.max_tokens is None else min(task.params.max_tokens, room)

    def _key_of(self, task: Task) -> Hashable:
        block = self._config.cache_layout.prefix_size
        if len(task.prompt) <= block:
            return "request", task.number
        return task.params.adapter, beginning_of(task.prompt, block)

    def step(self) -> None:
        """Hand out samples, and take what replicas tell."""
        if self._tasks and not self._replicas.has_events:
            self._hand_out()
            self._replicas.wait_for_event()
        for index, event in self._replicas.take_events():
            if event is Change.JOINED:
                self.sharing.join(index)
            elif event is Change.LOST:
                self._begin_again(*self.sharing.leave(index))
            else:
                assert isinstance(event, Report)
                self._note(index, event)
        self._hand_out()

    def take_progress(self) -> TaskProgress:
        """Return what has become of tasks since the last call."""
        progress, self._progress = self._progress, TaskProgress([], [], [])
        return progress

    def _hand_out(self) -> None:
        """Give each replica the samples that it begins next."""
        if not self.sharing.num_waiting:
            return
        for index in self.sharing.replicas:
            units = self.sharing.deal(index)
            if units:
                self._replicas.hand_out(index, self._tasks_of(units))

    def _tasks_of(self, units: list[Unit]) -> list[Task]:
        tasks = []
        for number, group in groupby(units, key=itemgetter(0)):
            task = self._tasks[number]._replace(grammar=None)  # the replica compiles it
            tasks += [task._replace(samples=samples) for samples in _runs([sample for _, sample in group])]
        return tasks

    def _note(self, index: int, report: Report) -> None:
        """Note what a replica has told."""
        progress = self._progress
        progress.steps.extend(report.progress.steps)
        progress.results.extend(report.progress.results)
        self.sharing.begin(index, report.begun)
        for number, result in report.progress.results:
            if result.finish_reason is not None:
                self.sharing.end(index, (number, result.number))
                self._end(number)

    def _end(self, number: int) -> None:
        """Note that a sample has ended."""
        self._nums_left[number] -= 1
        if not self._nums_left[number]:
            del self._tasks[number], self._keys[number], self._nums_left[number]
            self._aborted.discard(number)

    def _begin_again(self, again: list[Unit], given_up: list[Unit]) -> None:
        """Let samples of a dead replica wait for another, and end those that have seen two die."""
        for unit in given_up:
            self._end_here(unit, "error", GIVEN_UP)
        for unit in again:
            number, _ = unit
            if number in self._aborted and self.sharing.discard(unit, self._keys[number]):
                self._end_here(unit, "abort", None)
            elif self._tasks[number].streams:
                results = self._progress.results
                results[:] = [(own, result) for own, result in results if (own, result.number) != unit]
                self._progress.again.append(unit)

    def _end_here(self, unit: Unit, reason: FinishReason, stop_reason: str | None) -> None:
        """End a sample that no replica has."""
        number, index = unit
        params, log = self._tasks[number].params, CandidatesLog()
        result = SampleResult(
            index,
            text="",
            token_ids=[],
            finish_reason=reason,
            stop_reason=stop_reason,
            weights_versions=[(0, self._replicas.updater.version)],
            finished_at=time.perf_counter(),
            logprobs=None if params.logprobs is None else log,
            prompt_logprobs=None if params.prompt_logprobs is None or index else log,
            kept_tokens=[] if params.kept_tokens else None,
            entropies=[] if params.entropy else None,
        )
        self._progress.results.append((number, result))
        self._end(number)

    def abort(self, number: int) -> None:
        """End the samples of a request that wait, and let the replicas end theirs: `step` gets these."""
        key = self._keys[number]
        self._aborted.add(number)
        for index in self._tasks[number].samples:
            if self.sharing.discard((number, index), key):
                self._end_here((number, index), "abort", None)
        if number in self._tasks:
            self._replicas.tell_all("abort", number)

    def drop(self) -> None:
        """Forget all tasks."""
        self._replicas.drop_tasks()
        self._share_anew()

    def prepare_for_weights(self, in_flight: InFlightPolicy, adapter: str | None) -> None:
        """End tasks after new weights came, if in_flight says so; replicas do the rest."""
        if in_flight == "abort":
            for number, task in list(self._tasks.items()):
                if adapter in (None, task.params.adapter):
                    self.abort(number)


def _runs(numbers: list[int]) -> list[range]:
    """Cut rising numbers into runs without a gap."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
