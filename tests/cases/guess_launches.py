"""The launches of a verifying step around its model."""

from __future__ import annotations

import torch
from torch import Tensor, empty

from nanoinfer.kernels.drafting.accept import AdvancedRows, accept_guesses_triton
from nanoinfer.kernels.drafting.draft import DraftedRows, last_two_tokens_triton, next_tokens_triton
from nanoinfer.kernels.drafting.gather import RowColumns, gather_rows_triton
from nanoinfer.kernels.drafting.lines import find_lines_triton
from nanoinfer.kernels.drafting.pack import GuessingRows, Places, pack_guesses_triton
from nanoinfer.kernels.drafting.suffix import propose_suffixes_triton
from nanoinfer.kernels.drafting.texts import write_last_tokens_triton

MOST = 8  # guesses of a row
WIDTH, VOCABULARY = 32_768, 151_936


def numbers(*shape: int) -> Tensor:
    return empty(shape, dtype=torch.int32)


def draft_and_accept(rows: int, places: int) -> None:
    """Write the last tokens, propose guesses, pack and accept them, without the model."""
    texts, lengths, members, row = numbers(1024, WIDTH), numbers(1024), numbers(512, 16), numbers(rows)
    write_last_tokens_triton(texts, lengths, row, row, row)
    proposed = propose_suffixes_triton(texts, lengths, members, row, row, MOST)
    drafted = DraftedRows(*[row] * 3)
    last_two_tokens_triton(drafted, texts, row)
    next_tokens_triton(drafted, row, 1)
    packed = Places.room(rows, rows + places, row.device)
    pack_guesses_triton(GuessingRows(*proposed, *[row] * 4), packed, VOCABULARY, are_free=True)
    columns = RowColumns(numbers(rows, 128), empty(rows), empty(rows, dtype=torch.int64), row, row)
    gather_rows_triton(columns, packed.row_of)
    accepted = AdvancedRows(texts, lengths, row, row, row, row)
    find_lines_triton(packed, empty(rows, dtype=torch.int64), row, places)
    accept_guesses_triton(numbers(rows + places), packed, accepted, numbers(rows, MOST + 2))
