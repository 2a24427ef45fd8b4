"""ModelTexts: the tokens that a checkpoint's model wants of a text or a pair, by the files of sentence-transformers."""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from nanoinfer.checkpoint import Checkpoint
from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.pooling.text_settings import FLAT, TextSettings
from nanoinfer.requests.text.bound_tokenizer import BoundTokenizer
from nanoinfer.requests.text.texts import TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("nanoinfer")

FILLERS = "0", "1 2 3 4"  # texts of which no token is alike: what chats of them end with alike is the template's
MOST_SHOWN = 60  # characters of a text in an error message
MOST_ENDS = 16  # of templates are remembered

Turn = tuple[str, str]  # the role and the text of a message


class ModelTexts:
    """Makes tokens as sentence-transformers does: in lower case, in a chat, cut to a length, where settings say so.

    There must be a tokenizer. Raises ValueError for what it does not take, or its chat template.
    """

    def __init__(self, config: Config, texts: TextTokenizer, settings: TextSettings) -> None:
        self._config, self._texts, self._settings = config, texts, settings
        self._has_told = False  # that texts are cut
        self._end_of = lru_cache(MOST_ENDS)(self._find_end)

    @property
    def writes_chats(self) -> bool:
        """Whether texts become chats."""
        return self._settings.form is not None

    @property
    def changes(self) -> bool:
        """Whether a text's tokens are others than the tokenizer's, even if it is not cut."""
        return self._settings.lowers or self.writes_chats

    def read_text(self, name: str, text: str, before: str) -> list[int]:
        """Return the tokens of a text; name: begins the messages of errors; before: stands before it, or is ''."""
        if not self.writes_chats:
            return self._encode(name, before + text)
        return self._encode_chat(name, (("user", text),), before)

    def read_pair(self, name: str, query: str, document: str, before: str) -> list[int]:
        """Return the tokens of a pair; before: stands before the query, or is ''."""
        if not self.writes_chats:
            return self._encode(name, before + query, document)
        return self._encode_chat(name, (("query", query), ("document", document)), before)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The LLM's own, or a copy that makes lower case, or that others do not use while it cuts."""
        tokenizer = self._texts.tokenizer
        assert tokenizer is not None
        if not self._settings.lowers:
            return deepcopy(tokenizer) if self._config.sees else tokenizer
        if not tokenizer.is_fast:
            folder = self._texts.folder
            raise ValueError(f"{folder!r}: do_lower_case=True needs a tokenizer.json, which the folder does not have")
        return _lowering(deepcopy(tokenizer))

    @cached_property
    def _most_tokens(self) -> int | None:
        """So many tokens a text keeps; None: it is not cut, or more than the LLM allows."""
        most = self._settings.most_tokens
        if most is None:
            checkpoint = Checkpoint.open(self._config.model, self._config.hf_config_path)
            positions = getattr(checkpoint.hf_config, "max_position_embeddings", None)
            limit = self._tokenizer.model_max_length
            most = limit if positions is None else min(limit, positions)
        return most if self._settings.cut is not None and most <= self._config.max_model_len else None

    @cached_property
    def bound(self) -> BoundTokenizer:
        """What makes tokens of texts and pairs, and in chats of what the template writes."""
        cut: dict[str, Any] = {}
        if self._most_tokens is not None:
            cut = {"truncation": self._settings.cut, "max_length": self._most_tokens}
        return BoundTokenizer(self._tokenizer, add_special_tokens=not self.writes_chats, **cut)

    def _encode(self, name: str, *texts: str) -> list[int]:
        try:
            token_ids = self.bound.encode(*texts)
        except Exception as error:  # a text has half a surrogate pair, or a pair is too long where one text is cut
            shown = short(texts[-1], MOST_SHOWN)
            raise ValueError(f"{name} is {shown}: the tokenizer does not take it: {error}") from None
        if len(token_ids) == self._most_tokens and not self._has_told:
            self._has_told = True
            log.warning("texts of over %d tokens are cut, as the files of %r say", len(token_ids), self._texts.folder)
        return token_ids

    def _encode_chat(self, name: str, turns: tuple[Turn, ...], before: str) -> list[int]:
        """Return the tokens of a chat; of one that is cut, the last ones may be the template's all the same."""
        end = self._end_of(tuple(role for role, _ in turns), before)
        token_ids = self._encode(name, self._render(turns, before))
        if self._settings.keeps_end and len(token_ids) == self._most_tokens:
            kept = end[-len(token_ids) :]
            token_ids[len(token_ids) - len(kept) :] = kept
        return token_ids

    def _find_end(self, roles: tuple[str, ...], before: str) -> list[int]:
        """Return the tokens that the template writes behind any texts in these roles.

        Raises ValueError if a text in one of the roles does not count for it.
        """
        first, second = ([(role, filler) for role in roles] for filler in FILLERS)
        written = self._render(first, before)
        for index, role in enumerate(roles):
            if self._render([*first[:index], second[index], *first[index + 1 :]], before) == written:
                raise ValueError(f"{self._texts.folder!r}: its chat template leaves out messages of role {role!r}")
        one, other = (
            self._tokenizer.encode(self._render(turns, before), add_special_tokens=False) for turns in (first, second)
        )
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
        count = len(list(alike))
        return one[len(one) - count :] if count < min(len(one), len(other)) else []

    def _render(self, turns: Any, before: str) -> str:
        """Return the text of a chat. before: the system's message, if there is one"""
        spoken = [("system", before), *turns] if before else turns
        is_flat = self._settings.form == FLAT
        messages = [
            {"role": role, "content": text if is_flat else [{"type": "text", "text": text}]} for role, text in spoken
        ]
        try:
            made: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._settings.template)
        except Exception as error:
            folder = self._texts.folder
            raise ValueError(f"{folder!r}: its chat template does not take its texts as messages: {error}") from error
        return made


def _lowering(tokenizer: Any) -> Any:
    """Return a tokenizer that now makes lower case first, if it did not before."""
    from tokenizers.normalizers import Lowercase, Sequence  # here: most need none

    backend = tokenizer.backend_tokenizer
    own: Any = backend.normalizer
    steps: Any = [] if own is None else own if isinstance(own, Sequence) else [own]
    if not any(isinstance(step, Lowercase) for step in steps):
        backend.normalizer = Sequence([Lowercase(), *steps])
    return tokenizer
