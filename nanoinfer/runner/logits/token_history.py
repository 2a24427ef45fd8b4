"""TokenHistory: the tokens so far of the rows whose penalties need them."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from nanoinfer.runner.transfer import upload

PLANNED_TOKENS = 4096  # of a row, for which memory is planned; few rows have more
COLUMNS = 1024  # are added at a time


class TokenHistory:
    """On the device, and as wide as the longest of these rows: max_model_len may be many times that."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._tokens = torch.empty((max_num_seqs, 0), dtype=torch.int32, device=device)
        self._num_steps = 0
        # By row, less _num_steps, at most; the token that is drawn next counts:
        self._lengths: dict[int, int] = {}

    def step(self, count: int, longest: int) -> None:
        """Note that each row gets so many tokens, at most; no row has more than `longest` then."""
        if count == 1:
            self._num_steps += 1
        else:
            for row, length in self._lengths.items():
                self._lengths[row] = min(length + count, longest - self._num_steps)

    def join(self, row: int, token_ids: array[int]) -> None:
        """Add a row with its tokens so far."""
        self._lengths[row] = len(token_ids) + 1 - self._num_steps
        self._widen()
        self._tokens[row, : len(token_ids)] = upload(token_ids, self._tokens.device)

    def move(self, source: int, destination: int) -> None:
        """Move a row, if its tokens are known."""
        self.drop(destination)
        if source in self._lengths:
            self._lengths[destination] = self._lengths.pop(source)
            self._tokens[destination] = self._tokens[source]

    def drop(self, row: int) -> None:
        """Forget a row, if its tokens are known."""
        self._lengths.pop(row, None)
        if not self._lengths:
            self._tokens = self._tokens[:, :0].clone()  # the memory goes back

    def of(self, rows: Tensor) -> Tensor:
        """Return the tokens of these rows, [rows, longest] int32; behind its end, a row has any numbers.

        A row that was never added has any, too.
        """
        return self._tokens[rows, : self._longest]

    def write(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Write tokens of these rows; rows: [tokens] int64; positions: [tokens], of these tokens."""
        self._widen()
        last = self._tokens.shape[1] - 1  # a row that is not known may be longer
        self._tokens[rows, positions.long().clamp(0, last)] = token_ids

    @property
    def _longest(self) -> int:
        return max(self._lengths.values(), default=0) + self._num_steps

    def _widen(self) -> None:
        """Make room for the longest row."""
        rows, width = self._tokens.shape
        if self._longest > width:
            wider = self._tokens.new_zeros((rows, COLUMNS * -(-self._longest // COLUMNS)))
            wider[:, :width] = self._tokens
            self._tokens = wider
