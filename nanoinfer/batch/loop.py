"""Loop: keeps an LLM busy with the lines of a file, and makes each result when its requests have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.batch.files import FileLines
from nanoinfer.batch.interrupts import Interrupts
from nanoinfer.batch.lines.adapters import Models
from nanoinfer.batch.lines.requests import Job, LineError, digest, read_job, read_line
from nanoinfer.batch.lines.results import result_row
from nanoinfer.batch.progress import Progress
from nanoinfer.batch.report.report import RunReport
from nanoinfer.batch.rows import RowWriter
from nanoinfer.checks import short
from nanoinfer.llm import LLM
from nanoinfer.requests.prompts.stages import ComingRequest

AHEAD = 2  # times max_num_seqs of all replicas: so many requests the LLM has, that no step waits for the next line
HELD = 16  # times max_num_seqs of all replicas: so many rows wait for an earlier line, before no more lines are read

SomeJob = Job | LineError | None  # what a line asks for, why it cannot run, or that it is done


def read_jobs(
    lines: Iterator[bytes], done: Collection[bytes], defaults: Mapping[str, Any], seed: int, models: Models
) -> Iterator[SomeJob]:
    """Yield what each line asks for, or why it cannot run; None for a line that is done. Empty lines do not count.

    done: the digests of the ids that have results
    defaults, seed, models: as for read_job
    """
    seen: set[bytes] = set()
    for number, data in enumerate(lines, 1):
        if not data.strip():
            continue
        try:
            line = read_line(data, number)
            assert line.id is not None
            key = digest(line.id)
            if key in seen:
                raise LineError(line, f"an earlier line has its id {short(line.id)}")
            seen.add(key)
            yield None if key in done else read_job(line, defaults, seed, models)
        except LineError as error:
            yield error


@dataclass
class Work:
    """A line whose requests are on their way.

    turn: that of its row; outputs: of its requests, in their order, None for those that have not ended
    missing: how many these are; has_failed: the line has its row
    """

    turn: int
    job: Job
    outputs: list[Any]
    missing: int
    has_failed: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens were made, or read."""
        if self.job.embedding is not None:
            return sum(len(output.prompt_token_ids) for output in self.outputs)
        return sum(len(sample.token_ids) for sample in self.outputs[0].samples)


class Loop:
    """Runs jobs, and hands on their rows as they end."""

    def __init__(self, llm: LLM, model: str, rows: RowWriter, progress: Progress, report: RunReport | None) -> None:
        self._llm = llm
        self._model = model
        self._rows = rows
        self._progress = progress
        self._report = report
        self._coming: deque[tuple[Work, int, ComingRequest]] = deque()  # whose images are not prepared yet
        self._running: dict[int, tuple[Work, int]] = {}  # by request id; the number is its place among the line's

    def run(self, lines: FileLines, jobs: Iterator[SomeJob], interrupts: Interrupts) -> None:
        """Run all jobs, or until somebody presses Ctrl-C. Raises RuntimeError for more than max_errors errors.

        jobs: of these lines
        """
        try:
            self._run(lines, jobs, interrupts)
        finally:
            for _, _, coming in self._coming:
                coming.cancel()

    def _run(self, lines: FileLines, jobs: Iterator[SomeJob], interrupts: Interrupts) -> None:
        has_more = True
        while (has_more or self._is_busy) and not interrupts.asked:
            while has_more and self._has_room and not interrupts.asked and (lines.is_ready() or not self._is_busy):
                interrupts.waits = not self._is_busy
                try:
                    job = next(jobs)
                except StopIteration:
                    has_more = False
                    break
                finally:
                    interrupts.waits = False
                self._add(job)
                self._progress.show()
            self._begin()
            if self._running:
                self._step()
            self._progress.show()

    @property
    def _is_busy(self) -> bool:
        return bool(self._running or self._coming)

    @property
    def _has_room(self) -> bool:
        rows = self._llm.config.max_num_seqs * self._llm.config.data_parallel_size
        return len(self._running) + len(self._coming) < AHEAD * rows and self._rows.num_held < HELD * rows

    def _add(self, job: SomeJob) -> None:
        if job is None:
            self._progress.skip()
            return
        turn = self._rows.next_turn()
        if isinstance(job, LineError):
            self._rows.fail(turn, job)
            return
        try:
            coming = job.prepare(self._llm)
        except ValueError as error:
            self._rows.fail(turn, LineError(job.line, str(error)))
            return
        work = Work(turn, job, [None] * len(coming), len(coming))
        self._coming.extend((work, place, request) for place, request in enumerate(coming))

    def _begin(self) -> None:
        """Queue the requests whose images are prepared, in the order of their lines; wait for one if none runs."""
        while self._coming and (self._coming[0][2].is_ready or not self._running):
            work, place, coming = self._coming.popleft()
            try:
                request_id = self._llm.add_request(coming)
            except ValueError as error:
                self._fail_work(work, LineError(work.job.line, str(error)))
            else:
                self._running[request_id] = work, place

    def _step(self) -> None:
        for output in self._llm.step():
            work, place = self._running.pop(output.request_id)
            work.outputs[place] = output
            work.missing -= 1
            if not work.missing and not work.has_failed:
                self._end(work)

    def _end(self, work: Work) -> None:
        """Write the row of a line whose requests have ended."""
        try:
            row = result_row(work.job, work.outputs, self._model, self._llm)
        except LineError as error:
            self._rows.fail(work.turn, error)
            return
        self._rows.put(work.turn, row)
        self._progress.add(work.num_tokens)
        if self._report is not None and work.job.embedding is None:
            self._report.add(work.job.line, work.outputs[0])

    def _fail_work(self, work: Work, error: LineError) -> None:
        """Fail a line once, of whose requests others may run."""
        if not work.has_failed:
            work.has_failed = True
            self._rows.fail(work.turn, error)
