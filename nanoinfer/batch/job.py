"""run: a batch file from its first check to its last line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple

from nanoinfer.batch.files import STANDARD, FileLines, Writer, codec_of, is_regular
from nanoinfer.batch.interrupts import Interrupts
from nanoinfer.batch.ledger import Ledger, manifest_of
from nanoinfer.batch.lines.adapters import Folders, Models, check_folders, load_all, with_slots
from nanoinfer.batch.lines.requests import LineError
from nanoinfer.batch.loop import Loop, SomeJob, read_jobs
from nanoinfer.batch.progress import Progress
from nanoinfer.batch.report.report import RunReport
from nanoinfer.batch.rows import RowWriter
from nanoinfer.checks import check_flag, check_int
from nanoinfer.hints import vocabulary
from nanoinfer.llm import LLM
from nanoinfer.process.standard_error import say
from nanoinfer.sampling_params import SamplingParams

OF_LLM = {"seed", "logits_processors"}  # settings whose names are options of LLM, which count for a job
DEFAULTS = {field.name for field in fields(SamplingParams)} - OF_LLM
HOW_FAST = {  # options that change how fast a job runs, not what it asks for: a resumed job may have others
    "trust_remote_code",
    "data_parallel_backend",
    "data_parallel_size",
    "enable_lora",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_offload_gib",
    "kvcache_block_size",
    "max_adapter_rank",
    "max_adapters",
    "max_lora_rank",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_kvcache_blocks",
    "placement_timeout",
    "restart_replicas",
    "tensor_parallel_size",
    "use_tqdm",
    "weight_offload_gib",
    "worker_timeout",
}
MOST_NAMED = 5  # lines that cannot run, before the model loads


class Summary(NamedTuple):
    """How a job ended: the numbers of its lines that have results, and of those that have errors."""

    done: int
    errors: int

    def __str__(self) -> str:
        said = f"{self.done:,} of {self.done + self.errors:,} lines have results"
        if not self.errors:
            return said
        return f"{said}, {self.errors:,} have errors; run the same command again to try these again"


class Survey(NamedTuple):
    """What a file's lines are, before they run: how many (None: nobody knows), and whether one is left that can run."""

    total: int | None
    can_run: bool


def run(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    model: str,
    *,
    keep_order: bool = False,
    max_errors: int | None = None,
    report: str | os.PathLike[str] | None = None,
    stats: bool = False,
    adapters: Folders | None = None,
    **options: Any,
) -> Summary:
    """Generate for every line of a file, or embed, and write a line for each into another; go on where one has ended.

    Returns a Summary, which has the numbers of lines that have results (`done`) and errors (`errors`).

    input: a file of JSON lines, plain ({"id", "prompt" or "token_ids" or "messages", settings}) or as OpenAI's batches
        have them, of chats, completions and embeddings. Beside a plain line's prompt or ids, "image" may hold an image,
        or a list of them, and "video" the frames of one, or a list of such. "-" is standard input; names that end with
        .gz or .zst are compressed files
    output: the file of results, which must be this job's if it has lines; "-" is standard output
    model: as for LLM
    keep_order: True: rows come in the order of their lines; False: as their requests end. Lines that failed and are
        tried again come behind those of the earlier run, in either case
    max_errors: the job ends once more lines than this have failed; None: it goes on
    report: a file for a page of HTML, which shows this run's speed, lengths, first results and kinds of errors.
        matplotlib draws its charts, once pip install 'nanoinfer[plot]' has added that; else words say what these would
        show. None: there is no page
    stats: True: the job prints llm.stats() on standard error in the end, also when it breaks off; without a model, none
    adapters: a mapping from names to the folders of adapters, which the job loads. A line names one as its "adapter",
        or as OpenAI's "model"
    options: those of LLM, and settings of SamplingParams, for lines that do not say them

    Beside the output lies its manifest, OUTPUT.manifest.json, which holds the job's settings. A line without a seed
    gets one from the option `seed` and its id. So a job that was broken off and resumed draws the same tokens.

    The model loads if a line is left that can run. Raises ValueError for what cannot work, before the model loads; it
    looks at adapters behind that. Raises OSError if
    the output cannot be written, RuntimeError after too many errors or as LLM does, and KeyboardInterrupt after a
    Ctrl-C. What is done is in the output then, and the same call goes on.
    """
    source, target = os.fspath(input), os.fspath(output)
    keep_order = check_flag("keep_order", keep_order)
    max_errors = None if max_errors is None else check_int("max_errors", max_errors, 0)
    stats, folders = check_flag("stats", stats), check_folders(adapters)
    models = Models(model, tuple(folders))
    checked = SamplingParams(**{name: value for name, value in options.items() if name in DEFAULTS})
    defaults = {name: getattr(checked, name) for name in options if name in DEFAULTS}
    options = {name: value for name, value in options.items() if name not in DEFAULTS and value is not None}
    seed = options.get("seed", 0)
    said = {"model": model, **({"adapters": folders} if folders else {}), **options, **defaults}
    with _open_input(source, target) as lines, _open_output(source, target, said) as (writer, done):
        how = done, defaults, seed, models
        survey = _survey(source, *how, max_errors) if is_regular(source) else Survey(None, can_run=True)
        page = None if report is None else _open_report(os.fspath(report), source, target)
        num_done, left = _skip_done(read_jobs(lines, *how))
        progress = Progress(survey.total, num_done)
        rows, title = RowWriter(writer.write, progress, keep_order, max_errors), f"{source} with {model}"
        if left is None or not survey.can_run:
            with _told(progress, page, title):
                _fail_all(left or (), rows, progress)
            return Summary(progress.done, len(progress.errors))
        with LLM(model, **with_slots(options, folders)) as llm, Interrupts() as interrupts:
            load_all(llm, folders)
            if page is not None:
                llm.engine.on_step = page.step
            progress.start()
            with _told(progress, page, title, llm if stats else None):
                try:
                    Loop(llm, model, rows, progress, page).run(lines, left, interrupts)
                except KeyboardInterrupt:
                    interrupts.asked = True
            if interrupts.asked:
                raise KeyboardInterrupt(f"{progress.done:,} lines have results")
            return Summary(progress.done, len(progress.errors))


