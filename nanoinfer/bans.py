"""Bans: the tokens that a request may not draw, as the device reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]

NOTHING = -1  # in place of a token: a shorter sequence begins with it


@dataclass(frozen=True, slots=True, eq=False)
class Bans:
    """The tokens of one vocabulary that settings forbid.

    mask: [words], as for kernels.sampling.masks; None: every token may be drawn
    sequences: [n, longest], tokens of which the last may not follow the others, once the others have been generated
    """

    mask: Words | None
    sequences: Words

    @staticmethod
    def of(allowed: npt.ArrayLike | None, sequences: list[list[int]], vocab_size: int) -> Bans:
        """Pack the tokens that may be drawn (None: all), and sequences that may not be generated."""
        longest = max(map(len, sequences), default=1)
        padded = [[NOTHING] * (longest - len(sequence)) + sequence for sequence in sequences]
        return Bans(
            None if allowed is None else _pack(allowed, vocab_size),
            np.array(padded, np.int32).reshape(-1, longest),
        )


def _pack(token_ids: npt.ArrayLike, vocab_size: int) -> Words:
    """Return [words] in which bit i % 32 of word i // 32 says whether token i is there."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
