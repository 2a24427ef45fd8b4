"""Lists of token ids that are checked together: what passes is packed, and all else is left to the check of one."""

from array import array
from typing import Any

import numpy as np
import pytest

from nanoinfer.requests.prompts.token_ids import pack_ids, pack_lists

VOCAB_SIZE = 2**16

GOOD = [[5, 0, VOCAB_SIZE - 1], [1], [*range(300)], [7] * 5]


def test_lists_of_known_ids_are_packed_as_each_is_alone() -> None:
    assert pack_lists(GOOD, VOCAB_SIZE) == [pack_ids("x", ids, VOCAB_SIZE) for ids in GOOD]
    assert pack_lists([], VOCAB_SIZE) == []
    assert pack_lists([[], [3]], VOCAB_SIZE) == [array("i"), array("i", [3])]


@pytest.mark.parametrize(
    "entry",
    [
        True,
        None,
        1.0,
        "i\0\0\0\0",
        b"iiiii",
        [3, 4],
        [],
        {},
        np.int64(3),
        2**31,
        -1,
        VOCAB_SIZE,
        2**70,
        object(),
        "i",
        1j,
    ],
    ids=lambda entry: repr(entry)[:8],
)
@pytest.mark.parametrize("count", [1, 5])
def test_what_is_no_known_id_lets_each_list_be_checked_alone(entry: Any, count: int) -> None:
    for place in range(3):
        ids = [3, 4, 5]
        ids[place:place] = [entry] * count
        assert pack_lists([[1, 2], ids, [6]], VOCAB_SIZE) is None
