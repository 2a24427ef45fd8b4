"""Hints: the error for an unknown argument says what to write here instead.

What other libraries call things, and what that is here, a Vocabulary tells: nanoinfer/__init__.py brings one.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from nanoinfer.checks import short


class Vocabulary(Protocol):
    """What other libraries call things. taker: the name by which users call a function or a class of ours"""

    def take(self, taker: str, name: str, value: Any, beside: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return our arguments in place of one that we lack, none if it changes nothing; None: it is unknown.

        beside: all arguments of the call
        Raises ValueError for a value that cannot be had here.
        """

    def our_values(self, taker: str, named: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of ours, with our names for values that others name otherwise."""

    def meant(self, taker: str, name: str) -> str | None:
        """Return our argument for another's, or a sentence that says what to do; None if there is neither."""

    def reason_for(self, name: str) -> str | None:
        """Return what to know of an argument that some call of another library takes; None if none does."""

    def changes_nothing(self, taker: str) -> Collection[str]:
        """Return the arguments that `take` accepts only at values that change no result."""

    def attribute(self, owner: Any, name: str) -> Any:
        """Return an attribute that an LLM of ours lacks. Raises AttributeError, with what to do instead."""


_spoken: list[Vocabulary] = []  # empty, or one

SURE, LIKELY = 0.8, 0.6  # how much alike two names are, from 0 to 1, as difflib measures it

_takers: dict[str, list[str]] = {}  # our argument -> the calls that take it

T = TypeVar("T", bound=Callable[..., Any])


def speak(vocabulary: Vocabulary) -> None:
    """From now on, understand what a vocabulary knows."""
    _spoken[:] = [vocabulary]


def vocabulary() -> Vocabulary:
    """Return what `speak` got."""
    (spoken,) = _spoken
    return spoken


def hints_for(taker: str, its_own: Collection[str] | None = None) -> Callable[[T], T]:
    """Decorate a function or a class, so that it refuses unknown arguments by a ValueError with a hint.

    taker: the name by which users call the function or the class
    its_own: the arguments for which other calls point to it; None: all

    Where the vocabulary knows an argument, ours take its place. A function that passes other arguments on refuses only
    those that are clearly meant for us.
    """

    def decorate(call: T) -> T:
        function = cast(Any, call).__init__ if isinstance(call, type) else call
        parameters = inspect.signature(function).parameters.values()
        own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]  # no user passes these
        known = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
        taken = {*own, *known}
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in known if its_own is None else its_own:
            _takers.setdefault(name, []).append(taker)

        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            if not named:
                return function(*args)
            words = vocabulary()
            foreign = [name for name in named if name not in taken]
            beside = {**dict(zip(["self", *known], args, strict=False)), **named} if foreign else {}
            for name in foreign:
                if (ours := words.take(taker, name, named[name], beside)) is not None:
                    _replace(name, ours, named)
                elif hint := _hint(taker, name, known, is_open):
                    raise ValueError(f"unknown argument {name!r}: {hint}")
            return function(*args, **words.our_values(taker, named))

        if not isinstance(call, type):
            return cast(T, checked)
        cast(Any, call).__init__ = checked
        return call

    return decorate


def _replace(name: str, ours: Mapping[str, Any], named: dict[str, Any]) -> None:
    """Put our arguments in place of one; raises ValueError if the caller has given them, too."""
    value = named.pop(name)
    for own, meant in ours.items():
        if named.get(own) is not None:
            raise ValueError(f"{name}={short(value)}: must be left out beside {own}={short(named[own])}")
        named[own] = meant


def _hint(taker: str, name: str, known: list[str], is_open: bool) -> str | None:
    """Say what to write instead of an unknown argument; None if it may be one to pass on."""
    meant = vocabulary().meant(taker, name)
    if not is_open and meant is None and (reason := vocabulary().reason_for(name)):
        return reason
    ours = name if meant is None else meant
    if near := difflib.get_close_matches(ours, known, n=1, cutoff=SURE):
        return f"did you mean {near[0]!r}?"
    if ours in _takers:
        return f"write {' or '.join(f'{taker}({ours}=...)' for taker in _takers[ours])}"
    if meant is not None or is_open:
        return meant
    return nearest(name, known)


def nearest(name: str, known: Sequence[str]) -> str:
    """Say which known name may be meant by an unknown one, or which are known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=LIKELY)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
