"""A prompt's stages: what a caller passed, as it was asked for, with images that threads prepare, and ready to run."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple, TypeAlias

from nanoinfer.checks import as_int, as_list, short
from nanoinfer.grammar.grammar import Grammar
from nanoinfer.media.messages import NO_MEDIA, Media
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.pooling.read import PackedTexts
from nanoinfer.requests.chat.beside import MESSAGES, SALT
from nanoinfer.requests.prompts.embeds import EMBEDS
from nanoinfer.requests.prompts.token_ids import MOST_SHOWN
from nanoinfer.requests.settings import Settings
from nanoinfer.requests.text.bound_tokenizer import BoundTokenizer
from nanoinfer.sampling_params import SamplingParams

TEXT, TOKEN_IDS = "prompt", "prompt_token_ids"  # the keys of a prompt that is a mapping, as vLLM names them
A_MAPPING = f"a mapping with {TEXT!r} or {TOKEN_IDS!r}, and nothing else"
SMALLER = "; image_options can make images and videos smaller"

Tokens = str | ListLike[int]
SomeTokens = list[int] | MediaPrompt
PackedTokens: TypeAlias = "array[int] | MediaPrompt | PackedTexts"  # as engines take them


class Asked(NamedTuple):
    """A prompt as it was asked for.

    name: begins the messages of errors
    prompt: its text or tokens, with a placeholder for each image and each video
    text: its text; None if the user passed token ids alone
    media: its images and videos
    is_chat: a template wrote it, with the special tokens
    cache_salt: it shares blocks of the KV cache with prompts of the same salt alone; None: with those without one
    tokenize: makes its tokens, of its name in messages of errors; None: the tokenizer does, of its text
    bound: what `tokenize` encodes its prompt by, as it stands; None: it writes another text, or is None
    embeds: the prompt with embeddings in place of tokens; None: it has none
    """

    name: str
    prompt: Tokens
    text: str | None
    media: Media = NO_MEDIA
    is_chat: bool = False
    cache_salt: str | None = None
    tokenize: Callable[[str], list[int]] | None = None
    bound: BoundTokenizer | None = None
    embeds: MediaPrompt | None = None


OutputOf = Callable[[Any], Any]  # what makes the output of a Request that is read


class ComingRequest(NamedTuple):
    """A request whose images threads prepare; add_request takes it.

    seen: its prompt with them; None: it has none
    output_of: as for Prepared
    """

    asked: Asked
    settings: Settings
    seen: Future[MediaPrompt] | None
    output_of: OutputOf | None = None

    @property
    def listed(self) -> list[int] | None:
        """Its token ids, of which nobody knows yet whether they are some; None: it has others than a list of them."""
        has_others = self.seen is not None or self.asked.embeds is not None
        return self.asked.prompt if not has_others and type(self.asked.prompt) is list else None

    @property
    def is_ready(self) -> bool:
        """Whether its images are prepared, or cannot be: then add_request does not wait."""
        return self.seen is None or self.seen.done()

    def cancel(self) -> None:
        """Let no thread begin to prepare its images."""
        if self.seen is not None:
            self.seen.cancel()


class Prepared(NamedTuple):
    """A prompt that can run.

    prompt, params, grammar: its tokens, with images if there are some, and its settings
    token_ids: the same tokens, in which each image has all of its placeholders
    text: the text that became these tokens, as the user or a template gave it; None if the user passed token ids alone
    output_of: makes the output of a text that is read; None: the request generates
    texts: those that are computed as this one; empty: it is one prompt
    """

    prompt: PackedTokens
    token_ids: list[int]
    text: str | None
    params: SamplingParams
    grammar: Grammar | None
    output_of: OutputOf | None = None
    texts: tuple[Prepared, ...] = ()


def pack(texts: list[Prepared]) -> Prepared:
    """Return texts of the same settings as one that can run. They have no images."""
    token_ids = array("i")
    for text in texts:
        assert isinstance(text.prompt, array)
        token_ids.extend(text.prompt)
    together = PackedTexts(token_ids, [len(text.token_ids) for text in texts])
    return Prepared(together, [], None, texts[0].params, None, texts=tuple(texts))


class CallPrompts:
    """The prompts of one call. Those with images become ready one after another, and the first ones need not wait.

    count: how many they are
    """

    def __init__(
        self, prompts: ListLike[Prepared | ComingRequest], finish: Callable[[ComingRequest], Prepared]
    ) -> None:
        """finish: waits until a request's images are prepared; raises ValueError if they cannot be"""
        self.count = len(prompts)
        self._prompts, self._finish = prompts, finish
        self._are_ready = all(isinstance(prompt, Prepared) for prompt in prompts)
        self._next = 0

    @property
    def params(self) -> list[SamplingParams]:
        """The settings of each."""
        return [one.params if isinstance(one, Prepared) else one.settings.params for one in self._prompts]

    def take_prompts(self, most_tokens: int | None = None) -> list[Prepared]:
        """Return the next prompts, ready to run.

        most_tokens: of a step; None: return all. Unless all of the call are ready, the first ones fill one step, which
            need not wait then, and later ones two, so that images are prepared for a step ahead
        Raises ValueError for an image that cannot be prepared; then no thread begins to prepare another.
        """
        taken: list[Prepared] = []
        room = float("inf") if most_tokens is None or self._are_ready else most_tokens * min(2, self._next + 1)
        try:
            while self._next < self.count and room > 0:
                prompt = self._prompts[self._next]
                taken.append(prompt if isinstance(prompt, Prepared) else self._finish(prompt))
                self._next += 1
                room -= len(taken[-1].token_ids)
        except BaseException:
            self.close()
            raise
        return taken

    def close(self) -> None:
        """Let no thread begin to prepare images of prompts that have not been taken."""
        for prompt in self._prompts[self._next :]:
            if isinstance(prompt, ComingRequest):
                prompt.cancel()


