"""RoutedExperts: the experts that a sequence's tokens took."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nanoinfer.engine.results.token_record import TokenRecord

ExpertIds = npt.NDArray[np.integer[Any]]


class RoutedExperts(TokenRecord):
    """The experts of a sequence's first tokens; a token has [layers, used]."""

    __slots__ = ("_dtype", "_shape")

    def __init__(self, layers: int, used: int, number_type: str) -> None:
        """layers: how many have experts; used: how many of these a token uses; number_type: of an expert's number"""
        self._shape, self._dtype = (layers, used), np.dtype(number_type)
        super().__init__(layers * used * self._dtype.itemsize)

    def array(self) -> ExpertIds:
        """Return all of them, [tokens, layers, used]."""
        return np.frombuffer(bytes(self._bytes), self._dtype).reshape(-1, *self._shape)
