"""What sentence-transformers writes beside a model: files of settings, and the list of modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from nanoinfer.checks import check_settings, short

MODULES_FILE, SETTINGS_FILE = "modules.json", "config.json"
OWN = "sentence_transformers."  # begins the types of modules that need no code of the checkpoint's


class Module(NamedTuple):
    """A module. kind: its class, which sentence-transformers has moved from file to file; folder: its files'"""

    kind: str
    folder: Path

    @property
    def settings_file(self) -> Path:
        """Where its settings are, except for a Transformer's."""
        return self.folder / SETTINGS_FILE


def read_modules(folder: str) -> list[Module]:
    """Return the modules of a checkpoint, in their order; none without a modules.json.

    Raises ValueError, naming the file, for an entry that is not known.
    """
    file, modules = Path(folder) / MODULES_FILE, []
    for index, entry in enumerate(_entries(folder)):
        where, path, kind = f"{file}: entry {index}", Path(folder) / str(entry.get("path", "")), str(entry["type"])
        check_settings(where, entry, ("idx", "name", "path", "type"), {"kwargs": ([],)})
        if not kind.startswith(OWN):
            raise ValueError(f"{where} has type={kind!r}: must begin with {OWN!r}: no code of a checkpoint's runs here")
        if not path.resolve().is_relative_to(Path(folder).resolve()):
            raise ValueError(f"{where} has path={entry['path']!r}: must be in the folder")
        modules.append(Module(_kind(entry), path))
    if modules and (modules[0].kind != "Transformer" or modules[0].folder != Path(folder)):
        first = f"{modules[0].kind} in {str(modules[0].folder)!r}"
        raise ValueError(f"{file} begins with {first}: must begin with a Transformer whose path is ''")
    return modules


def makes_embeddings(folder: str) -> bool:
    """Whether a checkpoint's files say how its hidden states become embeddings."""
    return any(_kind(entry) == "Pooling" for entry in _entries(folder))


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings of a file; one that is not there has none. Raises ValueError, naming it, for no mapping."""
    return mapping_of(str(file), _read(file))


def mapping_of(where: str, value: Any) -> dict[str, Any]:
    """Return a mapping, which is empty in place of None. Raises ValueError for all else; where: begins the message"""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{where}={short(value)}: must be a mapping")
    return value or {}


def _entries(folder: str) -> list[dict[str, Any]]:
    file = Path(folder) / MODULES_FILE
    entries = _read(file) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "type" in entry for entry in entries):
        raise ValueError(f"{file}: must be a list of modules, each with its type and path")
    return entries


def _kind(entry: dict[str, Any]) -> str:
    return str(entry["type"]).rpartition(".")[2]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8")) if file.is_file() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
