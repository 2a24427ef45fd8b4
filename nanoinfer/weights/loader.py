"""Weights: from safetensors files, each rank reading its slice, or random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

# Tensors that some checkpoints store and no model reads: they can be computed.
COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(slots=True)
class Shard:
    """One checkpoint tensor's share of a parameter on this rank."""

    target: Tensor  # the parameter, or the part of it, that the tensor fills
    shape: tuple[int, ...]  # the whole tensor's shape in the checkpoint
    start: int = 0  # this rank's slice begins here along `dim` and is as long as the target there
    dim: int = 0
    sibling: str | None = None  # the checkpoint's name for it, where that differs from the module's own
    name: str = "weight"


@runtime_checkable
class HasShards(Protocol):
    """A module with weights of its own."""

    def shards(self) -> Iterator[Shard]:
        """The checkpoint tensors that fill this module's parameters."""
        ...


def load_weights(model: nn.Module, folder: str, ignored: tuple[str, ...] = ()) -> None:
    """Fill the model from the folder's *.safetensors files.

    ignored: names of tensors that may be there and are not read.
    Raises ValueError, naming the tensors, when one is missing, unknown, or of another shape than the model's.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"model={folder!r}: the folder has no *.safetensors file")
    expected = _expected(model)
    missing = dict(expected)
    unknown: list[str] = []
    for file in files:
        with _open(file) as reader:
            for name in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                if name in expected:
                    _read(reader.get_slice(name), expected[name], name, file)
                    missing.pop(name, None)
                elif name not in ignored and not name.endswith(COMPUTED):
                    unknown.append(name)
    if missing or unknown:
        raise ValueError(
            f"model={folder!r}: the checkpoint does not fit {type(model).__name__}:"
            f" {_list('missing', sorted(missing))}{_list('unknown', unknown)}"
        )


def random_weights(model: nn.Module, seed: int) -> None:
    """Fill the model with normal noise of deviation 0.02, and norms with ones, on the device it is on."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for shard in _expected(model).values():
        if shard.target.ndim == 1:
            shard.target.fill_(1)
        else:
            shard.target.normal_(0, 0.02, generator=generator)


def _expected(model: nn.Module) -> dict[str, Shard]:
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, HasShards):
            for shard in module.shards():
                parent = path.rpartition(".")[0]
                owner = f"{parent}.{shard.sibling}" if shard.sibling else path
                found[f"{owner}.{shard.name}"] = shard
    return found


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error


def _read(tensor: Any, shard: Shard, name: str, file: Path) -> None:
    shape = tuple(tensor.get_shape())
    if shape != shard.shape:
        raise ValueError(f"{file.name}: {name} has shape {list(shape)}, but the model needs {list(shard.shape)}")
    index = [slice(None)] * len(shape)
    index[shard.dim] = slice(shard.start, shard.start + shard.target.shape[shard.dim])
    shard.target.copy_(tensor[tuple(index)])


def _list(kind: str, names: list[str], most: int = 5) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f" {kind}: {', '.join(names[:most])}{rest}."
