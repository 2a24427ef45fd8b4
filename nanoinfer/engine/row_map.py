"""RowMap: turns a scheduled step into the message that makes the ranks run it."""

from __future__ import annotations

from array import array
from itertools import chain

from nanoinfer.drafting.options import MOST_GUESSES
from nanoinfer.engine.media import MediaFeed
from nanoinfer.engine.prefixes.shared_prefixes import PrefixFinder
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.engine.speculation.text_slots import TextSlots
from nanoinfer.engine.step import Chunk, DecodeStep, PrefillStep, Step
from nanoinfer.runner.logits.settings import is_plain, needs_tokens
from nanoinfer.runner.media_messages import NewMedia
from nanoinfer.runner.message import (
    ChunkMessage,
    DecodeMessage,
    JoinMessage,
    LogitsMessage,
    PrefillMessage,
    PrefixMessage,
    StepMessage,
)


class RowMap:
    """The host's list of the sequence in each row on the device. Rows stay packed.

    The invariant: RowMap, InputBatch and LogitsProcessors apply the same moves in the same order. So a row's number
    means the same sequence to the host and to every rank, and neither asks the other.

    seqs: row i holds seqs[i]
    """

    def __init__(
        self,
        finder: PrefixFinder | None = None,
        feed: MediaFeed | None = None,
        may_adapt: bool = False,
        texts: TextSlots | None = None,
        tells_all: bool = False,
        may_show: bool = False,
    ) -> None:
        """finder: given if decode attention reads shared prefixes once; feed: if prompts may have images.

        may_adapt: whether sequences may have adapters; texts: given if guesses are verified
        tells_all: whether ranks are told the settings and the tokens of all sequences
        may_show: whether sequences may want hidden states
        """
        self.seqs: list[Sequence] = []
        self._finder = finder
        self._feed = feed
        self._may_adapt, self._may_show = may_adapt, may_show
        self._texts = texts
        self._tells_all = tells_all
        self._shares = False  # whether rows share prefixes, since they last changed
        self._has_changed = False  # whether rows have come or gone since the last decode step

    def describe(self, step: Step) -> tuple[StepMessage, list[Sequence]]:
        """Turn a scheduled step into the message that makes the ranks run it.

        Returns the message and the sequences that get a token from it, in the order of the tokens.
        """
        if isinstance(step, DecodeStep):
            return self._describe_decode(step)
        joins = _describe_joins(step)  # a sequence that starts again may still be in its old row
        moves = self._pack([seq for seq in self.seqs if seq.status is SequenceStatus.RUNNING and seq not in joins])
        num_rows = len(self.seqs)
        self._has_changed |= bool(joins)
        for seq in joins:
            seq.row = len(self.seqs)
            self.seqs.append(seq)
        media = self.new_media(step.chunks)  # some may be faulty, which their chunks tell
        chunks = [_describe_chunk(chunk) for chunk in step.chunks]
        message = PrefillMessage(moves, num_rows, chunks, list(joins.values()), step.copies, media=media)
        for seq, join in joins.items() if self._tells_all else ():
            join.told = LogitsMessage(seq.params, seq.token_ids, seq.num_prompt_tokens, (), 0)
        if self._may_show:
            wants = [chunk.seq for chunk in step.chunks if chunk.hidden_from is not None]
            message.hidden_layers = _hidden_layers(wants)
        if self._texts is not None:
            for seq, join in joins.items():
                join.drafting = self._texts.join(seq)
            message.members = self._texts.take_changed()
        return message, list(joins)

    def new_media(self, chunks: list[Chunk]) -> NewMedia | None:
        """Return the images that the ranks need for the chunks of a prefill step; None: the chunks have no images."""
        seen = [(chunk.seq.media, chunk.start, chunk.end) for chunk in chunks if chunk.seq.media is not None]
        if not seen:
            return None
        assert self._feed is not None
        return self._feed.take(seen)

    def clear(self) -> None:
        """Empty every row, whatever state an interrupt left them in."""
        self.seqs = []
        if self._texts is not None:
            self._texts.clear()

    def _describe_decode(self, step: DecodeStep) -> tuple[DecodeMessage, list[Sequence]]:
        moves = self._pack(step.seqs)
        grown = [(seq.row, group, column, seq.block_tables[group][column]) for seq, group, column in step.grown]
        message = DecodeMessage(moves, len(self.seqs), grown, step.max_context_len, guesses=step.guesses)
        message.lacking = [_describe_chunk(chunk) for chunk in step.lacking]
        message.new_prefixes = self._new_prefixes()
        message.shares = self._shares
        if self._may_adapt:
            message.has_adapters = any(seq.adapter >= 0 for seq in self.seqs)
        if self._may_show:
            message.hidden_layers = _hidden_layers(self.seqs)
        return message, self.seqs.copy()

    def _new_prefixes(self) -> PrefixMessage | None:
        """Find what the rows share, if they have changed. Blocks that a row gets later are its own."""
        if not self._has_changed or self._finder is None:
            return None
        self._has_changed = False
        prefixes = self._finder.find([seq.block_tables[0] for seq in self.seqs])
        self._shares = prefixes is not None
        return prefixes

    def _pack(self, staying: list[Sequence]) -> list[tuple[int, int]]:
        """Remove all but `staying`, and move the last rows into the holes; returns (source, destination) rows."""
        num_rows = len(staying)
        if num_rows == len(self.seqs):
            return []
        self._has_changed = True
        leaving = set(self.seqs).difference(staying)
        holes = sorted(seq.row for seq in leaving if seq.row < num_rows)
        movers = [seq for seq in self.seqs[num_rows:] if seq not in leaving]
        moves = [(seq.row, hole) for seq, hole in zip(movers, holes, strict=True)]
        for seq in leaving:
            seq.row = -1
            if self._texts is not None:
                self._texts.leave(seq)
        for seq, hole in zip(movers, holes, strict=True):
            seq.row = hole
            self.seqs[hole] = seq
        del self.seqs[num_rows:]
        return moves


