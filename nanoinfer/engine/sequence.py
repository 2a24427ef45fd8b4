"""Sequence: one request's tokens, block table and status."""

from __future__ import annotations

from array import array
from enum import Enum, auto

import xxhash

from nanoinfer.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-6  # what is below is greedy: logits divided by it would overflow


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    ENDING = auto()  # runs, and its last token is on its way
    FINISHED = auto()


class Sequence:
    """One request, from its prompt to its last token.

    The host runs ahead of the device, so lengths come in two kinds. `num_scheduled` counts the tokens whose keys
    and values a launched step computes. Only tokens that have been read back are in `token_ids`.
    """

    __slots__ = (
        "_block_hashes",
        "block_table",
        "check_at",
        "ignore_eos",
        "max_len",
        "num_prompt_tokens",
        "num_scheduled",
        "row",
        "seed",
        "status",
        "temperature",
        "token_ids",
    )

    def __init__(self, prompt: list[int], params: SamplingParams, seed: int, max_model_len: int) -> None:
        self.token_ids = array("i", prompt)
        self.num_prompt_tokens = len(prompt)
        self.temperature = params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0
        self.ignore_eos = params.ignore_eos
        self.seed = seed
        self.max_len = min(len(prompt) + params.max_tokens, max_model_len)
        self.status = SequenceStatus.WAITING
        self.num_scheduled = 0
        self.check_at = 0  # kept by Scheduler: the num_scheduled that fills the last block, or leaves one token to go
        self.block_table: list[int] = []  # kept by BlockManager
        self.row = -1  # this sequence's row on the device, kept by RowMap; -1: none
        self._block_hashes: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def is_finished(self) -> bool:
        """Whether the last token has been read back."""
        return self.status is SequenceStatus.FINISHED

    @property
    def is_exhausted(self) -> bool:
        """Whether the token that a launched step samples is the last this sequence may have."""
        return self.num_scheduled + 1 >= self.max_len

    def block_tokens(self, index: int, block_size: int) -> array[int]:
        """The tokens of the full block `index`."""
        return self.token_ids[index * block_size : (index + 1) * block_size]

    def block_hash(self, index: int, block_size: int) -> int:
        """The name of the full block `index`: xxh64 over the previous block's name and its own token ids."""
        while len(self._block_hashes) <= index:
            previous = self._block_hashes[-1] if self._block_hashes else 0
            tokens = self.block_tokens(len(self._block_hashes), block_size)
            assert len(tokens) == block_size, "only a full block has a name"
            digest = xxhash.xxh64(previous.to_bytes(8, "little"))
            digest.update(tokens.tobytes())
            self._block_hashes.append(digest.intdigest())
        return self._block_hashes[index]
