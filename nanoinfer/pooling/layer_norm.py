"""LayerNorm: a norm behind the pooling, as sentence-transformers stores it in a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanoinfer.checks import check_settings
from nanoinfer.pooling.activations import Vector
from nanoinfer.pooling.dense import ON_EMBEDDINGS, WEIGHTS_FILE, read_weights
from nanoinfer.pooling.files import Module, read_settings

EPS = np.float32(1e-5)  # torch's


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + 1e-5) * weight + bias, in float32. weight, bias: [numbers]"""

    weight: Vector
    bias: Vector

    @classmethod
    def open(cls, module: Module) -> LayerNorm:
        """Read a module's files. Raises ValueError, naming one, for what nobody computes here."""
        file = module.settings_file
        config = read_settings(file)
        check_settings(str(file), config, ("dimension",), ON_EMBEDDINGS)
        weight, bias = read_weights(module.folder / WEIGHTS_FILE, "norm")
        if config.get("dimension", len(weight)) != len(weight):
            raise ValueError(f"{file}: dimension={config['dimension']!r}: must be {len(weight)}, as in {WEIGHTS_FILE}")
        return cls(weight, np.zeros_like(weight) if bias is None else bias)

    def __call__(self, x: Vector) -> Vector:
        """Return [numbers] float32."""
        centred = x - x.mean()
        return centred / np.sqrt(np.square(centred).mean() + EPS) * self.weight + self.bias
