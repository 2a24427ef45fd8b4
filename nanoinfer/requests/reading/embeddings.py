"""Embeddings: how an LLM's checkpoint makes them, and what a call may ask of that."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from nanoinfer.checks import as_int, short
from nanoinfer.config import Config
from nanoinfer.pooling.activations import Vector
from nanoinfer.pooling.read import Read
from nanoinfer.pooling.sentence_model import SentenceModel, read_sentence_model
from nanoinfer.requests.prompts.stages import Asked
from nanoinfer.requests.reading.model_texts import ModelTexts
from nanoinfer.requests.reading.outputs import EmbeddingOutput, ReadText
from nanoinfer.requests.text.texts import TextTokenizer

SMALLEST = 1e-12  # a length below it counts as this, as torch.nn.functional.normalize counts it


class Embeddings:
    """Makes embeddings of what steps read, on the host in float32."""

    def __init__(self, config: Config, texts: TextTokenizer) -> None:
        self._config, self._texts = config, texts

    @cached_property
    def model(self) -> SentenceModel:
        """What the checkpoint's files say. Raises ValueError, naming it, for what nobody computes here."""
        return read_sentence_model(self._config.model, "mean" if self._config.description.is_encoder else "last")

    @cached_property
    def _model_texts(self) -> ModelTexts | None:
        texts = self.model.texts
        if texts is None or self._texts.tokenizer is None:  # then a text is refused as any LLM refuses it
            return None
        return ModelTexts(self._config, self._texts, texts)

    @property
    def read(self) -> Read:
        """What steps read of each text."""
        return Read(self.model.what)

    @property
    def _width(self) -> int:
        """How many numbers an embedding has that is not cut."""
        behind = self.model.behind
        model = self._config.description
        return len(behind[-1].bias) if behind else model.result_size or model.hidden_size

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

    def find_prompt(self, name: str | None) -> Callable[[Asked], Asked]:
        """Return what puts a prompt before a text. Raises ValueError for a name that the checkpoint does not know."""
        prompts = self.model.settings.prompts
        if name is not None and (not isinstance(name, str) or name not in prompts):
            known = f"must be one of {', '.join(prompts)}" if prompts else "must be left out: the checkpoint has none"
            raise ValueError(f"prompt_name={short(name)}: {known}")
        return partial(self._ask, before=self.model.settings.prompt if name is None else prompts[name], name=name)

    def _ask(self, asked: Asked, before: str, name: str | None) -> Asked:
        """Return a text with what stands before it, and what makes its tokens; tokens and chats stay as they are.

        name: that of a prompt which a call asks for. Raises ValueError for what is no text, if that or the files do.
        """
        given, own = asked.prompt, self._model_texts
        if isinstance(given, str) and own is not None and own.changes and (asked.is_chat or any(asked.media)):
            what = "text alone, which sentence-transformers' files change, or token ids"
            raise ValueError(f"{asked.name}: must be {what}")
        if isinstance(given, str) and asked.text is not None and not asked.is_chat:
            asked = asked._replace(prompt=before + given, text=before + asked.text)
            if own is None:
                return asked
            bound = None if own.writes_chats else own.bound
            return asked._replace(tokenize=partial(own.read_text, text=given, before=before), bound=bound)
        if name is not None:
            raise ValueError(f"prompt_name={short(name)}: {asked.name} must be text: it stands before that")
        return asked

    def outputs(self, texts: list[ReadText], dimensions: int | None, normalize: bool | None) -> list[EmbeddingOutput]:
        """Return the outputs of texts. dimensions: as check_dimensions returns it; normalize: as for LLM.embed"""
        read = [text for text in texts if text.pooled is not None]
        made = iter(self._embeddings(read, dimensions, normalize))
        return [
            EmbeddingOutput(
                text.facts,
                embedding=None if text.pooled is None else next(made),
                hidden_states=text.hidden_states,
            )
            for text in texts
        ]

    def _embeddings(self, texts: list[ReadText], dimensions: int | None, normalize: bool | None) -> list[Vector]:
        """Return the embeddings of texts without errors; each is the same in any company."""
        if not texts:
            return []
        divisors = [[self.read.divisor(len(text.prompt.token_ids))] for text in texts]
        x = (np.array([text.pooled for text in texts]) / divisors).astype(np.float32)
        for module in self.model.behind:
            x = np.stack([module(row) for row in x])
        x = x[:, :dimensions]
        if self.model.normalises if normalize is None else normalize:
            lens = np.sqrt(np.square(x).sum(axis=1, keepdims=True))
            x = x / np.maximum(lens, np.float32(SMALLEST))
        kept = x.shape[1] if dimensions is not None else self.model.settings.truncate_dim
        return [row[:kept].copy() for row in x]  # a view would keep those of the others, too
