"""Checks of arguments: what counts as an integer, a number, a flag or a list, whichever library it comes from."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Set
from contextlib import suppress
from numbers import Integral, Real
from typing import Any


def as_int(value: Any) -> int | None:
    """An integer of any library as Python's, None for everything else: for booleans, and for arrays of one integer."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (not isinstance(value, Integral) and (_is_boolean(value) or _has_axes(value))):
        return None
    try:
        return operator.index(value)
    except Exception:  # whatever its own conversion raises
        return None


def as_number(value: Any) -> float | None:
    """A number of any library as Python's int or float, None for everything else: for booleans, and for strings."""
    if type(value) is float:
        return value
    if (integer := as_int(value)) is not None:
        return integer
    try:
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        return None if isinstance(value, int) or not isinstance(value, Real) else float(value)
    except Exception:  # whatever its own conversion raises
        return None


def as_list(value: Any, ordered: bool = True) -> list[Any] | None:
    """The entries of what can be iterated, None for everything else: for strings, and for mappings.

    ordered: for sets, too; tensors and arrays give lists of Python's numbers, or of such lists
    """
    if isinstance(value, (str, bytes, bytearray, memoryview)) or hasattr(value, "keys"):
        return None
    if ordered and isinstance(value, Set):
        return None
    try:
        entries = value.tolist() if hasattr(value, "tolist") else iter(value)
    except Exception:  # whatever its own conversion raises
        return None
    return list(entries) if isinstance(entries, (list, Iterator)) else None


def check_int(name: str, value: Any, low: int, high: int | None = None, what: str = "") -> int:
    """The integer. Raises ValueError when it is none, or not in the range, which `what` may tell better."""
    integer = as_int(value)
    if integer is None or integer < low or (high is not None and integer > high):
        what = what or (f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}")
        raise ValueError(f"{name}={short(value)}: must be {what}")
    return integer


def check_number(name: str, value: Any, low: float, high: float, what: str) -> float:
    """The number. Raises ValueError when it is none, or not in the range, which `what` tells."""
    number = as_number(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}={short(value)}: must be a number {what}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """A boolean of any library as Python's. Raises ValueError for everything else."""
    if isinstance(value, bool):
        return value
    if _is_boolean(value) and not _has_axes(value):
        with suppress(Exception):  # whatever its own conversion raises
            return bool(value)
    raise ValueError(f"{name}={short(value)}: must be True or False")


def check_choice(name: str, value: Any, allowed: list[str]) -> str:
    """The string. Raises ValueError when it is none of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={short(value)}: must be one of {', '.join(map(repr, allowed))}")
    return str(value)


def short(value: object, most: int = 500) -> str:
    """A value as an error shows it."""
    try:
        text = repr(value)
    except Exception:  # such as of an integer with thousands of digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[:most]}..."


def _is_boolean(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _has_axes(value: Any) -> bool:
    """An array or a tensor of one entry is not that entry."""
    return getattr(value, "ndim", 0) != 0
