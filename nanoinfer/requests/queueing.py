"""QueuesRequests: an LLM step by step, for callers who add requests while others run."""

from __future__ import annotations

from typing import Any

from nanoinfer.checks import check_flag
from nanoinfer.hints import hints_for
from nanoinfer.requests.admin.adapters import LoadsAdapters
from nanoinfer.requests.inputs import Inputs, Prompt
from nanoinfer.requests.progress import is_news
from nanoinfer.requests.prompts.stages import ComingRequest
from nanoinfer.requests.request import Request
from nanoinfer.sampling_params import SamplingParams


class QueuesRequests(LoadsAdapters):
    """The methods of LLM that queue requests and run one step at a time."""

    _inputs: Inputs

    @hints_for("prepare")
    def prepare(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> ComingRequest:
        """Check a prompt and let threads prepare its images, while requests run; returns what add_request takes.

        prompt: a string, a list of token ids, or a mapping, as for generate
        sampling_params: the request's settings; None: SamplingParams()

        The result has an attribute is_ready: add_request does not wait any more.
        Raises ValueError as generate does, but for what is wrong with images: add_request raises that.
        """
        with self._door("open"):
            return self._inputs.begin(prompt, sampling_params)

    @hints_for("add_request")
    def add_request(
        self,
        prompt: Prompt | ComingRequest,
        sampling_params: SamplingParams | None = None,
        streams: bool = False,
    ) -> int:
        """Queue a prompt for `step`; returns the request_id that its outputs will have.

        prompt: a string, a list of token ids, or a mapping, as for generate; or what `prepare` or
            `prepare_to_embed` has returned
        sampling_params: the request's settings; None: SamplingParams(), or those that `prepare` got
        streams: `step` returns what its samples have new, as LLM.stream does, instead of one output at its end

        Raises ValueError as generate does.
        """
        with self._door("ready"):
            streams = check_flag("streams", streams)
            prepared = self._inputs.check_one(prompt, sampling_params)
            if streams and prepared.output_of is not None:
                raise ValueError("streams=True: must be False for a request of prepare_to_embed, which gets no tokens")
            if streams:
                self._inputs.texts.check_streams("streams=True", [prepared.params])
        with self._turn():
            self._check_adapters([prepared.params])
            with self._requests:
                return self._requests.add(prepared, streams).id

    def step(self) -> list[Any]:
        """Run one step of all queued requests; returns the outputs of the requests that ended with it.

        Each is a RequestOutput, or an EmbeddingOutput if prepare_to_embed has made the request. Of a request that
        streams there are StreamOutputs instead, one for each sample that has something new, with 0 as its index. The
        last one of a sample has a finish_reason.

        While the LLM sleeps or lacks weights, it raises RuntimeError, and the requests wait. If the step itself raises,
        or Ctrl-C interrupts it, every request is dropped; has_unfinished_requests() is False then.
        """
        self.engine.check_ready()
        with self._turn(), self._requests:
            if not self._requests.finished:  # abort may have ended some
                self._requests.step()
            new = [sample.take_new(0) for sample in dict.fromkeys(self._requests.take_changed())]
            ended = [request for request in self._requests.take_finished() if not request.samples]
            return [*filter(is_news, new), *map(_output_of, ended)]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has outputs to give."""
        if not self._busy.locked():
            self._requests.settle()
        return self._requests.are_left

    @hints_for("abort")
    def abort(self, request_id: int) -> None:
        """End a request now, from the thread that runs the loop over `step` or over a stream.

        request_id: the number that add_request returned, or the request_id of a StreamOutput

        The request's output has the tokens so far, and finish_reason "abort". If the request has ended, nothing
        happens. With several replicas, it may still end by itself in the meantime.
        Raises ValueError for a number that no request has had.
        """
        request = self._requests.find(request_id)
        if request is not None:
            self._requests.abort(request)


def _output_of(request: Request) -> Any:
    make = request.prompt.output_of
    return request.output() if make is None else make(request)
