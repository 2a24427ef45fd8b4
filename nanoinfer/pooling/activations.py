"""The functions that sentence-transformers' files name by torch's classes, in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nanoinfer.checks import short

Vector = npt.NDArray[np.float32]
TORCH = "torch.nn."  # begins the names of classes that need no code of the checkpoint's


def sigmoid(x: Vector) -> Vector:
    """Return 1 / (1 + exp(-x)) of each number, also where that exponential is infinite."""
    return np.exp(-np.logaddexp(np.float32(0), -x))


def _same(x: Vector) -> Vector:
    return x


ACTIVATIONS: dict[str, Callable[[Vector], Vector]] = {"Identity": _same, "Sigmoid": sigmoid, "Tanh": np.tanh}


def find_activation(name: str, path: object) -> Callable[[Vector], Vector]:
    """Return the function of torch's class, such as "torch.nn.modules.activation.Tanh".

    Raises ValueError for others. name: of the setting, behind its file's
    """
    begin, _, kind = str(path).rpartition(".")
    if not f"{begin}.".startswith(TORCH) or kind not in ACTIVATIONS:
        shown = kind if begin.startswith(TORCH) else short(path)
        raise ValueError(f"{name}={shown}: must be one of torch.nn's {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[kind]
