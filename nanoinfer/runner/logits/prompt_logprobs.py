"""The log-probabilities of prompts' tokens, each by the logits of the token before it."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.kernels.sampling.distribution import at_temperature
from nanoinfer.runner.logits.logprobs import LogProbs
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.transfer import upload, upload_all


def prompt_logprobs(
    chunks: list[ChunkMessage],
    logits_at: Callable[[Tensor], Tensor],
    device: torch.device,
    is_processed: bool,
    tokens_at_once: int,
) -> list[LogProbs]:
    """Return the log-probabilities that the chunks' requests ask for, by chunk.

    logits_at: computes the logits of n tokens, [n, vocabulary], from their places in the step, [n] int32: it has one
        chunk after another
    is_processed: whether logits are divided by the requests' temperatures
    tokens_at_once: so many tokens' logits are computed together
    """
    places, tokens, temperatures, begin = array("i"), array("i"), array("f"), 0
    counts: list[int] = []
    keys: list[int] = []
    for index, chunk in enumerate(chunks):
        scored, first = chunk.scored, begin + chunk.num_unscored
        places.extend(range(first, first + len(scored)))
        tokens.extend(scored)
        temperatures.extend([chunk.temperature] * len(scored))
        counts += [chunk.num_logprobs or 0] * len(scored)
        keys += [index] * len(scored)
        begin += len(chunk.token_ids)
    device_places, device_tokens = upload_all([places, tokens], device)
    device_temperatures = upload(temperatures, device) if is_processed else None
    logprobs: list[LogProbs] = []
    for start in range(0, len(tokens), tokens_at_once):
        some = slice(start, start + tokens_at_once)
        logits = logits_at(device_places[some])
        if device_temperatures is not None:
            logits = at_temperature(logits.float(), device_temperatures[some])
        logprobs += LogProbs.by_count(logits, device_tokens[some], counts[some], keys[some])
    return logprobs
