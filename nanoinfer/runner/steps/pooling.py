"""Pooling: what a prefill step reads of texts that are not continued, of their hidden states behind the last norm."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoinfer.kernels.text_sums import sum_texts
from nanoinfer.pooling.read import LabelsOf, Read
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.transfer import to_host, upload, upload_all


@dataclass
class Pooled:
    """What some chunks of a step give.

    chunks: their numbers among the step's; counts: how many texts each has
    numbers: [texts, width], float32 or, for sums, float64
    """

    chunks: list[int]
    counts: list[int]
    numbers: Tensor

    def to_host(self) -> Pooled:
        """Copy to host memory; from a CUDA device the copy is complete with the stream's next event."""
        return Pooled(self.chunks, self.counts, to_host(self.numbers))

    def entries(self) -> Iterator[tuple[int, npt.NDArray[np.floating[Any]]]]:
        """Yield each chunk's number, and the numbers of its texts, [texts, width]."""
        begin, numbers = 0, self.numbers.numpy()
        for chunk, count in zip(self.chunks, self.counts, strict=True):
            yield chunk, numbers[begin : begin + count]
            begin += count


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
        counts, spans = [len(chunks[number].lens) for number in numbers], list[tuple[int, int]]()
        for number in numbers:
            cuts = [*accumulate(chunks[number].lens, initial=ends[number] - len(chunks[number].token_ids))]
            spans += pairwise(cuts)
        of = labels_of if read.what == "labels" else read.what
        if of == "max":
            found = torch.stack([hidden[begin:end].amax(dim=0) for begin, end in spans]).float()
        elif of in ("mean", "weighted"):
            begins, lens = array("i", [begin for begin, _ in spans]), array("i", [end - begin for begin, end in spans])
            arrays = [begins, lens]
            if of == "weighted":
                arrays.append(array("i", [chunks[number].start for number in numbers for _ in chunks[number].lens]))
            on_device = upload_all(arrays, hidden.device)
            found = sum_texts(hidden, *on_device)
            if read.what == "labels":
                found = score(found / on_device[1].unsqueeze(1))
        else:
            places = upload(array("i", [begin if of == "first" else end - 1 for begin, end in spans]), hidden.device)
            if read.what in ("first", "last"):
                found = hidden[places.long()].float()
            else:
                found = torch.cat([_scores(read, logits_at(some)) for some in places.split(tokens_at_once)])
        pooled.append(Pooled(numbers, counts, found))
    return pooled


def _scores(read: Read, logits: Tensor) -> Tensor:
    """Return the logits that count, [texts, labels or tokens] float32."""
    if not read.tokens:
        return logits.float()
    return logits[:, upload(array("i", read.tokens), logits.device).long()].float()
