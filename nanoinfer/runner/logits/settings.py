"""Settings that need logits, each declared once: penalties change logits, bans and filters leave out tokens.

A setting needs no more than its entry in PENALTIES, BANS or FILTERS. LogitsProcessors read these lists. So do
kept_tokens, and log-probabilities of the distributions that tokens are drawn from.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.bans import NOTHING, Bans
from nanoinfer.kernels.sampling.masks import apply_masks
from nanoinfer.kernels.sampling.penalties import penalize
from nanoinfer.kernels.sampling.sequences import ban_sequences
from nanoinfer.kernels.sampling.thoughts import Thoughts, forced_tokens
from nanoinfer.runner.logits.functions import make_functions
from nanoinfer.runner.logits.lines import Which
from nanoinfer.runner.message import LogitsMessage
from nanoinfer.runner.transfer import upload
from nanoinfer.sampling_params import SamplingParams

Change = Callable[[Tensor, Tensor, Tensor | None, Which], Tensor]
Keep = Callable[[Tensor, Tensor, Tensor], Tensor]
Force = Callable[[Tensor, Tensor | None, Which], Tensor]

ALL = -1  # 32 tokens that may all be drawn
MINUS_INFINITY = float("-inf")
FARTHEST = 2**31 - 1  # no text has so many tokens


@dataclass(frozen=True)
class Penalty:
    """Settings that make tokens less likely, or more likely; as one of BANS, impossible.

    is_set: whether a request asks for it
    make: takes the messages of some rows, and their device; returns the function that changes these rows' logits. Its
        arguments are the logits, [lines, vocabulary] float32; the positions of the tokens to be drawn, [lines] int32;
        the tokens so far, [lines, longest] int32, or None; and for which row each line is. It returns new logits; rows
        that do not ask keep theirs
    needs_tokens: it depends on the tokens so far
    """

    is_set: Callable[[SamplingParams], bool]
    make: Callable[[list[LogitsMessage], torch.device], Change]
    needs_tokens: bool = False


@dataclass(frozen=True)
class Filter:
    """A setting that leaves unlikely tokens out of the draw. At temperature 0 none is needed.

    name: the setting's
    is_set: whether the setting, with this value, leaves out any token
    keep: takes penalized logits, [rows, vocabulary] float32, in which -inf stands for tokens that are left out already;
        temperatures and the setting's values, both [rows] float32. It returns which tokens stay, [rows, vocabulary]
        bool, of each row at least the likeliest. None: kernels.sampling.cutoff knows the setting
    """

    name: str
    is_set: Callable[[Any], bool]
    keep: Keep | None = None

    def is_wanted(self, params: SamplingParams) -> bool:
        """Whether a request asks for it."""
        return not params.is_greedy and self.is_set(getattr(params, self.name))


def _make_bias(messages: list[LogitsMessage], device: torch.device) -> Change:
    own = [message.params.logit_bias or {} for message in messages]
    ids = _table([list(biases) for biases in own], device)
    values = _table([list(biases.values()) for biases in own], device, "f")
    return lambda logits, positions, tokens, rows: logits.scatter_add(1, ids[rows].long(), values[rows])


def _make_repetition(messages: list[LogitsMessage], device: torch.device) -> Change:
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    lengths = upload(array("i", [message.num_prompt_tokens for message in messages]), device)
    penalties = [upload(array("f", [getattr(message.params, name) for message in messages]), device) for name in names]

    def change(logits: Tensor, positions: Tensor, tokens: Tensor | None, rows: Which) -> Tensor:
        assert tokens is not None
        return penalize(logits, tokens, positions, lengths[rows], *(penalty[rows] for penalty in penalties))

    return change


def _make_mask(messages: list[LogitsMessage], device: torch.device) -> Change:
    masks = masks_of(messages, device)
    return lambda logits, positions, tokens, rows: apply_masks(logits, masks[rows])


def masks_of(messages: list[LogitsMessage], device: torch.device) -> Tensor:
    """Return the masks of rows of which some have one, [rows, words] int32, as apply_masks takes them."""
    own = [None if bans is None else bans.mask for bans in _bans_of(messages)]
    num_words = max(len(mask) for mask in own if mask is not None)
    words = np.concatenate([np.full(num_words, ALL, np.int32) if mask is None else mask for mask in own])
    return upload(array("i", words.tobytes()), device).view(len(messages), num_words)


def _make_bans(messages: list[LogitsMessage], device: torch.device) -> Change:
    own = {row: bans.sequences for row, bans in enumerate(_bans_of(messages)) if bans is not None}
    most, longest = (max(sequences.shape[axis] for sequences in own.values()) for axis in (0, 1))
    packed = np.full((len(messages), most, longest), NOTHING, np.int32)
    for row, sequences in own.items():
        packed[row, : len(sequences), longest - sequences.shape[1] :] = sequences
    sequences_of = upload(array("i", packed.tobytes()), device).long().view(packed.shape)
    starts = upload(array("i", [message.num_prompt_tokens for message in messages]), device)

    def change(logits: Tensor, positions: Tensor, tokens: Tensor | None, rows: Which) -> Tensor:
        assert tokens is not None
        return ban_sequences(logits, tokens, positions, starts[rows], sequences_of[rows])

    return change


def _bans_of(messages: list[LogitsMessage]) -> list[Bans | None]:
    return [message.params.bans for message in messages]


def make_min_tokens(messages: list[LogitsMessage], device: torch.device) -> Change:
    """Return the function that keeps rows from ending before min_tokens, as Penalty.make does."""
    ids = _table([list(message.suppressed) for message in messages], device)
    changes = _table([[MINUS_INFINITY] * len(message.suppressed) for message in messages], device, "f")
    first_ends = [message.num_prompt_tokens + message.params.min_tokens for message in messages]
    ends = upload(array("i", [min(end, FARTHEST) for end in first_ends]), device)

    def change(logits: Tensor, positions: Tensor, tokens: Tensor | None, rows: Which) -> Tensor:
        is_early = positions[:, None] < ends[rows, None]
        return logits.scatter_add(1, ids[rows].long(), changes[rows].where(is_early, 0))

    return change


def make_forced(messages: list[LogitsMessage], device: torch.device) -> Force:
    """Return the function that closes thoughts whose budgets are spent: see kernels.sampling.thoughts.

    Its arguments are the positions, the tokens so far and the rows, as Penalty.make says.
    """
    thoughts = [message.params.thought for message in messages]
    markers = next(thought for thought in thoughts if thought is not None)  # all rows have the same
    leaving = upload(array("i", markers.leaving), device).long()
    spans = [FARTHEST if own is None or own.budget is None else min(own.budget, FARTHEST) for own in thoughts]
    budgets = upload(array("i", spans), device)
    are_open = upload(array("i", [own is not None and own.is_open for own in thoughts]), device).bool()
    lengths = upload(array("i", [message.num_prompt_tokens for message in messages]), device)

    def force(positions: Tensor, tokens: Tensor | None, rows: Which) -> Tensor:
        assert tokens is not None
        own = Thoughts(lengths[rows], are_open[rows], budgets[rows])
        return forced_tokens(tokens, positions, own, markers.opening, markers.closing, leaving)

    return force


def _table(lists: list[list[Any]], device: torch.device, kind: str = "i") -> Tensor:
    """Return numbers of each row, [rows, most], as int32 or, of kind "f", as float32; a shorter list goes on with 0."""
    most = max(map(len, lists))
    flat = array(kind, [number for own in lists for number in (*own, *[0] * (most - len(own)))])
    return upload(flat, device).view(len(lists), most)


PENALTIES = [
    Penalty(lambda params: params.logits_processors is not None, make_functions, needs_tokens=True),
    Penalty(lambda params: bool(params.logit_bias), _make_bias),
    Penalty(lambda params: params.has_penalties, _make_repetition, needs_tokens=True),
]
MASK = Penalty(lambda params: params.bans is not None and params.bans.mask is not None, _make_mask)
BANS = [
    MASK,
    Penalty(lambda params: params.bans is not None and len(params.bans.sequences) > 0, _make_bans, needs_tokens=True),
]
FILTERS = [
    Filter("top_k", lambda top_k: top_k > 0),
    Filter("top_p", lambda top_p: top_p < 1),
    Filter("min_p", lambda min_p: min_p > 0),
]


def filters_of(params: SamplingParams) -> list[Filter]:
    """Return the filters that a request asks for."""
    return [own for own in FILTERS if own.is_wanted(params)]


def changes_of(params: SamplingParams) -> list[Penalty]:
    """Return the penalties and bans that a request asks for."""
    return [own for own in (*PENALTIES, *BANS) if own.is_set(params)]


def may_force(params: SamplingParams) -> bool:
    """Whether some tokens are put in, whatever else the request asks for: a thought's budget may be spent."""
    return params.thought is not None and params.thought.budget is not None


