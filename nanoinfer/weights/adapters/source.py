"""AdapterSource: an adapter as a user gives it, a folder or a trainer's tensors, before a model has seen it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.weights.adapters.config import AdapterConfig, check_alpha, read_config
from nanoinfer.weights.adapters.files import CONFIG_FILE, read_folder
from nanoinfer.weights.sources import TensorSource

Tensors: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class AdapterSource:
    """An adapter's settings, and its tensors by PEFT's names for them. name: what requests call it"""

    name: str
    config: AdapterConfig
    tensors: list[tuple[str, Tensor]]


def open_adapter(
    name: str, source: str | Path | Tensors, config: Any = None, alpha: float | None = None
) -> AdapterSource:
    """Open an adapter.

    name: what requests call it
    source: a folder or a Hub id, or tensors by PEFT's names for them
    config: for tensors: the settings, as in adapter_config.json, or peft.LoraConfig
    alpha: for tensors without config: lora_alpha; the ranks are the tensors'
    Raises ValueError, naming the adapter, for what cannot be read, and for settings that nanoinfer refuses.
    """
    what = f"adapter={name!r}"
    if not isinstance(source, (str, Path)):
        own = _config_of_tensors(what, config, alpha)
        try:
            return AdapterSource(name, own, _gather(TensorSource(source, argument="source")))
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    if config is not None or alpha is not None:
        raise ValueError(f"{what}: config and alpha must be None, as {str(source)!r} has its {CONFIG_FILE}")
    try:
        settings, tensors = read_folder(source)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    return AdapterSource(name, read_config(settings, what), list(tensors.items()))


def _gather(source: TensorSource) -> list[tuple[str, Tensor]]:
    """Return all of a trainer's tensors; those of an iterator are copied, as the next may lie in the same memory."""
    if source.holds_tensors:
        return list(source.pairs())
    gathered = []
    for name, tensor in source.pairs():
        with fresh_torch_state():
            gathered.append((name, tensor.clone()))
    return gathered


def _config_of_tensors(what: str, config: Any, alpha: float | None) -> AdapterConfig:
    if (config is None) == (alpha is None):
        raise ValueError(f"{what}: tensors need either config, such as PEFT's LoraConfig, or alpha, its lora_alpha")
    if alpha is None:
        return read_config(config, what)
    return AdapterConfig(check_alpha(f"{what}: alpha", alpha))
