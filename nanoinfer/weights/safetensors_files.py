"""SafetensorsFiles: the safetensors files of a folder, chosen as transformers chooses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nanoinfer.gguf.header import GGUF
from nanoinfer.weights.bitsandbytes.files import Stored, is_of_matrix, joined

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsFiles:
    """Those that hold a checkpoint's weights."""

    def __init__(self, folder: str, what: str) -> None:
        """what: begins the messages of errors"""
        self._files = _choose_files(Path(folder), what)

    def tensors(self) -> Iterator[Stored]:
        """Yield each tensor's name, a slice object that reads it lazily, and its file; or a BnbMatrix: see `joined`."""
        return joined(self._stored()) if self.have_matrices else self._stored()

    @cached_property
    def have_matrices(self) -> bool:
        """Whether some matrices are bitsandbytes'."""
        return any(is_of_matrix(name) for file in self._files for name in _names(file))

    def _stored(self) -> Iterator[Stored]:
        for file in self._files:
            with _open(file) as reader:
                for name in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                    yield name, reader.get_slice(name), file


def _names(file: Path) -> list[str]:
    with _open(file) as reader:
        return list(reader.keys())


def _choose_files(folder: Path, what: str) -> list[Path]:
    """what: begins the messages of errors"""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        lacks = f"neither {SINGLE_FILE} nor {INDEX_FILE}, only {', '.join(others)}"
        if not others:
            lacks = "no *.safetensors file" + _named_gguf(folder)
        raise ValueError(f"{what}: the folder has {lacks}")
    for name in (names := _read_index(index)):
        if not (folder / name).is_file():
            raise ValueError(f"{what}: {INDEX_FILE} names {name}, which is not there")
    return [folder / name for name in names]


def _named_gguf(folder: Path) -> str:
    """Say which GGUF files a folder has, if it has some."""
    names = sorted(file.name for file in folder.glob(f"*{GGUF}"))
    return f"; for its GGUF file, give gguf_file={names[0]!r}" if names else ""


def _read_index(index: Path) -> list[str]:
    """Return the files that an index names; raises ValueError for a path out of its folder."""
    try:
        content = json.loads(index.read_text("utf-8"))
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
