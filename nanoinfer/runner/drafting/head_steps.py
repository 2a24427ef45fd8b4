"""HeadSteps: what a model's prediction heads compute, over the rows and the blocks of the model."""

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
from nanoinfer.models.prediction_head import PredictionHeads
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.draft_layers import DraftLayers
from nanoinfer.runner.drafting.proposer import Proposer
from nanoinfer.runner.drafting.sizes import most_tokens, sizes_that_verify
from nanoinfer.runner.drafting.texts import DraftingRows
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.message import ChunkMessage
from nanoinfer.runner.steps.input_batch import InputBatch
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs
from nanoinfer.runner.transfer import upload


class HeadSteps(Proposer):
    """The Proposer that runs prediction heads. A guess is drawn as by DraftSteps.

    Head k's keys of position p need the hidden state there, and the token at p + 1 + k. So between steps it has the
    right keys of all positions but a row's last 2 + k. Each decode step begins with those that its last token brings.
    The head's guess stands behind that of the head before, and comes of the hidden state of the last position but one:
    so it needs the keys of k positions before this one, too, which are right if the guesses before hold. A single head
    makes further guesses of its own hidden state, and leaves keys that are nearly right. Behind the model's pass, keys
    of places are computed again, of the model's hidden states, where the token that they need was guessed.

    Where a prompt ends with a full block, samples of it share the places of its last keys, which need their first
    tokens. So do later prompts that go on otherwise. A guess there may see another one's. The keys of a position are
    not computed again if an earlier chunk, or another prompt, had its hidden state.
    """

    def __init__(
        self, config: Config, tp: TensorParallel, batch: InputBatch, rows: DraftingRows, holdings: Holdings
    ) -> None:
        assert holdings.draft is not None
        assert isinstance(holdings.draft.model, PredictionHeads)
        self._heads, self._backend = holdings.draft.model, holdings.draft.backend
        self._batch, self._rows, self._holdings = batch, rows, holdings
        self._layers = DraftLayers(config, batch, rows, holdings)
        count, size, dtype = len(self._heads), config.description.hidden_size, config.torch_dtype
        # Of each row's last tokens but one, the newest first; and of how many tokens they are.
        self._hidden = batch.table.column(dtype, count * size).view(-1, count, size)
        self._known = batch.table.column(torch.int32)
        self._back = torch.arange(count, device=batch.device)
        most = most_tokens(sizes_that_verify(config))
        self._of_places = torch.zeros((most, size), dtype=dtype, device=batch.device)  # of a verifying step
        self._sampler = Sampler(self._model.first_id, tp)

    @property
    def _model(self) -> Decoder:
        model = self._holdings.model
        assert isinstance(model, Decoder)
        return model

    def see_prompts(self, prompts: PrefillInputs, chunks: list[ChunkMessage], hidden: Tensor) -> None:
        """Compute the keys of chunks of prompts.

        Those that need tokens behind a prompt are computed again once these are known.
        """
        context = self._layers.beside(prompts.context)
        for number in range(len(self._heads)):
            following = array("i")
            for chunk in chunks:
                length, known = len(chunk.token_ids), chunk.following(1 + number)
                following.extend(known[:length])
                following.extend([0] * (length - len(known)))
            tokens = upload(following, hidden.device)
            self._heads[number].remember(self._model.inputs(tokens, context), hidden, context)

    def see_joining(self, rows: slice, prompts: PrefillInputs, hidden: Tensor) -> None:
        """Keep the hidden states of the prompts' last tokens, behind which the next ones are to be drawn."""
        packed, last = prompts.context.prefill, prompts.last_indices
        assert packed is not None
        chunk = torch.searchsorted(packed.cu_query_lens, last.int(), right=True) - 1
        self._hidden[rows] = hidden[(last[:, None] - self._back).clamp(min=0)]
        self._known[rows] = (last - packed.cu_query_lens[chunk] + 1).int()

    def begin_plain(self, num_rows: int) -> None:
        """Compute the keys that the rows' last tokens bring."""
        for number in range(len(self._heads)):
            self._remember_behind(number, [self._batch.last_tokens[:num_rows]])

    def propose(self, num_rows: int, guesses: int) -> tuple[Tensor, Tensor]:
        """Draw guesses for each of the first rows, as many as there are places for each."""
        batch = self._batch
        of_batch = batch.last_tokens, batch.positions, self._rows.ends
        rows = DraftedRows(*(column[:num_rows] for column in of_batch))
        own, depth = batch.columns.at(slice(num_rows)), self._layers.depth(num_rows, guesses)
        before, hidden = (rows.positions - 1).clamp(min=-1), self._hidden[:num_rows, 0]
        tokens, drawn = [rows.last_tokens], list[Tensor]()
        for number in range(len(self._heads)):
            draws = number < depth
            self._remember_behind(number, tokens[:number] if draws else tokens[: number + 1])
            if draws:
                guess, after = self._draw(number, tokens[-1], before, hidden, own)
                drawn.append(guess)
                tokens.append(guess.clamp(min=0))
        while len(drawn) < depth:  # a single head
            further, positions = next_tokens(rows, drawn[-1], len(drawn))
            guess, after = self._draw(0, further, (positions - 1).clamp(min=-1), after, own)
            drawn.append(guess)
        return torch.stack(drawn, dim=1), torch.full_like(rows.positions, depth)

    def see_rows(self, hidden: Tensor) -> None:
        """Keep the hidden states of a plain step."""
        kept = self._hidden[: len(hidden)]
        kept.copy_(torch.cat([hidden[:, None], kept[:, :-1]], dim=1))
        self._known[: len(hidden)] += 1

    def see_places(self, places: Places, hidden: Tensor, filled: Tensor | None) -> None:
        """Keep the hidden states of a verifying step, and compute the keys of places that guessed tokens bring."""
        count, num_rows = len(places.tokens), len(places.first)
        of_places = self._of_places[:count]
        of_places[slice(count) if filled is None else filled] = hidden
        place, own = torch.arange(count, device=hidden.device), self._batch.gather(places.row_of)
        for number in range(len(self._heads)):
            behind = torch.cat([num_rows + number + places.first, place[num_rows:] + 1 + number]).clamp(max=count - 1)
            follows = places.positions[behind] == places.positions + 1 + number
            is_there = follows & (places.row_of[behind] == places.row_of) & (places.positions >= 0)
            self._remember(number, places.tokens[behind], places.positions.where(is_there, -1), of_places, own)

    def see_kept(self, places: Places, kept: Tensor) -> None:
        """Keep the hidden states before the last token that each row has kept."""
        num_rows = len(places.first)
        held = (kept[:, :-1] != NOTHING).sum(dim=1)[:, None] - 1  # guesses; -1: the row has no new token
        row = torch.arange(num_rows, device=kept.device)[:, None]
        ahead = held - self._back  # of the step's first tokens; those behind are kept already
        place = torch.where(ahead > 0, num_rows + places.first[:, None] + ahead - 1, row)
        old = self._hidden[:num_rows]
        earlier = old[row, (-1 - ahead).clamp(min=0)]
        old.copy_(torch.where((ahead >= 0)[..., None], self._of_places[place], earlier))
        self._known[:num_rows] += (held[:, 0] + 1).int()

    def _remember_behind(self, number: int, tokens: list[Tensor]) -> None:
        """Compute the keys of a head that the rows' last tokens bring, and the guesses behind these.

        tokens: of each row, [rows] int32: the last ones, then first guesses, then second ones
        """
        if not tokens:
            return
        num_rows, back = len(tokens[0]), range(number, number - len(tokens), -1)
        last, known = self._batch.positions[:num_rows] - 1, self._known[:num_rows]
        row = torch.arange(num_rows, dtype=torch.int32, device=last.device).repeat(len(tokens))
        positions = torch.cat([(last - far).where((last >= 0) & (known > far), -1) for far in back])
        hidden = self._hidden[:num_rows, number - len(tokens) + 1 : number + 1].flip(1).transpose(0, 1).flatten(0, 1)
        self._remember(number, torch.cat(tokens), positions, hidden, self._batch.gather(row))

    def _remember(self, number: int, tokens: Tensor, positions: Tensor, hidden: Tensor, own: RowColumns) -> None:
        """Compute a head's keys of positions; a position of -1 has none.

        tokens: those at the head's distance; hidden: the hidden states; own: what each position has of its row
        """
        if self._layers.skips_empty:
            filled = (positions >= 0).nonzero()[:, 0]
            if not len(filled):
                return
            tokens, positions, hidden, own = tokens[filled], positions[filled], hidden[filled], own.at(filled)
        context = self._layers.at(positions, own)
        self._backend.prepare_decode(context)
        self._heads[number].remember(self._model.inputs(tokens, context), hidden, context)

    def _draw(
        self, number: int, tokens: Tensor, positions: Tensor, hidden: Tensor, own: RowColumns
    ) -> tuple[Tensor, Tensor]:
        """Run a head over a position of each row; returns the guesses, and the head's hidden states.

        Arguments: as for _remember
        """
        if not self._layers.skips_empty:
            return self._draw_all(number, tokens, positions, hidden, own)
        filled = (positions >= 0).nonzero()[:, 0]
        drawn, after = torch.full_like(tokens, NO_TOKEN), torch.zeros_like(hidden)
        if len(filled):
            some = tokens[filled], positions[filled], hidden[filled], own.at(filled)
            drawn[filled], after[filled] = self._draw_all(number, *some)
        return drawn, after

    def _draw_all(
        self, number: int, tokens: Tensor, positions: Tensor, hidden: Tensor, own: RowColumns
    ) -> tuple[Tensor, Tensor]:
        context = self._layers.at(positions, own)
        self._backend.prepare_decode(context)
        after = self._heads[number](self._model.inputs(tokens, context), hidden, context)
        logits = self._model.compute_logits(after)
        return self._sampler(logits, own.temperatures, own.seeds, positions + 2 + number), after
