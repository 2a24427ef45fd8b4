"""ExpertChoices: keeps the experts that the tokens of each step take."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.layers.experts import MixtureOfExperts


class ExpertChoices:
    """The layers with experts of a model. Make it before graphs are captured: they hold the copies that it needs."""

    def __init__(self, model: nn.Module, most: int, dtype: torch.dtype) -> None:
        """most: tokens in a step, at most; dtype: of the experts' numbers"""
        self._layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        self._dtype = dtype
        for layer in self._layers:
            layer.keep_taken(most)

    def taken(self, num_tokens: int) -> Tensor:
        """Return the experts that the last step's tokens took, [tokens, layers, used], the likeliest first."""
        layers = [layer.taken[:num_tokens] for layer in self._layers if layer.taken is not None]
        return torch.stack(layers, dim=1).to(self._dtype)
