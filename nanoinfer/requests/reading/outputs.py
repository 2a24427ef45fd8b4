"""The outputs of texts that are read: dictionaries, whose keys are attributes too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nanoinfer.requests.outputs import Output
from nanoinfer.requests.prompts import Prepared
from nanoinfer.requests.results import SampleResult

Vector = npt.NDArray[np.float32]


class EmbeddingOutput(Output):
    """A text's embedding, a dictionary whose keys are attributes too.

    prompt: the text, with the prompt of prompt_name before it; None if the prompt was token ids
    prompt_token_ids: its tokens, with those that the tokenizer adds
    num_cached_tokens: this many of them came from the KV cache
    embedding: [dimensions] float32, on the host; None if there is an error
    error: why there is no embedding, as for numbers that are not finite; else None

    An EmbeddingOutput has this attribute too, which is no key, by vLLM's name:

    outputs: itself, so that output.outputs.embedding is the embedding
    """

    __slots__ = ()

    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    embedding: Vector | None
    error: str | None

    @property
    def outputs(self) -> EmbeddingOutput:
        """Itself."""
        return self


def facts_of(prompt: Prepared, result: SampleResult) -> dict[str, Any]:
    """Return the keys that all these outputs have, for a text that has been read."""
    error = None
    if result.pooled is None:
        error = f"the request has ended: {result.stop_reason or result.finish_reason}"
    return {
        "prompt": prompt.text,
        "prompt_token_ids": prompt.token_ids,
        "num_cached_tokens": result.num_cached_tokens,
        "error": error,
    }
