"""Dense: a matrix behind the pooling, as sentence-transformers stores it in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from nanoinfer.checks import check_settings
from nanoinfer.pooling.activations import Vector, find_activation
from nanoinfer.pooling.files import Module, read_settings

WEIGHTS_FILE = "model.safetensors"
TANH = "torch.nn.modules.activation.Tanh"  # sentence-transformers' default
ON_EMBEDDINGS = dict.fromkeys(("module_input_name", "module_output_name"), ("sentence_embedding",))
KNOWN = ("in_features", "out_features", "bias", "activation_function")


@dataclass(frozen=True)
class Dense:
    """activation(weight x + bias), in float32.

    weight: [outputs, inputs]; bias: [outputs]
    """

    weight: Vector
    bias: Vector
    activation: Callable[[Vector], Vector]

    @classmethod
    def open(cls, module: Module) -> Dense:
        """Read a module's files. Raises ValueError, naming one, for what nobody computes here."""
        file = module.settings_file
        config = read_settings(file)
        check_settings(str(file), config, KNOWN, {"use_residual": (False,), **ON_EMBEDDINGS})
        activation = find_activation(f"{file}: activation_function", config.get("activation_function", TANH))
        weight, bias = read_weights(module.folder / WEIGHTS_FILE, "linear")
        sizes = {"out_features": weight.shape[0], "in_features": weight.shape[1], "bias": bias is not None}
        for name, size in sizes.items():
            if config.get(name, size) != size:
                raise ValueError(f"{file}: {name}={config[name]!r}: must be {size}, as in {WEIGHTS_FILE}")
        return cls(weight, np.zeros(len(weight), np.float32) if bias is None else bias, activation)

    def __call__(self, x: Vector) -> Vector:
        """Return [outputs] float32 of [inputs] float32."""
        return self.activation(self.weight @ x + self.bias)


def read_weights(file: Path, name: str) -> tuple[Vector, Vector | None]:
    """Return the weight, and the bias if there is one. Raises ValueError if the file lacks it. name: of both"""
    known = [f"{name}.weight", f"{name}.bias"]
    try:
        tensors = {name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError, TypeError) as error:
        raise ValueError(f"{file}: cannot be read: {error!r}") from error
    if known[0] not in tensors or not tensors.keys() <= {*known}:
        raise ValueError(f"{file} has {', '.join(tensors) or 'nothing'}: must have {known[0]}, and may have {known[1]}")
    return tensors[known[0]], tensors.get(known[1])
