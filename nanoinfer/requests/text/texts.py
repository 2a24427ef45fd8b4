"""TextTokenizer: what becomes of texts by an LLM's tokenizer, which may be missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.requests.text.bound_tokenizer import BoundTokenizer
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SHOWN = 60  # characters of a text in an error message


def check_characters(name: str, text: str) -> None:
    """Raise ValueError for half a surrogate pair, which no tokenizer takes; name: begins the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place, half = error.start, text[error.start]
        raise ValueError(
            f"{name} is {short(text, MOST_SHOWN)}: must have no half of a surrogate pair, as {half!r} at [{place}] is;"
            " text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace') joins halves that belong together, and"
            " replaces others"
        ) from None


class TextTokenizer:
    """Makes tokens of texts. Raises ValueError for what a tokenizer cannot do, or for want of one.

    tokenizer: the LLM's; None: there is none
    folder: the tokenizer's
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.folder = config.tokenizer or config.model
        self._model = config.model
        self._bound: dict[bool, BoundTokenizer] = {}  # by whether they add special tokens
        if tokenizer is not None:
            self._bound = {special: BoundTokenizer(tokenizer, add_special_tokens=special) for special in (True, False)}

    def tokenize(self, name: str, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text; name: begins the messages of errors."""
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, but {self._model!r} has no tokenizer: pass a list of token ids")
        check_characters(name, text)
        return self._bound[add_special_tokens].encode(text)

    def bound(self, add_special_tokens: bool) -> BoundTokenizer | None:
        """Return what makes the tokens of texts; None: there is no tokenizer."""
        return self._bound.get(add_special_tokens)

    def known_tokenizer(self, name: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer, which `name` needs."""
        if self.tokenizer is None:
            raise ValueError(f"{name} needs text, but {self._model!r} has no tokenizer")
        return self.tokenizer

    def check_detokenizer(self, name: str) -> None:
        """Raise ValueError if the tokenizer cannot make text token by token, which `name` needs."""
        if not self.known_tokenizer(name).is_fast:
            raise ValueError(f"{name} needs a tokenizer.json, which {self.folder!r} does not have")

    def check_streams(self, name: str, settings: Iterable[SamplingParams]) -> None:
        """Raise ValueError if requests want text, and the tokenizer cannot make it token by token."""
        if self.tokenizer is not None and any(params.detokenize for params in settings):
            self.check_detokenizer(name)
