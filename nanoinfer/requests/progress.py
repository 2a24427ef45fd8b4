"""Runs requests to their end, and shows a caller how far they are: by a stream of outputs, or by a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from nanoinfer.checks import check_flag, short
from nanoinfer.engine.results.stats import Rates
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.process.bar import Bar
from nanoinfer.requests.outputs import Output, StreamOutput
from nanoinfer.requests.prompts.stages import Prepared
from nanoinfer.requests.request import Request
from nanoinfer.requests.requests import Requests

REFRESH_SECONDS = 1.0  # of a bar's tokens and rates


SomeOutput = TypeVar("SomeOutput", bound=Output)


class Stream(Iterator[SomeOutput]):
    """The outputs of one call, as they come. After an error, each further `next` raises RuntimeError with its reason.

    `close`, or the stream's deletion, aborts the samples that have not ended.
    """

    def __init__(self, outputs: Generator[SomeOutput, None, None]) -> None:
        self._outputs = outputs
        self._failure: str | None = None  # not the error itself: its traceback keeps what the engine holds

    def __next__(self) -> SomeOutput:
        if self._failure is not None:
            raise RuntimeError(f"this stream has ended, make another: {self._failure}")
        try:
            return next(self._outputs)
        except StopIteration:
            raise
        except BaseException as error:
            self.close()  # an interrupt may come after the generator has yielded, which leaves it open
            self._failure = str(error) or type(error).__name__
            raise

    def close(self) -> None:
        """Abort the samples that have not ended."""
        self._outputs.close()


UseTqdm = bool | Callable[..., Any]


def check_use_tqdm(use_tqdm: UseTqdm) -> UseTqdm:
    """Return whether to show a bar, or the user's function that makes one."""
    if callable(use_tqdm):
        return use_tqdm
    return check_flag("use_tqdm", use_tqdm, "True or False, or a function that makes a bar as tqdm does")


def run_all(requests: Requests, count: int, take: Callable[[], list[Prepared]], use_tqdm: UseTqdm) -> list[Request]:
    """Queue all prompts of a call, step until their requests have ended, and take and return these, in their order.

    count: of the prompts; take: returns those that come next, before a step; use_tqdm: whether to show how far they are
    """
    added: list[Request] = []
    with closing(make_bar(count, use_tqdm, "Generating")) as bar:
        shown, num_finished = Shown(bar), 0
        while len(added) < count or requests.num_running:
            if len(added) < count:
                added += requests.add_all(take())
            results = requests.step()
            newly = len(requests.finished) - num_finished
            num_finished += newly
            if use_tqdm:
                shown.update(newly, results, is_last=num_finished == count)
        requests.take_finished()
    return added


class Shown:
    """What a bar shows: requests that have ended, tokens so far, and the rates of late; in the end, those of all steps.

    Tokens and rates are refreshed each second, also while no request ends.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._num_tokens = 0
        self._all, self._late = Rates(), Rates()
        self._next = time.perf_counter() + REFRESH_SECONDS

    def update(self, newly: int, results: Iterable[StepResult], is_last: bool) -> None:
        """Show `newly` more requests that have ended; results: the steps since the last call."""
        for result in results:
            self._num_tokens += self._count(result)
            self._all.add(result)
            self._late.add(result)
        is_due = is_last or time.perf_counter() >= self._next
        if is_due:
            self._bar.postfix = f"{self._num_tokens:,} tokens, {self._tell(self._all if is_last else self._late)}"
            self._late, self._next = Rates(), time.perf_counter() + REFRESH_SECONDS
        if is_due or newly:
            self._bar.update(newly)
        if is_due and hasattr(self._bar, "refresh"):
            self._bar.refresh()  # tqdm's `update` waits for more requests to end

    def _count(self, result: StepResult) -> int:
        """Return a step's tokens that are shown."""
        return result.num_generated_tokens

    def _tell(self, rates: Rates) -> str:
        return str(rates)


def make_bar(count: int | None, use_tqdm: UseTqdm, what: str) -> Any:
    """Return a bar; raises ValueError if the user's function makes none.

    count: of the requests; None: nobody knows it; what: begins the bar
    """
    make = use_tqdm if callable(use_tqdm) else partial(Bar, disable=not use_tqdm)
    try:
        bar = make(total=count, desc=what, dynamic_ncols=True)
        _ = bar.update, bar.close  # what is called below
        bar.postfix = getattr(bar, "postfix", "")  # what is set below
    except Exception as error:
        raise ValueError(f"use_tqdm={short(use_tqdm)}: must make a bar as tqdm does: {error!r}") from error
    return bar


def stream_all(
    requests: Requests, streamed: Collection[Request], check_open: Callable[[], None]
) -> Generator[StreamOutput, None, None]:
    """Step until all of `streamed` have ended, and yield what their samples have that is new.

    check_open: raises an error if the engine can make no steps any more
    """
    indices = {sample: index for index, request in enumerate(streamed) for sample in request.samples}
    while indices:
        changed = requests.take_changed()  # abort may have ended some
        if not changed:
            check_open()
            if not requests.num_running:
                raise RuntimeError("this stream's requests were dropped: an abort was interrupted")
            requests.step()
        for sample in changed or requests.take_changed():
            if sample not in indices:
                continue  # the loop's body aborted it, and its end was yielded already
            new = sample.take_new(indices[sample])
            if new["finish_reason"] is not None:
                del indices[sample]
            if is_news(new):
                yield new


def is_news(new: StreamOutput) -> bool:
    """Whether it tells anything: a sample may hold back the text of its newest token."""
    return bool(new["text"] or new["token_ids"] or new["finish_reason"])
