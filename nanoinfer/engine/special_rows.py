"""SpecialRows: the rows whose requests ask for more than a temperature.

The captured step draws for every row. For these it is done again, from logits that are changed as the request wants;
the other rows do not notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.engine.message import DecodeMessage, PrefillMessage, SpecialMessage
from nanoinfer.kernels.logits import keep_likely, penalize
from nanoinfer.kernels.sample import sample
from nanoinfer.utils.tensor_parallel import TensorParallel

ROWS_AT_ONCE = 64  # each takes about ten times its logits in float32


@dataclass
class LogProbs:
    """The log-probabilities of some tokens, each with the most likely ones of its place.

    token_ids: [tokens, 1 + most] int32, the token itself first; values: [tokens, 1 + most] float32
    counts: how many of the most likely ones each is to be told with
    keys: whose each is
    """

    token_ids: Tensor
    values: Tensor
    counts: list[int]
    keys: list[int]

    @staticmethod
    def of(logits: Tensor, token_ids: Tensor, counts: list[int], keys: list[int]) -> LogProbs:
        """logits: [tokens, vocabulary] float32; token_ids: [tokens]."""
        values = logits.log_softmax(dim=1)
        top_values, top_ids = values.topk(min(max(counts), logits.shape[1]), dim=1)
        ids = token_ids[:, None].long()
        return LogProbs(
            torch.cat([ids, top_ids], dim=1).int(),
            torch.cat([values.gather(1, ids), top_values], dim=1),
            counts,
            keys,
        )

    def to_host(self) -> LogProbs:
        """The same in host memory, where it arrives with the stream's next event."""
        return LogProbs(to_host(self.token_ids), to_host(self.values), self.counts, self.keys)

    def entries(self) -> Iterator[tuple[int, dict[int, float]]]:
        """Each one's key, and its log-probabilities by token id."""
        rows = zip(self.keys, self.counts, self.token_ids.tolist(), self.values.tolist(), strict=True)
        for key, count, ids, values in rows:
            yield key, dict(zip(ids[: count + 1], values[: count + 1], strict=True))


