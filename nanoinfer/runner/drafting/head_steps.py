"""HeadSteps: what a model's prediction head computes, over the rows and the blocks of the model."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from nanoinfer.config import Config
from nanoinfer.kernels.drafting.accept import NOTHING
from nanoinfer.kernels.drafting.draft import DraftedRows, next_tokens
from nanoinfer.kernels.drafting.gather import RowColumns
from nanoinfer.kernels.drafting.pack import Places
from nanoinfer.kernels.sampling.draw import NO_TOKEN
from nanoinfer.layers.sampler import Sampler
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.prediction_head import PredictionHead
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.draft_layers import DraftLayers
from nanoinfer.runner.drafting.proposer import Proposer
from nanoinfer.runner.drafting.sizes import most_tokens, verify_sizes
from nanoinfer.runner.drafting.texts import DraftingRows
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.steps.input_batch import InputBatch
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs
from nanoinfer.runner.transfer import upload


class HeadSteps(Proposer):
    """The Proposer that runs a prediction head. A guess is drawn as by DraftSteps.

    The head's keys of position p need the hidden state there, and the token at p + 1. So between steps it has the keys
    of all positions but a row's last two, and keeps the hidden state of the last but one. Each decode step begins with
    that one's keys. A guess behind it comes with them. Each further guess comes of the head's own hidden state before,
    and leaves keys that are nearly right. Behind the model's pass, those of places whose next token was guessed are
    computed again, of the model's hidden states: they are right if the guess holds.

    Where a prompt ends with a full block, samples of it share the place of its last keys, which need their first
    tokens. So do later prompts that go on otherwise. A guess there may see another one's.
    """

    def __init__(
        self, config: Config, tp: TensorParallel, batch: InputBatch, rows: DraftingRows, holdings: Holdings
    ) -> None:
        assert holdings.draft is not None
        assert isinstance(holdings.draft.model, PredictionHead)
        self._head, self._backend = holdings.draft.model, holdings.draft.backend
        self._batch, self._rows, self._holdings = batch, rows, holdings
        self._layers = DraftLayers(config, batch, rows, holdings)
        size, dtype = config.description.hidden_size, config.torch_dtype
        self._hidden = batch.table.column(dtype, size)  # of each row's last token but one
        most = most_tokens(verify_sizes(config.max_num_seqs, config.max_guesses))
        self._of_places = torch.zeros((most, size), dtype=dtype, device=batch.device)  # of a verifying step
        self._sampler = Sampler(self._model.first_id, tp)

    @property
    def _model(self) -> Decoder:
        model = self._holdings.model
        assert isinstance(model, Decoder)
        return model

    def see_prompts(self, prompts: PrefillInputs, chunks: list[ChunkMessage], hidden: Tensor) -> None:
        """Compute the keys of chunks of prompts.

        Those of a prompt's last token are computed again once the next token is known.
        """
        following = array("i")
        for chunk in chunks:
            following.extend(chunk.token_ids[1:])
            following.append(chunk.next_token or 0)
        context = self._layers.beside(prompts.context)
        tokens = upload(following, hidden.device)
        self._head.remember(self._model.inputs(tokens, context), hidden, context)

    def see_joining(self, rows: slice, prompts: PrefillInputs, hidden: Tensor) -> None:
        """Keep the hidden states of the prompts' last tokens, behind which the next ones are to be drawn."""
        self._hidden[rows] = hidden[prompts.last_indices]

    def begin_plain(self, num_rows: int) -> None:
        """Compute the keys of the rows' last tokens but one."""
        self._remember(*self._last(num_rows), self._batch.columns.at(slice(num_rows)))

    def propose(self, num_rows: int, guesses: int) -> tuple[Tensor, Tensor]:
        """Draw guesses for each of the first rows, as many as there are places for each."""
        batch = self._batch
        of_batch = batch.last_tokens, batch.positions, self._rows.ends
        rows = DraftedRows(*(column[:num_rows] for column in of_batch))
        own, depth = batch.columns.at(slice(num_rows)), self._layers.depth(num_rows, guesses)
        guess, hidden = self._draw(*self._last(num_rows), own)
        drawn = [guess]
        while len(drawn) < depth:
            tokens, positions = next_tokens(rows, drawn[-1], len(drawn))
            guess, hidden = self._draw(tokens, (positions - 1).clamp(min=-1), hidden, own)
            drawn.append(guess)
        return torch.stack(drawn, dim=1), torch.full_like(rows.positions, depth)

    def see_rows(self, hidden: Tensor) -> None:
        """Keep the hidden states of a plain step."""
        self._hidden[: len(hidden)] = hidden

    def see_places(self, places: Places, hidden: Tensor, filled: Tensor | None) -> None:
        """Keep the hidden states of a verifying step, and compute the keys of places whose next tokens were guessed."""
        count, num_rows = len(places.tokens), len(places.first)
        of_places = self._of_places[:count]
        of_places[slice(count) if filled is None else filled] = hidden
        place = torch.arange(count, device=hidden.device)
        behind = torch.cat([num_rows + places.first, place[num_rows:] + 1]).clamp(max=count - 1)
        is_next = (places.positions[behind] == places.positions + 1) & (places.row_of[behind] == places.row_of)
        positions = places.positions.where(is_next & (places.positions >= 0), -1)
        self._remember(places.tokens[behind], positions, of_places, self._batch.gather(places.row_of))

    def see_kept(self, places: Places, kept: Tensor) -> None:
        """Keep the hidden state before the last token that each row has kept."""
        num_rows = len(places.first)
        held = (kept[:, :-1] != NOTHING).sum(dim=1) - 1  # guesses; -1: the row has no new token
        row = torch.arange(num_rows, device=kept.device)
        place = torch.where(held > 0, num_rows + places.first + held - 1, row)
        hidden = self._hidden[:num_rows]
        hidden.copy_(torch.where(held[:, None] >= 0, self._of_places[place], hidden))

    def _last(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first rows' last tokens, and the positions and the hidden states before these."""
        before = (self._batch.positions[:num_rows] - 1).clamp(min=-1)
        return self._batch.last_tokens[:num_rows], before, self._hidden[:num_rows]

    def _remember(self, tokens: Tensor, positions: Tensor, hidden: Tensor, own: RowColumns) -> None:
        """Compute the head's keys of positions; a position of -1 has none.

        tokens: the next ones; hidden: the hidden states; own: what each position has of its row
        """
        if self._layers.skips_empty:
            filled = (positions >= 0).nonzero()[:, 0]
            if not len(filled):
                return
            tokens, positions, hidden, own = tokens[filled], positions[filled], hidden[filled], own.at(filled)
        context = self._layers.at(positions, own)
        self._backend.prepare_decode(context)
        self._head.remember(self._model.inputs(tokens, context), hidden, context)

    def _draw(self, tokens: Tensor, positions: Tensor, hidden: Tensor, own: RowColumns) -> tuple[Tensor, Tensor]:
        """Run the head over a position of each row; returns the guesses, and the head's hidden states.

        Arguments: as for _remember
        """
        if not self._layers.skips_empty:
            return self._draw_all(tokens, positions, hidden, own)
        filled = (positions >= 0).nonzero()[:, 0]
        drawn, after = torch.full_like(tokens, NO_TOKEN), torch.zeros_like(hidden)
        if len(filled):
            some = tokens[filled], positions[filled], hidden[filled], own.at(filled)
            drawn[filled], after[filled] = self._draw_all(*some)
        return drawn, after

    def _draw_all(self, tokens: Tensor, positions: Tensor, hidden: Tensor, own: RowColumns) -> tuple[Tensor, Tensor]:
        context = self._layers.at(positions, own)
        self._backend.prepare_decode(context)
        after = self._head(self._model.inputs(tokens, context), hidden, context)
        logits = self._model.compute_logits(after)
        return self._sampler(logits, own.temperatures, own.seeds, positions + 2), after
