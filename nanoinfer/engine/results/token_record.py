"""TokenRecord: something that the host keeps of each of a sequence's first tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class TokenRecord:
    """As many bytes for each token. One object holds them: an array for each token would cost the host more."""

    __slots__ = ("_bytes", "_token_bytes")

    def __init__(self, token_bytes: int) -> None:
        self._bytes = bytearray()
        self._token_bytes = token_bytes

    def __len__(self) -> int:
        return len(self._bytes) // self._token_bytes

    def put(self, position: int, values: npt.NDArray[Any]) -> None:
        """Take what tokens from `position` on have, and forget that of later tokens; values: of one, or of several."""
        assert position <= len(self)
        del self._bytes[position * self._token_bytes :]
        self._bytes += np.ascontiguousarray(values).reshape(-1).view(np.uint8).data

    def take_over(self, other: TokenRecord) -> None:
        """Copy what a sequence with the same tokens has."""
        self._bytes[:] = other._bytes

    def clear(self) -> None:
        """Forget all of it."""
        self._bytes.clear()
