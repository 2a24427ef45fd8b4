"""LogitsProcessorGroup: some rows' settings that need logits, side by side on the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from nanoinfer.kernels.sampling.cutoff import Cutoff, find_cutoff
from nanoinfer.kernels.sampling.masks import apply_masks
from nanoinfer.kernels.sampling.penalties import penalize
from nanoinfer.runner.logits.kept_tokens import KeptTokens
from nanoinfer.runner.logits.logprobs import LogProbs
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
    is_shaped: whether these rows, all of them, need their logits in float32, to change them or to tell of changed ones
    is_drawn: whether any of these rows draws another token than a temperature alone gives
    is_guided: whether these rows, all of them, have masks
    asks, asks_kept: whether any of these rows asks for log-probabilities, or for kept_tokens
    """

    def __init__(self, wanted: dict[int, LogitsMessage], is_shaped: bool, device: torch.device) -> None:
        self._numbers, self._messages, self._device = list(wanted), list(wanted.values()), device
        self._params = [message.params for message in self._messages]
        self.row_numbers = self._ints(self._numbers).long()
        self.is_shaped = is_shaped
        self.is_drawn = any(message.changes_logits or message.params.has_filters for message in self._messages)
        self.is_guided = self._params[0].is_guided
        self.has_penalties = any(params.has_penalties for params in self._params)
        self._bias = self._find_bias()
        self._suppressed = self._find_suppressed()
        self._asked = [i for i, params in enumerate(self._params) if params.logprobs is not None]
        self.asks = bool(self._asked)
        self._asked_rows = self._ints(self._asked)
        self._kept = [i for i, params in enumerate(self._params) if params.kept_tokens]
        self.asks_kept = bool(self._kept)
        self._kept_rows = self._ints(self._kept)
        self._penalties = self._find_penalties() if self.has_penalties else None
        self._filters = self._find_filters() if any(params.has_filters for params in self._params) else None

    def select(self, x: Tensor, first_row: int) -> Tensor:
        """Return the group's rows of x, which begins with row first_row; a view if these rows follow each other."""
        start = self._numbers[0]
        if self._numbers == list(range(start, start + len(self._numbers))):
            return x[start - first_row : start - first_row + len(self._numbers)]
        return x[self.row_numbers - first_row]

    def shape(self, logits: Tensor, positions: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the logits biased and penalized.

        logits: [rows, vocabulary] float32, like the result; positions: [rows], of the tokens to be drawn
        tokens: [rows, max_model_len] int32, the tokens so far; None if no row has penalties
        """
        if self._bias is not None:
            rows, ids, values = self._bias
            logits = logits.index_put((rows, ids), values, accumulate=True)
        if self._penalties is not None and tokens is not None:
            logits = penalize(logits, tokens.long(), positions, *self._penalties)
        return logits

    def forbid(self, logits: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return the logits with -inf for the tokens that may not be drawn.

        masks: as for kernels.sampling.masks; None if the rows are not guided
        """
        if self._suppressed is not None:
            logits = logits.index_put(self._suppressed, logits.new_full((), MINUS_INFINITY))
        if masks is not None:
            logits = apply_masks(logits, masks)
        return logits

    def find_cutoff(self, logits: Tensor, temperatures: Tensor) -> Cutoff | None:
        """Return the Cutoff (kernels.sampling), None if all tokens may be drawn. temperatures: [rows], 0 for greedy."""
        if self._filters is None:
            return None
        return find_cutoff(logits, temperatures.where(temperatures > 0, 1), *self._filters)

    def logprobs(self, logits: Tensor, token_ids: Tensor, first_row: int) -> list[LogProbs]:
        """Return the log-probabilities asked for, by row from first_row on; logits: [rows, vocabulary]."""
        if not self.asks:
            return []
        counts = [self._params[i].logprobs or 0 for i in self._asked]
        keys = [self._numbers[i] - first_row for i in self._asked]
        if len(keys) < len(logits):
            logits, token_ids = logits[self._asked_rows], token_ids[self._asked_rows]
        return [LogProbs.of(logits, token_ids, counts, keys)]

    def kept_tokens(self, shaped: Tensor, kept: Tensor, temperatures: Tensor, first_row: int) -> list[KeptTokens]:
        """Return the KeptTokens asked for, by row from first_row on; the tensors are as for KeptTokens.of."""
        if not self.asks_kept:
            return []
        keys = [self._numbers[i] - first_row for i in self._kept]
        return [KeptTokens.of(shaped, kept, temperatures, self._kept_rows, keys)]

    def _find_bias(self) -> tuple[Tensor, Tensor, Tensor] | None:
        entries = [
            (row, *entry) for row, params in enumerate(self._params) for entry in (params.logit_bias or {}).items()
        ]
        if not entries:
            return None
        rows, ids, values = zip(*entries, strict=True)
        return self._ints(rows).long(), self._ints(ids).long(), self._floats(values)

    def _find_suppressed(self) -> tuple[Tensor, Tensor] | None:
        """Return the rows and the token ids that must not be drawn in them; None if there are none."""
        entries = [(row, token_id) for row, message in enumerate(self._messages) for token_id in message.suppressed]
        if not entries:
            return None
        rows, ids = zip(*entries, strict=True)
        return self._ints(rows).long(), self._ints(ids).long()

    def _find_penalties(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            self._ints([message.num_prompt_tokens for message in self._messages]),
            self._floats([params.repetition_penalty for params in self._params]),
            self._floats([params.presence_penalty for params in self._params]),
            self._floats([params.frequency_penalty for params in self._params]),
        )

    def _find_filters(self) -> tuple[Tensor, Tensor, Tensor]:
        params = [entry if entry.has_filters else NO_FILTERS for entry in self._params]
        return (
            self._ints([min(entry.top_k, ALL) if entry.top_k > 0 else ALL for entry in params]),
            self._floats([max(entry.top_p, LEAST) for entry in params]),
            self._floats([entry.min_p for entry in params]),
        )

    def _ints(self, values: Iterable[int]) -> Tensor:
        return upload(array("i", values), self._device)

    def _floats(self, values: Iterable[float]) -> Tensor:
        return upload(array("f", values), self._device)
