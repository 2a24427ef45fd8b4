"""LogitsProcessorGroup: some rows' settings that need logits, side by side on the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from nanoinfer.kernels.drafting.lines import find_lines
from nanoinfer.kernels.sampling.cutoff import Cutoff, find_cutoff
from nanoinfer.kernels.sampling.masks import apply_masks
from nanoinfer.kernels.sampling.thoughts import Forced
from nanoinfer.runner.logits.kept_tokens import count_kept
from nanoinfer.runner.logits.line_values import LineValues
from nanoinfer.runner.logits.lines import EACH, Lines, StepLines, Which
from nanoinfer.runner.logits.logprobs import LogProbs
from nanoinfer.runner.logits.settings import (
    BANS,
    FILTERS,
    MINUS_INFINITY,
    PENALTIES,
    Change,
    Keep,
    Penalty,
    changes_logits,
    filters_of,
    has_mask_alone,
    make_forced,
    make_min_tokens,
    masks_of,
    may_force,
    needs_tokens,
)
from nanoinfer.runner.message import LogitsMessage
from nanoinfer.runner.transfer import upload
from nanoinfer.sampling_params import SamplingParams

ALL = 2**31 - 1  # as top_k: all tokens
LEAST = 1e-30  # as top_p: in float32, less may be 0
NO_FILTERS = SamplingParams()


class LogitsProcessorGroup:
    """Rows that are drawn together.

    row_numbers: [rows] int64, these rows in the batch
    at_once: so many lines are computed together, at most
    needs_float32: whether all of these rows need logits in float32, to change them or to tell of changed ones
    is_drawn: whether any of these rows draws another token than a temperature alone gives
    needs_tokens: whether penalties or bans of any of these rows need the tokens so far
    is_guided: whether these rows, all of them, have masks
    has_masks_alone: whether masks are all that these rows want
    asks, asks_kept, asks_entropy: whether any of these rows asks for log-probabilities, kept_tokens or entropies
    calls_functions: whether any of these rows has logits processors
    has_entropies_alone: whether entropies of the logits as they are, are all that these rows want
    """

    def __init__(
        self, wanted: dict[int, LogitsMessage], needs_float32: bool, at_once: int, device: torch.device
    ) -> None:
        self._numbers, self._messages, self._device = list(wanted), list(wanted.values()), device
        self._params = [message.params for message in self._messages]
        self.row_numbers = self._ints(self._numbers).long()
        self.needs_float32, self.at_once = needs_float32, at_once
        self.is_drawn = any(changes_logits(message) or filters_of(message.params) for message in self._messages)
        self.is_guided = self._params[0].is_guided
        self.needs_tokens = any(map(needs_tokens, self._params))
        self._changes, self._bans = self._make(PENALTIES), self._make(BANS)
        is_early = any(message.suppressed for message in self._messages)
        self._keep_on = make_min_tokens(self._messages, device) if is_early else None
        self._force = make_forced(self._messages, device) if any(map(may_force, self._params)) else None
        self._asked = [i for i, params in enumerate(self._params) if params.logprobs is not None]
        self.asks = bool(self._asked)
        self._asked_rows = self._ints(self._asked)
        self.calls_functions = any(params.logits_processors is not None for params in self._params)
        self._kept = [i for i, params in enumerate(self._params) if params.kept_tokens]
        self.asks_kept = bool(self._kept)
        self._kept_rows = self._ints(self._kept)
        self._measured = [i for i, params in enumerate(self._params) if params.entropy]
        self.asks_entropy = bool(self._measured)
        self._measured_rows = self._ints(self._measured)
        is_plain = not (needs_float32 or self.is_drawn or self.asks or self.asks_kept)
        self.has_entropies_alone = self.asks_entropy and is_plain
        self._masks = self._find_masks()
        self._of_rows: Tensor | None = None  # each row's number among these, see find_lines; made when a step verifies
        self._cutoff_settings = self._find_cutoff_settings()
        self.has_masks_alone = all(map(has_mask_alone, self._messages))
        has_own = self.has_masks_alone and not self.is_guided
        self._own_masks = masks_of(self._messages, device) if has_own else None  # [rows, words]

    def lines(self, step: StepLines, max_guesses: int, masks: Tensor | None) -> Lines:
        """Return the group's lines of a step; max_guesses: of a row; masks: one for each line, if it is guided."""
        places, rows, own = step.places, self.row_numbers, self._own_masks
        if places is None:
            at = rows - step.first_row if step.first_row else rows
            return Lines(at, EACH, own if masks is None else masks)
        num_rows, count = len(places.first), None
        if masks is not None:
            count = len(masks) - len(rows)  # the host has read the guesses
        elif step.has_all:
            count = min(len(places.tokens) - num_rows, max_guesses * len(rows))
        if self._of_rows is None or len(self._of_rows) < num_rows:
            numbers = dict(zip(self._numbers, range(len(rows)), strict=True))
            self._of_rows = self._ints(numbers.get(row, -1) for row in range(num_rows))
        at, whose = find_lines(places, rows, self._of_rows, count)
        return Lines(at, whose, masks if own is None else own[whose])

    def select(self, step: StepLines, lines: Lines) -> Tensor:
        """Return these lines of the logits; a view if they are those of rows that follow each other."""
        first = self._numbers[0]
        if isinstance(lines.rows, slice) and self._numbers == list(range(first, first + len(self._numbers))):
            return step.logits[first - step.first_row :][: len(self._numbers)]
        return step.logits[lines.places]

    def change(
        self, logits: Tensor, temperatures: Tensor, positions: Tensor, tokens: Tensor | None, lines: Lines
    ) -> tuple[Tensor, Tensor]:
        """Return the logits as penalties change them, and those of them that may be drawn: -inf stands for the others.

        logits: [lines, vocabulary], like the results, which are float32 if these rows need that
        temperatures, positions: [lines], for the tokens to be drawn
        tokens: [lines, longest] int32, the tokens so far; None if not needs_tokens
        The first result is the second if nobody asks for kept_tokens.
        """
        if not self.needs_float32:
            return logits, logits
        rows, changed = lines.rows, logits.float()
        for change in self._changes:
            changed = change(changed, positions, tokens, rows)
        penalized = changed if self.asks_kept else None  # else its memory is free
        forced = None if self._force is None else Forced.of(changed, self._force(positions, tokens, rows))
        for ban in self._bans:
            changed = ban(changed, positions, tokens, rows)
        if self._keep_on is not None:
            changed = self._keep_on(changed, positions, tokens, rows)
        if lines.masks is not None:
            changed = apply_masks(changed, lines.masks)
        changed = self.filter(changed, temperatures, rows)
        if forced is not None:
            changed = forced.put(changed)
        return changed if penalized is None else penalized, changed

    def filter(self, logits: Tensor, temperatures: Tensor, rows: Which = EACH) -> Tensor:
        """Return the logits with -inf for the tokens that filters leave out, but for those of the cutoff."""
        for keep, values, is_wanted in self._masks:
            kept = keep(logits, temperatures.where(temperatures > 0, 1), values[rows])
            logits = logits.masked_fill(is_wanted[rows] & ~kept, MINUS_INFINITY)
        return logits

    def find_cutoff(self, logits: Tensor, temperatures: Tensor, rows: Which = EACH) -> Cutoff | None:
        """Return the Cutoff (kernels.sampling); None if it leaves out no token. temperatures: [lines], 0 for greedy."""
        if self._cutoff_settings is None:
            return None
        own = [setting[rows] for setting in self._cutoff_settings]
        return find_cutoff(logits, temperatures.where(temperatures > 0, 1), *own)

    def logprobs(self, logits: Tensor, token_ids: Tensor, lines: Lines, first_row: int) -> list[LogProbs]:
        """Return the log-probabilities asked for, by row from first_row on; logits: [lines, vocabulary].

        Of a verifying step all lines have some.
        """
        if not self.asks:
            return []
        asked, which = self._asking(self._asked, self._asked_rows, lines)
        if len(asked) < len(self._numbers):
            logits, token_ids = logits[which], token_ids[which]
        counts = [self._params[i].logprobs or 0 for i in asked]
        return [LogProbs.of(logits, token_ids, counts, [self._numbers[i] - first_row for i in asked])]

    def kept_tokens(
        self, penalized: Tensor, kept: Tensor, temperatures: Tensor, lines: Lines, first_row: int
    ) -> list[LineValues]:
        """Return the kept_tokens asked for, as `logprobs` does; the tensors are as for count_kept."""
        if not self.asks_kept:
            return []
        asked, which = self._asking(self._kept, self._kept_rows, lines)
        columns = [column[which] for column in count_kept(penalized, kept, temperatures)]
        return [LineValues(columns, [self._numbers[i] - first_row for i in asked])]

    def entropies(self, values: Tensor, lines: Lines, first_row: int) -> list[LineValues]:
        """Return the entropies asked for, as `logprobs` does; values: [lines], of all lines"""
        asked, which = self._asking(self._measured, self._measured_rows, lines)
        return [LineValues([values[which]], [self._numbers[i] - first_row for i in asked])]

    def faults(self, first_row: int) -> dict[int, str]:
        """Return what functions of rows have done wrong, by row from first_row on."""
        messages = zip(self._numbers, self._messages, strict=True)
        return {number - first_row: message.fault for number, message in messages if message.fault is not None}

    def _asking(self, rows: list[int], on_device: Tensor, lines: Lines) -> tuple[list[int], Which]:
        """Return these rows, and their lines; where rows have several lines, all rows and all lines."""
        if isinstance(lines.rows, slice):
            return rows, on_device
        return list(range(len(self._numbers))), EACH

    def _make(self, penalties: list[Penalty]) -> list[Change]:
        """Return the functions of the penalties that at least one row asks for."""
        wanted = [penalty for penalty in penalties if any(map(penalty.is_set, self._params))]
        return [penalty.make(self._messages, self._device) for penalty in wanted]

    def _find_masks(self) -> list[tuple[Keep, Tensor, Tensor]]:
        """Return what each filter that rows want by a mask keeps, its values, and which rows want it, [rows, 1]."""
        masks = []
        for own in FILTERS:
            wanted = [own.is_wanted(params) for params in self._params]
            if own.keep is not None and any(wanted):
                rows = zip(self._params, wanted, strict=True)
                values = [float(getattr(params, own.name)) if is_wanted else 0.0 for params, is_wanted in rows]
                masks.append((own.keep, self._floats(values), self._ints(wanted).bool()[:, None]))
        return masks

    def _find_cutoff_settings(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return top_k, top_p and min_p of the rows; None if no row asks for one."""
        wants = [any(own.keep is None for own in filters_of(params)) for params in self._params]
        if not any(wants):
            return None
        params = [entry if is_wanted else NO_FILTERS for entry, is_wanted in zip(self._params, wants, strict=True)]
        return (
            self._ints([min(entry.top_k, ALL) if entry.top_k > 0 else ALL for entry in params]),
            self._floats([max(entry.top_p, LEAST) for entry in params]),
            self._floats([entry.min_p for entry in params]),
        )

    def _ints(self, values: Iterable[int]) -> Tensor:
        return upload(array("i", values), self._device)

    def _floats(self, values: Iterable[float]) -> Tensor:
        return upload(array("f", values), self._device)
