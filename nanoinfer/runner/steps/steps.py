"""Steps: what one rank's device computes in a step, over the rows of a KV cache."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, Guesses
from nanoinfer.config import PROCESSED, Config
from nanoinfer.kernels.attention.prefix_plan import SharedPrefixes
from nanoinfer.kernels.drafting.pack import Places
from nanoinfer.layers.sampler import Sampler
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.drafting.texts import DraftingRows
from nanoinfer.runner.drafting.verifier import Verifier
from nanoinfer.runner.extras import Extras
from nanoinfer.runner.logits.lines import Sampled
from nanoinfer.runner.logits.processors import LogitsProcessors
from nanoinfer.runner.logits.prompt_logprobs import prompt_logprobs
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.memory.kv_cache import KVCache
from nanoinfer.runner.memory.state_pool import StatePool
from nanoinfer.runner.message import ChunkMessage, MaskMessage, PrefillMessage, StepMessage
from nanoinfer.runner.steps.input_batch import InputBatch
from nanoinfer.runner.steps.pending_tokens import Launched
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
        self._row_decoder = RowDecoder.of(self.model, config.description, self.kv_cache.layers, backend)
        prefixes = None
        if config.shares_prefixes:
            heads = config.description.num_heads // tp.size
            prefixes = SharedPrefixes(config.max_num_seqs, heads, self.kv_cache.layers[groups[0].layers[0]][0])
        self._generates = config.description.generates
        self._whole_images = any(config.description.whole_images)
        device = logits.device
        has_deltas = config.description.has_sections
        self._may_adapt = holdings.adapters is not None
        drafting = None
        if config.speculation is not None:
            drafting = DraftingRows(config.max_num_seqs, config.max_guesses, device)
        how = prefixes, has_deltas, self._may_adapt, drafting
        self.batch = InputBatch(config.max_num_seqs, self.max_blocks, self.kv_cache, device, *how)
        if drafting is not None:
            self.verifier = Verifier(config, tp, self.batch, drafting, holdings)
        self.logits_processors = LogitsProcessors(
            config.description.vocab_size,
            config.max_num_seqs,
            config.max_model_len,
            device,
            tp,
            is_processed=config.logprobs_mode == PROCESSED,
            is_alone=config.is_one_by_one,
            is_deterministic=config.deterministic,
            max_guesses=0 if drafting is None else config.max_guesses,
        )

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
        self.logits_processors.update(message)
        if self.verifier is not None:
            self.verifier.update(message)

    def prefill(self, message: PrefillMessage) -> Launched:
        """Run a step of prompts, or of chunks of them."""
        self.kv_cache.copy_pairs(message.copies)
        how = self.states, self._whole_images, self._may_adapt
        prompts = PrefillInputs(message.chunks, message.joins, self.kv_cache, *how)
        if message.images is not None:
            assert self.holdings.images is not None
            prompts.context.images = self.holdings.images.gather(message.images, message.chunks)
        hidden = self._run_chunks(message.chunks, prompts)
        if self.verifier is not None and self.verifier.draft is not None:
            self.verifier.draft.prefill(prompts)
        extras = self.extras(message.num_tokens)
        at_once = self.logits_processors.prompt_tokens_at_once(message.chunks)

        def logits_at(places: Tensor) -> Tensor:
            return self._full_logits(*_at(places.long(), hidden, prompts.adapters))

        is_processed = self.logits_processors.is_processed
        extras.prompt_logprobs = prompt_logprobs(message.chunks, logits_at, hidden.device, is_processed, at_once)
        extras.pooled = pool(message.chunks, hidden, logits_at, at_once)
        self.kv_cache.copy_blocks(prompts.copied_blocks)
        self.holdings.states.copy(prompts.copied_states)
        if not message.joins:
            return Launched(slice(message.num_rows, message.num_rows), self.logits[:0], extras)
        logits = self._logits(*_at(prompts.last_indices, hidden, prompts.adapters))
        token_ids = self._sample(logits, prompts.temperatures, prompts.seeds, prompts.sample_positions)
        for row, join in enumerate(message.joins, message.num_rows):
            if join.logits is not None:
                self.logits_processors.join(row, join.logits)
        self.batch.join(prompts, token_ids)
        return Launched(slice(message.num_rows, message.num_rows + len(logits)), logits, extras)

    def decode_rows(
        self, num_rows: int, max_context_len: int, shares: bool = False, has_adapters: bool = False
    ) -> None:
        """Run one decode step over the first rows, all of it on the device.

        shares: as for decode_context; has_adapters: some row may have one
        """
        batch = self.batch
        if self.verifier is not None:
            self.verifier.note(num_rows)
        context = batch.decode_context(num_rows, self.kv_cache, self.states, max_context_len, shares)
        adapters = batch.adapters[:num_rows] if has_adapters and batch.adapters is not None else None
        hidden = self._run_rows(batch.last_tokens[:num_rows], context, adapters)
        logits = self._logits(hidden, adapters, self.logits[:num_rows])
        self.draw(logits, context.context_lens)

    def verify_rows(
        self, num_rows: int, guesses: int, max_context_len: int, shares: bool = False, has_adapters: bool = False
    ) -> None:
        """Run one verifying step over the first rows, with places for so many guesses, all of it on the device.

        shares, has_adapters: as for decode_rows
        """
        assert self.verifier is not None

        def draw(places: Places, guesses: Guesses | None) -> Tensor:
            own = self.batch.gather(places.row_of)
            context = self.batch.verify_context(places, own, self.kv_cache, max_context_len)
            context.guesses, context.prefixes = guesses, self.batch.prefixes if shares else None
            adapters = own.adapters if has_adapters else None
            hidden = self._run_rows(places.tokens, context, adapters)
            logits = self._logits(hidden, adapters, self.logits[: len(places.tokens)])
            return self._sample(logits, own.temperatures, own.seeds, context.context_lens)

        self.verifier.verify(num_rows, guesses, draw, self.logits)

    def draw(self, logits: Tensor, positions: Tensor) -> None:
        """Draw a token for each of the first rows, and advance these."""
        batch, num_rows = self.batch, len(logits)
        batch.advance(self._sample(logits, batch.temperatures[:num_rows], batch.seeds[:num_rows], positions))

    def redraw(self, launched: Launched, masks: MaskMessage | None = None) -> Tensor:
        """Draw again for the rows that want more than a temperature.

        Returns the step's InputBatch.drawn, [rows]; of a verifying step, Verifier.kept.
        """
        batch, rows, logits = self.batch, launched.rows, launched.logits
        again = partial(self.logits_processors.redraw, extras=launched.extras, masks=masks)
        if self.verifier is not None and launched.places is not None:
            if self.logits_processors.wanted:
                self.verifier.redraw(launched.places, logits, again)
            return self.verifier.kept[rows]
        if not self.logits_processors.wanted:
            return batch.drawn[rows]
        # The rows have advanced: batch.positions are those of the drawn tokens.
        how = batch.last_tokens[rows], batch.positions[rows], batch.temperatures[rows], batch.seeds[rows]
        redrawn = again(Sampled(rows.start, logits, *how))
        return batch.drawn[rows].where(batch.drawn[rows] < 0, redrawn)

    def extras(self, num_tokens: int) -> Extras:
        """Return the Extras of a step whose model has run."""
        routing = self.holdings.routing
        return Extras(experts=None if routing is None else routing.taken(num_tokens))

    def extras_of_guesses(self, places: Places, num_rows: int) -> Extras:
        """Return the Extras of a verifying step of so many rows whose model has run."""
        assert self.verifier is not None
        extras = self.extras(len(places.tokens))
        if extras.experts is not None:
            extras.experts = extras.experts[self.verifier.lines(places, num_rows)]
        return extras

    def _run_chunks(self, chunks: list[ChunkMessage], prompts: PrefillInputs) -> Tensor:
        """Run the model over chunks of prompts; returns the hidden states, [tokens, hidden_size]. prompts: the same"""
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
        if adapters is None:
            return self.model(token_ids, context)
        assert self.holdings.adapters is not None
        with self.holdings.adapters.beside_layers(adapters):
            return self.model(token_ids, context)

    def _logits(self, hidden: Tensor, adapters: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Compute CausalLM.compute_logits. adapters: [rows], those of the hidden states"""
        if adapters is None:
            return self.model.compute_logits(hidden, out)
        assert self.holdings.adapters is not None
        with self.holdings.adapters.beside_head(adapters):
            return self.model.compute_logits(hidden, out)

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
