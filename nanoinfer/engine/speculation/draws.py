"""Draws: what a step has drawn for each of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanoinfer.engine.sequence import Sequence
from nanoinfer.kernels.drafting.accept import NOTHING

NO_FAULT = 0


@dataclass(frozen=True)
class Draws:
    """The tokens of a step. Numbers below 0 are faults, as engine.results.faults knows them.

    firsts: each sequence's first token or its fault; NO_FAULT where it had ended on the device
    tokens: what each sequence is to get, several in a list, none that is a fault
    lasts: the fault behind a list's tokens, or NO_FAULT
    num_tokens: in all, those of sequences that have ended included
    num_first: the sequences that get a token and had not ended; num_proposed: the guesses that these had
    proposed: the guesses of each sequence; None: the step verified none
    """

    firsts: list[int]
    tokens: list[Any]
    lasts: list[int]
    num_tokens: int
    num_first: int = 0
    num_proposed: int = 0
    proposed: list[int] | None = None


def read_guesses(seqs: list[Sequence], guided: list[Sequence], told: list[int]) -> list[list[int]]:
    """Return the guesses of each guided one among a step's sequences; told: see Verifier.guesses."""
    own, count = set(guided), len(seqs)
    firsts, counts, tokens = told[:count], told[count : 2 * count], told[2 * count :]
    rows = zip(seqs, firsts, counts, strict=True)
    return [tokens[first : first + number] for seq, first, number in rows if seq in own]


def read_plain(drawn: list[int]) -> Draws:
    """Return what a plain step says; drawn: each sequence's token or its fault."""
    return Draws(drawn, drawn, [], len(drawn))


def read_verified(seqs: list[Sequence], drawn: list[list[int]]) -> Draws:
    """Return what a step says that verified guesses, and count the sequences' guesses.

    drawn: of each sequence the draws that it keeps, of which the last one may be a fault, then numbers below 0 up to
    the last place, which has the number of its guesses
    """
    firsts, tokens, lasts, num_first, num_proposed = [], [], [], 0, 0
    for seq, (*kept, proposed) in zip(seqs, drawn, strict=True):
        count = next((place for place, token_id in enumerate(kept) if token_id < 0), len(kept))
        fault = kept[count] if count < len(kept) and kept[count] != NOTHING else NO_FAULT
        firsts.append(kept[0] if count else fault)
        lasts.append(fault)
        tokens.append(kept[:count])
        if not seq.is_finished:
            seq.num_proposed_tokens += proposed
            num_proposed += proposed
            num_first += count > 0
    each = [row[-1] for row in drawn]
    return Draws(firsts, tokens, lasts, sum(map(len, tokens)), num_first, num_proposed, each)