@contextmanager
def _open_input(source: str, target: str) -> Iterator[FileLines]:
    """Open the input. Raises ValueError if it cannot be read, or is the output too."""
    is_regular(source)
    if STANDARD not in (source, target) and os.path.exists(target) and os.path.samefile(source, target):
        raise ValueError(f"{target}: is the input too; give another output")
    try:
        lines = FileLines(source)
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}") from None
    with closing(lines):
        try:
            yield lines
        except EOFError as error:
            raise ValueError(str(error)) from None


@contextmanager
def _open_output(source: str, target: str, said: Mapping[str, Any]) -> Iterator[tuple[Writer, set[bytes]]]:
    """Open the output; yields it, and the digests of the ids that have results there. said: what the caller asks for"""
    if not is_regular(target):
        with closing(Writer(target, codec_of(target))) as writer:
            yield writer, set()
        return
    left_out = HOW_FAST | set(vocabulary().changes_nothing("LLM"))
    same = {name: value for name, value in said.items() if name not in left_out}
    name = source if source == STANDARD else os.path.abspath(source)
    settings = json.dumps({"input": name, **same}, default=str, allow_nan=False)
    with closing(Ledger(target, json.loads(settings))) as ledger:
        yield ledger.writer, ledger.done


def _open_report(file: str, source: str, target: str) -> RunReport:
    """Open the report. Raises ValueError if it cannot be written, or would take the place of a file of the job."""
    if file == STANDARD:
        raise ValueError(f"report={file!r}: must be a file")
    for what, name in {"input": source, "output": target, "output's manifest": manifest_of(target)}.items():
        if os.path.isfile(file) and os.path.exists(name) and os.path.samefile(file, name):
            raise ValueError(f"report={file!r}: is the {what} too; give another file")
    return RunReport(file)


def _survey(
    source: str, done: set[bytes], defaults: Mapping[str, Any], seed: int, models: Models, max_errors: int | None
) -> Survey:
    """Look at the lines of a file, and name those that cannot run. Raises ValueError if these are too many."""
    total = bad = num_done = 0
    with closing(FileLines(source)) as lines:
        for job in read_jobs(lines, done, defaults, seed, models):
            total += 1
            num_done += job is None
            if isinstance(job, LineError):
                bad += 1
                if bad <= MOST_NAMED:
                    say(f"{source}: {job}")
    if bad > MOST_NAMED:
        say(f"{source}: {bad - MOST_NAMED:,} more lines cannot run")
    if max_errors is not None and bad > max_errors:
        raise ValueError(f"max_errors={max_errors}: {bad:,} lines of {source} cannot run")
    return Survey(total, can_run=total > num_done + bad)


def _skip_done(jobs: Iterator[SomeJob]) -> tuple[int, Iterator[SomeJob] | None]:
    """Return how many lines are done before the first that is not, and the lines from that one on; None: no such one"""
    num_done = 0
    for job in jobs:
        if job is not None:
            return num_done, chain([job], jobs)
        num_done += 1
    return num_done, None


def _fail_all(jobs: Iterable[SomeJob], rows: RowWriter, progress: Progress) -> None:
    """Write the rows of lines none of which can run. Raises RuntimeError if the file has got one that can."""
    for job in jobs:
        if isinstance(job, LineError):
            rows.fail(rows.next_turn(), job)
        elif job is None:
            progress.skip()
        else:
            raise RuntimeError(f"line {job.line.number} has come meanwhile")


@contextmanager
def _told(progress: Progress, page: RunReport | None, title: str, llm: LLM | None = None) -> Iterator[None]:
    """Say in the end how far the job has come, and write its page. llm: whose stats are said, too"""
    try:
        yield
    finally:
        progress.show(is_last=True)
        if llm is not None:
            say(llm.stats())
        if page is not None:
            page.write(title, str(progress), progress.errors)
