"""DraftSteps: what a draft model computes, over the rows and the blocks of the model for which it guesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nanoinfer.attention.context import Guesses
from nanoinfer.config import Config
from nanoinfer.kernels.drafting.draft import DraftedRows, last_two_tokens, next_tokens
from nanoinfer.kernels.drafting.gather import RowColumns
from nanoinfer.kernels.sampling.draw import NO_TOKEN
from nanoinfer.layers.sampler import Sampler
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.draft_layers import DraftLayers
from nanoinfer.runner.drafting.proposer import Proposer
from nanoinfer.runner.drafting.texts import DraftingRows, Texts
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.steps.input_batch import InputBatch
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs


class DraftSteps(Proposer):
    """The Proposer that runs a draft model.

    A guess is drawn as the model's own token will be, by the row's temperature and by the noise of its position. So it
    holds more often than one drawn by other noise: always, if the logits are equal.

    In a step that verifies, it first computes the last two tokens of each row. It lacks the first one's keys where all
    guesses of the step before have held. It computes prompts beside the model, and has no part in plain steps: the host
    lets it catch up before it guesses again.
    """

    def __init__(
        self,
        config: Config,
        tp: TensorParallel,
        batch: InputBatch,
        rows: DraftingRows,
        texts: Texts,
        holdings: Holdings,
    ) -> None:
        assert config.draft is not None
        assert holdings.draft is not None
        assert isinstance(holdings.draft.model, CausalLM)
        self._model, self._backend = holdings.draft.model, holdings.draft.backend
        self._batch, self._rows, self._texts, self._holdings = batch, rows, texts, holdings
        self._layers = DraftLayers(config, batch, rows, holdings)
        self._heads = config.draft.description.num_heads // tp.size
        self._ones = torch.ones_like(rows.ends)
        self._at_once = config.max_num_batched_tokens
        self._sampler = Sampler(self._model.first_id, tp)

    def see_prompts(self, prompts: PrefillInputs, chunks: list[ChunkMessage], hidden: Tensor) -> None:
        """Compute the keys of chunks of prompts."""
        self._prefill(prompts)

    def _prefill(self, prompts: PrefillInputs) -> None:
        self._model(prompts.token_ids, self._layers.beside(prompts.context))

    def catch_up(self, chunks: list[ChunkMessage]) -> None:
        """Compute the keys of tokens that plain steps have brought."""
        for part in _cut(chunks, self._at_once):
            self._prefill(PrefillInputs(part, [], self._holdings.kv_cache))

    def propose(self, num_rows: int, guesses: int) -> tuple[Tensor, Tensor]:
        """Draw guesses for each of the first rows, as many as there are places for each."""
        batch, columns = self._batch, self._rows
        of_batch = batch.last_tokens, batch.positions, columns.ends
        rows = DraftedRows(*(column[:num_rows] for column in of_batch))
        depth = self._layers.depth(num_rows, guesses)
        tokens, positions, row_of = last_two_tokens(rows, self._texts.tokens, columns.texts[:num_rows])
        # To the backend a row's last token is a guess behind the one before, so that their keys are read once for both.
        pairs = Guesses(row_of, row_of[:num_rows], self._ones[:num_rows], 1, self._heads)
        drawn = [self._draw(tokens, positions, batch.gather(row_of), num_rows, pairs)]
        own = batch.columns.at(slice(num_rows))
        while len(drawn) < depth:
            drawn.append(self._draw(*next_tokens(rows, drawn[-1], len(drawn)), own))
        return torch.stack(drawn, dim=1), torch.full_like(rows.positions, depth)

    def _draw(
        self, tokens: Tensor, positions: Tensor, own: RowColumns, first: int = 0, pairs: Guesses | None = None
    ) -> Tensor:
        """Run the draft model over tokens, each of some row; returns what it draws behind those from `first` on.

        own: what each token has of its row; pairs: as for Context.guesses
        """
        if not self._layers.skips_empty:
            return self._draw_all(tokens, positions, own, first, pairs)
        filled = (positions >= 0).nonzero()[:, 0]
        drawn = torch.full_like(tokens[first:], NO_TOKEN)
        if len(filled):
            number = int((filled < first).sum())
            some = tokens[filled], positions[filled], own.at(filled)
            drawn[filled[number:] - first] = self._draw_all(*some, number)
        return drawn

    def _draw_all(
        self, tokens: Tensor, positions: Tensor, own: RowColumns, first: int, pairs: Guesses | None = None
    ) -> Tensor:
        context = self._layers.at(positions, own)
        context.guesses = pairs
        self._backend.prepare_decode(context)
        hidden = self._model(tokens, context)
        logits = self._model.compute_logits(hidden[first:])
        return self._sampler(logits, own.temperatures[first:], own.seeds[first:], context.context_lens[first:])


def _cut(chunks: list[ChunkMessage], most: int) -> Iterator[list[ChunkMessage]]:
    """Yield the chunks, or parts of them, of which so many tokens at most are computed at once."""
    part, room = list[ChunkMessage](), most
    for chunk in chunks:
        begin, length = 0, len(chunk.token_ids)
        while begin < length:
            end = min(length, begin + room)
            part.append(replace(chunk, token_ids=chunk.token_ids[begin:end], start=chunk.start + begin))
            room, begin = room - (end - begin), end
            if room == 0:
                yield part
                part, room = [], most
    if part:
        yield part
