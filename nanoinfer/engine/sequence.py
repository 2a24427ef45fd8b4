"""Sequence: the tokens, block table and status of one sample of a request."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nanoinfer.engine.media import PromptMedia
from nanoinfer.engine.prefixes.prefix_tree import NONE, Node
from nanoinfer.engine.results.hidden_states import HiddenStates
from nanoinfer.engine.results.routed_experts import RoutedExperts
from nanoinfer.logprob import CandidatesLog
from nanoinfer.runner.message import Steered
from nanoinfer.sampling_params import SamplingParams

Vector = npt.NDArray[np.floating[Any]]
FinishReason = Literal["stop", "length", "abort", "error"]
NO_LOG = CandidatesLog()  # one for all sequences that ask for none: the garbage collector visits every object


class SequenceStatus(Enum):
    """How far a sequence has come."""

    WAITING = auto()
    RUNNING = auto()
    ENDING = auto()  # runs, and a step in flight computes its last token
    OUTGROWN = auto()  # runs, and starts again as a long sequence (see Scheduler) when its newest token is known
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One sample of a request, from its prompt to its last token.

    The host runs ahead of the device, so lengths come in two kinds. Only tokens that have been read back are in
    `token_ids`. `num_scheduled` counts the tokens whose keys and values launched steps compute, at most, as if it had
    no end. `num_unsure` of these are guesses that may not hold.
    """

    prompt: InitVar[list[int] | array[int]]
    params: SamplingParams
    seed: int
    max_model_len: InitVar[int]
    stop_ids: frozenset[int] = frozenset()  # tokens that end the sequence
    request_id: int = 0
    sample_index: int = 0  # its number among the request's samples
    media: PromptMedia | None = None  # the prompt's images and videos; None: it has none
    adapter: int = NONE  # the slot of its adapter; NONE: the model alone computes it

    _: KW_ONLY
    token_ids: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    temperature: float = field(init=False)
    max_len: int = field(init=False)
    num_cached_tokens: int = 0  # of the prompt's tokens, when it was first scheduled
    num_proposed_tokens: int = 0  # guesses that were verified
    num_accepted_tokens: int = 0  # generated tokens that had been guessed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token, the stop string, or the error's message
    logprobs: CandidatesLog = NO_LOG  # of the generated tokens
    kept_tokens: list[tuple[int, float]] = field(default_factory=list)  # of the generated tokens, if asked for
    entropies: list[float] = field(default_factory=list)  # likewise
    prompt_logprobs: CandidatesLog = NO_LOG  # of the prompt's tokens but the first
    text_lens: list[int] | None = None  # of the texts that it consists of; None: it is one
    pooled: Vector | None = None  # what its texts were read for, [texts, width]; None: not known yet, or not read
    routed_experts: RoutedExperts | None = None  # None: the LLM was not asked for them
    hidden_states: HiddenStates | None = None  # None: the request did not ask
    steering: Steered | None = None  # None: its hidden states are the model's own
    started_at: float = 0.0  # on time.perf_counter's clock, as the next two
    first_token_at: float = 0.0
    finished_at: float = 0.0
    versions: list[tuple[int, int]] = field(default_factory=list)  # see `use_weights`
    status: SequenceStatus = SequenceStatus.WAITING
    # Kept by Scheduler:
    num_scheduled: int = 0
    num_unsure: int = 0
    check_at: int = 0  # it looks at the sequence again at this num_scheduled
    end: int = field(init=False)  # so many tokens it has before it ends, or starts again as a long one
    is_long: bool = False  # whether it is computed as a long sequence, whose keys differ
    drafted: int | None = None  # a draft model has the keys of so many first tokens; None: of all but the last two
    on_token: Callable[[], object] | None = None  # called with each token, and may end it, where a step gives several
    # Kept by BlockManager:
    block_tables: list[list[int]] = field(default_factory=list)  # one for each group of layers; none: it has no blocks
    num_released: list[int] = field(default_factory=list)  # leading blocks of each table that it no longer holds
    node: Node | None = None  # of the longest recorded prefix; None: later sequences find none of its blocks
    num_nodes: int = 0  # of that prefix
    slot: int = NONE  # for states
    # Kept by HostTier, if it was preempted: the slots of host memory with what its last blocks held, which fill no
    # node, and with its states behind all tokens but the last; and the node before these blocks.
    kept: list[int] = field(default_factory=list)
    kept_behind: Node | None = None
    row: int = -1  # this sequence's row on the device, kept by RowMap; -1: none

    def __post_init__(self, prompt: list[int] | array[int], max_model_len: int) -> None:
        params = self.params
        self.token_ids, self.num_prompt_tokens = array("i", prompt), len(prompt)
        self.temperature = 0.0 if params.is_greedy else params.temperature
        most = max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        self.max_len = self.end = min(most, max_model_len)
        if params.logprobs is not None:
            self.logprobs = CandidatesLog()
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = CandidatesLog()

    def __len__(self) -> int:
        return len(self.token_ids)

    def content(self, start: int, end: int) -> bytes:
        """Return tokens `start` to `end` as bytes; placeholders of other images differ, and texts of other salts.

        So do texts of other steerings.
        """
        tokens = self.token_ids[start:end].tobytes()
        if start == 0 and (salt := self.params.cache_salt) is not None:
            tokens += sha256(salt.encode(errors="surrogatepass")).digest()  # so that no salt looks like an image
        if start == 0 and self.steering is not None:
            tokens += sha256(f"steering {self.steering[1:]}".encode()).digest()
        return tokens if self.media is None else tokens + self.media.content(start, end)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def use_weights(self, version: int) -> None:
        """Note that this version of the weights draws the next tokens."""
        if self.versions and self.versions[-1][0] == self.num_output_tokens:
            self.versions.pop()  # it has drawn none
        self.versions.append((self.num_output_tokens, version))

    @property
    def weights_versions(self) -> list[tuple[int, int]]:
        """The versions that drew the generated tokens, each with the first of its tokens; the first is always there."""
        return [entry for entry in self.versions if entry[0] < max(1, self.num_output_tokens)]

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
        """Whether an end-of-sequence or stop token, the last token, ended the sequence."""
        if self.finish_reason != "stop" or isinstance(self.stop_reason, str):
            return False
        return self.token_ids[-1] in self.stop_ids  # a guided sequence also ends where its text can only end

    @property
    def is_only_scored(self) -> bool:
        """Whether the sequence ends with its prompt, and never has a row."""
        return self.params.max_tokens == 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are still to be computed."""
        return self.params.prompt_logprobs is not None and self.sample_index == 0 and self.is_fresh

    def add_pooled(self, numbers: Vector) -> None:
        """Take what a chunk gives, which is added to what earlier ones gave."""
        if self.pooled is None:
            self.pooled = numbers.copy()
        else:
            is_max = self.params.read is not None and self.params.read.what == "max"
            self.pooled = np.maximum(self.pooled, numbers) if is_max else self.pooled + numbers

    @property
    def first_logits(self) -> int:
        """The first position whose logits are needed."""
        last = len(self) - 1
        return min(last, max(0, self.params.prompt_logprobs_start - 1)) if self.wants_prompt_logprobs else last

    @property
    def num_reusable(self) -> int:
        """How many of the first tokens may come from the cache: what is told of them is known, but for logits."""
        if self.params.read is not None and self.params.read.needs_all:
            return 0
        known = self.first_logits
        if self.routed_experts is not None:
            known = min(known, len(self.routed_experts))
        return known if self.hidden_states is None else min(known, self.hidden_states.num_known)

    def forget_records(self) -> None:
        """Forget what is told of tokens, so that shared blocks never give the sequence what others' tokens had."""
        if self.routed_experts is not None:
            self.routed_experts.clear()
        if self.hidden_states is not None:
            self.hidden_states.clear()

    @property
    def num_certain(self) -> int:
        """The tokens whose keys and values launched steps certainly compute."""
        return self.num_scheduled - self.num_unsure

    def count(self, reach: int) -> int:
        """Return how many further tokens a step computes that may give the sequence `reach`; it has an end.

        Below 0: as many less than the steps in flight may give, as if there was none
        """
        return min(reach, self.end - 1 - self.num_scheduled)