def _describe_chunk(chunk: Chunk) -> ChunkMessage:
    seq = chunk.seq
    tokens = seq.token_ids[chunk.start : chunk.end]
    message = ChunkMessage(tokens, chunk.start, seq.block_tables, is_long=seq.is_long, states=chunk.states)
    message.next_tokens = seq.token_ids[chunk.end : chunk.end + MOST_GUESSES]
    message.adapter = seq.adapter
    message.text_lens = seq.text_lens
    if (steering := seq.steering) is not None:
        message.steering = steering.slot, steering.strength
    if (first := chunk.hidden_from) is not None:
        message.hidden_from = first - chunk.start
    if seq.media is not None:
        message.media = seq.media.chunk(chunk.start, chunk.end)
    if (read := seq.params.read) is not None and (chunk.is_last or read.needs_all):
        message.read = read if read.what != "first" or chunk.start == 0 else None
    if seq.wants_prompt_logprobs:
        message.num_logprobs = seq.params.prompt_logprobs
        message.temperature = seq.temperature
        message.num_unscored = max(0, seq.first_logits - chunk.start)
    return message


def _hidden_layers(seqs: list[Sequence]) -> list[int]:
    """Return the numbers of the hidden states that some sequences want."""
    wanted = [seq.hidden_states.layers.values() for seq in seqs if seq.hidden_states is not None]
    return sorted({*chain.from_iterable(wanted)})


def _describe_joins(step: PrefillStep) -> dict[Sequence, JoinMessage]:
    """Describe the sequences that get their first token from a step, in the order of their rows."""
    complete = {chunk.seq: index for index, chunk in enumerate(step.chunks) if chunk.is_last}
    chunks = {seq: index for seq, index in complete.items() if not seq.is_only_scored}
    joins = {seq: _describe_join(seq, index) for seq, index in chunks.items()}
    for fork in step.forks:
        joins[fork.seq] = _describe_join(fork.seq, chunks[fork.source])
        joins[fork.seq].copied_blocks = fork.copied_blocks
    return joins


def _describe_join(seq: Sequence, chunk: int) -> JoinMessage:
    message = JoinMessage(chunk, seq.block_tables, seq.temperature, seq.seed, slot=seq.slot)
    if seq.media is not None:
        message.delta = seq.media.delta
    if not is_plain(seq.params) or seq.num_output_tokens < seq.params.min_tokens:
        message.logits = describe_logits(seq)
    return message


def describe_logits(seq: Sequence) -> LogitsMessage:
    """Describe a sequence that wants more than a temperature to the ranks, from its next token on."""
    params = seq.params
    # The mask of a guided row leaves out the tokens that would end it too early.
    num_suppressed = 0 if params.is_guided else max(0, params.min_tokens - seq.num_output_tokens)
    return LogitsMessage(
        params,
        token_ids=seq.token_ids if needs_tokens(params) else array("i"),
        num_prompt_tokens=seq.num_prompt_tokens,
        suppressed=tuple(sorted(seq.stop_ids)) if num_suppressed else (),
        num_suppressed=num_suppressed,
    )
