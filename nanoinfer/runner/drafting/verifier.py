"""Verifier: the part of a verifying step that stands around the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.attention.context import Guesses
from nanoinfer.config import Config
from nanoinfer.drafting.drafter import Drafter
from nanoinfer.drafting.suffix import SuffixDrafter
from nanoinfer.kernels.drafting.accept import AdvancedRows, accept_guesses
from nanoinfer.kernels.drafting.pack import GuessingRows, Places, pack_guesses
from nanoinfer.kernels.drafting.texts import write_last_tokens
from nanoinfer.kernels.sampling.draw import NO_TOKEN
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.draft_steps import DraftSteps
from nanoinfer.runner.drafting.proposer import OneForAll, Proposer, TextProposer
from nanoinfer.runner.drafting.sizes import most_tokens, verify_sizes
from nanoinfer.runner.drafting.texts import DraftingRows, Texts, num_texts
from nanoinfer.runner.logits.lines import Sampled
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.memory.plan import total_bytes
from nanoinfer.runner.message import DecodeMessage, StepMessage
from nanoinfer.runner.steps.input_batch import InputBatch

Draw = Callable[[Places, Guesses | None], Tensor]


class Verifier:
    """Proposes guesses for the rows of a batch, gives them places in a step, and keeps those that hold.

    kept: [rows, max_guesses + 2] int32, of the last verifying step: see accept_guesses
    draft: of a draft model; None: there is none
    packed: comes when a step has its guesses, before it runs the model; None on the CPU
    """

    def __init__(
        self, config: Config, tp: TensorParallel, batch: InputBatch, rows: DraftingRows, holdings: Holdings
    ) -> None:
        """rows: of the batch, which moves them. All ranks make theirs together, for as many texts."""
        device = batch.device
        self._batch, self._rows = batch, rows
        self._heads = config.description.num_heads // tp.size
        self._skips_empty = config.is_plain_cpu or config.is_one_by_one  # elsewhere, graphs need fixed sizes
        self._most, self._vocab_size = config.max_guesses, config.description.vocab_size
        count = num_texts(config.max_num_seqs, config.max_model_len, total_bytes(device)) + config.remember_outputs
        self.texts = Texts(tp.min(count, device), config.max_model_len, device)
        self.draft = None
        if config.draft is not None:
            self.draft = DraftSteps(config, tp, batch, rows, self.texts, holdings)
        self._proposer: Proposer = self.draft or self._text_proposer(config.speculation, tp)
        self.kept = torch.zeros((config.max_num_seqs, self._most + 2), dtype=torch.int32, device=device)
        most = most_tokens(verify_sizes(config.max_num_seqs, self._most))
        self._places = Places.room(config.max_num_seqs, most, device)
        # "external": a graph that records it lets it come in each replay, for those outside.
        self.packed = torch.cuda.Event(external=True) if device.type == "cuda" else None

    def _text_proposer(self, asked: str | Drafter | None, tp: TensorParallel) -> Proposer:
        """Return the Proposer of the option `speculation`, which reads texts."""
        rows, most = self._rows, self._most
        if asked is None or isinstance(asked, str):
            return TextProposer(SuffixDrafter(), self.texts, rows, most)
        own = TextProposer(asked, self.texts, rows, most)
        return own if tp.size == 1 else OneForAll(own, tp, self._batch.device, most)

    def update(self, message: StepMessage) -> None:
        """Take the texts of the sequences that join with a step, before it runs, or let a draft model catch up."""
        if isinstance(message, DecodeMessage):
            if message.lacking:
                assert self.draft is not None
                self.draft.catch_up(message.lacking)
            return
        joining = [join.drafting for join in message.joins if join.drafting is not None]
        assert len(joining) == len(message.joins)
        if joining:
            self.texts.write(joining)
            self._rows.join(message.num_rows, joining)
        if message.members:
            self.texts.regroup(message.members)

    def note(self, num_rows: int) -> None:
        """Write the last tokens of the first rows into their texts. Each decode step begins with it."""
        texts, batch, rows = self.texts, self._batch, self._rows
        of_rows = rows.texts[:num_rows], batch.positions[:num_rows], batch.last_tokens[:num_rows]
        write_last_tokens(texts.tokens, texts.lengths, *of_rows)

    def verify(self, num_rows: int, guesses: int, draw: Draw, logits: Tensor) -> None:
        """Run a verifying step over the first rows, with places for so many guesses.

        draw: runs the model over some places, and returns a token for each. Its second argument tells which of these
            the guesses have; None: some places were left out
        logits: where it writes theirs
        """
        self.note(num_rows)
        places = self.places(num_rows, guesses)
        self._fill(places)
        if self._skips_empty:
            drawn = _draw_filled(places, draw, logits)
        else:
            drawn = draw(places, Guesses(places.row_of, places.first, places.counts, self._most, self._heads))
        self.accept(places, drawn)

    def places(self, num_rows: int, guesses: int) -> Places:
        """Return where the newest step of this size has its places."""
        return self._places.of_size(num_rows, guesses)

    def guesses(self, places: Places, num_rows: int) -> Tensor:
        """Return the guesses of the first rows, int32: their Places.first and Places.counts, then all guesses."""
        return torch.cat([places.first[:num_rows], places.counts[:num_rows], places.tokens[len(places.first) :]])

    def lines(self, places: Places, num_rows: int) -> Tensor:
        """Return which tokens of the newest step were the first rows' last ones, then which were guesses."""
        device = places.positions.device
        guesses = torch.arange(len(places.first), len(places.tokens), device=device)
        lines = torch.cat([torch.arange(num_rows, device=device), guesses])
        if not self._skips_empty:
            return lines
        before = (places.positions >= 0).cumsum(0) - 1
        return before.clamp(min=0)[lines]

    def _fill(self, places: Places) -> None:
        """Propose guesses for the first rows, and pack them into places behind these."""
        batch, rows, num_rows = self._batch, self._rows, len(places.first)
        proposed, counts = self._proposer.propose(num_rows, len(places.tokens) - num_rows)
        guessing = GuessingRows(
            proposed.contiguous(),
            counts.contiguous(),
            batch.last_tokens[:num_rows],
            batch.positions[:num_rows],
            rows.ends[:num_rows],
            rows.limits[:num_rows],
        )
        pack_guesses(guessing, places, self._vocab_size, are_free=not self._skips_empty)
        if self.packed is not None:
            self.packed.record()

    def accept(self, places: Places, drawn: Tensor) -> None:
        """Keep what holds of the draws of all places, and move the rows on from where the step has found them."""
        texts, batch, num_rows = self.texts, self._batch, len(places.first)
        columns = self._rows.texts, batch.last_tokens, batch.positions, self._rows.limits
        rows = AdvancedRows(texts.tokens, texts.lengths, *(column[:num_rows] for column in columns))
        accept_guesses(drawn, places, rows, self.kept[:num_rows])

    def redraw(self, places: Places, logits: Tensor, again: Callable[[Sampled], Tensor]) -> None:
        """Draw again for the rows of the newest step that want more than a temperature, and keep what holds then.

        logits: those of all places; again: returns new draws for all places, [places] int32
        """
        batch, token_ids = self._batch, places.drawn.clamp(min=0)
        how = places.positions + 1, batch.temperatures, batch.seeds, places
        redrawn = again(Sampled(0, logits, token_ids, *how, has_all=not self._skips_empty))
        self.accept(places, places.drawn.where(places.drawn < 0, redrawn))


def _draw_filled(places: Places, draw: Draw, logits: Tensor) -> Tensor:
    """Draw for the places that are not empty alone.

    Returns as many tokens as there are places. logits: the first ones become those of the rows
    """
    drawn = torch.full_like(places.tokens, NO_TOKEN)
    filled = (places.positions >= 0).nonzero()[:, 0]
    if len(filled) == 0:
        return drawn
    tokens, positions, row_of = (column[filled] for column in places[:3])
    drawn[filled] = draw(places._replace(tokens=tokens, positions=positions, row_of=row_of), None)
    if filled[-1] >= len(filled):  # a row is empty: the logits of the later ones stand too early
        logits[filled] = logits[: len(filled)].clone()
    return drawn
