"""Sequence: one request's tokens, block table and status."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import Enum, auto
from typing import Literal

from nanoinfer.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    ENDING = auto()  # runs, and its last token is on its way
    OUTGROWN = auto()  # runs, and starts again as a long one when its newest token is known
    FINISHED = auto()


class Sequence:
    """One request, from its prompt to its last token.

    The host runs ahead of the device, so lengths come in two kinds. `num_scheduled` counts the tokens whose keys
    and values a launched step computes. Only tokens that have been read back are in `token_ids`.
    """

    __slots__ = (
        "block_table",
        "check_at",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "is_long",
        "last_serial",
        "logprobs",
        "max_len",
        "num_cached_tokens",
        "num_named",
        "num_prompt_tokens",
        "num_released",
        "num_scheduled",
        "params",
        "prompt_logprobs",
        "queued_at",
        "request_id",
        "row",
        "sample_index",
        "seed",
        "status",
        "stop_ids",
        "stop_reason",
        "temperature",
        "token_ids",
    )

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        max_model_len: int,
        stop_ids: frozenset[int] = frozenset(),
        request_id: int = 0,
        sample_index: int = 0,
    ) -> None:
        """stop_ids: tokens that end it; sample_index: which of the samples of its request, from 0."""
        self.token_ids = array("i", prompt)
        self.num_prompt_tokens = len(prompt)
        self.params = params
        self.temperature = 0.0 if params.is_greedy else params.temperature
        self.stop_ids = stop_ids
        self.seed = seed
        self.request_id = request_id
        self.sample_index = sample_index
        self.num_cached_tokens = 0  # of the prompt, when it was first scheduled
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop token or string, or what the error says
        self.logprobs: list[Mapping[int, float]] = []  # of the tokens generated, if they are asked for
        self.prompt_logprobs: list[Mapping[int, float]] = []  # of its tokens but the first
        self.queued_at = self.first_token_at = self.finished_at = 0.0  # on time.perf_counter's clock
        self.max_len = min(len(prompt) + params.max_tokens, max_model_len)
        self.status = SequenceStatus.WAITING
        self.num_scheduled = 0
        self.check_at = 0  # kept by Scheduler: the num_scheduled that fills the last block, or ends something else
        self.is_long = False  # whether it is computed as a long one, whose keys differ; kept by Scheduler
        # Kept by BlockManager:
        self.block_table: list[int] = []
        self.num_released = 0  # leading blocks of the table that are no longer its own
        self.num_named = 0  # leading blocks of the table that have names
        self.last_serial = 0  # of the last of them; before the first: 0, or 1 in a long sequence
        self.row = -1  # this sequence's row on the device, kept by RowMap; -1: none

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_output_tokens(self) -> int:
        """How many there are."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the last token has been read back."""
        return self.status is SequenceStatus.FINISHED

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been generated yet."""
        return self.num_output_tokens == 0

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token is an end-of-sequence or stop token that ended it."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be computed."""
        return self.params.prompt_logprobs is not None and self.sample_index == 0 and self.is_fresh

    @property
    def is_exhausted(self) -> bool:
        """Whether the token that a launched step samples is the last this sequence may have."""
        return self.num_scheduled + 1 >= self.max_len
