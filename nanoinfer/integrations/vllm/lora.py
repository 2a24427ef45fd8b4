"""LoRARequest: an adapter as vLLM's callers name it, which the LLM loads when a request first asks for it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from nanoinfer.checks import as_list, check_flag, check_int, short
from nanoinfer.engine.client import NO_SLOTS, LoadedAdapter
from nanoinfer.hints import hints_for
from nanoinfer.requests.admin.adapters import LoadsAdapters
from nanoinfer.requests.settings import AdapterNames
from nanoinfer.weights.adapters.source import AdapterSource


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
    load_inplace: True: the LLM reads the folder anew in each call. Requests that differ in it alone are equal

    Raises a ValueError that names the argument and its value, if it cannot be one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = field(default=False, compare=False)  # it says how to load an adapter, not which one

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

    @classmethod
    def of_call(cls, given: Any, llm: LoadsAdapters, alone: bool) -> CallLoras:
        """Return a call's adapters: see requests.admin.adapters.BringsAdapter."""
        return loras_of(llm).check_requests(llm, given, alone)


GivenLora = LoRARequest | ListLike[LoRARequest | None] | None  # by a user


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
        if one is None:
            continue
        if wanted.setdefault(one.lora_name, one) != one:
            raise ValueError(f"lora_request has {one} and {wanted[one.lora_name]}: must be one of this name")
        if one.load_inplace:
            wanted[one.lora_name] = one
    return wanted


class Brought(NamedTuple):
    """An adapter that a LoRARequest has brought; is_pinned: it may not go to make room."""

    request: LoRARequest
    loaded: LoadedAdapter
    is_pinned: bool = False


class NoRoomError(ValueError):
    """Adapters of requests that run have all room that there is."""


class CallLoras(NamedTuple):
    """What a call asks for by LoRARequests, when it is checked and before it is loaded.

    names: of the adapters
    wanted: by name
    opened: by name; the others are loaded already
    """

    llm: LoadsAdapters
    names: AdapterNames
    wanted: Mapping[str, LoRARequest]
    opened: Mapping[str, AdapterSource]
    argument: str = "lora_request"

    def load(self, used: Collection[str | None] = ()) -> None:
        """Load those that are missing. Raises ValueError if there can be no room. used: adapters of the settings"""
        loras_of(self.llm).load(self.llm, self, used)


