"""Grammars: what the text of a request with structured outputs may be, compiled for the tokens of one tokenizer."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from nanoinfer.structured_outputs import ANY_OBJECT

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MOST_KEPT = 256  # compiled grammars
NUM_THREADS = min(4, os.cpu_count() or 1)  # that make masks
COPIES = 8  # of a compiled matcher, before another is compiled
# Between the tokens of JSON: without a bound, a model that likes white space may never come to an end.
SPACE = "[ ]?"
# llguidance knows beforehand which tokens these match whole. With six lengths of pieces of a JSON string, the masks in
# strings of bounded length take two thirds of the time that they take with llguidance's own two.
PIECE = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{PIECE}{{1,{most}}}" for most in (1, 2, 4, 8, 14, 30)), f"{PIECE}+"]


class Grammar:
    """A grammar, which gives each sequence a matcher of its own.

    Copies of a matcher share a lock while one makes a mask. So there are several compiled ones to copy, for the threads
    that make masks side by side.

    num_words: a mask of the tokenizer's tokens has this many words of 32 bits
    eos_token_ids: the tokens that a mask allows where the text may end
    """

    def __init__(self, compile_anew: Callable[[], LLMatcher], locks: Iterator[int], tokenizer: LLTokenizer) -> None:
        """locks: numbers, of which each compiled matcher takes the next; raises as compile_anew does."""
        self._compile_anew, self._locks = compile_anew, locks
        self._compiled = [(compile_anew(), next(locks))]
        self._num_copies = 0
        self.num_words = -(-tokenizer.vocab_size // 32)
        self.eos_token_ids = frozenset(tokenizer.eos_tokens)

    def matcher(self) -> tuple[LLMatcher, int]:
        """Return a matcher that has read nothing, and the number of its lock."""
        turn = self._num_copies // COPIES % NUM_THREADS
        self._num_copies += 1
        if turn == len(self._compiled):
            self._compiled.append((self._compile_anew(), next(self._locks)))
        matcher, lock = self._compiled[turn]
        return matcher.deep_copy(), lock


class Grammars:
    """Compiles structured outputs, each value once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """vocab_size: the model's; eos_token_ids: the model's, or none: then the tokenizer's own."""
        self._tokenizer = _convert(tokenizer, vocab_size, eos_token_ids)
        self._locks = itertools.count()
        self._compile = lru_cache(MOST_KEPT)(self._grammar)

    def compile(self, structured_outputs: Mapping[str, Any]) -> Grammar:
        """Compile what check_structured_outputs returned. Raises ValueError with the reason if that cannot be."""
        ((kind, wanted),) = structured_outputs.items()
        return self._compile(kind, wanted)

    def _grammar(self, kind: str, wanted: Any) -> Grammar:
        return Grammar(partial(self._compile_anew, kind, wanted), self._locks, self._tokenizer)

    def _compile_anew(self, kind: str, wanted: Any) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, _rules(kind, wanted), log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(error_of(matcher))
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"no token can begin its text: {error_of(matcher)}")
        return matcher


def error_of(matcher: LLMatcher) -> str:
    """Return what is wrong with a matcher or its grammar; "" if nothing is."""
    return matcher.get_error().removesuffix("<non-verbose/>").strip()


def _rules(kind: str, wanted: Any) -> str:
    """Return the grammar as llguidance writes it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind in ("json", "json_object"):
        schema = wanted if kind == "json" else ANY_OBJECT
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": SPACE})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(wanted)
    if kind == "choice":  # a name in capitals is one regular expression, which may have any number of branches
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, wanted)))
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(wanted))
    except Exception as error:  # the conversion raises Exception itself
        raise ValueError(str(error)) from error


def _convert(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise ValueError("needs the llguidance package: pip install 'nanoinfer[structured]'") from error
    known = 1 + max(tokenizer.get_vocab().values())
    # A model may have more tokens than its tokenizer, or fewer.
    return from_tokenizer(_readable(tokenizer), max(known, vocab_size), sorted(eos_token_ids) or None, SLICES)


def _readable(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a decoder that llguidance knows: it takes Metaspace's spaces for a letter."""
    from tokenizers import decoders

    backend = tokenizer.backend_tokenizer
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    for step in decoder.get("decoders", [decoder]):
        if step.get("type") == "Metaspace":
            spaces = decoders.Replace(step["replacement"], " ")
            tokenizer = copy(tokenizer)
            tokenizer._tokenizer = copy(backend)
            tokenizer._tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
