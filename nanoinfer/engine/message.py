"""What the host tells the ranks before each step: small, plain, and all that they need."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from nanoinfer.engine.scheduler import Chunk, DecodeStep, PrefillStep, Step
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.sampling_params import SamplingParams


@dataclass(slots=True)
class ChunkMessage:
    """One chunk of a prompt."""

    token_ids: array[int]
    start: int  # position of the first of them
    block_table: list[int]
    num_logprobs: int | None = None  # of the tokens that follow each of these in the prompt
    next_token: int | None = None  # the prompt's token after the last of these, if it goes on


@dataclass(slots=True)
class SpecialMessage:
    """What a row needs to know whose request asks for more than a temperature."""

    params: SamplingParams
    token_ids: array[int]  # all so far, if they count for the next one
    num_prompt_tokens: int
    suppressed: tuple[int, ...]  # the tokens that would end it
    num_suppressed: int  # for so many steps

    @staticmethod
    def of(seq: Sequence) -> SpecialMessage:
        """What is to be known of a sequence from its next token on."""
        params = seq.params
        num_suppressed = max(0, params.min_tokens - seq.num_output_tokens)
        return SpecialMessage(
            params,
            token_ids=seq.token_ids if params.has_penalties else array("i"),
            num_prompt_tokens=seq.num_prompt_tokens,
            suppressed=tuple(sorted(seq.stop_ids)) if num_suppressed else (),
            num_suppressed=num_suppressed,
        )

    @property
    def is_shaped(self) -> bool:
        """Whether it needs its logits in float32, to be changed or told about."""
        params = self.params
        return bool(params.has_penalties or params.logit_bias or self.suppressed) or params.logprobs is not None


@dataclass(slots=True)
class JoinMessage:
    """A sequence whose prompt is complete: its first token is sampled, and it joins the rows."""

    chunk: int  # the last of its prompt, among the step's
    block_table: list[int]
    temperature: float
    seed: int
    special: SpecialMessage | None = None
    copied_block: tuple[int, int] | None = None  # (from, to), before anything is written to it


@dataclass(slots=True)
class PrefillMessage:
    """A prefill step: `moves` and `num_rows` as in DecodeMessage; the sequences join from row `num_rows` on."""

    moves: list[tuple[int, int]]
    num_rows: int
    chunks: list[ChunkMessage]
    joins: list[JoinMessage]


@dataclass(slots=True)
class DecodeMessage:
    """A decode step over rows 0 to `num_rows`, told as what changed since the last step."""

    moves: list[tuple[int, int]]  # (source row, destination row): the last rows fill the holes that others left
    num_rows: int  # rows from here on are empty
    new_blocks: list[tuple[int, int, int]]  # (row, column of the block table, block)
    max_context_len: int


Message = PrefillMessage | DecodeMessage


class RowMap:
    """The host's view of the device's rows: which sequence is in which. Rows stay packed."""

    def __init__(self) -> None:
        self.rows: list[Sequence] = []

    def describe(self, step: Step) -> tuple[Message, list[Sequence]]:
        """Turn a scheduled step into the message that makes the ranks run it.

        Returns the message and the sequences that get a token from it, in the order of the tokens.
        """
        if isinstance(step, DecodeStep):
            return self._describe_decode(step)
        moves = self._pack([seq for seq in self.rows if seq.status is SequenceStatus.RUNNING])
        num_rows = len(self.rows)
        joins = _describe_joins(step)
        for seq in joins:
            seq.row = len(self.rows)
            self.rows.append(seq)
        chunks = [_describe_chunk(chunk) for chunk in step.chunks]
        return PrefillMessage(moves, num_rows, chunks, list(joins.values())), list(joins)

    def clear(self) -> None:
        """Empty every row, whatever state an interrupt left them in."""
        self.rows = []

    def _describe_decode(self, step: DecodeStep) -> tuple[DecodeMessage, list[Sequence]]:
        moves = self._pack(step.seqs)
        grown = [(seq.row, len(seq.block_table) - 1, seq.block_table[-1]) for seq in step.grown]
        return DecodeMessage(moves, len(self.rows), grown, step.max_context_len), self.rows.copy()

    def _pack(self, staying: list[Sequence]) -> list[tuple[int, int]]:
        """Let all but `staying` leave, and move the last rows into the holes; returns (source, destination) rows."""
        num_rows = len(staying)
        if num_rows == len(self.rows):
            return []
        leaving = set(self.rows).difference(staying)
        holes = sorted(seq.row for seq in leaving if seq.row < num_rows)
        movers = [seq for seq in self.rows[num_rows:] if seq not in leaving]
        moves = [(seq.row, hole) for seq, hole in zip(movers, holes, strict=True)]
        for seq in leaving:
            seq.row = -1
        for seq, hole in zip(movers, holes, strict=True):
            seq.row = hole
            self.rows[hole] = seq
        del self.rows[num_rows:]
        return moves


def _describe_chunk(chunk: Chunk) -> ChunkMessage:
    seq = chunk.seq
    message = ChunkMessage(seq.token_ids[chunk.start : chunk.end], chunk.start, seq.block_table)
    if seq.wants_prompt_logprobs:
        message.num_logprobs = seq.params.prompt_logprobs
        message.next_token = None if chunk.is_last else seq.token_ids[chunk.end]
    return message


def _describe_joins(step: PrefillStep) -> dict[Sequence, JoinMessage]:
    """The sequences that get their first token from a step, in the order of their rows."""
    chunks = {chunk.seq: index for index, chunk in enumerate(step.chunks) if chunk.is_last}
    joins = {seq: _describe_join(seq, index) for seq, index in chunks.items()}
    for fork in step.forks:
        joins[fork.seq] = _describe_join(fork.seq, chunks[fork.source])
        joins[fork.seq].copied_block = fork.copied_block
    return joins


def _describe_join(seq: Sequence, chunk: int) -> JoinMessage:
    message = JoinMessage(chunk, seq.block_table, seq.temperature, seq.seed)
    if not seq.params.is_plain or seq.num_output_tokens < seq.params.min_tokens:
        message.special = SpecialMessage.of(seq)
    return message
