"""BatchProcessors: a caller's classes that change the logits of all rows, and what they are told of these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.logits_processors import BatchUpdate, MoveDirectionality, name_of
from nanoinfer.runner.message import LogitsMessage
from nanoinfer.runner.results.extras import Extras
from nanoinfer.runner.steps.pending_tokens import PendingTokens
from nanoinfer.sampling_params import SamplingParams

COPIES = 3  # of all rows' logits in float32, while classes change them


class ProcessedRow:
    """A row as classes know it. output: grows by each token that is drawn for it"""

    __slots__ = ("output", "params", "prompt")

    def __init__(self, message: LogitsMessage) -> None:
        token_ids = message.token_ids.tolist()
        self.params: SamplingParams = message.params
        self.prompt, self.output = token_ids[: message.num_prompt_tokens], token_ids[message.num_prompt_tokens :]


class BatchProcessors:
    """The objects of the classes, one each, and the rows of the batch. It moves rows as a column of the RowTable does.

    While a step runs, the host waits for the tokens of the one before, which classes see in their lists.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        """Make the objects. Raises what their constructors raise."""
        classes, told = config.logits_processors or (), _as_vllm(config)
        self._processors: list[Any] = [own(told, device, device.type == "cuda") for own in classes]
        self._rows: list[ProcessedRow | None] = []
        self._removed: list[int] = []
        self._moved: list[tuple[int, int, MoveDirectionality]] = []
        self._added: list[tuple[int, SamplingParams, list[int], list[int]]] = []
        self._updates: list[BatchUpdate] = []  # that no object has seen
        self._drawn: tuple[list[ProcessedRow | None], PendingTokens] | None = None  # of the newest step
        self.working_bytes = COPIES * config.max_num_seqs * config.description.vocab_size * torch.float32.itemsize

    @property
    def has_rows(self) -> bool:
        """Whether there are rows to change: trials and captures have none."""
        return bool(self._rows)

    def move(self, source: int, destination: int) -> None:
        """Put a row in the place of another, which has left."""
        self._end_joins()
        self._removed.append(destination)
        self._moved.append((source, destination, MoveDirectionality.UNIDIRECTIONAL))
        self._rows[destination], self._rows[source] = self._rows[source], None

    def leave(self, num_rows: int) -> None:
        """Forget the rows from this one on. It comes behind all moves of a step."""
        self._end_joins()
        self._removed += [row for row in range(num_rows, len(self._rows)) if self._rows[row] is not None]
        del self._rows[num_rows:]
        self._updates.append(BatchUpdate(num_rows, self._removed, [], self._moved))
        self._removed, self._moved = [], []

    def join(self, message: LogitsMessage) -> None:
        """Add a row behind the others."""
        row = ProcessedRow(message)
        self._added.append((len(self._rows), row.params, row.prompt, row.output))
        self._rows.append(row)

    def change(self, logits: Tensor, rows: slice, extras: Extras) -> Tensor:
        """Return the logits of rows as the classes make them, float32; those of all rows where a class fails are NaN.

        logits: [rows, vocabulary], the model's, which stay
        extras: gets what has failed, by row, and which rows' logits are not finite any more
        """
        self._read()
        updates, first = self._take_updates(), rows.start or 0
        whole = logits.to(torch.float32, copy=True)
        if first:  # the rows before have no draw in this step
            whole = F.pad(whole, (0, 0, first, 0))
        is_greedy = all(row is not None and row.params.is_greedy for row in self._rows)
        fault: str | None = None
        for processor in self._processors:
            try:
                for update in updates:
                    processor.update_state(update)
                if fault is None and not (is_greedy and processor.is_argmax_invariant()):
                    whole = _checked(processor.apply(whole), whole)
            except Exception as error:
                fault = fault or f"logits_processors: {name_of(processor)}: {error or type(error).__name__}"
        if fault is not None:
            extras.faults |= dict.fromkeys(range(len(logits)), fault)
            return whole[first:].fill_(float("nan"))
        changed = whole[first:]
        extras.spoiled = logits.amax(dim=1).isfinite() & ~changed.amax(dim=1).isfinite()
        return changed

    def note(self, rows: slice, drawn: Tensor) -> None:
        """Let the tokens that rows have got come to their lists. drawn: [rows] int32"""
        self._drawn = self._rows[rows], PendingTokens(drawn, Extras())

    def _read(self) -> None:
        """Wait for the tokens of the step before, and put them into the lists."""
        if self._drawn is None:
            return
        rows, pending = self._drawn
        for row, token_id in zip(rows, pending.wait(), strict=True):
            if row is not None and token_id >= 0:
                row.output.append(token_id)
        self._drawn = None

    def _take_updates(self) -> list[BatchUpdate | None]:
        """Return the changes that no object has seen, in their order; a None: there are none."""
        self._end_joins()
        updates, self._updates = self._updates, []
        return [*updates] or [None]

    def _end_joins(self) -> None:
        """Make a change of the rows that have joined, before others come."""
        if self._added:
            self._updates.append(BatchUpdate(len(self._rows), [], self._added, []))
            self._added = []


class NoLogitsError(Exception):
    """A class has returned what are no logits."""


def _checked(result: Any, before: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != before.shape:
        shown = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise NoLogitsError(f"returned {shown}: must return logits of shape {list(before.shape)}")
    return result.to(before.dtype)


def _as_vllm(config: Config) -> SimpleNamespace:
    """Return what constructors read of vLLM's config."""
    vocab_size = config.description.vocab_size
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=config.max_model_len, get_vocab_size=lambda: vocab_size, model=config.model
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=config.max_num_seqs),
        speculative_config=None,
    )
