"""Verifier: the part of a verifying step that stands around the model."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.attention.context import Guesses
from nanoinfer.config import Config
from nanoinfer.drafting.drafter import Drafter
from nanoinfer.drafting.suffix import SuffixDrafter
from nanoinfer.kernels.drafting.accept import AdvancedRows, accept_guesses
from nanoinfer.kernels.drafting.pack import GuessedRows, GuessingRows, Places, pack_guesses
from nanoinfer.kernels.drafting.texts import write_last_tokens
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.draft_steps import DraftSteps
from nanoinfer.runner.drafting.head_steps import HeadSteps
from nanoinfer.runner.drafting.proposer import OneForAll, Proposer, TextProposer
from nanoinfer.runner.drafting.sizes import most_tokens, sizes_that_verify
from nanoinfer.runner.drafting.texts import DraftingRows, Texts, num_texts
from nanoinfer.runner.logits.lines import StepLines
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.memory.plan import total_bytes
from nanoinfer.runner.message import DecodeMessage, StepMessage
from nanoinfer.runner.steps.input_batch import InputBatch


class Verifier:
    """Proposes guesses for the rows of a batch, gives them places in a step, and keeps those that hold.

    rows: what the batch's rows have beside other columns
    kept: [rows, max_guesses + 2] int32, of the last verifying step: see accept_guesses
    proposer: makes the guesses
    skips_empty: whether the model runs over the places that are not empty alone
    packed: comes when a step has its guesses, before it runs the model; None on the CPU
    """

    def __init__(self, config: Config, tp: TensorParallel, batch: InputBatch, holdings: Holdings) -> None:
        """Add columns to the batch's. All ranks make theirs together, for as many texts."""
        device = batch.device
        self._batch, self.rows = batch, DraftingRows(batch.table, config.max_guesses)
        self._heads = config.description.num_heads // tp.size
        self.skips_empty = config.is_plain_cpu or config.is_one_by_one  # elsewhere, graphs need fixed sizes
        self._most, self._vocab_size = config.max_guesses, config.description.vocab_size
        count = num_texts(config.max_num_seqs, config.max_model_len, total_bytes(device)) + config.remember_outputs
        self.texts = Texts(tp.min(count, device), config.max_model_len, device)
        self.proposer = self._make_proposer(config, tp, holdings)
        self.kept = torch.zeros((config.max_num_seqs, self._most + 2), dtype=torch.int32, device=device)
        most = most_tokens(sizes_that_verify(config))
        self._places = Places.room(config.max_num_seqs, most, device)
        # "external": a graph that records it lets it come in each replay, for those outside.
        self.packed = torch.cuda.Event(external=True) if device.type == "cuda" else None

    def _make_proposer(self, config: Config, tp: TensorParallel, holdings: Holdings) -> Proposer:
        if config.draft is None:
            return self._text_proposer(config.speculation, tp)
        if config.draft.are_heads:
            return HeadSteps(config, tp, self._batch, self.rows, holdings)
        return DraftSteps(config, tp, self._batch, self.rows, self.texts, holdings)

    def _text_proposer(self, asked: str | Drafter | None, tp: TensorParallel) -> Proposer:
        """Return the Proposer of the option `speculation`, which reads texts."""
        rows, most = self.rows, self._most
        if asked is None or isinstance(asked, str):
            return TextProposer(SuffixDrafter(), self.texts, rows, most)
        own = TextProposer(asked, self.texts, rows, most)
        return own if tp.size == 1 else OneForAll(own, tp, self._batch.device, most)

    def update(self, message: StepMessage) -> None:
        """Take the texts of the sequences that join with a step, before it runs, or let a draft model catch up."""
        if isinstance(message, DecodeMessage):
            if message.lacking:
                self.proposer.catch_up(message.lacking)
            return
        joining = [join.drafting for join in message.joins if join.drafting is not None]
        assert len(joining) == len(message.joins)
        if joining:
            self.texts.write(joining)
            self.rows.join(message.num_rows, joining)
        if message.members:
            self.texts.regroup(message.members)

    def begin(self, num_rows: int, guesses: int) -> None:
        """Begin a decode step: write the last tokens of the first rows into their texts. guesses: 0 in a plain step"""
        texts, batch, rows = self.texts, self._batch, self.rows
        of_rows = rows.texts[:num_rows], batch.positions[:num_rows], batch.last_tokens[:num_rows]
        write_last_tokens(texts.tokens, texts.lengths, *of_rows)
        if guesses == 0:
            self.proposer.begin_plain(num_rows)

    def propose(self, num_rows: int, guesses: int) -> Places:
        """Propose guesses for the first rows, and pack them into places behind these. Returns the step's places."""
        batch, rows, places = self._batch, self.rows, self._places.of_size(num_rows, guesses)
        proposed, counts = self.proposer.propose(num_rows, guesses)
        guessing = GuessingRows(
            proposed.contiguous(),
            counts.contiguous(),
            batch.last_tokens[:num_rows],
            batch.positions[:num_rows],
            rows.ends[:num_rows],
            rows.limits[:num_rows],
        )
        pack_guesses(guessing, places, self._vocab_size, are_free=not self.skips_empty)
        if self.packed is not None:
            self.packed.record()
        return self.places(num_rows, guesses)

    def tell(self, places: Places) -> Guesses:
        """Return which tokens of a step are guesses."""
        return Guesses(places.row_of, places.first, places.counts, self._most, self._heads)

    def guessed(self, places: Places, filled: Tensor | None) -> GuessedRows:
        """Return the rows of a step; filled: [n] int64, the places that it computes, if it skips empty ones"""
        num_rows = len(places.first)
        if filled is None:
            return GuessedRows(slice(num_rows), places.first, places.counts, self._most)
        rows = filled[filled < num_rows]
        return GuessedRows(rows, places.first[rows], places.counts[rows], self._most)

    def places(self, num_rows: int, guesses: int) -> Places:
        """Return where the newest step of this size has its places; if it skips empty ones, up to its last guess."""
        places = self._places.of_size(num_rows, guesses)
        return self._places.of_size(num_rows, int(places.counts.sum())) if self.skips_empty else places

    def guesses(self, places: Places, num_rows: int) -> Tensor:
        """Return the guesses of the first rows, int32: their Places.first and Places.counts, then all guesses."""
        return torch.cat([places.first[:num_rows], places.counts[:num_rows], places.tokens[len(places.first) :]])

    def lines(self, places: Places, num_rows: int) -> Tensor:
        """Return which tokens of the newest step were the first rows' last ones, then which were guesses."""
        device = places.positions.device
        guesses = torch.arange(len(places.first), len(places.tokens), device=device)
        lines = torch.cat([torch.arange(num_rows, device=device), guesses])
        if not self.skips_empty:
            return lines
        before = (places.positions >= 0).cumsum(0) - 1
        return before.clamp(min=0)[lines]

    def step_lines(self, places: Places, logits: Tensor) -> StepLines:
        """Return the lines of the newest step; logits: of all places"""
        batch, has_all = self._batch, not self.skips_empty
        return StepLines(0, logits, places.positions + 1, batch.temperatures, batch.seeds, places, has_all)

    def accept(self, places: Places, drawn: Tensor) -> None:
        """Keep what holds of the draws of all places, and move the rows on from where the step has found them."""
        texts, batch, num_rows = self.texts, self._batch, len(places.first)
        columns = self.rows.texts, batch.last_tokens, batch.positions, self.rows.limits
        rows = AdvancedRows(texts.tokens, texts.lengths, *(column[:num_rows] for column in columns))
        accept_guesses(drawn, places, rows, self.kept[:num_rows])
        self.proposer.see_kept(places, self.kept[:num_rows])
