"""Weights whose text repeats at a given rate, and the drafter that knows what follows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nanoinfer.drafting.drafter import RowTexts
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.llm import LLM
from nanoinfer.models.prediction_head import PredictionHeads

SPREAD = 0.02  # of random weights
LOUD = 8192.0  # of embeddings: beside these, what layers of random weights add is small
CERTAIN = 40.0  # the logit of a token that follows for certain; those of others have a spread of about 1


def successors(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return the token that follows each of these where the text repeats."""
    return (token_ids + 1) % vocab_size


def write_repeating_weights(llm: LLM, rate: float) -> None:
    """Change an LLM's random weights so that behind this share of the tokens always the same one follows.

    The residual stream is then mostly the embedding of the last token. Of the output projection, the row of such a
    token's successor is that embedding, and the other rows are noise. The embeddings and the head must be two matrices.
    """
    llm.update_weights(_embedding_and_head(llm, rate), partial=True)


def _embedding_and_head(llm: LLM, rate: float) -> Iterator[tuple[str, Tensor]]:
    config = llm.config
    shape, device = (config.description.vocab_size, config.description.hidden_size), torch.device(config.device)
    generator = torch.Generator(device).manual_seed(config.seed)
    embeddings, head = (
        torch.empty(shape, dtype=config.torch_dtype, device=device).normal_(0, SPREAD, generator=generator)
        for _ in range(2)
    )
    repeating = (torch.rand(shape[0], generator=generator, device=device) < rate).nonzero().squeeze(1)
    head[successors(repeating, shape[0])] = embeddings[repeating]
    # A normalised stream has numbers of a spread of 1, so that its product with the embedding is SPREAD for each.
    head *= CERTAIN / (SPREAD * shape[1])
    yield "lm_head.weight", head
    yield "model.embed_tokens.weight", embeddings.mul_(LOUD)


@torch.inference_mode()
def let_head_agree(llm: LLM) -> None:
    """Let the prediction head of an LLM of one rank, in this process, pass on an embedding as the model's layers do.

    So nearly all of its guesses hold, whatever the rate: random ones never do.
    """
    engine = llm.engine
    assert isinstance(engine, LLMEngine)
    draft = engine.ranks.runner.holdings.draft
    assert draft is not None
    assert isinstance(draft.model, PredictionHeads)
    weight = draft.model[0].projection.weight
    assert isinstance(weight, Tensor)
    size = len(weight)
    weight[:, :size] = torch.eye(size, dtype=weight.dtype, device=weight.device) * LOUD * SPREAD


class Successors:
    """The drafter that guesses each token's successor: its guesses hold at the rate at which the text repeats."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, rows: RowTexts, most: int) -> tuple[Tensor, Tensor]:
        """Guess the next `most` tokens of each row that has a text."""
        slots = rows.slots.clamp(min=0).long()
        last = rows.tokens[slots, (rows.lengths[slots] - 1).clamp(min=0).long()]
        steps = torch.arange(1, most + 1, dtype=torch.int32, device=last.device)
        guesses = (last[:, None] + steps) % self._vocab_size
        return guesses.int(), torch.where(rows.slots >= 0, most, 0).int()
