"""OneByOne: steps that compute each token alone, so that no bit of it depends on its company."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, MediaContext, StateContext
from nanoinfer.config import Config
from nanoinfer.layers.sampler import Sampler
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.extras import Extras
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.message import ChunkMessage, ChunkStates, StepMessage
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs
from nanoinfer.runner.steps.steps import Steps


class OneByOne(Steps):
    """Steps on the CPU, whose libraries add up in another order when they compute more tokens at once.

    A prompt's token and a generated one run through the model alike, as a chunk of one token. Chunks come in the order
    in which the step was planned. So the blocks that a prompt shares are filled before it reads them.
    """

    def __init__(
        self, config: Config, tp: TensorParallel, holdings: Holdings, backend: AttentionBackend, logits: Tensor
    ) -> None:
        super().__init__(config, tp, holdings, backend, logits)
        self._long_from = config.description.long_from
        self.sampler = Sampler(0, TensorParallel())
        self._experts: list[Tensor] = []  # of the step's tokens so far, if outputs have them

    def update(self, message: StepMessage) -> None:
        """Bring the rows up to date, as the message says, before its step runs."""
        super().update(message)
        self._experts = []  # a step that was interrupted has left its own

    def extras(self, num_tokens: int) -> Extras:
        """Return the Extras of a step whose model has run."""
        return Extras(experts=torch.cat(self._experts) if self._experts else None)

    def _run_chunks(self, chunks: list[ChunkMessage], prompts: PrefillInputs) -> Tensor:
        tokens = [
            (token_id, position, chunk.block_tables, chunk.is_long, chunk.adapter, _states_of(chunk, position))
            for chunk in chunks
            for position, token_id in enumerate(chunk.token_ids, chunk.start)
        ]
        seen = _seen(prompts.context, len(tokens))
        return torch.cat([self._run_token(*token, *own) for token, own in zip(tokens, seen, strict=True)])

    def _run_rows(self, token_ids: Tensor, context: Context, adapters: Tensor | None) -> Tensor:
        tokens, positions = token_ids.tolist(), context.positions.tolist()
        tables = [
            (group.block_tables[:, : max(positions) // block_size + 1] // step).tolist()
            for group, block_size, step in zip(context.groups, self.batch.block_sizes, self.batch.steps, strict=True)
        ]
        are_long = map(self._is_long, positions)
        slots = [-1] * len(tokens) if adapters is None else adapters.tolist()
        own = [None] * len(tokens) if context.states is None else map(_in_place, _slots_of(context.states))
        seen = _seen(context, len(tokens))
        rows = zip(tokens, positions, map(list, zip(*tables, strict=True)), are_long, slots, own, seen, strict=True)
        return torch.cat([self._run_token(*row, *of_row) for *row, of_row in rows])

    def _is_long(self, position: int) -> bool:
        """Return whether a running sequence, whose last token has this position, is computed as a long one."""
        return self._long_from is not None and position >= self._long_from

    def _run_token(
        self,
        token_id: int,
        position: int,
        block_tables: list[list[int]],
        is_long: bool,
        adapter: int,
        states: ChunkStates | None,
        rotary: Tensor,
        media: MediaContext | None,
    ) -> Tensor:
        """Run the model over one token; returns its hidden state, [1, hidden_size].

        states: where its layers find and leave theirs; snapshots are copies of what they leave
        rotary, media: the token's own part of Context.rotary_rows and Context.media
        """
        snapshots: dict[int, int] = {}
        if states is not None:
            states, snapshots = replace(states, snapshots={}), states.snapshots
        tokens = array("i", [token_id])
        chunk = ChunkMessage(tokens, position, block_tables, is_long=is_long, adapter=adapter, states=states)
        inputs = PrefillInputs([chunk], [], self.kv_cache, self.states, may_adapt=self._may_adapt)
        inputs.context.rotary_rows, inputs.context.media = rotary, media
        hidden = super()._run_chunks([chunk], inputs)
        if states is not None and (snapshot := snapshots.get(position + 1)) is not None:
            self.holdings.states.copy(torch.tensor([[states.slot], [snapshot]]))
        if self.holdings.routing is not None:
            self._experts.append(self.holdings.routing.taken(1))
        return hidden

    def _logits(self, hidden: Tensor, adapters: Tensor | None, out: Tensor | None = None) -> Tensor:
        of_row, slots = super()._logits, [None] * len(hidden) if adapters is None else adapters.split(1)
        return torch.cat([of_row(*row) for row in zip(hidden.split(1), slots, strict=True)], out=out)

    def _sample(self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        logits = self.logits_processors.gather(logits)  # every rank draws, from as many tokens as one rank would
        rows = zip(*(x.split(1) for x in (logits, temperatures, seeds, positions)), strict=True)
        return torch.cat([self.sampler(*row) for row in rows])


def _seen(context: Context, count: int) -> Iterator[tuple[Tensor, MediaContext | None]]:
    """Yield the rotary positions of each of a step's tokens, and what it gets of an image; None: it is no image's."""
    media = context.media
    entries = {} if media is None else {place: entry for entry, place in enumerate(media.places.tolist())}
    for place, rotary in zip(range(count), context.rotary_rows.split(1, dim=-1), strict=True):
        if media is None or (entry := entries.get(place)) is None:
            yield rotary, None
            continue
        embedded, *deep = (x[entry : entry + 1] for x in (media.embeddings, *media.deep))
        yield rotary, MediaContext(torch.zeros_like(media.places[:1]), embedded, deep)


def _states_of(chunk: ChunkMessage, position: int) -> ChunkStates | None:
    """Return where a chunk's token finds states, and leaves them: those behind it are found in the sequence's slot."""
    if chunk.states is None or position == chunk.start:
        return chunk.states
    return replace(chunk.states, source=chunk.states.slot)


def _slots_of(states: StateContext) -> list[int]:
    assert states.rows is not None
    return states.rows.slots.tolist()


def _in_place(slot: int) -> ChunkStates:
    return ChunkStates(slot, slot)
