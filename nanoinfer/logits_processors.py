"""Logits processors of callers: functions for one row, and classes for a whole batch, with vLLM's interface.

A class gets each change of the batch by update_state, and then the logits of all rows by apply. The rows of a batch are
numbered from 0. An entry of `added` has the row's number, its SamplingParams, its prompt's tokens, and the list of its
output's tokens, which grows as they come. Changes are made in the order removed, added, moved.
"""

from __future__ import annotations

import inspect
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from typing import Any

from torch import Tensor

from nanoinfer.checks import as_list, short

Function = Callable[..., Tensor]
METHODS = ("update_state", "apply", "is_argmax_invariant")


class MoveDirectionality(Enum):
    """Whether a row takes another's place, or the two change places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """What has changed in a batch.

    batch_size: its rows from now on
    removed: rows that have left; added: (row, params, prompt's tokens, output's tokens); moved: (from, to, direction)
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, Any, list[int], list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Changes the logits of a batch. Classes that have these methods need not inherit from it."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for settings of a request that cannot work."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """vllm_config: has scheduler_config.max_num_seqs, model_config.max_model_len and .get_vocab_size().

        device: where the logits are; is_pin_memory: whether memory of the host that is copied there should be pinned
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take what has changed in the batch; None: nothing has."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits, [rows, vocabulary] float32, as they are to be; they may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest: then `apply` is left out where all rows are greedy."""


def name_of(processor: Any) -> str:
    """Return the name of a function or class, or of an object's class."""
    return str(getattr(processor, "__name__", type(processor).__name__))


def num_parameters(function: Function) -> int | None:
    """Return how many positional arguments a function needs; None: nobody can tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    known = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in known if p.default is p.empty])


def check_functions(name: str, value: Any) -> tuple[Function, ...] | None:
    """Return a request's functions; None: it has none. Raises ValueError for anything else."""
    functions = [] if value is None else as_list(value)
    what = "functions of (token_ids, logits), or of (prompt, output, logits)"
    if functions is None:
        raise ValueError(f"{name}={short(value)}: must be None, or a list of {what}")
    for function in functions:
        if not callable(function) or isinstance(function, type) or num_parameters(function) not in (2, 3, None):
            raise ValueError(f"{name} has {short(function)}: must be a list of {what}")
    return tuple(functions) or None


def check_pickles(name: str, functions: Sequence[Any], where: str) -> None:
    """Raise ValueError for a function that cannot go to another process; where: the option that asks for those."""
    for index, function in enumerate(functions):
        try:
            pickle.dumps(function)
        except Exception as error:
            raise ValueError(
                f"{name}[{index}] is {name_of(function)}: must pickle, because {where} has other processes, and does"
                f" not: {error}; a function of a module does"
            ) from None


def check_classes(name: str, value: Any) -> tuple[type, ...]:
    """Return the classes of an option, of which each is a class or "module:Class". Raises ValueError for others."""
    entries = [] if value is None else as_list(value)
    if entries is None:
        raise ValueError(f'{name}={short(value)}: must be None, or a list of classes or of "module:Class"')
    return tuple(_class_of(name, entry) for entry in entries)


def _class_of(name: str, entry: Any) -> type:
    found = entry
    if isinstance(entry, str):
        module, _, path = entry.partition(":")
        try:
            found = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f'{name} has {entry!r}: must be "module:Class": {error}') from None
    lacking = [method for method in METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or lacking:
        raise ValueError(f"{name} has {short(entry)}: must be a class with the methods {', '.join(METHODS)}")
    return found
