"""Embeddings: how an LLM's checkpoint makes them, and what a call may ask of that."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import numpy as np

from nanoinfer.checks import as_int, short
from nanoinfer.config import Config
from nanoinfer.pooling.read import Read
from nanoinfer.pooling.sentence_model import SentenceModel, read_sentence_model
from nanoinfer.requests.interface import AnyRequest
from nanoinfer.requests.reading.outputs import EmbeddingOutput, Vector, facts_of

SMALLEST = 1e-12  # a length below it counts as this, as torch.nn.functional.normalize counts it


class Embeddings:
    """Makes embeddings of what steps read, on the host in float32."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @cached_property
    def model(self) -> SentenceModel:
        """What comes behind the last norm. Raises ValueError, naming it, for what nobody computes here."""
        return read_sentence_model(self._config.model)

    @property
    def read(self) -> Read:
        """What steps read of each text."""
        return Read(self.model.what)

    @property
    def _width(self) -> int:
        """How many numbers an embedding has that is not cut."""
        denses = self.model.denses
        return len(denses[-1].bias) if denses else self._config.description.hidden_size

    def check_dimensions(self, dimensions: int | None) -> int | None:
        """Return how many numbers a call's embeddings keep. Raises ValueError if the model does not allow it."""
        if dimensions is None:
            return None
        config = json.loads((Path(self._config.model) / "config.json").read_text("utf-8"))
        listed, count = config.get("matryoshka_dimensions"), as_int(dimensions)
        if listed is not None and count not in listed:
            raise ValueError(f"dimensions={short(dimensions)}: must be one of {listed}, as config.json has them")
        if count is None or not 1 <= count <= self._width:
            raise ValueError(f"dimensions={short(dimensions)}: must be an integer from 1 to {self._width}")
        return count

    def find_prompt(self, name: str | None) -> str:
        """Return what stands before each text. Raises ValueError for a name that the checkpoint does not know."""
        prompts = self.model.prompts
        wanted = self.model.default_prompt if name is None else name
        if wanted is None:
            return ""
        if not isinstance(wanted, str) or wanted not in prompts:
            known = f"must be one of {', '.join(prompts)}" if prompts else "must be left out: the checkpoint has none"
            raise ValueError(f"prompt_name={short(wanted)}: {known}")
        return prompts[wanted]

    def output(self, request: AnyRequest, dimensions: int | None) -> EmbeddingOutput:
        """Return the output of a text. dimensions: as check_dimensions returns it"""
        result, embedding = request.first_result(), None
        if result.pooled is not None:
            embedding = self._embedding(result.pooled, len(request.prompt.token_ids), dimensions)
        return EmbeddingOutput(facts_of(request, result), embedding=embedding)

    def _embedding(self, pooled: Vector, tokens: int, dimensions: int | None) -> Vector:
        x = (pooled / tokens if self.read.needs_all else pooled).astype(np.float32, copy=False)
        for dense in self.model.denses:
            x = dense(x)
        x = x[:dimensions]
        return x / np.maximum(np.linalg.norm(x), np.float32(SMALLEST)) if self.model.normalises else x
