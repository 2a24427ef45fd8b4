"""Token ids that a caller passes: checks them, and packs them as engines take them."""

from __future__ import annotations

import marshal
from array import array
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from nanoinfer.checks import as_int, as_list, short

A_PROMPT = "a string or a list of token ids"
MOST_SHOWN = 60  # characters of a prompt in an error message

MARSHAL_VERSION = 2  # later ones remember objects that come twice, which changes how an integer is written
CELL = np.dtype([("kind", "u1"), ("value", "<i4")])  # how marshal writes an integer of 32 bits, and begins a list


def token_ids_of(name: str, prompt: Any, what: str = A_PROMPT) -> list[int]:
    """Return token ids as Python's integers. Raises ValueError for all else; what: as for list_of"""
    entries = as_list(prompt)
    if entries is None:
        raise ValueError(f"{name} is {short(prompt, MOST_SHOWN)}: must be {what}")
    if set(map(type, entries)) <= {int}:  # most prompts are, and a long one should not cost more
        return entries
    token_ids = []
    for entry in entries:
        if (token_id := as_int(entry)) is None:
            shown, wrong = short(prompt, MOST_SHOWN), short(entry, MOST_SHOWN)
            raise ValueError(f"{name} is {shown}: must be {what}, and {wrong} is none")
        token_ids.append(token_id)
    return token_ids


def pack_ids(name: str, token_ids: list[int], vocab_size: int) -> array[int]:
    """Return tokens as engines take them. Raises ValueError for one that the vocabulary does not have."""
    try:
        packed = array("i", token_ids)
        are_known = not packed or np.frombuffer(packed, np.uint32).max() < vocab_size  # one below 0 is the largest
    except OverflowError:
        are_known = False
    if not are_known:
        wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise ValueError(f"{name} has token id {short(wrong)}: must be from 0 to {vocab_size - 1}")
    return packed


def pack_lists(lists: list[list[int]], vocab_size: int) -> list[array[int]] | None:
    """Return several prompts' tokens as engines take them; None: an entry is no integer, or not in the vocabulary.

    One pass of marshal reads the entries' types and values at a third of the time that Python takes.
    """
    try:
        written = marshal.dumps(lists, MARSHAL_VERSION)
    except ValueError:  # an object that it does not know
        return None
    lens = [len(entries) for entries in lists]
    if len(written) != CELL.itemsize * (1 + len(lists) + sum(lens)):
        return None
    cells = np.frombuffer(written, CELL)
    values = cells["value"][cells["kind"] == ord("i")]
    if len(values) != sum(lens) or values.view(np.uint32).max(initial=0) >= vocab_size:  # all but the lists' heads
        return None
    ids = values.tobytes()
    return [array("i", ids[begin:end]) for begin, end in pairwise(accumulate((4 * n for n in lens), initial=0))]