class SpecialRows:
    """Which rows are special and how, and the tokens so far of those for which they count.

    rows: row -> what its request wants
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, max_model_len: int, tp: TensorParallel) -> None:
        self.rows: dict[int, SpecialMessage] = {}
        self.vocab_size = vocab_size
        self.tp = tp
        self._history_shape = (max_num_seqs, max_model_len)
        self._history: Tensor | None = None  # [rows, max_model_len] int32, made when the first row needs it

    def update(self, message: PrefillMessage | DecodeMessage) -> None:
        """Follow the rows to where the host has them."""
        for source, destination in message.moves:
            self.rows.pop(destination, None)
            if source in self.rows:
                self.rows[destination] = self.rows.pop(source)
                if self._history is not None:
                    self._history[destination] = self._history[source]
        for row in [row for row in self.rows if row >= message.num_rows]:
            del self.rows[row]

    def join(self, row: int, special: SpecialMessage, device: torch.device) -> None:
        """Take in a row."""
        self.rows[row] = special
        if special.params.has_penalties:
            if self._history is None:
                self._history = torch.zeros(self._history_shape, dtype=torch.int32, device=device)
            tokens = torch.tensor(special.token_ids, dtype=torch.int32)
            self._history[row, : len(tokens)] = tokens.to(device)

    def redraw(
        self, first_row: int, logits: Tensor, token_ids: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
    ) -> list[LogProbs]:
        """Draw again for the special ones of the rows from first_row on.

        logits: [rows, this rank's token ids]; temperatures, seeds, positions: [rows], see kernels.sample
        token_ids: [rows] int32, what was drawn for all, which is replaced for the special ones
        Returns the log-probabilities that were asked for, by place among these rows.
        """
        logprobs: list[LogProbs] = []
        rows = iter(sorted(row for row in self.rows if row >= first_row))
        while some := list(islice(rows, ROWS_AT_ONCE)):
            row = torch.tensor(some, device=logits.device)
            at = row - first_row
            group = SpecialGroup([self.rows[row] for row in some], temperatures[at], positions[at])
            raw = self.gather_logits(logits[at])
            shaped = group.shape(raw, None if self._history is None else self._history[row])
            drawn = sample(shaped, group.temperatures, seeds[at], group.positions)[1]
            token_ids[at] = drawn
            if self._history is not None:
                self._history[row, group.positions.long()] = drawn
            logprobs += group.logprobs(raw, drawn, [row - first_row for row in some])
        return logprobs

    def gather_logits(self, logits: Tensor) -> Tensor:
        """[rows, this rank's token ids] to [rows, vocabulary] float32 on every rank."""
        share = -(-self.vocab_size // self.tp.size)  # see VocabParallelEmbedding: the last rank may have fewer
        padded = F.pad(logits, (0, share - logits.shape[1]))
        return self.tp.all_gather(padded).transpose(0, 1).flatten(1)[:, : self.vocab_size].float()


class SpecialGroup:
    """Some special rows, their settings side by side on the device."""

    def __init__(self, specials: list[SpecialMessage], temperatures: Tensor, positions: Tensor) -> None:
        self.specials = specials
        self.temperatures = temperatures
        self.positions = positions

    def shape(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        """The logits to draw from: biased, penalized, filtered. [rows, vocabulary] float32, as is what returns.

        tokens: [rows, max_model_len] int32, those so far, if any row needs them
        """
        params = [special.params for special in self.specials]
        logits = self._suppress(self._bias(logits))
        if tokens is not None and any(entry.has_penalties for entry in params):
            logits = penalize(
                logits,
                tokens.long(),
                self.positions,
                self._column([special.num_prompt_tokens for special in self.specials]),
                self._column([entry.repetition_penalty for entry in params]),
                self._column([entry.presence_penalty for entry in params]),
                self._column([entry.frequency_penalty for entry in params]),
            )
        if any(entry.has_filters for entry in params):
            vocabulary = logits.shape[1]
            scale = torch.where(self.temperatures > 0, self.temperatures, 1)
            kept = keep_likely(
                logits / scale[:, None],
                self._column([min(entry.top_k, vocabulary) if entry.top_k > 0 else vocabulary for entry in params]),
                self._column([entry.top_p for entry in params]),
                self._column([entry.min_p for entry in params]),
            )
            logits = logits.masked_fill(kept == float("-inf"), float("-inf"))
        return logits

    def logprobs(self, logits: Tensor, token_ids: Tensor, keys: list[int]) -> list[LogProbs]:
        """Those of the tokens whose requests ask for them."""
        asked = [i for i, special in enumerate(self.specials) if special.params.logprobs is not None]
        if not asked:
            return []
        counts = [self.specials[i].params.logprobs or 0 for i in asked]
        return [LogProbs.of(logits[asked], token_ids[asked], counts, [keys[i] for i in asked])]

    def _bias(self, logits: Tensor) -> Tensor:
        biases = [
            (row, token_id, bias)
            for row, special in enumerate(self.specials)
            for token_id, bias in (special.params.logit_bias or {}).items()
        ]
        if not biases:
            return logits
        rows, ids, values = (self._column(list(column)) for column in zip(*biases, strict=True))
        return logits.index_put((rows, ids), values, accumulate=True)

    def _suppress(self, logits: Tensor) -> Tensor:
        """No token ends a request before its least length."""
        pairs = [(row, token_id) for row, special in enumerate(self.specials) for token_id in special.suppressed]
        if not pairs:
            return logits
        least = self._column([special.num_prompt_tokens + special.params.min_tokens for special in self.specials])
        rows, ids = (self._column(list(column)) for column in zip(*pairs, strict=True))
        values = logits[rows, ids].masked_fill(self.positions[rows] < least[rows], float("-inf"))
        return logits.index_put((rows, ids), values)

    def _column(self, values: list[int] | list[float]) -> Tensor:
        return torch.tensor(values, device=self.positions.device)


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, for which the host does not wait."""
    if not x.is_cuda:
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
