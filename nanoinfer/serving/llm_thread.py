"""LLMThread: a thread that owns an LLM, and takes requests from any thread while others run."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

from nanoinfer.llm import LLM
from nanoinfer.replicas.tasks import UNBEGUN
from nanoinfer.requests.outputs import StreamOutput
from nanoinfer.requests.prompts.stages import ComingRequest

CLOSED = "this LLM is closed: make another"

Prepare = Callable[[LLM], ComingRequest]  # makes a request; raises ValueError for one that cannot run
Told = list[tuple[Any, Any]]  # keys, each with an output of its request, with what a call returned, or with an error


class Submitted(NamedTuple):
    """A request that the LLM has not got yet. most_tokens: that it may get"""

    key: Hashable
    coming: ComingRequest
    most_tokens: float
    streams: bool


@dataclass
class Running:
    """A request that the LLM has. num_left: so many outputs of it will come, but for those of streams in between"""

    key: Hashable
    num_left: int


class LLMThread:
    """Makes an LLM on a thread of its own, where all of its methods are called.

    A request has a key, which its caller chooses. What becomes of requests is told by their keys, once for each step.
    """

    def __init__(self, make: Callable[[], LLM], tell: Callable[[Told], None], longest_first: bool = False) -> None:
        """make: makes the LLM; if it raises an error, each request gets it. tell: called on the thread

        longest_first: requests that may get more tokens overtake others that wait. As long as such come, others wait
        """
        self._make, self._tell, self._longest_first = make, tell, longest_first
        self._llm: LLM | None = None
        self._failure: BaseException = RuntimeError(CLOSED)  # why there is no LLM
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the end
        self._told: Told = []  # what `tell` will be called with
        self._waiting: list[Submitted] = []
        self._running: dict[int, Running] = {}  # by the LLM's numbers
        self._numbers: dict[Hashable, int] = {}  # of those that run, by their keys
        self._lock, self._is_closed = Lock(), False
        self._thread = Thread(target=self._run, name="nanoinfer", daemon=True)
        self._thread.start()

    def submit(
        self, key: Hashable, prepare: Prepare, max_tokens: int | None, streams: bool = False, at_once: bool = False
    ) -> None:
        """Queue a request. Raises RuntimeError if the thread is closed.

        max_tokens: of its settings; streams: as for LLM.add_request
        at_once: the LLM gets it before others are prepared, as where `prepare` loads an adapter for it alone
        """
        most_tokens = math.inf if max_tokens is None else max_tokens
        queue = self._begin if at_once else self._waiting.append
        self._ask(key, lambda llm: queue(Submitted(key, prepare(llm), most_tokens, streams)))

    def call(self, key: Hashable, function: Callable[[LLM], Any]) -> None:
        """Let a function use the LLM between two steps. Raises RuntimeError if the thread is closed."""
        self._ask(key, lambda llm: self._told.append((key, function(llm))))

    def abort(self, key: Hashable) -> None:
        """End a request of which nobody wants to hear any more."""
        with suppress(RuntimeError):  # `close` has ended it
            self._ask(key, lambda llm: self._abort(llm, key))

    def finish(self, key: Hashable) -> None:
        """End a request now: its output has the tokens so far, and finish_reason "abort"."""
        with suppress(RuntimeError):  # `close` has ended it
            self._ask(key, lambda llm: self._finish(llm, key))

    def close(self) -> None:
        """End all requests with an error that says so, and close the LLM; safe to call twice."""
        with self._lock:
            self._is_closed = True
            self._asked.put(None)
        self._thread.join()

    def _ask(self, key: Hashable, do: Callable[[LLM], None]) -> None:
        """Let the thread do something; an error is told by the key."""

        def job() -> None:
            try:
                if self._llm is None:
                    raise copy_of(self._failure)
                do(self._llm)
            except BaseException as error:  # else the thread would end, and leave all others waiting
                self._told.append((key, error))

        with self._lock:
            if self._is_closed:
                raise RuntimeError(CLOSED)
            self._asked.put(job)

    def _run(self) -> None:
        try:
            self._make_llm()
            while self._do_asked():
                self._start_waiting()
                self._flush()
                self._step()
                self._flush()
        finally:
            self._end()

    def _make_llm(self) -> None:
        try:
            self._llm = self._make()
        except BaseException as error:
            self._failure = copy_of(error)  # its traceback would keep what there is of the LLM

    def _end(self) -> None:
        """Tell all that it is closed, and close the LLM."""
        with self._lock:
            self._is_closed = True
        llm, self._llm = self._llm, None
        self._end_running(RuntimeError(CLOSED))
        for one in self._waiting:
            one.coming.cancel()
            self._told.append((one.key, RuntimeError(CLOSED)))
        while not self._asked.empty():
            if (job := self._asked.get()) is not None:
                job()
        self._flush()
        if llm is not None:
            llm.close()

    def _do_asked(self) -> bool:
        """Do what is asked, and wait for it while no request is there; returns whether the end has not come."""
        while not self._asked.empty() or self._is_idle:
            if self._asked.empty():
                self._flush()
            if (job := self._asked.get()) is None:
                return False
            job()
            self._end_dropped()
        return True

    @property
    def _is_idle(self) -> bool:
        return self._llm is None or not (self._waiting or self._llm.has_unfinished_requests())

    def _start_waiting(self) -> None:
        """Give the LLM as many requests as it can begin soon."""
        assert self._llm is not None
        config = self._llm.config
        most = math.ceil((1 + UNBEGUN) * config.max_num_seqs * config.data_parallel_size)
        if self._longest_first:
            self._waiting.sort(key=attrgetter("most_tokens"), reverse=True)
        while len(self._running) < most and (place := self._choose()) is not None:
            self._begin(self._waiting.pop(place))

    def _begin(self, one: Submitted) -> None:
        """Give the LLM a request."""
        assert self._llm is not None
        try:
            number = self._llm.add_request(one.coming, streams=one.streams)
            self._running[number] = Running(one.key, one.coming.settings.params.n if one.streams else 1)
            self._numbers[one.key] = number
        except BaseException as error:
            self._told.append((one.key, error))
            self._end_dropped()

    def _choose(self) -> int | None:
        """Return the place of the first whose images are prepared; if there is none and nothing runs, the first."""
        ready = next((place for place, one in enumerate(self._waiting) if one.coming.is_ready), None)
        return 0 if ready is None and self._waiting and not self._running else ready

    def _step(self) -> None:
        assert self._llm is not None
        try:
            outputs = self._llm.step()
        except BaseException as error:
            self._llm._requests.abort_all()  # if it could not step, it has kept them
            self._end_running(error)
            return
        for output in outputs:
            if (running := self._running.get(output.request_id)) is None:
                continue  # it was aborted
            self._told.append((running.key, output))
            running.num_left -= not isinstance(output, StreamOutput) or output.finish_reason is not None
            if not running.num_left:
                del self._running[output.request_id], self._numbers[running.key]

    def _abort(self, llm: LLM, key: Hashable) -> None:
        if (number := self._numbers.pop(key, None)) is not None:
            del self._running[number]
            llm.abort(number)
            return
        for place, one in enumerate(self._waiting):
            if one.key == key:
                one.coming.cancel()
                del self._waiting[place]
                return

    def _finish(self, llm: LLM, key: Hashable) -> None:
        place = next((place for place, one in enumerate(self._waiting) if one.key == key), None)
        if place is not None:
            self._begin(self._waiting.pop(place))
        if (number := self._numbers.get(key)) is not None:
            llm.abort(number)

    def _end_dropped(self) -> None:
        """Tell of requests that the LLM has dropped, because a call has closed it or was broken off."""
        if self._running and self._llm is not None and not self._llm.has_unfinished_requests():
            self._end_running(
                RuntimeError("the LLM has dropped this request, because another call failed or closed it")
            )

    def _end_running(self, error: BaseException) -> None:
        self._told += [(running.key, copy_of(error)) for running in self._running.values()]
        self._running.clear()
        self._numbers.clear()

    def _flush(self) -> None:
        """Tell what nobody has been told."""
        if self._told:
            told, self._told = self._told, []
            self._tell(told)


def copy_of(error: BaseException) -> BaseException:
    """Return an error like this one: each task raises its own."""
    try:
        return copy(error)
    except Exception:  # its __init__ takes other arguments
        return RuntimeError(f"{type(error).__name__}: {error}")