def ids_of(prompt: SomeTokens) -> list[int]:
    """Return a prompt's tokens, in which each image has all of its placeholders."""
    return prompt.token_ids if isinstance(prompt, MediaPrompt) else prompt


def beginning_of(prompt: PackedTokens, count: int) -> int:
    """Return a hash of a prompt's first tokens, and of the images there."""
    tokens = prompt if isinstance(prompt, array) else prompt.token_ids
    spans = prompt.spans if isinstance(prompt, MediaPrompt) else ()
    return hash((*tokens[:count], *(span.key for span in spans if span.start < count)))


def list_of(name: str, value: Any, what: str) -> list[Any]:
    """Return the entries of an argument. Raises ValueError if it is no list; what: it must be, in the message"""
    entries = as_list(value)
    if entries is None:
        raise ValueError(f"{name}={short(value, MOST_SHOWN)}: must be {what}")
    return entries


def prompts_of(prompts: Any) -> list[Any]:
    """Return the prompts of a call; a lone one that is no list of tokens counts as a list."""
    is_one = isinstance(prompts, str) or _holds_prompt(prompts)
    items = [prompts] if is_one else list_of("prompts", prompts, f"a string or a list of prompts, or {A_MAPPING}")
    if items and as_int(items[0]) is not None:
        shown = short(items, MOST_SHOWN)
        raise ValueError(f"prompts={shown}: must be a list of prompts; pass one prompt's ids as [[...]]")
    return items


def _holds_prompt(value: object) -> bool:
    return isinstance(value, Mapping) and any(key in value for key in (TEXT, TOKEN_IDS, MESSAGES, EMBEDS))


def describe_length(prompt: SomeTokens) -> tuple[str, str]:
    """Return how many tokens a prompt has, and a hint how it could have fewer."""
    if not isinstance(prompt, MediaPrompt) or not prompt.counts:
        return f"{len(prompt)} tokens", ""
    medium, count = prompt.largest
    return f"{len(prompt.token_ids)} tokens, of which {medium} has {count}", SMALLER


@contextmanager
def cancelled_by_errors(coming: list[ComingRequest]) -> Iterator[None]:
    """Let no thread prepare the images of these behind an error."""
    try:
        yield
    except BaseException:
        for begun in coming:
            begun.cancel()
        raise


def salted(params: SamplingParams, salt: str | None) -> SamplingParams:
    """Return a request's settings with its prompt's cache_salt."""
    if salt is not None:
        params = copy(params)  # which other prompts have, too
        vars(params)[SALT] = salt
    return params
