"""What vLLM's embed, classify, score, encode and reward return, and their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoinfer.checks import as_list, check_flag, short
from nanoinfer.requests.reading.outputs import EmbeddingOutput


@dataclass
class PoolingParams:
    """How texts are read.

    dimensions, normalize: of embeddings, as for nanoinfer.LLM.embed
    activation, softmax: False: a classifier's scores as its head gives them; None or True: as the checkpoint says.
        softmax is that of reward
    """

    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        for name in ("normalize", "activation", "softmax"):
            if (given := getattr(self, name)) is not None:
                setattr(self, name, check_flag(name, given))
        for name in ("step_tag_id", "returned_token_ids"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={short(getattr(self, name))}: must be None: a text is read as a whole")


@dataclass
class PoolingOutput:
    """What was read of a text. data: float32, on the host"""

    data: Tensor


@dataclass
class EmbeddingData:
    """A text's embedding. embedding: its numbers"""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass
class ClassificationData:
    """What a classifier makes of a text. probs: those of its labels"""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass
class ScoringData:
    """How well two texts fit. score: the larger, the better"""

    score: float


@dataclass
class PoolingRequestOutput:
    """A text's result.

    request_id: its number among the LLM's texts, as a string
    outputs: what was read
    prompt_token_ids: its tokens
    finished: True: the result is there when it is returned
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    """A text's embedding, in outputs.embedding."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """What a classifier makes of a text, in outputs.probs."""


class ScoringRequestOutput(PoolingRequestOutput):
    """How well two texts fit, in outputs.score."""


def all_read(kind: Callable[..., Any], found: Iterable[Any], read: Callable[[Any], Any]) -> list[Any]:
    """Return outputs under vLLM's names. read: makes `outputs` of each

    Raises RuntimeError for a text whose numbers are not finite.
    """
    outputs = []
    for place, output in enumerate(found):
        if output.error is not None:
            raise RuntimeError(f"prompts[{place}]: {output.error}")
        outputs.append(kind(str(output.request_id), read(output), output.prompt_token_ids))
    return outputs


def data_of(numbers: Any) -> PoolingOutput:
    """Return numbers as `outputs.data`."""
    return PoolingOutput(torch.from_numpy(numbers.copy()))


def pooling_of(pooling_params: Any) -> PoolingParams:
    """Return the PoolingParams of a call, which are one for all texts. Raises ValueError if they differ."""
    asked = [pooling_params] if (listed := as_list(pooling_params)) is None else listed
    for one in asked:
        if one is not None and not isinstance(one, PoolingParams):
            raise ValueError(f"pooling_params={short(pooling_params)}: must be PoolingParams, or a list of them")
    first, *others = [PoolingParams() if one is None else one for one in asked] or [PoolingParams()]
    if any(other != first for other in others):
        raise ValueError(f"pooling_params={short(pooling_params)}: must be equal in one call")
    return first


def as_pairs(data_1: Any, data_2: Any) -> tuple[list[Any], list[Any]]:
    """Return the texts of pairs, as many on each side. Raises ValueError for other numbers."""
    firsts, seconds = ([one] if isinstance(one, (str, dict)) else as_list(one) for one in (data_1, data_2))
    if not firsts or not seconds or len(firsts) not in (1, len(seconds)):
        raise ValueError(
            f"data_1={short(data_1)}, data_2={short(data_2)}: must be a text and several, or as many texts as others"
        )
    return firsts * len(seconds) if len(firsts) == 1 else firsts, seconds


def cosines(found: list[EmbeddingOutput]) -> list[ScoringRequestOutput]:
    """Return the cosines of embeddings: of the first half, each with its own of the second."""
    half = len(found) // 2

    def fit(one: PoolingRequestOutput, other: PoolingRequestOutput) -> ScoringRequestOutput:
        score = torch.nn.functional.cosine_similarity(one.outputs.data, other.outputs.data, dim=0)
        ids = one.prompt_token_ids + other.prompt_token_ids
        return ScoringRequestOutput(one.request_id, ScoringData(float(score)), ids)

    read = all_read(PoolingRequestOutput, found, lambda one: data_of(one.embedding))
    return list(map(fit, read[:half], read[half:]))
