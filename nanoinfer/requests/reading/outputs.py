"""The outputs of texts that are read: dictionaries, whose keys are attributes too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nanoinfer.engine.results.hidden_states import HiddenStates
from nanoinfer.pooling.activations import Vector
from nanoinfer.requests.outputs import Output
from nanoinfer.requests.prompts.stages import Prepared
from nanoinfer.requests.request import Request


class EmbeddingOutput(Output):
    """A text's embedding, a dictionary whose keys are attributes too.

    request_id: the number that add_request returned; embed, classify and rerank number their texts too
    prompt: the text, with the prompt of prompt_name before it; None if the prompt was token ids
    prompt_token_ids: its tokens, with those that the tokenizer adds
    num_cached_tokens: this many of them came from the KV cache
    embedding: [dimensions] float32, on the host; None if there is an error
    hidden_states: those of the text's tokens, as in SampleOutput; None if the call did not ask
    error: why there is no embedding, as for numbers that are not finite; else None

    An EmbeddingOutput has this attribute too, which is no key, by vLLM's name:

    outputs: itself, so that output.outputs.embedding is the embedding
    """

    __slots__ = ()

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    embedding: Vector | None
    hidden_states: dict[int, Tensor] | None
    error: str | None

    @property
    def outputs(self) -> EmbeddingOutput:
        """Itself."""
        return self


class ClassificationOutput(Output):
    """What a classifier makes of a text, a dictionary whose keys are attributes too.

    request_id: the number that add_request returned; embed, classify and rerank number their texts too
    prompt: the text; None if the prompt was token ids
    prompt_token_ids: its tokens, with those that the tokenizer adds, and without padding at the end
    num_cached_tokens: this many of them came from the KV cache
    label: the name of the label whose number in probs is the largest, as config.json's id2label has it; None if there
        is an error
    probs: [labels] float32: the softmax of logits; for several labels at once (problem_type) or a single one their
        sigmoid; for a regression logits as they are; None if there is an error
    logits: [labels] float32, the scores of the classifier's head; None if there is an error
    error: why there are none of these, as for numbers that are not finite; else None

    A ClassificationOutput has these attributes too, which are no keys, by vLLM's names:

    outputs: itself, so that output.outputs.probs are the probs
    num_classes: how many labels there are; 0 if there is an error
    """

    __slots__ = ()

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    label: str | None
    probs: Vector | None
    logits: Vector | None
    error: str | None

    @property
    def outputs(self) -> ClassificationOutput:
        """Itself."""
        return self

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return 0 if self.probs is None else len(self.probs)


class RerankOutput(Output):
    """How well a document answers a query, a dictionary whose keys are attributes too.

    request_id: as in EmbeddingOutput
    index: the document's place among those of the call
    document: its text
    score: from 0 to 1: the probability of "yes" beside "no", or the sigmoid of a classifier's score; None if there is
        an error
    prompt_token_ids: the tokens of the pair
    num_cached_tokens: this many of them came from the KV cache
    error: why there is no score, as for numbers that are not finite; else None

    A RerankOutput has this attribute too, which is no key, by vLLM's name:

    outputs: itself, so that output.outputs.score is the score
    """

    __slots__ = ()

    request_id: int
    index: int
    document: str
    score: float | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    error: str | None

    @property
    def outputs(self) -> RerankOutput:
        """Itself."""
        return self


class ReadText(NamedTuple):
    """A text that has been read.

    request_id: its number among the LLM's requests
    num_cached_tokens: this many of its tokens came from the KV cache
    pooled: what it was read for, [width]; None: there is an error
    error: why there is no such thing
    hidden_states: those of its tokens, as SampleOutput has them; None: not asked for
    """

    request_id: int
    prompt: Prepared
    num_cached_tokens: int
    pooled: Vector | None
    error: str | None
    hidden_states: dict[int, Tensor] | None

    @property
    def facts(self) -> dict[str, Any]:
        """The keys that all outputs of texts have."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt.text,
            "prompt_token_ids": self.prompt.token_ids,
            "num_cached_tokens": self.num_cached_tokens,
            "error": self.error,
        }


def texts_read(request: Request) -> list[ReadText]:
    """Return the texts of a request that has ended."""
    result, texts = request.first_result(), request.prompt.texts or (request.prompt,)
    rows: list[Vector | None] = [None] * len(texts) if result.pooled is None else [*result.pooled]
    if result.pooled is not None and result.stop_reason is not None:  # why some of several texts have no numbers
        rows = [row if np.isfinite(row).all() else None for row in result.pooled]
    error = f"the request has ended: {result.stop_reason or result.finish_reason}"
    shown = _divide(result.hidden_states, texts)
    return [
        ReadText(number, text, result.num_cached_tokens, row, error if row is None else None, own)
        for number, text, row, own in zip(count(request.id), texts, rows, shown, strict=False)
    ]


def _divide(states: HiddenStates | None, texts: Sequence[Prepared]) -> list[dict[int, Tensor] | None]:
    """Return the hidden states of each of some texts that were computed together."""
    if states is None or states.num_known < (ends := [*accumulate(len(text.token_ids) for text in texts)])[-1]:
        return [None] * len(texts)
    made = states.tensors()
    return [
        {layer: own[end - len(text.token_ids) : end] for layer, own in made.items()}
        for text, end in zip(texts, ends, strict=True)
    ]
