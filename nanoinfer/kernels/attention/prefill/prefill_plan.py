"""Which new tokens of a prefill step attend by cuDNN, and which by our own kernel.

cuDNN multiplies faster than our kernel. But it prepares each pair of lengths anew, which takes long. So it gets
stretches of tokens, of at most LONGEST, that begin and end at multiples of UNIT. Our kernel gets the pieces before and
after these.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

UNIT = 2048  # tokens
LONG = 2 * UNIT  # new tokens of a sequence, among which lies a whole unit; with fewer, the kernel does them all
LONGEST = 8 * UNIT  # tokens


class Stretch(NamedTuple):
    """Neighbouring new tokens of one sequence, for cuDNN."""

    row: int  # the sequence's, in the block tables
    first: int  # the place of the first token among the packed queries
    position: int  # of the first token in its sequence, a multiple of UNIT
    length: int  # a multiple of UNIT, at most LONGEST


@dataclass(slots=True)
class Division:
    """A prefill step's new tokens, divided into pieces, as if each were a sequence of its own.

    rows: each piece's row in the block tables
    cu_query_lens: where each piece's queries begin, and the last one's end
    context_lens: how many tokens the context of each piece has, its queries included; 0: the piece is a stretch, which
        the kernel leaves out
    max_query_len: the most queries of a piece that is no stretch; 0: all are stretches
    """

    stretches: list[Stretch]
    rows: array[int]
    cu_query_lens: array[int]
    context_lens: array[int]
    max_query_len: int


@dataclass(slots=True)
class DividedPrefill:
    """A Division whose pieces are on the device. cu_query_lens: [pieces + 1]; context_lens: [pieces]; all int32"""

    stretches: list[Stretch]
    max_query_len: int
    cu_query_lens: Tensor
    context_lens: Tensor


def divide(query_lens: Iterable[int], context_lens: Iterable[int]) -> Division | None:
    """Divide a step's new tokens; None: no sequence has a long stretch of them.

    query_lens, context_lens: how many new tokens each sequence has, and how many tokens in all
    """
    division = Division([], array("i"), array("i", [0]), array("i"), 0)
    for row, (queries, end) in enumerate(zip(query_lens, context_lens, strict=True)):
        start = end - queries
        begin, stop = -(-start // UNIT) * UNIT, end // UNIT * UNIT
        if queries < LONG:
            begin = stop = end
        ends = begin, *range(begin + LONGEST, stop, LONGEST), stop, end
        for piece_start, piece_end in pairwise((start, *ends)):
            if piece_start == piece_end:
                continue
            length, first = piece_end - piece_start, division.cu_query_lens[-1]
            is_stretch = begin <= piece_start < stop
            if is_stretch:
                division.stretches.append(Stretch(row, first, piece_start, length))
            else:
                division.max_query_len = max(division.max_query_len, length)
            division.rows.append(row)
            division.cu_query_lens.append(first + length)
            division.context_lens.append(0 if is_stretch else piece_end)
    return division if division.stretches else None
