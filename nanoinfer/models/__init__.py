"""The supported architectures, one file each."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.qwen3 import Qwen3ForCausalLM

MODELS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def find_model(config: PretrainedConfig, tensor_parallel_size: int) -> type[Qwen3ForCausalLM]:
    """The class that runs a checkpoint with this config on this many ranks.

    Raises ValueError when there is none, or when the class does not support what the config asks for.
    """
    names = getattr(config, "architectures", None) or [f"model_type {config.model_type}"]
    if names[0] not in MODELS:
        raise ValueError(f"model: architecture {names[0]!r} is not supported; supported: {', '.join(MODELS)}")
    model = MODELS[names[0]]
    model.check(config, tensor_parallel_size)
    return model