class LoRARequests:
    """Knows which adapters of an LLM came by LoRARequests, and which was last used."""

    def __init__(self) -> None:
        self._brought: dict[str, Brought] = {}  # by name, the least recently used one first

    def check_requests(self, llm: LoadsAdapters, given: GivenLora, alone: bool = False) -> CallLoras:
        """Check what a call asks for. Raises ValueError for what cannot be; no adapter comes or goes.

        alone: raise RuntimeError while requests of add_request have not ended
        """
        asked = _listed(given)
        wanted = _by_name(asked)
        most = llm.config.max_adapters
        if wanted and not most:
            raise ValueError(f"lora_request={short(given)}: {NO_SLOTS}")
        if len(wanted) > most:
            raise ValueError(
                f"lora_request has {len(wanted)} adapters, and max_adapters={most}: one call must name at most so many;"
                f" make the LLM with max_adapters={len(wanted)}"
            )
        self._settle(llm)
        new = {name: one.lora_path for name, one in wanted.items() if not self._is_there(llm, one)}
        self._find_leaving(llm, wanted, ())  # before files are read: who waits for room asks often
        opened = {name: llm._open_checked(name, folder, alone) for name, folder in new.items()}
        names = [None if one is None else one.lora_name for one in asked]
        return CallLoras(llm, names[0] if isinstance(given, LoRARequest) else names, wanted, opened)

    def load(self, llm: LoadsAdapters, call: CallLoras, used: Collection[str | None] = ()) -> None:
        """Load what a call asks for, and unload others to make room. Raises ValueError if there can be none.

        used: adapters that the call names otherwise
        """
        if not call.wanted:
            return
        for name in used:
            if name is not None and name not in call.wanted:
                llm.engine.adapters.check_is_loaded(name)
        self._settle(llm)
        for name in self._find_leaving(llm, call.wanted, used):
            llm.unload_adapter(name)
            del self._brought[name]
        for name, wanted in call.wanted.items():
            self._load(llm, wanted, call.opened.get(name))

    def _settle(self, llm: LoadsAdapters) -> None:
        """Forget what somebody has replaced or unloaded since."""
        there = llm.adapters
        self._brought = {name: brought for name, brought in self._brought.items() if there.get(name) is brought.loaded}

    def _is_there(self, llm: LoadsAdapters, wanted: LoRARequest) -> bool:
        """Return whether one need not be loaded. Raises ValueError if another one has its name."""
        name = wanted.lora_name
        known = self._brought.get(name)
        if known is None and name in llm.adapters:
            raise ValueError(
                f"lora_request={wanted}: llm.load_adapter has loaded an adapter of this name; write"
                f" SamplingParams(adapter={name!r}), or take another name"
            )
        return known is not None and known.request == wanted and not wanted.load_inplace

    def _find_leaving(self, llm: LoadsAdapters, wanted: Collection[str], used: Collection[str | None]) -> list[str]:
        """Return which adapters go to make room for a call's, the least recently used ones that may.

        Raises ValueError if these are too few. used: as for `load`
        """
        there, most = llm.adapters, llm.config.max_adapters
        coming = [name for name in wanted if name not in there]
        count = max(0, len(there) + len(coming) - most)
        idle = [
            name
            for name, brought in self._brought.items()
            if not (name in wanted or name in used or brought.is_pinned or llm._requests.of_adapter(name))
        ]
        if count > len(idle):
            staying = ", ".join(repr(name) for name in there if name not in idle)
            raise NoRoomError(
                f"lora_request names {', '.join(map(repr, coming))}: max_adapters={most}, and these must stay:"
                f" {staying}; llm.unload_adapter(name) makes room"
            )
        return idle[:count]

    def _load(self, llm: LoadsAdapters, wanted: LoRARequest, opened: AdapterSource | None) -> None:
        """Load one, and note that it was used. opened: None: it is there"""
        name = wanted.lora_name
        known, before = self._brought.get(name), llm.adapters.get(name)
        try:
            if opened is not None:
                llm._load_opened(opened, "recompute", llm._requests.before_new_weights("recompute", name))
        finally:  # an interrupt may come when it is loaded
            loaded = llm.adapters.get(name)
            if loaded is not None and (opened is None or loaded is not before):
                self._brought.pop(name, None)
                self._brought[name] = Brought(wanted, loaded, known is not None and known.is_pinned)

    def numbers(self, llm: LoadsAdapters) -> set[int]:
        """Return the numbers of the adapters that are loaded."""
        self._settle(llm)
        return {brought.request.lora_int_id for brought in self._brought.values()}

    def unload(self, llm: LoadsAdapters, number: int) -> bool:
        """Unload the adapters of a number; returns whether there was one."""
        names = self._named(llm, number)
        for name in names:
            llm.unload_adapter(name)
        return bool(names)

    def pin(self, llm: LoadsAdapters, number: int) -> bool:
        """Let no other take the place of a number's adapters; returns whether there is one."""
        names = self._named(llm, number)
        for name in names:
            self._brought[name] = self._brought[name]._replace(is_pinned=True)
        return bool(names)

    def _named(self, llm: LoadsAdapters, number: int) -> list[str]:
        """Return the names of the adapters of a number."""
        self._settle(llm)
        return [name for name, brought in self._brought.items() if brought.request.lora_int_id == number]


_known: WeakKeyDictionary[LoadsAdapters, LoRARequests] = WeakKeyDictionary()


def loras_of(llm: LoadsAdapters) -> LoRARequests:
    """Return what is known of an LLM's LoRARequests."""
    return _known.setdefault(llm, LoRARequests())
