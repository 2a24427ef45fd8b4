"""Classes: the labels of an LLM's classifier, and what makes probabilities of their scores."""

from __future__ import annotations

from array import array
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import Config
from nanoinfer.models.reading.classes import ALL_CLASSIFIERS
from nanoinfer.pooling.activations import Vector, sigmoid
from nanoinfer.requests.prompts.stages import Prepared
from nanoinfer.requests.reading.outputs import ClassificationOutput, ReadText

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Classes:
    """Makes outputs of a classifier's scores, as transformers' pipeline does."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @cached_property
    def _settings(self) -> PretrainedConfig:
        return Checkpoint.open(self._config.model, self._config.hf_config_path).hf_config

    def check(self, call: str, count: int | None = None) -> None:
        """Raise ValueError if the model is no classifier, or has another number of labels. call: begins the message"""
        labels = self._config.description.labels
        if not labels:
            (name, *_) = self._settings.architectures
            raise ValueError(f"{call}: {name} has no labels: must be one of {', '.join(ALL_CLASSIFIERS)}")
        if count not in (None, labels):
            raise ValueError(f"{call}: the model has {labels} labels: must have {count}; llm.classify takes any number")

    def trim(self, prompt: Prepared) -> Prepared:
        """Leave out padding at a prompt's end: transformers scores the last token that is none."""
        packed, pad = prompt.prompt, self._settings.get_text_config().pad_token_id
        if not isinstance(packed, array) or pad is None or packed[-1] != pad:
            return prompt
        end = 1 + next((place for place in reversed(range(len(packed))) if packed[place] != pad), 0)
        return prompt._replace(prompt=packed[:end], token_ids=prompt.token_ids[:end])

    def classified(self, text: ReadText) -> ClassificationOutput:
        """Return the output of a text."""
        logits, probs, label = text.pooled, None, None
        if logits is not None:
            probs = self._probabilities(logits)
            label = self._settings.id2label[int(probs.argmax())]
        return ClassificationOutput(text.facts, label=label, probs=probs, logits=logits)

    def _probabilities(self, logits: Vector) -> Vector:
        """Return what transformers' pipeline does; scores of a regression stay as they are."""
        kind = self._settings.problem_type
        if kind == "regression":
            return logits
        return sigmoid(logits) if kind == "multi_label_classification" or len(logits) == 1 else softmax(logits)


def softmax(x: Vector) -> Vector:
    """Return the shares that the exponentials of the numbers have."""
    parts: Vector = np.exp(x - x.max())
    return parts / parts.sum()
