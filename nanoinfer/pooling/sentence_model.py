"""SentenceModel: how a checkpoint makes an embedding of hidden states, by the files of sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.pooling.dense import Dense
from nanoinfer.pooling.read import What

MODULES_FILE, SETTINGS_FILE = "modules.json", "config_sentence_transformers.json"
OLD_MODES = "pooling_mode_"  # begins the names of flags that have become one setting, pooling_mode
POOLINGS: dict[str, What] = {"lasttoken": "last", "mean": "mean"}


@dataclass(frozen=True)
class SentenceModel:
    """What comes behind the last norm: pooling, matrices, a cut of the first numbers, and length 1.

    what: how hidden states become one
    denses: applied to it, one after another
    normalises: the embedding's length becomes 1
    prompts: what may stand before a text, by the name that asks for it
    default_prompt: the name that counts if none is given; None: no prompt stands there then
    """

    what: What = "last"
    denses: tuple[Dense, ...] = ()
    normalises: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def makes_embeddings(folder: str) -> bool:
    """Whether a checkpoint's files say how its hidden states become embeddings."""
    return any(_kind(module) == "Pooling" for module in _read_modules(folder))


def read_sentence_model(folder: str) -> SentenceModel:
    """Read the files of a checkpoint; one without them has the last token's hidden state, of length 1.

    Raises ValueError, naming it, for what nobody computes here.
    """
    modules = _read_modules(folder)
    kinds = [_kind(module) for module in modules]
    if "Pooling" not in kinds:
        return SentenceModel()
    kinds_behind = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    unknown = [kind for kind in kinds_behind if kind != "Dense"]
    if kinds[:2] != ["Transformer", "Pooling"] or unknown:
        raise ValueError(
            f"model={folder!r}: its {MODULES_FILE} has {', '.join(kinds)}: must be Transformer, Pooling, Dense modules"
            " and Normalize, of which the last two may be missing"
        )
    paths = [_path(folder, module) for module in modules]
    denses = [Dense.open(path) for path, kind in zip(paths, kinds, strict=True) if kind == "Dense"]
    settings = _read(Path(folder) / SETTINGS_FILE)
    prompts, default = dict(settings.get("prompts") or {}), settings.get("default_prompt_name")
    return SentenceModel(_read_pooling(paths[1]), tuple(denses), kinds[-1] == "Normalize", prompts, default)


def _read_pooling(folder: Path) -> What:
    file = folder / "config.json"
    config = _read(file)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [name.removeprefix(OLD_MODES) for name, is_on in config.items() if name.startswith(OLD_MODES) and is_on]
        modes = [mode.removesuffix("_token").removesuffix("_tokens") for mode in modes] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(f"{file}: pooling_mode={', '.join(modes)}: must be one of {', '.join(POOLINGS)}")
    if not config.get("include_prompt", True):
        raise ValueError(f"{file}: include_prompt=false: must be true: a prompt's tokens count here")
    return POOLINGS[modes[0]]


def _read_modules(folder: str) -> list[dict[str, Any]]:
    file = Path(folder) / MODULES_FILE
    modules = _read(file) if file.is_file() else []
    if not isinstance(modules, list) or not all(isinstance(module, dict) and "type" in module for module in modules):
        raise ValueError(f"{file}: must be a list of modules, each with its type and path")
    return modules


def _kind(module: dict[str, Any]) -> str:
    """Return a module's class: sentence-transformers has moved its classes from file to file."""
    return str(module["type"]).rpartition(".")[2]


def _path(folder: str, module: dict[str, Any]) -> Path:
    path = Path(folder) / str(module.get("path", ""))
    if not path.resolve().is_relative_to(Path(folder).resolve()):
        raise ValueError(f"{Path(folder) / MODULES_FILE}: path={module['path']!r}: must be in the folder")
    return path


def _read(file: Path) -> Any:
    """Read a file of JSON; one that is not there has no settings."""
    try:
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
