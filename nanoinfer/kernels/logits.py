"""What a request may have done to its logits before the draw. Few ask for it: these are plain torch on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def penalize(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Make tokens that occurred less likely, or more.

    logits: [rows, vocabulary] float32
    tokens: [rows, longest] int64, each row's prompt and output, of which the first `lengths` are valid
    lengths, prompt_lengths: [rows] int32
    repetition: [rows], of all of them: divides a positive logit and multiplies a negative one (Keskar et al., 2019)
    presence, frequency: [rows], of the output: taken from the logit once, and as often as the token occurs
    """
    at = torch.arange(tokens.shape[1], device=tokens.device)
    is_valid = at < lengths[:, None]
    tokens = tokens.where(is_valid, 0)
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, is_valid.float()) > 0
    is_output = is_valid & (at >= prompt_lengths[:, None])
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, is_output.float())

    factor = torch.where(logits > 0, 1 / repetition[:, None], repetition[:, None])
    logits = torch.where(seen, logits * factor, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def keep_likely(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set the scores of unlikely tokens to -inf: by top_k first, then by top_p, then by min_p, as transformers does.

    scores: [rows, vocabulary] float32, logits / temperature
    top_k: [rows] int64, from 1 to the vocabulary: all that are as likely as the k-th stay
    top_p: [rows]; 1 keeps all. Of what top_k left, the least likely go whose probabilities add up to 1 - p at most;
        of equals the smaller ids go first, and the most likely token always stays
    min_p: [rows]; what is less likely than this times the most likely token goes
    """
    minus_infinity = float("-inf")
    ascending, ids = scores.sort(dim=1, stable=True)
    kth = ascending.gather(1, scores.shape[1] - top_k[:, None])
    ascending = ascending.masked_fill(ascending < kth, minus_infinity)
    goes = ascending.softmax(dim=1).cumsum(dim=1) <= 1 - top_p[:, None]
    goes &= top_p[:, None] < 1
    goes[:, -1] = False
    ascending = ascending.masked_fill(goes, minus_infinity)
    kept = torch.empty_like(scores).scatter_(1, ids, ascending)
    probabilities = kept.softmax(dim=1)
    return kept.masked_fill(probabilities < min_p[:, None] * probabilities.amax(dim=1, keepdim=True), minus_infinity)
