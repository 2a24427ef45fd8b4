"""The module that programs import as vllm: nanoinfer by vLLM's names."""

from nanoinfer.integrations.vllm.names.modules import fill

fill(__name__)
