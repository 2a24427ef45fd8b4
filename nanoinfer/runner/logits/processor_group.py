"""LogitsProcessorGroup: some rows' settings that need logits, side by side on the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from nanoinfer.kernels.sampling.cutoff import Cutoff, find_cutoff
from nanoinfer.kernels.sampling.masks import apply_masks
from nanoinfer.runner.logits.kept_tokens import KeptTokens
from nanoinfer.runner.logits.logprobs import LogProbs
from nanoinfer.runner.logits.settings import (
    BANS,
    FILTERS,
    PENALTIES,
    Change,
    Keep,
    Penalty,
    changes_logits,
    filters_of,
    needs_tokens,
)
from nanoinfer.runner.message import LogitsMessage
from nanoinfer.runner.transfer import upload
from nanoinfer.sampling_params import SamplingParams

MINUS_INFINITY = float("-inf")
ALL = 2**31 - 1  # as top_k: all tokens
LEAST = 1e-30  # as top_p: in float32, less may be 0
NO_FILTERS = SamplingParams()


class LogitsProcessorGroup:
    """Rows that are drawn together.

    row_numbers: [rows] int64, these rows in the batch
    needs_float32: whether all of these rows need logits in float32, to change them or to tell of changed ones
    is_drawn: whether any of these rows draws another token than a temperature alone gives
    needs_tokens: whether penalties or bans of any of these rows need the tokens so far
    is_guided: whether these rows, all of them, have masks
    asks, asks_kept: whether any of these rows asks for log-probabilities, or for kept_tokens
    """

    def __init__(self, wanted: dict[int, LogitsMessage], needs_float32: bool, device: torch.device) -> None:
        self._numbers, self._messages, self._device = list(wanted), list(wanted.values()), device
        self._params = [message.params for message in self._messages]
        self.row_numbers = self._ints(self._numbers).long()
        self.needs_float32 = needs_float32
        self.is_drawn = any(changes_logits(message) or filters_of(message.params) for message in self._messages)
        self.is_guided = self._params[0].is_guided
        self.needs_tokens = any(map(needs_tokens, self._params))
        self._changes, self._bans = self._make(PENALTIES), self._make(BANS)
        self._suppressed = self._find_suppressed()
        self._asked = [i for i, params in enumerate(self._params) if params.logprobs is not None]
        self.asks = bool(self._asked)
        self._asked_rows = self._ints(self._asked)
        self._kept = [i for i, params in enumerate(self._params) if params.kept_tokens]
        self.asks_kept = bool(self._kept)
        self._kept_rows = self._ints(self._kept)
        self._masks = self._find_masks()
        self._cutoff_settings = self._find_cutoff_settings()

    def select(self, x: Tensor, first_row: int) -> Tensor:
        """Return the group's rows of x, which begins with row first_row; a view if these rows follow each other."""
        start = self._numbers[0]
        if self._numbers == list(range(start, start + len(self._numbers))):
            return x[start - first_row : start - first_row + len(self._numbers)]
        return x[self.row_numbers - first_row]

    def penalize(self, logits: Tensor, positions: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the logits as penalties change them.

        logits: [rows, vocabulary] float32, like the result; positions: [rows], of the tokens to be drawn
        tokens: [rows, longest] int32, the tokens so far; None if not needs_tokens
        """
        for change in self._changes:
            logits = change(logits, positions, tokens)
        return logits

    def ban(self, logits: Tensor, positions: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the logits with -inf for the tokens that bans forbid; the arguments are as for `penalize`."""
        for ban in self._bans:
            logits = ban(logits, positions, tokens)
        return logits

    def forbid(self, logits: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return the logits with -inf for the tokens that min_tokens or a form forbids.

        masks: as for kernels.sampling.masks; None if the rows are not guided
        """
        if self._suppressed is not None:
            logits = logits.index_put(self._suppressed, logits.new_full((), MINUS_INFINITY))
        if masks is not None:
            logits = apply_masks(logits, masks)
        return logits

    def filter(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Return the logits with -inf for the tokens that filters leave out, but for those of the cutoff."""
        for keep, values, is_wanted in self._masks:
            kept = keep(logits, temperatures.where(temperatures > 0, 1), values)
            logits = logits.masked_fill(is_wanted & ~kept, MINUS_INFINITY)
        return logits

    def find_cutoff(self, logits: Tensor, temperatures: Tensor) -> Cutoff | None:
        """Return the Cutoff (kernels.sampling); None if it leaves out no token. temperatures: [rows], 0 for greedy."""
        if self._cutoff_settings is None:
            return None
        return find_cutoff(logits, temperatures.where(temperatures > 0, 1), *self._cutoff_settings)

    def logprobs(self, logits: Tensor, token_ids: Tensor, first_row: int) -> list[LogProbs]:
        """Return the log-probabilities asked for, by row from first_row on; logits: [rows, vocabulary]."""
        if not self.asks:
            return []
        counts = [self._params[i].logprobs or 0 for i in self._asked]
        keys = [self._numbers[i] - first_row for i in self._asked]
        if len(keys) < len(logits):
            logits, token_ids = logits[self._asked_rows], token_ids[self._asked_rows]
        return LogProbs.by_count(logits, token_ids, counts, keys)

    def kept_tokens(self, penalized: Tensor, kept: Tensor, temperatures: Tensor, first_row: int) -> list[KeptTokens]:
        """Return the KeptTokens asked for, by row from first_row on; the tensors are as for KeptTokens.of."""
        if not self.asks_kept:
            return []
        keys = [self._numbers[i] - first_row for i in self._kept]
        return [KeptTokens.of(penalized, kept, temperatures, self._kept_rows, keys)]

    def _make(self, penalties: list[Penalty]) -> list[Change]:
        """Return the functions of the penalties that at least one row asks for."""
        wanted = [penalty for penalty in penalties if any(map(penalty.is_set, self._params))]
        return [penalty.make(self._messages, self._device) for penalty in wanted]

    def _find_suppressed(self) -> tuple[Tensor, Tensor] | None:
        """Return the rows and the token ids that must not be drawn in them; None if there are none."""
        entries = [(row, token_id) for row, message in enumerate(self._messages) for token_id in message.suppressed]
        if not entries:
            return None
        rows, ids = zip(*entries, strict=True)
        return self._ints(rows).long(), self._ints(ids).long()

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
