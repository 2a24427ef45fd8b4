"""Pooling: what a prefill step reads of texts that are not continued, of their hidden states behind the last norm."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoinfer.pooling.read import LabelsOf, Read
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.transfer import to_host, upload

UNIT = 2.0**24  # sums count 1 / UNIT
ADDED_AT_ONCE = 1024  # tokens, so that their sums need little memory


@dataclass
class Pooled:
    """What some chunks of a step give.

    chunks: their numbers among the step's
    numbers: [chunks, width], float32 or, for sums, float64
    """

    chunks: list[int]
    numbers: Tensor

    def to_host(self) -> Pooled:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        return Pooled(self.chunks, to_host(self.numbers))

    def entries(self) -> Iterator[tuple[int, npt.NDArray[np.floating[Any]]]]:
        """Yield each chunk's number, and its numbers, [width]."""
        yield from zip(self.chunks, self.numbers.numpy(), strict=True)


def pool(
    chunks: list[ChunkMessage],
    hidden: Tensor,
    logits_at: Callable[[Tensor], Tensor],
    tokens_at_once: int,
    labels_of: LabelsOf,
    score: Callable[[Tensor], Tensor],
) -> list[Pooled]:
    """Return what the chunks' texts are read for.

    hidden: [tokens, hidden_size], of one chunk after another
    logits_at, tokens_at_once: as for prompt_logprobs; a classifier's scores count as logits
    labels_of: what these are made of; score: makes them of [texts, hidden_size], for "mean"
    """
    reads: dict[Read, list[int]] = {}
    for number, chunk in enumerate(chunks):
        if chunk.read is not None:
            reads.setdefault(chunk.read, []).append(number)
    if not reads:
        return []
    ends = [*accumulate(len(chunk.token_ids) for chunk in chunks)]
    pooled = []
    for read, numbers in reads.items():
        spans = [(ends[number] - len(chunks[number].token_ids), ends[number]) for number in numbers]
        of = labels_of if read.what == "labels" else read.what
        if of == "max":
            found = torch.stack([hidden[begin:end].amax(dim=0) for begin, end in spans]).float()
        elif of in ("mean", "weighted"):
            starts = [chunks[number].start for number in numbers] if of == "weighted" else None
            found = _sums(hidden, spans, starts)
            if read.what == "labels":
                counts = upload(array("i", [end - begin for begin, end in spans]), hidden.device)
                found = score(found / counts.unsqueeze(1))
        else:
            places = upload(array("i", [begin if of == "first" else end - 1 for begin, end in spans]), hidden.device)
            if read.what in ("first", "last"):
                found = hidden[places.long()].float()
            else:
                found = torch.cat([_scores(read, logits_at(some)) for some in places.split(tokens_at_once)])
        pooled.append(Pooled(numbers, found))
    return pooled


def _scores(read: Read, logits: Tensor) -> Tensor:
    """Return the logits that count, [texts, labels or tokens] float32."""
    if not read.tokens:
        return logits.float()
    return logits[:, upload(array("i", read.tokens), logits.device).long()].float()


def _sums(hidden: Tensor, spans: list[tuple[int, int]], starts: list[int] | None) -> Tensor:
    """Add up the hidden states from each span's begin to its end; returns [spans, hidden_size] float64.

    starts: the place in the text of each span's first token, to count each token times its place, from 1; None: once
    Each number is rounded to a multiple of 1 / UNIT. So float64 adds them without an error, up to sums of 2^29, and no
    order of tokens or chunks can change the sum.
    """
    places, owners = array("i"), array("i")
    for owner, (begin, end) in enumerate(spans):
        places.extend(range(begin, end))
        owners.extend([owner] * (end - begin))
    sums = torch.zeros(len(spans), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    arrays = [places, owners]
    if starts is not None:
        counted = [range(1 + start, 1 + start + end - begin) for start, (begin, end) in zip(starts, spans, strict=True)]
        arrays.append(array("i", chain.from_iterable(counted)))
    for own, of, *times in zip(*(upload(part, hidden.device).split(ADDED_AT_ONCE) for part in arrays), strict=True):
        numbers = hidden[own.long()].double().mul_(UNIT).round_()
        for factors in times:
            numbers.mul_(factors.unsqueeze(1))
        sums.index_add_(0, of, numbers)
    return sums.div_(UNIT)
