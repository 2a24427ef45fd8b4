"""Adapters of a job: their folders, and which of them a line names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoinfer.checks import short
from nanoinfer.hints import nearest
from nanoinfer.llm import LLM

GIVE = "give it some by --load-adapter NAME=FOLDER, or by adapters={'name': 'folder'}"

Folders = Mapping[str, str | os.PathLike[str]]  # by a user


def check_folders(adapters: Folders | None) -> dict[str, str]:
    """Return the adapters' folders by their names. Raises ValueError for what is no such mapping."""
    if adapters is None:
        return {}
    if isinstance(adapters, Mapping):
        folders = {name: os.fspath(one) if isinstance(one, os.PathLike) else one for name, one in adapters.items()}
        if all(isinstance(text, str) and text for pair in folders.items() for text in pair):
            return folders
    raise ValueError(f"adapters={short(adapters)}: must be a mapping from names to folders, or to Hub ids")


def with_slots(options: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of an LLM with room for all adapters, or for as many as the options say."""
    if not folders:
        return dict(options)
    return {"max_loras" if options.get("enable_lora") else "max_adapters": len(folders), **options}


def load_all(llm: LLM, folders: Mapping[str, str]) -> None:
    """Load all adapters. Raises ValueError as load_adapter does."""
    for name, folder in folders.items():
        llm.load_adapter(name, folder)


class Models(NamedTuple):
    """What a line's `model` and `adapter` may name: the job's model, and the adapters beside it."""

    base: str = ""
    adapters: tuple[str, ...] = ()

    def find(self, model: Any) -> str | None:
        """Return the adapter that OpenAI's `model` names; None: it names the job's model, with or without its folders.

        A job without adapters has one model, whatever a line calls it. Raises ValueError for another name.
        """
        if model in self.adapters:
            return str(model)
        if not self.adapters or (isinstance(model, str) and _last(model) == _last(self.base)):
            return None
        known = nearest(str(model), [*self.adapters, self.base])
        raise ValueError(f"model={short(model)}: must be {self.base!r}, or an adapter of the job: {known}")

    def check(self, adapter: str | None) -> None:
        """Raise ValueError if a line's adapter is none of the job's."""
        if adapter is not None and adapter not in self.adapters:
            known = nearest(adapter, self.adapters) if self.adapters else f"it has none; {GIVE}"
            raise ValueError(f"adapter={adapter!r}: must be an adapter of the job: {known}")


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
