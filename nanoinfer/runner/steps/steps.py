"""Steps: what one rank's device computes in a step, over the rows of a KV cache."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, Guesses
from nanoinfer.config import PROCESSED, Config
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.drafting.gather import RowColumns
from nanoinfer.kernels.drafting.pack import GuessedRows
from nanoinfer.layers.sampler import Sampler
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.verifier import Verifier
from nanoinfer.runner.logits.lines import StepLines
from nanoinfer.runner.logits.processors import LogitsProcessors
from nanoinfer.runner.logits.prompt_logprobs import prompt_logprobs
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.memory.kv_cache import KVCache
from nanoinfer.runner.memory.state_pool import StatePool
from nanoinfer.runner.message import ChunkMessage, DecodeMessage, MaskMessage, PrefillMessage, StepMessage
from nanoinfer.runner.results.extras import Extras
from nanoinfer.runner.steering import SteeringColumns
from nanoinfer.runner.steps.captured import Captured
from nanoinfer.runner.steps.input_batch import InputBatch
from nanoinfer.runner.steps.kinds import DecodeKind
from nanoinfer.runner.steps.launched import Launched
from nanoinfer.runner.steps.pooling import pool
from nanoinfer.runner.steps.prefill_inputs import TABLE_STEP, PrefillInputs
from nanoinfer.runner.steps.row_decoder import RowDecoder


class Steps:
    """The steps of one rank, over the KV cache that its Holdings have.

    max_blocks: for each group of layers, as many as a row can have, rounded up
    logits: [rows, this rank's token ids], written by each decode step
    """

    verifier: Verifier | None = None  # None: no guesses are verified

    def __init__(
        self, config: Config, tp: TensorParallel, holdings: Holdings, backend: AttentionBackend, logits: Tensor
    ) -> None:
        self.holdings = holdings
        self.backend = backend
        self.logits = logits
        groups = self.kv_cache.layout.groups
        self.max_blocks = [TABLE_STEP * -(-config.max_model_len // (group.block_size * TABLE_STEP)) for group in groups]
        self.sampler = Sampler(self.model.first_id, tp)
        self._row_decoder: RowDecoder | None = None
        # One launch of all layers shows none, changes none, and waits for none.
        if holdings.stream is None and not (config.hidden_layers or config.max_steerings):
            self._row_decoder = RowDecoder.of(self.model, config.description, self.kv_cache.layers, backend)
        prefixes = None
        if config.shares_prefixes:
            heads = config.description.num_heads // tp.size
            k_cache, _ = self.kv_cache.layers[groups[0].layers[0]]
            prefixes = SharedPrefixes(config.max_num_seqs, heads, k_cache, config.description.latent is not None)
        self._generates, self._labels_of = config.description.generates, config.description.labels_of
        self._whole_images = any(config.description.whole_images)
        device = logits.device
        has_deltas = config.description.has_sections
        self._may_adapt = holdings.adapters is not None
        # Kernels that turn by three positions may round otherwise than those that turn by one.
        self._in_sections = config.is_in_order and has_deltas
        how = prefixes, has_deltas, self._may_adapt, self._in_sections
        self.batch = InputBatch(config.max_num_seqs, self.max_blocks, self.kv_cache, device, *how)
        if config.speculation is not None:
            self.verifier = Verifier(config, tp, self.batch, holdings)
        self.logits_processors = LogitsProcessors(
            config.description.vocab_size,
            config.max_num_seqs,
            config.max_model_len,
            device,
            tp,
            is_processed=config.logprobs_mode == PROCESSED,
            is_alone=config.is_one_by_one,
            is_deterministic=config.deterministic,
            max_guesses=0 if self.verifier is None else config.max_guesses,
            classes=holdings.batch_processors,
        )
        self.batch.table.add(self.logits_processors)
        self.steering = None if holdings.steering is None else SteeringColumns(holdings.steering, self.batch.table)

    @property
    def model(self) -> CausalLM:
        """This rank's share of the model."""
        return self.holdings.model

    @property
    def kv_cache(self) -> KVCache:
        """This rank's KV cache."""
        return self.holdings.kv_cache

    @property
    def states(self) -> StatePool | None:
        """This rank's states, if layers have some."""
        return self.holdings.states if self.kv_cache.layout.states else None

    def update(self, message: StepMessage) -> None:
        """Bring the rows up to date, as the message says, before its step runs."""
        self.batch.update(message)
        if isinstance(message, DecodeMessage):
            self.logits_processors.begin(message)
        if self.verifier is not None:
            self.verifier.update(message)

    def prefill(self, message: PrefillMessage) -> Launched:
        """Run the model over prompts, or over chunks of them, and let those join whose prompts are complete."""
        self.kv_cache.copy_pairs(message.copies)
        how = self.states, self._whole_images, self._may_adapt, self._in_sections
        prompts = PrefillInputs(message.chunks, message.joins, self.kv_cache, *how)
        if message.media is not None:
            assert self.holdings.media is not None
            prompts.context.media = self.holdings.media.gather(message.media, message.chunks)
        if self.steering is not None:
            prompts.context.steering = self.steering.of_chunks(message.chunks)
        hidden = self._run_chunks(message.chunks, prompts)
        if self.verifier is not None:
            self.verifier.proposer.see_prompts(prompts, message.chunks, hidden)
        extras = self.captured(message.num_tokens).of_prompts(message, self.holdings)
        at_once = self.logits_processors.prompt_tokens_at_once(message.chunks)

        def logits_at(places: Tensor) -> Tensor:
            return self._full_logits(*_at(places.long(), hidden, prompts.adapters))

        is_processed = self.logits_processors.is_processed
        extras.prompt_logprobs = prompt_logprobs(message.chunks, logits_at, hidden.device, is_processed, at_once)
        score = partial(self._full_logits, adapters=None)
        extras.pooled = pool(message.chunks, hidden, logits_at, at_once, self._labels_of, score)
        self.kv_cache.copy_blocks(prompts.copied_blocks)
        self.holdings.states.copy(prompts.copied_states)
        if not message.joins:
            return Launched(slice(message.num_rows, message.num_rows), self.logits[:0], extras)
        logits = self._logits(*_at(prompts.last_indices, hidden, prompts.adapters))
        rows = self.batch.join(prompts)  # first: the table counts them, and so forgets what an interrupt leaves of them
        if self.steering is not None:
            self.steering.join(rows, message)
        if self.verifier is not None:
            self.verifier.proposer.see_joining(rows, prompts, hidden)
        for row, join in enumerate(message.joins, rows.start):
            self.logits_processors.join(row, join.logits, join.told)
        return Launched(rows, logits, extras)

    def forward(self, num_rows: int, kind: DecodeKind, max_context_len: int) -> None:
        """Run the model over the first rows' last tokens, and over guesses behind these, all of it on the device."""
        batch, verifier = self.batch, self.verifier
        if verifier is not None:
            verifier.begin(num_rows, kind.guesses)
        if kind.guesses == 0:
            own = batch.columns.at(slice(num_rows))
            tokens, positions = batch.last_tokens[:num_rows], batch.positions[:num_rows]
            hidden = self._decode(tokens, positions, own, slice(num_rows), kind, max_context_len)
            if verifier is not None:
                verifier.proposer.see_rows(hidden)
            return
        assert verifier is not None
        places = verifier.propose(num_rows, kind.guesses)
        tokens, positions, own = places.tokens, places.positions, batch.gather(places.row_of)
        if not verifier.skips_empty:
            told = verifier.guessed(places, None), verifier.tell(places)
            hidden = self._decode(tokens, positions, own, places.row_of, kind, max_context_len, *told)
            verifier.proposer.see_places(places, hidden, None)
        elif len(filled := (positions >= 0).nonzero()[:, 0]):
            packed = tokens[filled], positions[filled], own.at(filled), places.row_of[filled]
            hidden = self._decode(*packed, kind, max_context_len, verifier.guessed(places, filled))
            if filled[-1] >= len(filled):  # a row is empty: the logits of the later ones stand too early
                self.logits[filled] = self.logits[: len(filled)].clone()
            verifier.proposer.see_places(places, hidden, filled)

    def _decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        own: RowColumns,
        rows: slice | Tensor,
        kind: DecodeKind,
        max_context_len: int,
        guessed: GuessedRows | None = None,
        guesses: Guesses | None = None,
    ) -> Tensor:
        """Compute the logits behind a token each of rows, or of places; returns the hidden states.

        own: what they have of their rows; rows: these, the first ones or one for each place
        guessed, guesses: of a verifying step, the latter for backends
        """
        context = self.batch.context(positions, own, self.kv_cache, max_context_len)
        if self.states is not None:
            context.states = self.batch.state_context(positions, self.states, guessed)
        context.guesses, context.prefixes = guesses, self.batch.prefixes if kind.shares else None
        if self.steering is not None:
            context.steering = self.steering.of_rows(rows)
        adapters = own.adapters if kind.has_adapters else None
        hidden = self._run_rows(token_ids, context, adapters)
        self._logits(hidden, adapters, self.logits[: len(token_ids)])
        return hidden

    def launched(self, num_rows: int, size: int, kind: DecodeKind) -> Launched:
        """Return the step whose model `forward` has run over so many rows. size: the empty ones too"""
        places = None
        if kind.guesses:
            assert self.verifier is not None
            places = self.verifier.places(size, kind.guesses)
        num_lines = num_rows if places is None else len(places.tokens)
        return Launched(slice(num_rows), self.logits[:num_lines], Extras(), places, (size, kind.guesses))

    def extras_of(self, launched: Launched, hidden_layers: list[int]) -> Extras:
        """Return what a decode step gives beside its tokens, but for what its draw adds.

        hidden_layers: those whose hidden states the host gets
        """
        lines: Tensor | slice = slice(None)
        if launched.places is not None and (self.holdings.routing is not None or hidden_layers):
            assert self.verifier is not None
            lines = self.verifier.lines(launched.places, launched.rows.stop)
        return self.captured(len(launched.logits)).of_lines(lines, hidden_layers, self.holdings)

    def sample(self, launched: Launched) -> tuple[StepLines, Tensor]:
        """Draw behind all lines of a step by temperature alone; returns the lines, and the tokens: [lines] int32.

        Classes of a caller's have changed the logits of these lines, if the LLM has some.
        """
        lines = self._lines(launched)
        if self.logits_processors.changes_all:
            lines = self.logits_processors.change_all(lines, launched.rows, self.model.first_id, launched.extras)
        return lines, self._sample(*lines.how)

    def draw(self, launched: Launched, masks: MaskMessage | None = None) -> None:
        """Draw behind all lines of a step, by temperature alone or as rows want, and move the rows on."""
        lines, drawn = launched.sampled or self.sample(launched)
        if self.logits_processors.wanted:
            self.logits_processors.draw(lines, drawn, launched.extras, masks)
        if launched.places is None:
            self.batch.advance(launched.rows, drawn)
            self.logits_processors.note(launched.rows, drawn)
        else:
            assert self.verifier is not None
            self.verifier.accept(launched.places, drawn)

    def told(self, launched: Launched) -> Tensor:
        """Return what a step has drawn, for the host: InputBatch.drawn; of a verifying step, Verifier.kept."""
        if launched.places is None:
            return self.batch.drawn[launched.rows]
        assert self.verifier is not None
        return self.verifier.kept[launched.rows]

    def _lines(self, launched: Launched) -> StepLines:
        if launched.places is not None:
            assert self.verifier is not None
            return self.verifier.step_lines(launched.places, launched.logits)
        rows, batch = launched.rows, self.batch
        own = batch.positions[rows] + 1, batch.temperatures[rows], batch.seeds[rows]
        return StepLines(rows.start or 0, launched.logits, *own)

    def captured(self, num_tokens: int) -> Captured:
        """Return what the model has kept of each token of a step that has run."""
        return Captured.of_step(self.holdings, num_tokens)

    def _run_chunks(self, chunks: list[ChunkMessage], prompts: PrefillInputs) -> Tensor:
        """Run the model over chunks of prompts; returns the hidden states, [tokens, hidden_size]. prompts: the same"""
        if (states := self.states) is not None:
            slots, boundaries = prompts.left
            states.boundaries[slots] = boundaries.int()
        return self._run(prompts.token_ids, prompts.context, prompts.adapters)

    def _run_rows(self, token_ids: Tensor, context: Context, adapters: Tensor | None) -> Tensor:
        """Run the model over a token of each row, [rows]; returns the hidden states, [rows, hidden_size].

        adapters: [rows], as InputBatch has them; None: no row has one
        """
        if self._row_decoder is not None and adapters is None and self._row_decoder.takes(token_ids, context):
            return self._row_decoder(token_ids, context)
        self.backend.prepare_decode(context)
        return self._run(token_ids, context, adapters)

    def _run(self, token_ids: Tensor, context: Context, adapters: Tensor | None) -> Tensor:
        if adapters is not None:
            assert self.holdings.adapters is not None
            context.adapters = self.holdings.adapters.beside_layers(adapters)
        return self.model(token_ids, context)

    def _logits(self, hidden: Tensor, adapters: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Compute CausalLM.compute_logits. adapters: [rows], those of the hidden states"""
        if adapters is None:
            return self.model.compute_logits(hidden, out)
        assert self.holdings.adapters is not None
        return self.model.compute_logits(hidden, out, self.holdings.adapters.beside_head(adapters))

    def _sample(self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw a token for each row, as Sampler does."""
        return self.sampler(logits, temperatures, seeds, positions)

    def _full_logits(self, hidden: Tensor, adapters: Tensor | None) -> Tensor:
        """Compute the logits of all ranks' token ids, [n, vocabulary]; hidden, adapters: as for _logits

        A classifier's scores are whole on each rank.
        """
        logits = self._logits(hidden, adapters)
        return self.logits_processors.gather(logits) if self._generates else logits


def _at(places: Tensor, hidden: Tensor, adapters: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states in some places, and their adapters."""
    return hidden[places], None if adapters is None else adapters[places]
