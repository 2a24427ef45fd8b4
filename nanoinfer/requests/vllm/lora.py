"""LoRARequest: an adapter as vLLM's callers name it, which the LLM loads when a request first asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nanoinfer.checks import as_list, check_flag, check_int, short
from nanoinfer.config import Config
from nanoinfer.engine.ranks.adapters import LoadedAdapter
from nanoinfer.hints import hints_for
from nanoinfer.requests.interface import SomeRequests
from nanoinfer.requests.settings import AdapterNames


@hints_for("LoRARequest")
@dataclass(frozen=True)
class LoRARequest:
    """An adapter in a folder, for generate(..., lora_request=LoRARequest("mine", 1, "adapters/mine")).

    The LLM loads the adapter when a request first asks for it. If max_adapters are loaded, one goes that another
    LoRARequest has brought: the least recently used one that no request uses. A LoRARequest with another path or number
    replaces the adapter of its name.

    lora_name: the adapter's name, as in SamplingParams(adapter=...)
    lora_int_id: its number, at least 1, as llm.llm_engine.list_loras() tells it
    lora_path: its folder, or a Hub id
    load_inplace: True: the LLM reads the folder anew in each call

    Raises a ValueError that names the argument and its value, if it cannot be one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        checked = vars(self)
        for name, what in (("lora_name", "a name"), ("lora_path", "a folder or a Hub id")):
            value = checked[name]
            text = os.fspath(value) if isinstance(value, os.PathLike) else value
            if not isinstance(text, str) or text == "":
                raise ValueError(f"{name}={short(value)}: must be {what}")
            checked[name] = text
        checked["lora_int_id"] = check_int("lora_int_id", self.lora_int_id, 1)
        checked["load_inplace"] = check_flag("load_inplace", self.load_inplace)


GivenLora = LoRARequest | ListLike[LoRARequest | None] | None  # by a user


class Adaptable(Protocol):
    """The part of an LLM that loads adapters."""

    config: Config
    _requests: SomeRequests

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """Those that are loaded, by name."""
        ...

    def load_adapter(self, name: str, source: str) -> int:
        """Load one, or replace it."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget one, which no request uses."""
        ...


def _listed(given: GivenLora) -> list[LoRARequest | None]:
    asked = [given] if isinstance(given, LoRARequest) else as_list(given)
    if asked is None or not all(one is None or isinstance(one, LoRARequest) for one in asked):
        raise ValueError(
            f"lora_request={short(given)}: must be a LoRARequest, from nanoinfer, or a list with one, or None, for each"
            " prompt"
        )
    return asked


def _by_name(asked: list[LoRARequest | None]) -> dict[str, LoRARequest]:
    wanted: dict[str, LoRARequest] = {}
    for one in asked:
        if one is not None and wanted.setdefault(one.lora_name, one) != one:
            raise ValueError(f"lora_request has {one} and {wanted[one.lora_name]}: must be one of this name")
    return wanted


class Brought(NamedTuple):
    """An adapter that a LoRARequest has brought; is_pinned: it may not go to make room."""

    request: LoRARequest
    loaded: LoadedAdapter
    is_pinned: bool = False


class LoRARequests:
    """Knows which adapters of an LLM came by LoRARequests, and which was last used."""

    def __init__(self) -> None:
        self._brought: dict[str, Brought] = {}  # by name, the least recently used one first

    def load(self, llm: Adaptable, given: GivenLora) -> AdapterNames:
        """Load what a call asks for, unless it is there; returns the names. Raises ValueError for what cannot be."""
        if given is None:
            return None
        asked = _listed(given)
        wanted = _by_name(asked)
        if len(wanted) > llm.config.max_adapters > 0:
            raise ValueError(
                f"lora_request has {len(wanted)} adapters, and max_adapters={llm.config.max_adapters}: one call must"
                f" name at most so many; make the LLM with max_adapters={len(wanted)}"
            )
        self._settle(llm)
        for one in wanted.values():
            self._load(llm, one, wanted)
        names = [None if one is None else one.lora_name for one in asked]
        return names[0] if isinstance(given, LoRARequest) else names

    def _settle(self, llm: Adaptable) -> None:
        """Forget what somebody has replaced or unloaded since."""
        there = llm.adapters
        self._brought = {name: brought for name, brought in self._brought.items() if there.get(name) is brought.loaded}

    def _load(self, llm: Adaptable, wanted: LoRARequest, beside: Mapping[str, LoRARequest]) -> None:
        """Load one, unless it is there. beside: those that the call needs"""
        name = wanted.lora_name
        known, before = self._brought.get(name), llm.adapters.get(name)
        if known is None and before is not None:
            raise ValueError(
                f"lora_request={wanted}: llm.load_adapter has loaded an adapter of this name; write"
                f" SamplingParams(adapter={name!r}), or take another name"
            )
        if known is None:
            self._make_room(llm, beside)
        is_there = known is not None and known.request == wanted and not wanted.load_inplace
        try:
            if not is_there:
                llm.load_adapter(name, wanted.lora_path)
        finally:  # an interrupt may come when it is loaded
            loaded = llm.adapters.get(name)
            if loaded is not None and (is_there or loaded is not before):
                self._brought.pop(name, None)
                self._brought[name] = Brought(wanted, loaded, known is not None and known.is_pinned)

    def _make_room(self, llm: Adaptable, kept: Mapping[str, LoRARequest]) -> None:
        """Unload the least recently used adapter if there is no room, and one may go. kept: those that may not"""
        if len(llm.adapters) < llm.config.max_adapters:
            return
        for name, brought in self._brought.items():
            if not (name in kept or brought.is_pinned or llm._requests.of_adapter(name)):
                llm.unload_adapter(name)
                del self._brought[name]
                return

    def numbers(self, llm: Adaptable) -> set[int]:
        """Return the numbers of the adapters that are loaded."""
        self._settle(llm)
        return {brought.request.lora_int_id for brought in self._brought.values()}

    def unload(self, llm: Adaptable, number: int) -> bool:
        """Unload the adapters of a number; returns whether there was one."""
        names = self._named(llm, number)
        for name in names:
            llm.unload_adapter(name)
        return bool(names)

    def pin(self, llm: Adaptable, number: int) -> bool:
        """Let no other take the place of a number's adapters; returns whether there is one."""
        names = self._named(llm, number)
        for name in names:
            self._brought[name] = self._brought[name]._replace(is_pinned=True)
        return bool(names)

    def _named(self, llm: Adaptable, number: int) -> list[str]:
        """Return the names of the adapters of a number."""
        self._settle(llm)
        return [name for name, brought in self._brought.items() if brought.request.lora_int_id == number]
