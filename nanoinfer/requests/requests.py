"""Requests: the prompts on their way through the engines, and the outputs that nobody has taken yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from nanoinfer.checks import as_int, check_choice, short
from nanoinfer.engine.client import InFlightPolicy
from nanoinfer.engine.new_sequences import seed_of
from nanoinfer.engine.results.stats import Counters
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.engine.sequence import FinishReason
from nanoinfer.requests.prompts.stages import Prepared
from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.requests.request import Request
from nanoinfer.requests.tasks.messages import TaskProgress, TaskRunner
from nanoinfer.requests.tasks.streamed import StreamedSample
from nanoinfer.requests.text.spelling import TokenDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Requests:
    """The requests whose outputs have not been returned yet.

    Change requests only inside `with requests:`. If the block is left by an exception (Ctrl-C too), every request is
    dropped, because one may be half-updated. If Ctrl-C interrupts even that, the next `with` completes it.

    finished: the requests whose samples have all ended, in the order in which they ended
    num_added: how many have been added so far, ended ones included
    """

    def __init__(
        self,
        tasks: TaskRunner,
        counters: Counters,
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None,
        reasoning: Reasoning | None = None,
    ) -> None:
        """seed: the LLM's, from which requests without one get theirs; reasoning: the LLM's; None: it has no markers"""
        self.finished: list[Request] = []
        self.num_added = 0
        self._tasks, self._counters, self._seed = tasks, counters, seed
        self._reasoning = reasoning
        self._decode = None if tokenizer is None else TokenDecoder(tokenizer, skip_special_tokens=False)
        self._running: dict[int, Request] = {}  # by id
        self._changed: list[StreamedSample] = []  # since the last take_changed
        self._is_settled = True  # no request is half-updated

    def __enter__(self) -> None:
        self.settle()
        self._is_settled = False

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._is_settled = True
        else:
            self.abort_all()

    def settle(self) -> None:
        """Drop every request if an interrupt has left one half-updated."""
        if not self._is_settled:
            self.abort_all()

    @property
    def num_running(self) -> int:
        """The number of requests that have not ended."""
        return len(self._running)

    @property
    def are_left(self) -> bool:
        """Whether requests have not ended, or nobody has taken their outputs."""
        return bool(self._running or self.finished)

    def add(self, prompt: Prepared, streams: bool = False) -> Request:
        """Queue a request; streams: the caller takes each sample's new text and tokens as they come."""
        request = self._make(prompt, streams)
        self._tasks.queue([request.task()], longest_first=False)
        return request

    def add_all(self, prompts: list[Prepared], longest_first: bool = True) -> list[Request]:
        """Queue the requests of one call, and return them in the same order.

        longest_first: if some must wait for others, those that may get more tokens begin sooner. Otherwise a long one
            that begins late runs almost alone in the end
        """
        requests = [self._make(prompt, streams=False) for prompt in prompts]
        self._tasks.queue([request.task() for request in requests], longest_first)
        return requests

    def _make(self, prompt: Prepared, streams: bool) -> Request:
        id = self.num_added
        request = Request(id, prompt, seed_of(prompt.params, self._seed, id), streams, self._decode, self._reasoning)
        self.num_added += request.num_texts
        self._running[id] = request
        return request

    def step(self) -> list[StepResult]:
        """Go on until a step has ended, or several; returns their figures."""
        self._tasks.step()
        return self._update().steps

    def _update(self) -> TaskProgress:
        """Note what has become of tasks, and return it."""
        progress = self._tasks.take_progress()
        for number, index in progress.again:
            self._running[number].samples[index].begin_again()
        for number, result in progress.results:
            request = self._running[number]
            if request.samples:
                sample = request.samples[result.number]
                sample.extend(result)
                self._changed.append(sample)
            else:
                request.results[result.number] = result
            if result.finish_reason is not None:
                self._end_sample(request, result.finish_reason)
        return progress

    def _end_sample(self, request: Request, reason: FinishReason) -> None:
        """Note that a sample has ended, and its request if it was the last."""
        request.num_running -= 1
        if request.num_running == 0:
            self.finished.append(self._running.pop(request.id))
        for _ in range(request.num_texts):
            self._counters.end_sample(reason, is_last=request.num_running == 0)

    def before_new_weights(self, in_flight: InFlightPolicy, adapter: str | None = None) -> Callable[[], None]:
        """Return the function that prepares the requests for new weights.

        in_flight: as for LLM.update_weights; adapter: it alone gets new ones, and only its requests are prepared
        """
        check_choice("in_flight", in_flight, list(get_args(InFlightPolicy)))

        def prepare() -> None:
            with self:
                self._tasks.prepare_for_weights(in_flight, adapter)
                self._update()

        return prepare

    def of_steering(self, name: str) -> list[Request]:
        """Return the requests of a steering that have not ended."""
        all_running = self._running.values()
        return [request for request in all_running if (request.prompt.params.steering or ("",))[0] == name]

    def of_adapter(self, name: str) -> list[Request]:
        """Return the requests of an adapter that have not ended."""
        return [request for request in self._running.values() if request.prompt.params.adapter == name]

    def find(self, request_id: int) -> Request | None:
        """Return the request, or None if it has ended. Raises ValueError for an id that no request has had."""
        known = as_int(request_id)
        if known is None or known not in range(self.num_added):
            raise ValueError(
                f"request_id={short(request_id)}: no request has it; pass a number that add_request returned"
            )
        return self._running.get(known)

    def abort(self, request: Request) -> None:
        """End the samples of a request that have not ended, outside or in the middle of `with requests:`."""
        was_settled, self._is_settled = self._is_settled, False
        try:
            self._tasks.abort(request.id)
            self._update()
        except BaseException:
            self.abort_all()
            raise
        self._is_settled = was_settled

    def abort_all(self) -> None:
        """Drop every request, ended ones included."""
        self._is_settled = False
        self._tasks.drop()
        dropped, self._running = self._running, {}
        self._counters.drop([request.num_running for request in dropped.values() for _ in range(request.num_texts)])
        self._changed.clear()
        self.finished.clear()
        self._is_settled = True

    def take_finished(self) -> list[Request]:
        """Return the requests that have ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def take_changed(self) -> list[StreamedSample]:
        """Return the streaming samples that have new tokens or ended since the last call; one may be there twice."""
        changed, self._changed = self._changed, []
        return changed
