"""DraftWeights: one rank's share of a draft."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from nanoinfer.attention import make_backend
from nanoinfer.config import Config
from nanoinfer.draft import Draft
from nanoinfer.models import build
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.models.prediction_head import PredictionHeads
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.bar import MakeBar, no_bar
from nanoinfer.process.torch_state import default_dtype
from nanoinfer.runner.weight_writer import WeightWriter
from nanoinfer.weights.sources import RandomSource, Source


class DraftWeights:
    """A draft, split over the ranks as the model is, so that all ranks know the same guesses.

    model: a draft model, or prediction heads; built, and not filled
    backend: its own, for the part of the KV cache that it has. It need not add up in order, as guesses change nothing
    num_bytes: its parameters and tables take this much
    """

    model: CausalLM | PredictionHeads

    def __init__(
        self,
        draft: Draft,
        config: Config,
        tp: TensorParallel,
        device: torch.device,
        memory: AbstractContextManager[Any],
    ) -> None:
        """memory: a context in which its parameters get theirs"""
        self._draft, self._config, self._device = draft, config, device
        layout = config.cache_layout.part(draft.layers)
        latent_heads = draft.description.latent_heads(tp.size)
        self.backend = make_backend(config.attention_backend, layout, latent_heads=latent_heads)
        with device, default_dtype(config.torch_dtype), memory:
            how = draft.description, config.max_model_len, self.backend, tp
            self.model = PredictionHeads(*how) if draft.are_heads else build(*how, config.torch_head_dtype)
        self.num_bytes = sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))
        self._writer = WeightWriter(self.model, None, tp, device)

    def fill(self, bar: MakeBar = no_bar) -> None:
        """Fill the weights, for the first time or again; raises ValueError as Source.fill does. bar: as there"""
        source: Source = RandomSource(self._config.seed, self._device)
        if self._config.is_loaded:
            source = self._draft.source()
        self._writer.fill(source, bar)
        self._writer.finish()
