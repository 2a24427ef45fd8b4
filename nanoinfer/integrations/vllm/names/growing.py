"""Outputs of a request that runs: all that its samples have so far, or what each has new."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from nanoinfer.integrations.vllm.lora import LoRARequest
from nanoinfer.integrations.vllm.names.outputs import CompletionOutput, RequestOutput
from nanoinfer.integrations.vllm.names.params import RequestOutputKind
from nanoinfer.requests.outputs import StreamOutput
from nanoinfer.requests.prompts import Prepared

OTHERS = ("request_id", "sample", "prompt_logprobs")  # of a StreamOutput, which a sample has not
LISTS = ("text", "token_ids", "logprobs", "kept_tokens")  # what grows


class Growing:
    """Makes RequestOutputs of a request's StreamOutputs: of all samples so far, or of the one with something new."""

    def __init__(
        self,
        request_id: str,
        num_samples: int,
        kind: RequestOutputKind,
        lora: LoRARequest | None,
        prepared: Callable[[], Prepared],
    ) -> None:
        """kind: CUMULATIVE, or DELTA; prepared: returns the prompt, once its images are ready: the request runs then"""
        self._request_id, self._kind, self._lora = request_id, kind, lora
        self._make_prepared = prepared
        self._prompt_logprobs: Any = None
        self._so_far: dict[int, dict[str, Any]] = {}  # by sample
        self._num_left = num_samples

    @cached_property
    def _prepared(self) -> Prepared:
        return self._make_prepared()

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return self._num_left == 0

    def take(self, new: StreamOutput) -> RequestOutput:
        """Return the output when a sample has something new."""
        self._num_left -= new.finish_reason is not None
        if new.prompt_logprobs is not None:
            self._prompt_logprobs = new.prompt_logprobs
        entries = {name: value for name, value in new.items() if name not in OTHERS} | {"index": new.sample}
        if self._kind is RequestOutputKind.CUMULATIVE:
            before = self._so_far.get(new.sample, {})
            entries |= {name: _longer(before.get(name), entries[name]) for name in LISTS}
            self._so_far[new.sample] = entries
        told = self._so_far or {new.sample: entries}
        samples = [CompletionOutput(told[number], lora_request=self._lora) for number in sorted(told)]
        return RequestOutput(
            dict.items(samples[0]),
            request_id=self._request_id,
            prompt=self._prepared.text,
            prompt_token_ids=self._prepared.token_ids,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=None,
            timings=None,
            is_finished=self.is_finished,
            samples=samples,
        )


def _longer(before: Any, new: Any) -> Any:
    """Return what was there with what is new behind it; None: nobody asked for it."""
    return new if before is None or new is None else before + new
