"""Values of vLLM's arguments that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from nanoinfer.checks import as_flag, as_int, as_list, as_number

Arguments = Mapping[str, Any]


class Values(NamedTuple):
    """Values that change nothing. text: describes them; has: whether a value is one of them, beside other arguments."""

    text: str
    has: Callable[[Any, Arguments], bool]


def only(*values: Any) -> Values:
    """Return None and these values; those from other libraries count as well."""
    return Values(_listed(["None", *map(repr, values)]), lambda value, _: any(_equal(value, known) for known in values))


def _listed(names: list[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _equal(value: Any, known: Any) -> bool:
    """Whether a value, from any library, is a known one; a boolean is no number."""
    if isinstance(known, bool):
        return as_flag(value) is known
    if isinstance(known, int):
        return as_number(value) == known
    return isinstance(value, str) and value == known


def _is_empty(value: Any, beside: Arguments) -> bool:
    return isinstance(value, (str, Mapping, Set, list, tuple)) and not value


def _is_default(value: Any, beside: Arguments) -> bool:
    """Whether a group of settings is one of vLLM's objects as it is made, or a mapping that sets nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        try:
            return bool(value == type(value)())
        except Exception:  # one that cannot be made without arguments, for one
            return False
    if not isinstance(value, Mapping):
        return _is_empty(value, beside)
    off = only(False, "auto")
    return all(entry is None or off.has(entry, {}) or _is_default(entry, {}) for entry in value.values())


def _is_number(value: Any, beside: Arguments) -> bool:
    number = as_number(value)
    return number is not None and number >= 0


def _is_positive(value: Any, beside: Arguments) -> bool:
    integer = as_int(value)
    return integer is not None and integer > 0


def _starts_as_ours(backend: Any, beside: Arguments) -> bool:
    """Whether ranks start as ours do. With external_launcher each process has a rank, or is a model of its own."""
    if _equal(backend, "external_launcher"):
        sizes = (beside.get("tensor_parallel_size"), beside.get("data_parallel_size"))
        return beside.get("tensor_parallel_group") is not None or all(size is None or _equal(size, 1) for size in sizes)
    return any(_equal(backend, known) for known in ("mp", "uni", "ray"))


def _is_whole_output(kind: Any, beside: Arguments) -> bool:
    """Whether outputs are whole: vLLM's RequestOutputKind is CUMULATIVE, which is 0, or FINAL_ONLY, which is 2."""
    if isinstance(name := getattr(kind, "name", None), str):
        return name in ("CUMULATIVE", "FINAL_ONLY")
    return _equal(kind, 0) or _equal(kind, 2)


def _are_equal_priorities(priority: Any, beside: Arguments) -> bool:
    entries = as_list(priority)
    if entries is None:
        return _equal(priority, 0)
    prompts = as_list(beside.get("prompts", beside.get("messages")))
    is_one = not prompts or as_int(prompts[0]) is not None or (isinstance(prompts[0], Mapping) and "role" in prompts[0])
    count = 1 if is_one or prompts is None else len(prompts)
    return len(entries) == count and all(entry is None or _equal(entry, 0) for entry in entries)


NONE = Values("None", lambda value, _: False)
ANY = Values("any value", lambda value, _: True)
EMPTY = Values("None or empty", _is_empty)
DEFAULT = Values("None, empty or its default", _is_default)
FLAG = Values("None, True or False", lambda value, _: as_flag(value) is not None)
FALSE, TRUE = only(False), only(True)
NUMBER = Values("None or a number of at least 0", _is_number)
POSITIVE = Values("None or a positive integer", _is_positive)
STARTS = Values("None, 'mp', 'uni', 'ray', or 'external_launcher' with one process a model", _starts_as_ours)
WHOLE_OUTPUT = Values("None, CUMULATIVE or FINAL_ONLY", _is_whole_output)
BEST_OF = Values("None or n", lambda value, beside: as_int(value) == as_int(beside.get("n", 1)))
BEAM_WIDTH = Values("None or beam_width", lambda value, beside: as_int(value) == as_int(beside.get("beam_width", 0)))
EQUAL_PRIORITIES = Values("None or 0, for all prompts or one for each", _are_equal_priorities)
