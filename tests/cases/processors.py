"""Logits processors that tests use, in a module of their own: other processes import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nanoinfer.logits_processors import BatchUpdate, LogitsProcessor, MoveDirectionality

MOST = 300  # tokens that `cap` leaves
MINUS_INFINITY = float("-inf")


def ban_newest(token_ids: list[int], logits: Tensor) -> Tensor:
    """Leave out the three newest tokens."""
    changed = logits.clone()
    changed[token_ids[-3:]] = MINUS_INFINITY
    return changed


def boost(bias: Mapping[int, float], prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    for token_id, value in bias.items():
        logits[token_id] += value
    return logits


def cap(token_ids: list[int], logits: Tensor) -> Tensor:
    logits[MOST:] = MINUS_INFINITY
    return logits


def record(seen: list[Any], prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    seen.append((prompt, output, tuple(logits.shape)))
    return logits


class Rows(LogitsProcessor):
    """Follows the rows of a batch, and holds each change to the interface's promises."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.most, self.size = vllm_config.scheduler_config.max_num_seqs, 0
        self.rows: dict[int, tuple[Any, list[int], list[int]]] = {}

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.rows[index]
        for index, *row in batch_update.added:
            assert index not in self.rows
            self.rows[index] = (row[0], row[1], row[2])
        for source, destination, direction in batch_update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            assert destination not in self.rows
            self.rows[destination] = self.rows.pop(source)
        self.size = batch_update.batch_size
        assert sorted(self.rows) == list(range(self.size))
        assert self.size <= self.most

    def is_argmax_invariant(self) -> bool:
        return False


class Bias(Rows):
    """Adds a bias to all rows."""

    def apply(self, logits: Tensor) -> Tensor:
        assert len(logits) == self.size
        logits[:, 70] += 3.0
        return logits


class Target(Rows):
    """Draws the token that a request's extra_args name, where they name one."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        target = (sampling_params.extra_args or {}).get("target")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target={target!r}: must be a token")

    def apply(self, logits: Tensor) -> Tensor:
        for index, (params, _, _) in self.rows.items():
            if (target := (params.extra_args or {}).get("target")) is not None:
                own = logits[index, target].clone()
                logits[index] = MINUS_INFINITY
                logits[index, target] = own
        return logits


class Mirror(Rows):
    """Leaves out the three newest tokens, as ban_newest does, by the lists that grow."""

    def apply(self, logits: Tensor) -> Tensor:
        for index, (_, prompt, output) in self.rows.items():
            logits[index, (prompt + output)[-3:]] = MINUS_INFINITY
        return logits


class Broken(Rows):
    """Fails as a request's extra_args say, or all of them."""

    def apply(self, logits: Tensor) -> Tensor:
        for index, (params, _, _) in self.rows.items():
            how = (params.extra_args or {}).get("how")
            if how == "nan":
                logits[index] = float("nan")
            elif how == "shape":
                return logits[:, :5]
            elif how == "raises":
                raise IndexError("no such row")
        return logits
