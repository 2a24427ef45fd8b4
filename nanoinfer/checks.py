"""Checks of arguments: integers, numbers, flags and lists, from whichever library they come."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")
OFF: tuple[Any, ...] = (None, False, "", [], {})  # what any setting of a file has that changes nothing


def as_int(value: Any) -> int | None:
    """Convert any library's integer to Python's. All else gives None, also a boolean or an array of one integer."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (not isinstance(value, Integral) and (_is_boolean(value) or _has_axes(value))):
        return None
    try:
        return operator.index(value)
    except Exception:  # its own conversion may raise anything
        return None


def as_number(value: Any) -> float | None:
    """Convert any library's number to Python's int or float. All else gives None, also a boolean or a string."""
    if type(value) is float:
        return value
    if (integer := as_int(value)) is not None:
        return integer
    try:
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        return None if isinstance(value, int) or not isinstance(value, Real) else float(value)
    except Exception:  # its own conversion may raise anything
        return None


def as_flag(value: Any) -> bool | None:
    """Convert any library's boolean to Python's. All else gives None."""
    if isinstance(value, bool):
        return value
    if _is_boolean(value) and not _has_axes(value):
        with suppress(Exception):  # its own conversion may raise anything
            return bool(value)
    return None


def as_list(value: Any, ordered: bool = True) -> list[Any] | None:
    """List the entries of an iterable. Everything else gives None, also a string or a mapping.

    ordered: a set gives None too, because it has no order

    A tensor or an array gives a list of Python's numbers, or of such lists.
    """
    if type(value) is list:  # mostly
        return value.copy()
    if isinstance(value, (str, bytes, bytearray, memoryview)) or hasattr(value, "keys"):
        return None
    if ordered and isinstance(value, Set):
        return None
    try:
        entries = value.tolist() if hasattr(value, "tolist") else iter(value)
    except Exception:  # its own conversion may raise anything
        return None
    return list(entries) if isinstance(entries, (list, Iterator)) else None


def check_int(name: str, value: Any, low: int, high: int | None = None, what: str = "") -> int:
    """Return the integer. Raises ValueError if it is none or out of range; `what` may describe the range better."""
    integer = as_int(value)
    if integer is None or integer < low or (high is not None and integer > high):
        what = what or (f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}")
        raise ValueError(f"{name}={short(value)}: must be {what}")
    return integer


def check_texts(name: str, value: Any, count: int) -> tuple[str, ...] | None:
    """Return a tuple of so many texts, or an empty one; None stays None. Raises ValueError for anything else."""
    if value is None:
        return None
    texts = as_list(value)
    if texts is None or len(texts) not in (0, count) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name}={short(value)}: must be None, (), or {count} non-empty strings")
    return tuple(map(str, texts))


def ranged(default: T, low: int, high: int | None = None) -> T:
    """Return a dataclass's field of an integer from `low` to `high`, to which `check_ranges` holds it."""
    made: T = field(default=default, metadata={"range": (low, high)})
    return made


def check_ranges(options: Any) -> None:
    """Convert a dataclass's fields that `ranged` has made to Python's own integers; None stays None.

    Raises ValueError as check_int does.
    """
    for option in [option for option in fields(options) if "range" in option.metadata]:
        if (value := getattr(options, option.name)) is not None:
            setattr(options, option.name, check_int(option.name, value, *option.metadata["range"]))


def check_number(name: str, value: Any, low: float, high: float, what: str, other: str = "") -> float:
    """Return the number. Raises ValueError if it is none or out of the range that `what` describes.

    other: says what else it may be, which the caller has looked for
    """
    number = as_number(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}={short(value)}: must be {other}a number {what}")
    return number


def check_flag(name: str, value: Any, what: str = "True or False") -> bool:
    """Return the boolean. Raises ValueError for everything else; `what` may describe what else is allowed."""
    flag = as_flag(value)
    if flag is None:
        raise ValueError(f"{name}={short(value)}: must be {what}")
    return flag


def check_none(name: str, value: Any, why: str) -> None:
    """Raise ValueError for everything but None; `why` says what we lack."""
    if value is not None:
        raise ValueError(f"{name}={short(value)}: must be None: {why}")


def check_adapter(name: str, value: Any) -> str | None:
    """Return an adapter's name; None is the model alone. Raises ValueError for all else, and for an empty name."""
    if value is None:
        return None
    if not isinstance(value, str) or value == "":
        raise ValueError(f"{name}={short(value)}: must be None, or the name of an adapter that is loaded")
    return str.__str__(value)


def check_choice(name: str, value: Any, allowed: list[str], why: str = "") -> str:
    """Return the string. Raises ValueError if it is none of the allowed ones; `why` says more about these."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={short(value)}: must be one of {', '.join(map(repr, allowed))}{why}")
    return str(value)


def check_subset(name: str, value: Any, allowed: list[str]) -> set[str]:
    """Return the strings of a list. Raises ValueError if they are not all among the allowed ones."""
    strings = as_list(value, ordered=False)
    if strings is None or not all(isinstance(string, str) and string in allowed for string in strings):
        raise ValueError(f"{name}={short(value)}: must be a list of any of {', '.join(map(repr, allowed))}")
    return set(strings)


def check_settings(
    where: str,
    settings: Mapping[str, Any],
    read: Collection[str],
    idle: Mapping[str, Collection[Any]] | None = None,
    off: Collection[Any] = OFF,
) -> None:
    """Raise ValueError for a setting of a file that nobody reads and that may change results.

    where: begins the message, such as "model: quantization_config" or the path of a file
    read: the names whose values the caller checks, and those that never change a result, such as a version's
    idle: other known names, and the values with which each changes nothing; those in `off` never do
    off: (None,) or () where also False may change something, as where settings take others' place
    """
    known: dict[str, Collection[Any]] = {**dict.fromkeys(read, ()), **(idle or {})}
    for name, value in settings.items():
        if name in read or any(type(value) is type(each) and value == each for each in off):
            continue
        if name not in known:
            raise ValueError(f"{where} has {name}={short(value)}: nothing reads it here; known are {', '.join(known)}")
        if value not in known[name]:
            allowed = " or ".join(map(repr, known[name])) or "left out"
            raise ValueError(f"{where} has {name}={short(value)}: must be {allowed}")


def short(value: object, most: int = 500) -> str:
    """Show a value in an error message, with at most `most` characters of it."""
    try:
        text = repr(value)
    except Exception:  # repr refuses an integer with thousands of digits, for one
        return f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[:most]}..."


def _is_boolean(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _has_axes(value: Any) -> bool:
    """Whether a value is an array or a tensor with axes, which is no number even with a single entry."""
    return getattr(value, "ndim", 0) != 0
