"""Outputs with the attributes that vLLM's have beside ours, and those of requests that run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from nanoinfer.integrations.vllm.lora import GivenLora, LoRARequest
from nanoinfer.integrations.vllm.names.metrics import RequestStateStats, times_of
from nanoinfer.integrations.vllm.names.params import RequestOutputKind
from nanoinfer.requests import outputs
from nanoinfer.requests.outputs import StreamOutput
from nanoinfer.requests.prompts.stages import Prepared

OTHERS = ("request_id", "sample", "prompt_logprobs")  # of a StreamOutput, which a sample has not
LISTS = ("text", "reasoning", "answer", "token_ids", "logprobs", "kept_tokens", "entropies")  # what grows


class CompletionOutput(outputs.SampleOutput):
    """One sample of a prompt.

    lora_request: the prompt's
    """

    __slots__ = ()

    lora_request: LoRARequest | None


class RequestOutput(outputs.RequestOutput):
    """One prompt's result. Its request_id is a string, as vLLM's is.

    lora_request: the one that the prompt came with, or None
    finished: whether all samples have ended; an output of a request that runs may come before
    metrics: when things happened to it; None before its end
    encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: None
    """

    __slots__ = ()
    encoder_prompt = encoder_prompt_token_ids = kv_transfer_params = None

    lora_request: LoRARequest | None

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return bool(dict.get(self, "is_finished", True))

    @property
    def metrics(self) -> RequestStateStats | None:
        """When things happened to it."""
        return None if self.timings is None else times_of(self.timings, sum(len(one.token_ids) for one in self.samples))


def renamed(output: outputs.RequestOutput, lora_request: LoRARequest | None) -> RequestOutput:
    """Return an output under vLLM's names. What is made when somebody first reads it stays so."""
    own = RequestOutput(dict.items(output), request_id=str(output.request_id), lora_request=lora_request)
    own["samples"] = [CompletionOutput(dict.items(sample), lora_request=lora_request) for sample in output.samples]
    return own


def all_renamed(found: list[outputs.RequestOutput], lora_request: GivenLora) -> list[RequestOutput]:
    """Return the outputs of a call under vLLM's names. lora_request: one for all, or one each"""
    loras = lora_request if isinstance(lora_request, (list, tuple)) else [lora_request] * len(found)
    return list(map(renamed, found, loras))


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
