"""What the host tells the ranks before each step: small, plain, and all that they need."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from nanoinfer.engine.scheduler import Chunk, DecodeStep, Step
from nanoinfer.engine.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class ChunkMessage:
    """One chunk of a prompt. Its last token's row is sampled, and joins the batch, if `is_last`."""

    token_ids: array[int]
    start: int  # position of the first of them
    block_table: list[int]
    is_last: bool
    temperature: float
    seed: int


@dataclass(slots=True)
class PrefillMessage:
    """A prefill step: `moves` and `num_rows` as in DecodeMessage; finished prompts join from row `num_rows` on."""

    moves: list[tuple[int, int]]
    num_rows: int
    chunks: list[ChunkMessage]


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
        finished = [chunk.seq for chunk in step.chunks if chunk.is_last]
        for seq in finished:
            seq.row = len(self.rows)
            self.rows.append(seq)
        return PrefillMessage(moves, num_rows, [_describe_chunk(chunk) for chunk in step.chunks]), finished

    def clear(self) -> None:
        """Empty every row."""
        self._pack([])

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
    return ChunkMessage(
        token_ids=seq.token_ids[chunk.start : chunk.end],
        start=chunk.start,
        block_table=seq.block_table,
        is_last=chunk.is_last,
        temperature=seq.temperature,
        seed=seq.seed,
    )
