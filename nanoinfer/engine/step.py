"""Step: what the scheduler lets the device compute at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.sequence import Sequence
from nanoinfer.runner.message import ChunkStates


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of one sequence, to be prefilled in one step."""

    seq: Sequence
    start: int
    end: int
    is_last: bool  # the sequence's tokens end with it: its logits give the next one, if there is one
    states: ChunkStates | None = None  # if the model's layers have some

    @property
    def hidden_from(self) -> int | None:
        """The position of its first token whose hidden states the sequence wants; None: it wants those of none."""
        own = self.seq.hidden_states
        if own is None or own.first >= self.end:
            return None
        return max(self.start, own.first)


@dataclass(frozen=True)
class Fork:
    """A sequence that starts with the blocks of another, whose last chunk is in the same step."""

    seq: Sequence
    source: Sequence
    copied_blocks: list[tuple[int, int]]  # (last block, its copy), of each group whose last block is not full


@dataclass(frozen=True)
class PrefillStep:
    """A step that computes prompts, or chunks of them."""

    chunks: list[Chunk]
    forks: list[Fork]
    copies: list[tuple[int, int]] = field(default_factory=list)  # (block, its copy), before the step runs
    guesses = 0  # as DecodeStep has them

    @property
    def scored(self) -> list[Sequence]:
        """The sequences that end with this step, because they get no tokens."""
        return [chunk.seq for chunk in self.chunks if chunk.is_last and chunk.seq.is_only_scored]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(frozen=True)
class DecodeStep:
    """A step that gives every sequence in it one more token, or several where guesses hold."""

    seqs: list[Sequence]
    grown: list[tuple[Sequence, int, int]]  # the blocks that came for this step: sequence, group, column of its table
    due: list[Sequence]  # sequences that this step may take to their check_at
    max_context_len: int
    guesses: int = 0  # so many places there are for guesses of all sequences: see Scheduler
    lacking: list[Chunk] = field(default_factory=list)  # tokens of which a draft model lacks the keys

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.seqs)


Step = PrefillStep | DecodeStep
