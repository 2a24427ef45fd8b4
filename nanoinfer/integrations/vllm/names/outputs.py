"""Outputs with the attributes that vLLM's have beside ours."""

from __future__ import annotations

from nanoinfer.integrations.vllm.lora import GivenLora, LoRARequest
from nanoinfer.integrations.vllm.names.metrics import RequestStateStats, times_of
from nanoinfer.requests import outputs


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
