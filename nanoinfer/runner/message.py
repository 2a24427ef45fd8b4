"""The messages by which the host tells the ranks, before each step, all that the step needs: small, plain data."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoinfer.pooling.read import Read
from nanoinfer.runner.media_messages import ChunkMedia, NewMedia
from nanoinfer.runner.memory.transfers import Transfers
from nanoinfer.sampling_params import SamplingParams


class Steered(NamedTuple):
    """The steering of a sequence: its slot, a number that nothing else has had there, and its strength."""

    slot: int
    number: int
    strength: float


@dataclass(slots=True)
class ChunkStates:
    """The slots that a chunk uses, if the model's layers have states."""

    source: int  # holds the states before the chunk; -1: they are zeros
    slot: int  # the sequence's own: gets the states behind the chunk
    snapshots: dict[int, int] = field(default_factory=dict)  # position -> the slot that gets the states before it


@dataclass(slots=True)
class ChunkMessage:
    """One chunk of a prompt."""

    token_ids: array[int]
    start: int  # position of the first token
    block_tables: list[list[int]]  # for each group of layers; the numbers of blocks behind its window mean nothing
    num_logprobs: int | None = None  # the request's prompt_logprobs, for the prompt's tokens that follow these
    temperature: float = 1.0  # for prompt_logprobs, where these are processed
    num_unscored: int = 0  # for prompt_logprobs: behind this many first tokens of the chunk, none is computed
    next_tokens: array[int] = field(default_factory=lambda: array("i"))  # the first behind this chunk that are known
    is_long: bool = False  # whether the sequence has the rotary frequencies of long ones
    states: ChunkStates | None = None
    media: ChunkMedia | None = None
    adapter: int = -1  # its slot; -1: none
    read: Read | None = None  # what the chunk gives of a text that is read; None: nothing
    text_lens: list[int] | None = None  # of several whole texts that the chunk consists of; None: it is of one
    steering: tuple[int, float] | None = None  # its slot and strength; None: it has none
    hidden_from: int | None = None  # the host gets hidden states from this one of its tokens on; None: of none

    @property
    def lens(self) -> list[int]:
        """How many of its tokens belong to each of its texts."""
        return [len(self.token_ids)] if self.text_lens is None else self.text_lens

    @property
    def scored(self) -> array[int]:
        """The prompt's tokens whose log-probabilities the chunk gives: those behind its tokens from num_unscored on."""
        if self.num_logprobs is None:
            return array("i")
        return self.following(1)[self.num_unscored : len(self.token_ids)]

    def following(self, distance: int) -> array[int]:
        """Return the known tokens that stand so far behind the chunk's."""
        return (self.token_ids + self.next_tokens)[distance:]


@dataclass(slots=True)
class LogitsMessage:
    """The settings of a row whose request asks for more than a temperature."""

    params: SamplingParams
    token_ids: array[int]  # all tokens so far if a penalty needs them, else none
    num_prompt_tokens: int
    suppressed: tuple[int, ...]  # tokens that would end the sequence too early
    num_suppressed: int  # for this many steps
    fault: str | None = None  # of this rank: what a function of the request's has done wrong, which ends it


@dataclass(slots=True)
class DraftingMessage:
    """What a joining sequence brings along where guesses are verified."""

    token_ids: array[int]  # all tokens so far; the one that is sampled for it comes behind these
    text: int  # the slot of its text
    end: int  # it has at most so many tokens
    group: int = -1  # whose members' texts may go on alike; -1: none


@dataclass(slots=True)
class JoinMessage:
    """A sequence whose prompt is complete: its first token is sampled, and it joins the rows."""

    chunk: int  # the number, among the step's chunks, of the prompt's last
    block_tables: list[list[int]]  # for each group of layers
    temperature: float
    seed: int
    logits: LogitsMessage | None = None
    copied_blocks: list[tuple[int, int]] = field(default_factory=list)  # (block, its copy), copied behind the step
    slot: int = -1  # for states; if it is not the chunk's, they are copied behind the step
    delta: int = 0  # rotary positions of the tokens behind the prompt, less their places
    told: LogitsMessage | None = None  # with all tokens so far; None: the LLM has no processors of whole batches
    drafting: DraftingMessage | None = None  # None: no guesses are verified


@dataclass(slots=True)
class PrefillMessage:
    """A prefill step: `moves` and `num_rows` as in DecodeMessage; the sequences join from row `num_rows` on."""

    moves: list[tuple[int, int]]
    num_rows: int
    chunks: list[ChunkMessage]
    joins: list[JoinMessage]
    copies: list[tuple[int, int]] = field(default_factory=list)  # (block, its copy), copied before the step runs
    transfers: Transfers | None = None
    media: NewMedia | None = None  # None: no chunk has any
    members: dict[int, list[int]] = field(default_factory=dict)  # of each group that has changed: its newest texts
    hidden_layers: list[int] = field(default_factory=list)  # those whose hidden states the host gets of some chunk

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class SharedRun(NamedTuple):
    """Neighbouring blocks that several rows hold, at the same columns of their block tables."""

    first: int  # the place, in PrefixMessage.order, of the first of the rows
    rows: int
    start: int  # the first column
    end: int  # the column behind the last


@dataclass(slots=True)
class PrefixMessage:
    """What the rows share. A row's first run begins with column 0, and each further one where the one before ends."""

    order: list[int]  # all rows; those that share a run are neighbours
    runs: list[SharedRun]  # a row's in their order


@dataclass(slots=True)
class DecodeMessage:
    """A decode step over the first `num_rows` rows, told as the changes since the last step."""

    moves: list[tuple[int, int]]  # (source row, destination row): the last rows fill the holes that others left
    num_rows: int  # rows from here on are empty
    new_blocks: list[tuple[int, int, int, int]]  # (row, group of layers, column of its block table, block)
    max_context_len: int
    shares: bool = False  # whether decode attention is to read shared prefixes once
    new_prefixes: PrefixMessage | None = None  # given if they have changed since the last step that shares
    transfers: Transfers | None = None
    has_adapters: bool = False  # whether some row has an adapter
    guesses: int = 0  # places for guesses beside the rows' last tokens, see verify_sizes; 0: none are verified
    lacking: list[ChunkMessage] = field(default_factory=list)  # tokens that a draft model computes before the step
    hidden_layers: list[int] = field(default_factory=list)  # those whose hidden states the host gets of all rows

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes, at most."""
        return self.num_rows + self.guesses


@dataclass(slots=True)
class MaskMessage:
    """Which tokens may be drawn for the guided rows of a step, in ascending order."""

    guesses: list[int]  # how many each of these rows has
    words: array[int]  # as many for each row; bit i % 32 of a row's word i // 32 says whether it may get token i
    behind: array[int]  # the same behind each guess, row after row


StepMessage = PrefillMessage | DecodeMessage
