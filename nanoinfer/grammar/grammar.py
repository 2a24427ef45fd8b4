"""Grammars: what the text of a request with structured outputs may be, compiled for the tokens of one tokenizer."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from nanoinfer.grammar.errors import explain
from nanoinfer.grammar.tokens import SLICES, GrammarTokens, Spell
from nanoinfer.structured_outputs import ANY_OBJECT, KINDS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MOST_KEPT = 256  # compiled grammars
NUM_THREADS = min(4, os.cpu_count() or 1)  # that make masks
COPIES = 8  # of a compiled matcher, before another is compiled
# Between the tokens of JSON: without a bound, a model that likes white space may never come to an end.
SPACE = "[ ]?"
# What stands in a Lark grammar: strings, regular expressions and comments, which may hold anything; names of tokens.
LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|(<[^<>\s]+>)')


class Grammar:
    """A grammar, which gives each sequence a matcher of its own.

    Copies of a matcher share a lock while one makes a mask. So there are several compiled ones to copy, for the threads
    that make masks side by side.

    num_words: a mask of the tokenizer's tokens has this many words of 32 bits
    eos_token_ids: the tokens that a mask allows where the text may end
    """

    def __init__(
        self,
        compile_anew: Callable[[], LLMatcher],
        locks: Iterator[int],
        num_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """locks: numbers, of which each compiled matcher takes the next; raises as compile_anew does."""
        self._compile_anew, self._locks = compile_anew, locks
        self._compiled = [(compile_anew(), next(locks))]
        self._num_copies = 0
        self.num_words = -(-num_tokens // 32)
        self.eos_token_ids = eos_token_ids

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

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Collection[int], spell: Spell
    ) -> None:
        """vocab_size, eos_token_ids: the model's; spell: returns the bytes that an output shows of a token."""
        known = 1 + max(tokenizer.get_vocab().values())
        self._num_tokens = max(known, vocab_size)  # a model may have more tokens than its tokenizer, or fewer
        self._eos_token_ids = frozenset(eos_token_ids)
        convert = partial(_convert, tokenizer, self._num_tokens, self._eos_token_ids, spell)
        self._tokenizer = lru_cache(convert)  # one for grammars that name tokens, and one for the others
        self._locks = itertools.count()
        self._compile = lru_cache(MOST_KEPT)(self._grammar)

    def compile(self, structured_outputs: Mapping[str, Any]) -> Grammar:
        """Compile what check_structured_outputs returned. Raises ValueError with the reason if that cannot be."""
        ((kind, wanted),) = ((kind, wanted) for kind, wanted in structured_outputs.items() if kind in KINDS)
        return self._compile(kind, wanted)

    def _grammar(self, kind: str, wanted: Any) -> Grammar:
        compile_anew = partial(self._compile_anew, kind, wanted)
        return Grammar(compile_anew, self._locks, self._num_tokens, self._eos_token_ids)

    def _compile_anew(self, kind: str, wanted: Any) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise ValueError("needs the llguidance package: pip install 'nanoinfer[structured]'") from error
        rules, has_names = _rules(kind, wanted)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer(has_names), rules, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            is_lark = kind == "grammar" and "::=" not in wanted  # GBNF becomes Lark of other lines
            raise ValueError(f"{kind!r}: {error_of(matcher, has_lines=is_lark)}")
        return matcher


def error_of(matcher: LLMatcher, has_lines: bool = False) -> str:
    """Return what is wrong with a matcher or its grammar, and what would work; has_lines: see `explain`."""
    return explain(matcher.get_error().removesuffix("<non-verbose/>").strip(), has_lines)


def names_tokens(lark: str) -> bool:
    """Whether a grammar in Lark asks for tokens by their names, such as <tool_call>."""
    return any(found[1] for found in LARK.finditer(lark))


def _rules(kind: str, wanted: Any) -> tuple[str, bool]:
    """Return the grammar as llguidance writes it, and whether it names tokens."""
    from llguidance import LLMatcher

    if kind in ("json", "json_object"):
        schema = wanted if kind == "json" else ANY_OBJECT
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": SPACE}), False
    if kind == "regex":
        return LLMatcher.grammar_from_regex(wanted), False
    if kind == "choice":  # a name in capitals is one regular expression, which may have any number of branches
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, wanted))), False
    lark = _as_lark(wanted)
    return LLMatcher.grammar_from_lark(lark), names_tokens(lark)


def _as_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the conversion raises Exception itself
        raise ValueError(f"'grammar': {explain(str(error))}") from error


def _convert(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int, eos_token_ids: frozenset[int], spell: Spell, has_names: bool
) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = GrammarTokens(tokenizer.backend_tokenizer, num_tokens, eos_token_ids, spell, has_names)
    return LLTokenizer(TokenizerWrapper(tokens), eos_token=sorted(eos_token_ids) or None, slices=SLICES)
