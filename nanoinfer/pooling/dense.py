"""Dense: a matrix behind the pooling, as sentence-transformers stores it in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

Vector = npt.NDArray[np.float32]


def _same(x: Vector) -> Vector:
    return x


ACTIVATIONS: dict[str, Callable[[Vector], Vector]] = {"Identity": _same, "Tanh": np.tanh}
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Dense:
    """activation(weight x + bias), in float32.

    weight: [outputs, inputs]; bias: [outputs]
    activation: its name in ACTIVATIONS
    """

    weight: Vector
    bias: Vector
    activation: str

    @classmethod
    def open(cls, folder: Path) -> Dense:
        """Read a module's folder. Raises ValueError, naming it, for what nobody computes here."""
        config = _read_config(folder)
        activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
        if activation not in ACTIVATIONS:
            raise ValueError(f"{folder}: activation_function={activation}: must be one of {', '.join(ACTIVATIONS)}")
        if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
            raise ValueError(
                f"{folder}: use_residual and module_input_name must be left out: a matrix reads an embedding"
            )
        try:
            tensors = load_file(folder / WEIGHTS_FILE)
            weight = tensors["linear.weight"].astype(np.float32)
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise ValueError(f"{folder}: must have a {WEIGHTS_FILE} with linear.weight: {error!r}") from error
        bias = tensors.get("linear.bias", np.zeros(len(weight)))
        return cls(weight, bias.astype(np.float32), activation)

    def __call__(self, x: Vector) -> Vector:
        """Return [outputs] float32 of [inputs] float32."""
        return ACTIVATIONS[self.activation](self.weight @ x + self.bias)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: cannot be read: {error}") from error
