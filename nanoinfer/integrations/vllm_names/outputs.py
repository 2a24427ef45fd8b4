"""Outputs with the attributes that vLLM's have beside ours."""

from __future__ import annotations

from nanoinfer.requests import outputs


class CompletionOutput(outputs.SampleOutput):
    """One sample of a prompt.

    lora_request: None
    """

    __slots__ = ()
    lora_request = None


class RequestOutput(outputs.RequestOutput):
    """One prompt's result. Its request_id is a string, as vLLM's is.

    metrics, lora_request, encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: None
    """

    __slots__ = ()
    metrics = lora_request = encoder_prompt = encoder_prompt_token_ids = kv_transfer_params = None


def renamed(output: outputs.RequestOutput) -> RequestOutput:
    """Return an output under vLLM's names. What is made when somebody first reads it stays so."""
    own = RequestOutput(dict.items(output))
    own["request_id"] = str(output.request_id)
    own["samples"] = [CompletionOutput(dict.items(sample)) for sample in output.samples]
    return own
