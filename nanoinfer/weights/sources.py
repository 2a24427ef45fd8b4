"""Sources: where a model's weights come from. Each fills a whole table of shards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoinfer.weights.shards import Shard, Table

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
COMPUTED = ("rotary_emb.inv_freq",)  # tensors that some checkpoints store and no model reads
LANGUAGE_MODEL = "language_model."  # stands in the tensor names of a multimodal checkpoint's language model
OTHER_MODELS = ("vision_tower.", "multi_modal_projector.", "visual.")  # begin the names of its other tensors


class Source(Protocol):
    """Gives the tensors that a table names."""

    def fill(self, table: Table) -> None:
        """Fill every target of the table; raises ValueError, naming them, if tensors are missing or do not fit."""
        ...


class RandomSource:
    """Normal noise of standard deviation 0.02, drawn on the targets' device, or ones or zeros where a shard says so."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fill(self, table: Table) -> None:
        """Fill every target of the table, always alike for the same seed."""
        shards = [shard for entries in table.values() for shard in entries if not shard.replaces]
        generator = torch.Generator(shards[0].target.device).manual_seed(self.seed)
        for shard in shards:
            if shard.random == "noise":
                shard.target.normal_(0, 0.02, generator=generator)
            else:
                shard.target.fill_(float(shard.random == "ones"))


class FileSource:
    """The safetensors files of a folder, chosen as transformers chooses them."""

    def __init__(self, folder: str, is_multimodal: bool = False) -> None:
        """is_multimodal: tensor names have a prefix, and tensors of other models stand beside the language model's."""
        self.folder = folder
        self.is_multimodal = is_multimodal
        self.files = _choose_files(Path(folder))

    def fill(self, table: Table) -> None:
        """Fill every target of the table, straight from the mapped files; raises ValueError as Source.fill says."""
        unknown: list[str] = []
        twice: set[str] = set()
        filled: dict[str, list[Tensor]] = {}
        for name, tensor, file in self._tensors():
            if name in filled:
                twice.add(name)
            elif name in table:
                _check_numbers(name, tensor, file)
                for shard in table[name]:
                    _copy(shard, tensor, file)
                filled[name] = [shard.target for shard in table[name]]
            elif not name.endswith(COMPUTED):
                unknown.append(name)
        replaced = {other for name in filled for other in table[name][0].replaces}
        missing = [name for name in table.keys() - filled - replaced if not table[name][0].replaces]
        twice |= {
            name for name in filled if table[name][0].entry is not None and filled.keys() & table[name][0].replaces
        }
        if missing or unknown or twice:
            raise ValueError(
                f"model={self.folder!r}: the checkpoint does not fit its config.json:"
                f"{_list('missing', sorted(missing))}{_list('unknown', unknown)}{_list('stored twice', sorted(twice))}"
            )
        _check_finite(self.folder, filled)

    def has_own_head(self, head: str, embedding: str) -> bool:
        """Return whether the files hold an output projection unlike the embedding. Arguments: the two tensors' names"""
        found = {name: tensor for name, tensor, _ in self._tensors() if name in (head, embedding)}
        return len(found) == 2 and not torch.equal(found[head][:], found[embedding][:])

    def _tensors(self) -> Iterator[tuple[str, Any, Path]]:
        """Yield each tensor's name in the language model, a slice object that reads it lazily, and its file."""
        for file in self.files:
            with _open(file) as reader:
                for name in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                    known = self._known_name(name)
                    if known is not None:
                        yield known, reader.get_slice(name), file

    def _known_name(self, name: str) -> str | None:
        if not self.is_multimodal:
            return name
        if name.removeprefix("model.").startswith(OTHER_MODELS):
            return None
        return name.replace(LANGUAGE_MODEL, "", 1)


def _choose_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        lacks = (
            f"neither {SINGLE_FILE} nor {INDEX_FILE}, only {', '.join(others)}" if others else "no *.safetensors file"
        )
        raise ValueError(f"model={str(folder)!r}: the folder has {lacks}")
    for name in (names := _read_index(index)):
        if not (folder / name).is_file():
            raise ValueError(f"model={str(folder)!r}: {INDEX_FILE} names {name}, which is not there")
    return [folder / name for name in names]


def _read_index(index: Path) -> list[str]:
    """Return the files that an index names; raises ValueError for a path out of its folder."""
    try:
        content = json.loads(index.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{index}: cannot be read: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: must have a 'weight_map' that names the file of each tensor")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{index}: 'weight_map' has {name!r}: must be a file in the folder")
    return sorted(set(weight_map.values()))


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error


def _check_numbers(name: str, tensor: Any, file: Path) -> None:
    dtype = tensor.get_dtype()
    if dtype not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(f"{file.name}: {name} has numbers of type {dtype}, which are not supported as weights")


def _copy(shard: Shard, tensor: Any, file: Path) -> None:
    shape = tuple(tensor.get_shape())
    if shape != shard.shape:
        raise ValueError(f"{file.name}: {shard.name} has shape {list(shape)}, but the model needs {list(shard.shape)}")
    shard.target.copy_(tensor[shard.index])


def _check_finite(folder: str, filled: dict[str, list[Tensor]]) -> None:
    """Raise ValueError if a target holds NaN or infinity. It looks at each number only if their sum is not finite."""
    targets = [(name, target) for name, entries in filled.items() for target in entries]
    if not targets:
        return
    sums = torch.stack([target.sum(dtype=torch.float32) for _, target in targets])
    for index in (~sums.isfinite()).nonzero().flatten().tolist():
        name, target = targets[index]
        if not target.isfinite().all():
            dtype = str(target.dtype).removeprefix("torch.")
            raise ValueError(f"model={folder!r}: {name} has numbers that are NaN or infinite as {dtype}")


def _list(kind: str, names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    if not names:
        return ""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f" {kind}: {', '.join(names[:most])}{rest}."
