"""Finds the tokens that a request may not draw, which its settings name by ids and by words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nanoinfer.bans import Bans
from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.sampling_params import SamplingParams

Encode = Callable[[str], list[int]]


def find_bans(name: str, params: SamplingParams, config: Config, encode: Encode) -> Bans | None:
    """Return the Bans of settings that were checked; None if they forbid no token.

    name: begins the messages of errors; encode: makes tokens of a text, without special ones

    Raises ValueError for a token id that the vocabulary does not have, for a word without tokens, and if a sample could
    not have even a first token.
    """
    vocab_size = config.description.vocab_size
    sequences = [sequence for word in params.bad_words or () for sequence in _spellings(name, word, encode)]
    sequences = [sequence for sequence in sequences if max(sequence) < vocab_size]  # the tokenizer may have more tokens
    _check_first_token(name, params, config, {sequence[0] for sequence in sequences if len(sequence) == 1})
    if params.allowed_token_ids is None and not sequences:
        return None
    allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids)
    if allowed is not None and (allowed.min() < 0 or allowed.max() >= vocab_size):
        wrong = next(token_id for token_id in params.allowed_token_ids or () if not 0 <= token_id < vocab_size)
        raise ValueError(f"{name}.allowed_token_ids has token id {short(wrong)}: must be from 0 to {vocab_size - 1}")
    return Bans.of(allowed, sequences, vocab_size)


def _spellings(name: str, word: str, encode: Encode) -> list[list[int]]:
    """Return the tokens of a word at the beginning of a text and, as vLLM does, of one behind a space."""
    bare = word.lstrip()
    first, behind_space = encode(bare), encode(f" {bare}")
    if not first:
        raise ValueError(f"{name}.bad_words has {word!r}: must have a character that the tokenizer makes a token of")
    if behind_space and len(behind_space) == len(first) and behind_space[0] != first[0]:
        return [first, behind_space]
    return [first]


def _check_first_token(name: str, params: SamplingParams, config: Config, banned: set[int]) -> None:
    """Raise ValueError if settings leave no first token. A form may leave others, which only its grammar knows."""
    vocab_size = config.description.vocab_size
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    stops = params.stop_token_ids or ()
    settings = ["allowed_token_ids"] if params.allowed_token_ids is not None else []
    if banned:
        settings.append("bad_words")
    if params.min_tokens > 0 and not params.is_guided:
        settings.append("min_tokens")
        if not set(stops).isdisjoint(allowed):
            settings.append("stop_token_ids")
        banned = banned.union(stops, () if params.ignore_eos else config.eos_token_ids)
    if params.max_tokens != 0 and banned and banned.issuperset(allowed):
        *first, last = settings
        told = f"{', '.join(first)} and {last}" if first else last
        raise ValueError(f"{name}: {told} leave no token that may be drawn: allow more tokens")
