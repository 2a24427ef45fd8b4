"""StreamedSample: what a sample that streams has new for its caller."""

from __future__ import annotations

from typing import Any

from nanoinfer.logprob import CandidatesLog, Decode
from nanoinfer.requests.outputs import StreamOutput
from nanoinfer.requests.reasoning.parts import Parts
from nanoinfer.requests.reasoning.stages import Part
from nanoinfer.requests.tasks.results import SampleResult, prompt_logprobs
from nanoinfer.sampling_params import SamplingParams

GROWING = (
    "text",
    "token_ids",
    "logprobs",
    "kept_tokens",
    "entropies",
)  # of results that stream: each goes on where the last ended


class StreamedSample:
    """A sample that streams: what has been told of it, and the caller has not taken.

    If its replica dies, another one tells all again from the beginning, and the caller gets the rest alone.
    """

    __slots__ = (
        "_decode",
        "_new",
        "_newest",
        "_num_taken",
        "_num_told",
        "_params",
        "_parts",
        "_prompt_logprobs",
        "_request_id",
    )

    def __init__(
        self, request_id: int, params: SamplingParams, decode: Decode | None, parts: Parts | None = None
    ) -> None:
        """decode: makes text of tokens; parts: divides it; None: the LLM knows no markers"""
        self._parts = parts
        self._request_id, self._params, self._decode = request_id, params, decode
        self._newest: SampleResult | None = None
        self._num_taken = dict.fromkeys(GROWING, 0)
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what nobody has taken: the replica is dead, and another one tells it again."""
        self._num_told = dict.fromkeys(GROWING, 0)  # by whoever computes it now
        self._prompt_logprobs: CandidatesLog | None = None
        self._empty()

    def _empty(self) -> None:
        params = self._params
        self._new: dict[str, Any] = {
            "text": "",
            "token_ids": [],
            "logprobs": None if params.logprobs is None else [],
            "kept_tokens": [] if params.kept_tokens else None,
            "entropies": [] if params.entropy else None,
        }

    def extend(self, result: SampleResult) -> None:
        """Take what is new."""
        logprobs = None if result.logprobs is None else result.logprobs.logprobs(self._decode)
        values = (result.text, result.token_ids, logprobs, result.kept_tokens, result.entropies)
        for name, value in zip(GROWING, values, strict=True):
            if value is not None:
                known = self._num_taken[name] + len(self._new[name]) - self._num_told[name]
                self._num_told[name] += len(value)
                self._new[name] += value[max(0, known) :]
        if self._newest is not None and not self._num_told["token_ids"]:  # it ends where nobody computes it
            result = result._replace(weights_versions=self._newest.weights_versions)
        if result.prompt_logprobs is not None:
            self._prompt_logprobs = result.prompt_logprobs
        self._newest = result

    def take_new(self, index: int) -> StreamOutput:
        """Return the text and tokens since the last call; index: the prompt's place in the list given to LLM.stream."""
        newest, new, is_first = self._newest, self._new, not self._num_taken["token_ids"]
        assert newest is not None
        for name, value in new.items():
            self._num_taken[name] += 0 if value is None else len(value)
        self._empty()
        text, token_ids = new["text"], new["token_ids"]
        parts: dict[Part, str] = {}
        if self._parts is not None:
            parts = self._parts.read(token_ids, text, is_finished=newest.finish_reason is not None)
        return StreamOutput(
            request_id=self._request_id,
            index=index,
            sample=newest.number,
            text=text,
            reasoning=parts.get("reasoning"),
            answer=parts.get("answer", text),
            token_ids=token_ids,
            finish_reason=newest.finish_reason,
            stop_reason=newest.stop_reason,
            weights_versions=newest.weights_versions,
            logprobs=new["logprobs"],
            kept_tokens=new["kept_tokens"],
            entropies=new["entropies"],
            routed_experts=newest.routed_experts,
            hidden_states=None if newest.hidden_states is None else newest.hidden_states.tensors(),
            prompt_logprobs=prompt_logprobs(self._params, self._prompt_logprobs, self._decode) if is_first else None,
        )
