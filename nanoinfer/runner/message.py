"""What the host tells the ranks before each step: small, plain, and all that they need."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from nanoinfer.sampling_params import SamplingParams


@dataclass(slots=True)
class ChunkMessage:
    """One chunk of a prompt."""

    token_ids: array[int]
    start: int  # position of the first of them
    block_table: list[int]  # with numbers that mean nothing where all layers' windows have left a block behind
    num_logprobs: int | None = None  # of the tokens that follow each of these in the prompt
    next_token: int | None = None  # the prompt's token after the last of these, if it goes on
    is_long: bool = False  # whether its sequence has the rotary frequencies of long ones


@dataclass(slots=True)
class LogitsMessage:
    """What a row needs to know whose request asks for more than a temperature."""

    params: SamplingParams
    token_ids: array[int]  # all so far, if they count for the next one
    num_prompt_tokens: int
    suppressed: tuple[int, ...]  # the tokens that would end it
    num_suppressed: int  # for so many steps

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
    logits: LogitsMessage | None = None
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


StepMessage = PrefillMessage | DecodeMessage
