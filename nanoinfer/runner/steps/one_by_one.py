"""OneByOne: steps that compute each token alone, so that no bit of it depends on its company."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, MediaContext, StateContext
from nanoinfer.config import Config
from nanoinfer.kernels.states.boundaries import begin_rows
from nanoinfer.kernels.states.memory import StateRows
from nanoinfer.layers.sampler import Sampler
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.memory.holdings import Holdings
from nanoinfer.runner.memory.state_pool import StatePool
from nanoinfer.runner.message import ChunkMessage, ChunkStates, StepMessage
from nanoinfer.runner.steps.captured import Captured
from nanoinfer.runner.steps.prefill_inputs import PrefillInputs
from nanoinfer.runner.steps.steps import Steps

# A token's id and position, its row's block tables, whether the row is long, its adapter and its steering.
Place: TypeAlias = tuple[int, int, list[list[int]], bool, int, tuple[int, float] | None]


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
        self._captured: list[Captured] = []  # of the step's tokens so far

    def update(self, message: StepMessage) -> None:
        """Bring the rows up to date, as the message says, before its step runs."""
        super().update(message)
        self._captured = []  # a step that was interrupted has left its own

    def captured(self, num_tokens: int) -> Captured:
        """Return what the model has kept of each token of a step that has run."""
        return Captured.joined(self._captured)

    def _run_chunks(self, chunks: list[ChunkMessage], prompts: PrefillInputs) -> Tensor:
        hidden, seen = list[Tensor](), _seen(prompts.context)
        for chunk in chunks:
            states = chunk.states
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                row = None if states is None else self._begin(states, position, is_first=position == chunk.start)
                where = chunk.block_tables, chunk.is_long, chunk.adapter, chunk.steering
                hidden.append(self._run_token(token_id, position, *where, row, *next(seen)))
                if states is not None and (snapshot := states.snapshots.get(position + 1)) is not None:
                    self.holdings.states.copy(torch.tensor([[states.slot], [snapshot]]))
        return torch.cat(hidden)

    def _run_rows(self, token_ids: Tensor, context: Context, adapters: Tensor | None) -> Tensor:
        tokens, positions = token_ids.tolist(), context.positions.tolist()
        tables = [
            (group.block_tables[:, : max(positions) // block_size + 1] // step).tolist()
            for group, block_size, step in zip(context.groups, self.batch.block_sizes, self.batch.steps, strict=True)
        ]
        are_long = map(self._is_long, positions)
        slots = [-1] * len(tokens) if adapters is None else adapters.tolist()
        steered: list[tuple[int, float] | None] = [None] * len(tokens)
        if (named := context.steering) is not None:
            steered = list(zip(named.slots.tolist(), named.strengths.tolist(), strict=True))
        of_rows = map(list, zip(*tables, strict=True))
        where: Iterator[Place] = zip(tokens, positions, of_rows, are_long, slots, steered, strict=True)
        rows = None if context.states is None else context.states.rows
        if rows is None:
            return torch.cat(
                [self._run_token(*own, None, *seen) for own, seen in zip(where, _seen(context), strict=True)]
            )
        begun = zip(where, self._begin_rows(rows), _seen(context), strict=True)
        hidden = [self._run_token(*own, row, *seen) for own, row, seen in islice(begun, len(rows.slots))]
        with self._standing(rows.slots):
            hidden += [self._run_token(*own, row, *seen) for own, row, seen in begun]
        return torch.cat(hidden)

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
        steering: tuple[int, float] | None,
        states: StateRows | None,
        rotary: Tensor,
        media: MediaContext | None,
    ) -> Tensor:
        """Run the model over one token; returns its hidden state, [1, hidden_size].

        states: where its layers find and leave theirs
        rotary, media: the token's own part of Context.rotary_rows and Context.media
        """
        chunk = ChunkMessage(array("i", [token_id]), position, block_tables, is_long=is_long, adapter=adapter)
        inputs = PrefillInputs([chunk], [], self.kv_cache, may_adapt=self._may_adapt)
        inputs.context.rotary_rows, inputs.context.media = rotary, media
        if states is not None:
            inputs.context.states = StateContext(self.holdings.states.layers, states)
        if self.steering is not None:
            chunk.steering = steering
            inputs.context.steering = self.steering.of_chunks([chunk])
        hidden = self._run(inputs.token_ids, inputs.context, inputs.adapters)
        captured = super().captured(1)
        self._captured.append(
            captured if captured.hidden is None else captured._replace(hidden=captured.hidden.clone())
        )
        return hidden

    def _begin(self, states: ChunkStates, position: int, is_first: bool) -> StateRows:
        """Begin a token of a chunk as a row of a decode step begins. is_first: of the chunk"""
        pool = self.holdings.states
        if is_first and states.source == -1:
            for part in pool.parts(states.slot):
                part.zero_()
        elif is_first and states.source != states.slot:
            pool.copy(torch.tensor([[states.source], [states.slot]]))
        slots, positions = (torch.tensor([number], dtype=torch.int32) for number in (states.slot, position))
        return _begin_row(slots, positions, pool)

    def _begin_rows(self, rows: StateRows) -> Iterator[StateRows]:
        """Yield the tokens of a step, which has begun for the last one of each row, each as a row of its own."""
        positions, guessed = rows.positions.split([len(rows.slots), len(rows.positions) - len(rows.slots)])
        for own in zip(rows.slots.split(1), positions.split(1), rows.boundaries.split(1), strict=True):
            yield StateRows(*own)
        if rows.counts is not None and len(guessed):  # of no numbers, torch would make one part, too
            slots = rows.slots.repeat_interleave(rows.counts)
            for slot, position in zip(slots.split(1), guessed.split(1), strict=True):
                yield _begin_row(slot, position, self.holdings.states)

    @contextmanager
    def _standing(self, slots: Tensor) -> Iterator[None]:
        """Let the matrices of slots stand afterwards where they do now: guesses move them on, and may not hold."""
        pool = self.holdings.states
        matrices = [own.recurrence.matrices for own in pool.layers.values() if own.recurrence is not None]
        before = [(numbers, numbers[slots]) for numbers in (pool.boundaries, *matrices)]
        yield
        for numbers, own in before:
            numbers[slots] = own

    def _logits(self, hidden: Tensor, adapters: Tensor | None, out: Tensor | None = None) -> Tensor:
        of_row, slots = super()._logits, [None] * len(hidden) if adapters is None else adapters.split(1)
        return torch.cat([of_row(*row) for row in zip(hidden.split(1), slots, strict=True)], out=out)

    def _sample(self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        logits = self.logits_processors.gather(logits)  # every rank draws, from as many tokens as one rank would
        rows = zip(*(x.split(1) for x in (logits, temperatures, seeds, positions)), strict=True)
        return torch.cat([self.sampler(*row) for row in rows])


def _begin_row(slots: Tensor, positions: Tensor, pool: StatePool) -> StateRows:
    own, boundaries = begin_rows(slots, positions, pool.boundaries)
    return StateRows(own, positions, boundaries)


def _seen(context: Context) -> Iterator[tuple[Tensor, MediaContext | None]]:
    """Yield the rotary positions of each of a step's tokens, and what it gets of an image; None: it is no image's."""
    media = context.media
    entries = {} if media is None else {place: entry for entry, place in enumerate(media.places.tolist())}
    for place, rotary in enumerate(context.rotary_rows.split(1, dim=-1)):
        if media is None or (entry := entries.get(place)) is None:
            yield rotary, None
            continue
        embedded, *deep = (x[entry : entry + 1] for x in (media.embeddings, *media.deep))
        yield rotary, MediaContext(torch.zeros_like(media.places[:1]), embedded, deep)
