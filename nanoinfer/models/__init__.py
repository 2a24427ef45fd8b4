"""The supported architectures, one file each."""

from __future__ import annotations

from transformers import PretrainedConfig

from nanoinfer.models.qwen3 import Qwen3ForCausalLM

MODELS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def check_architectures(names: list[str]) -> None:
    """Raise ValueError when the architectures that a config.json names have no file here."""
    if not names or names[0] not in MODELS:
        named = f"architecture {names[0]!r}" if names else "a config.json without 'architectures'"
        raise ValueError(f"model: {named} is not supported; supported: {', '.join(MODELS)}")


def find_model(config: PretrainedConfig, tensor_parallel_size: int) -> type[Qwen3ForCausalLM]:
    """The class that runs a checkpoint with this config on this many ranks.

    Raises ValueError when there is none, or when the class does not support what the config asks for.
    """
    check_architectures(config.architectures or [])
    model = MODELS[config.architectures[0]]
    model.check(config, tensor_parallel_size)
    return model