def needs_tokens(params: SamplingParams) -> bool:
    """Whether a penalty, a ban or a thought's budget makes the next token depend on the tokens so far."""
    return may_force(params) or any(own.needs_tokens for own in changes_of(params))


def is_plain(params: SamplingParams) -> bool:
    """Whether a draw needs only logits, temperature and seed, once min_tokens have been generated."""
    wants_more = changes_of(params) or filters_of(params) or params.is_guided or may_force(params)
    return not (wants_more or params.kept_tokens or params.entropy) and params.logprobs is None


def changes_logits(message: LogitsMessage) -> bool:
    """Whether a row's token is drawn from other logits than the model's; the filters of a cutoff need no others."""
    params = message.params
    masks = any(own.keep is not None for own in filters_of(params))
    return masks or bool(message.suppressed) or params.is_guided or may_force(params) or bool(changes_of(params))


def has_mask_alone(message: LogitsMessage) -> bool:
    """Whether a mask is all that a row wants: a guided row's, or that of allowed_token_ids."""
    params = message.params
    wants_more = filters_of(params) or message.suppressed or params.kept_tokens or params.logprobs is not None
    wants_more = wants_more or may_force(params) or params.entropy
    return changes_of(params) == ([] if params.is_guided else [MASK]) and not wants_more
