"""RoutedExperts: the experts that a sequence's tokens took."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ExpertIds = npt.NDArray[np.integer[Any]]


class RoutedExperts:
    """The experts of a sequence's first tokens. Bytes hold them: an array for each token would cost the host more."""

    __slots__ = ("_bytes", "_dtype", "_shape")

    def __init__(self, layers: int, used: int, number_type: str) -> None:
        """layers: how many have experts; used: how many of these a token uses; number_type: of an expert's number"""
        self._bytes = bytearray()
        self._shape = layers, used
        self._dtype = np.dtype(number_type)

    @property
    def _token_bytes(self) -> int:
        return self._shape[0] * self._shape[1] * self._dtype.itemsize

    def __len__(self) -> int:
        return len(self._bytes) // self._token_bytes

    def put(self, position: int, taken: ExpertIds) -> None:
        """Take the experts of the tokens from `position` on, and forget those of later tokens.

        taken: [layers, used] or [tokens, layers, used]
        """
        assert position <= len(self)
        self._bytes[position * self._token_bytes :] = taken.tobytes()

    def take_over(self, other: RoutedExperts) -> None:
        """Copy the experts of a sequence with the same tokens."""
        self._bytes[:] = other._bytes

    def clear(self) -> None:
        """Forget all of them."""
        self._bytes.clear()

    def array(self) -> ExpertIds:
        """Return all of them, [tokens, layers, used]."""
        return np.frombuffer(bytes(self._bytes), self._dtype).reshape(-1, *self._shape)
