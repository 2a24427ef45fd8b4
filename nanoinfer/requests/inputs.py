"""Inputs: checks prompts, chats and settings before anything runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

from nanoinfer.checks import as_int, check_none, short
from nanoinfer.config import Config
from nanoinfer.hidden_layers import check_layers
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.requests.chat.beside import TEMPLATE, as_template
from nanoinfer.requests.chat.renderer import ChatRenderer
from nanoinfer.requests.prompts.embeds import check_settings
from nanoinfer.requests.prompts.media import MediaInputs, WithMedia
from nanoinfer.requests.prompts.reader import PromptReader
from nanoinfer.requests.prompts.stages import (
    Asked,
    CallPrompts,
    ComingRequest,
    OutputOf,
    PackedTokens,
    Prepared,
    SomeTokens,
    Tokens,
    cancelled_by_errors,
    describe_length,
    ids_of,
    list_of,
    prompts_of,
    salted,
)
from nanoinfer.requests.prompts.token_ids import MOST_SHOWN, pack_ids, pack_lists, token_ids_of
from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.requests.reasoning.thoughts import with_prompt
from nanoinfer.requests.settings import (
    NO_ADAPTERS,
    CallAdapters,
    GivenSettings,
    Settings,
    SettingsReader,
)
from nanoinfer.requests.text.bound_tokenizer import BoundTokenizer
from nanoinfer.requests.text.spelling import whole_decoder
from nanoinfer.requests.text.texts import TextTokenizer, check_characters
from nanoinfer.runner.memory.room import room_for
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 1024  # texts that are tokenized together

Prompt = Tokens | Mapping[str, object]
SomePrompts = Prompt | ListLike[Prompt]
ManyPrompts = list[str] | tuple[str, ...] | ListLike[ListLike[int] | Mapping[str, object]]  # to a type checker: no str
ChatMessage = Mapping[str, Any]
Chats = ListLike[ChatMessage] | ListLike[ListLike[ChatMessage]]


class Inputs:
    """Turns prompts and chats into token ids, and checks these and settings. Raises ValueError if one cannot work."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.config = config
        self.texts = TextTokenizer(config, tokenizer)
        self.reasoning = Reasoning.find(config, tokenizer)
        self._settings = SettingsReader(config, self.texts, self.reasoning)
        self._media = MediaInputs(config, tokenizer) if config.sees else None
        chats = None if tokenizer is None else ChatRenderer(tokenizer, config.sees)
        self.reader = PromptReader(config, self.texts, chats, self._media)

    def close(self) -> None:
        """Prepare no further images."""
        if self._media is not None:
            self._media.close()

    def check_prompts(
        self,
        prompts: Prompt | ListLike[Prompt],
        sampling_params: GivenSettings,
        adapters: CallAdapters = NO_ADAPTERS,
    ) -> CallPrompts:
        """Return the prompts of generate or stream."""
        items = prompts_of(prompts)
        settings = self._settings.check_all(len(items), sampling_params, adapters)
        return self._prepare([self.reader.read(f"prompts[{i}]", item) for i, item in enumerate(items)], settings)

    def begin_texts(
        self,
        name: str,
        prompts: Prompt | ListLike[Prompt],
        settings_of: Callable[[int], list[Settings]],
        change: Callable[[Asked], Asked],
    ) -> list[ComingRequest]:
        """Return the prompts of a call that reads them, whose tokens are not checked yet.

        name: begins the messages of errors; change: puts something before a text
        settings_of: makes the settings of so many prompts
        """
        items = prompts_of(prompts)
        settings = settings_of(len(items))
        return self._begin(
            [change(self.reader.read_whole(f"{name}[{i}]", item)) for i, item in enumerate(items)], settings
        )

    def begin_text(
        self,
        name: str,
        prompt: object,
        settings: Settings,
        change: Callable[[Asked], Asked],
        output_of: OutputOf | None = None,
    ) -> ComingRequest:
        """Check a prompt that is read, and let its images be prepared in other threads.

        change: as for begin_texts; output_of: as for Prepared
        """
        asked = change(self.reader.read_whole(name, prompt))
        return self._coming(asked, settings, output_of)

    def check_one(self, prompt: Prompt | ComingRequest, sampling_params: SamplingParams | None) -> Prepared:
        """Return the prompt of add_request, ready to run."""
        return self.finish(self.begin(prompt, sampling_params))

    def begin(self, prompt: Prompt | ComingRequest, sampling_params: SamplingParams | None) -> ComingRequest:
        """Check the prompt of add_request, and let its images be prepared in other threads."""
        if isinstance(prompt, ComingRequest):
            check_none("sampling_params", sampling_params, "llm.prepare has got those of this request")
            return prompt
        settings = self._settings.check_one(sampling_params)
        return self._coming(self.reader.read("prompt", prompt), settings)

    def finish(self, coming: ComingRequest, packed: array[int] | None = None) -> Prepared:
        """Return a prompt ready to run, when its images are prepared. packed: its token ids, if they are known ones"""
        asked, settings = coming.asked, coming.settings
        prompt = self.tokens_of(asked, coming.seen) if packed is None else [*asked.prompt]
        checked, token_ids = self.check_tokens(asked.name, prompt, settings.params, packed), ids_of(prompt)
        params = with_prompt(settings.params, token_ids, self.reasoning)
        return Prepared(checked, token_ids, asked.text, params, settings.grammar, output_of=coming.output_of)

    def finish_all(self, coming: list[ComingRequest]) -> list[Prepared]:
        """Return prompts ready to run, in their order; the first error is raised.

        Texts are tokenized together, and lists of token ids checked together.
        """
        texts: dict[BoundTokenizer, list[str]] = {}
        for asked, _, seen, _ in coming:
            if isinstance(asked.prompt, str) and seen is None:
                bound = self.texts.bound(not asked.is_chat) if asked.tokenize is None else asked.bound
                if bound is not None:
                    texts.setdefault(bound, []).append(asked.prompt)
        listed = [each.listed for each in coming]
        known = iter(pack_lists([*filter(None, listed)], self.config.description.vocab_size) or [])
        with ExitStack() as stack:
            for bound, some in texts.items():
                stack.enter_context(bound.at_once(some))
            packed = [next(known, None) if ids else None for ids in listed]
            return [*map(self.finish, coming, packed)]

    def check_hidden_states(self, layers: Iterable[int] | None) -> tuple[int, ...] | None:
        """Return the hidden states that a call asks for. Raises ValueError for those that the LLM cannot tell."""
        if layers is None:
            return None
        numbers = check_layers("hidden_states", layers)
        self._settings.check_hidden_states("hidden_states", numbers)
        return numbers

    def check_chats(
        self,
        messages: Chats,
        sampling_params: GivenSettings,
        given: dict[str, Any],
        others: Mapping[str, Any] | None = None,
        adapters: CallAdapters = NO_ADAPTERS,
    ) -> CallPrompts:
        """Return the chats' prompts.

        given, others: the template's arguments; it must read those of the first kind
        """
        template = dict(as_template(f"{TEMPLATE}=", others))
        template.update((key, value) for key, value in given.items() if value is not None or key not in template)
        self.reader.check_template(template, given)
        chats = list_of("messages", messages, "a list of messages, or of such lists")
        if chats and isinstance(chats[0], Mapping):
            chats = [chats]
        settings = self._settings.check_all(len(chats), sampling_params, adapters)
        asked = [self.reader.read_chat(f"messages[{i}]", chat, template) for i, chat in enumerate(chats)]
        return self._prepare(asked, settings)

    def tokenize(self, texts: str | ListLike[str]) -> list[int] | list[list[int]]:
        """Return the tokens of a text, or of each text in a list."""
        self.texts.known_tokenizer("tokenize")
        if isinstance(texts, str):
            return self.texts.tokenize("texts", texts)
        entries = list_of("texts", texts, "a string or a list of strings")
        for index, entry in enumerate(entries):
            if not isinstance(entry, str):
                raise ValueError(f"texts[{index}] is {short(entry, MOST_SHOWN)}: must be a string")
        return [self.texts.tokenize(f"texts[{index}]", entry) for index, entry in enumerate(entries)]

    def detokenize(self, ids: ListLike[int] | ListLike[ListLike[int]]) -> str | list[str]:
        """Return the text of a list of tokens, or of each list in a list."""
        decode = whole_decoder(self.texts.known_tokenizer("detokenize"), skip_special_tokens=True)
        entries = list_of("ids", ids, "a list of token ids, or a list of such lists")
        if not entries or as_int(entries[0]) is not None:
            return decode(self._check_ids("ids", entries))
        return [decode(self._check_ids(f"ids[{index}]", entry)) for index, entry in enumerate(entries)]

    def _check_ids(self, name: str, ids: object) -> list[int]:
        token_ids = token_ids_of(name, ids, "a list of token ids")
        pack_ids(name, token_ids, self.config.description.vocab_size)
        return token_ids

    def _prepare(self, asked: list[Asked], settings: list[Settings]) -> CallPrompts:
        """Return the prompts of a call, of which those without images are ready to run; the first error is raised."""
        coming = self._begin(asked, settings)
        with cancelled_by_errors(coming):
            alone = [each for each in coming if each.seen is None]
            parts = (alone[first : first + AT_ONCE] for first in range(0, len(alone), AT_ONCE))
            ready = chain.from_iterable(map(self.finish_all, parts))
            return CallPrompts([next(ready) if each.seen is None else each for each in coming], self.finish)

    def _begin(self, asked: list[Asked], settings: list[Settings]) -> list[ComingRequest]:
        """Let the images of a call's prompts be prepared."""
        coming: list[ComingRequest] = []
        with cancelled_by_errors(coming):
            for each, own in zip(asked, settings, strict=True):
                coming.append(self._coming(each, own))
        return coming

    def _coming(self, asked: Asked, settings: Settings, output_of: OutputOf | None = None) -> ComingRequest:
        """Return a prompt with its settings, and let its images be prepared."""
        if asked.cache_salt is not None:
            settings = settings._replace(params=salted(settings.params, asked.cache_salt))
        return ComingRequest(asked, settings, self.see(asked), output_of)

    def opened(self, asked: Asked) -> Asked:
        """Return a prompt whose images and videos are opened: it may come several times."""
        if self._media is None or not any(asked.media):
            return asked
        return asked._replace(media=self._media.open(asked.name, asked.media))

    def see(self, asked: Asked) -> Future[MediaPrompt] | None:
        """Let a prompt's images and videos be prepared; None: it has none."""
        if self._media is None or not any(asked.media):
            return None
        prompt = asked.prompt if isinstance(asked.prompt, str) else token_ids_of(asked.name, asked.prompt)
        if isinstance(prompt, str):
            check_characters(asked.name, prompt)
        media = asked.media
        return self._media.begin(
            WithMedia(asked.name, prompt, media.images, not asked.is_chat, media.videos, media.audio)
        )

    def tokens_of(self, asked: Asked, seen: Future[MediaPrompt] | None) -> SomeTokens:
        """Return a prompt's tokens; seen: with its images, if it has some."""
        if asked.embeds is not None:
            return asked.embeds
        if seen is not None:
            try:
                return seen.result()
            except CancelledError:
                raise ValueError(f"{asked.name}: its images were cancelled, as close cancels them") from None
        if self._media is not None and isinstance(asked.prompt, str):
            self._media.check_text(asked.name, asked.prompt)
        if asked.tokenize is not None:
            return asked.tokenize(asked.name)
        return self.to_token_ids(asked.name, asked.prompt, not asked.is_chat)

    def to_token_ids(self, name: str, prompt: object, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens, or those that are given."""
        if isinstance(prompt, str):
            return self.texts.tokenize(name, prompt, add_special_tokens)
        return token_ids_of(name, prompt)

    def check_tokens(
        self, name: str, prompt: SomeTokens, params: SamplingParams, packed: array[int] | None = None
    ) -> PackedTokens:
        """Return a prompt's tokens, which fit the model and the settings. packed: they, if they are known ones"""
        token_ids = ids_of(prompt)
        if isinstance(prompt, MediaPrompt):
            check_settings(name, prompt, params)
        if not token_ids:
            raise ValueError(f"{name} is empty: it must have at least one token")
        if packed is None:
            packed = pack_ids(name, token_ids, self.config.description.vocab_size)
        length, most = len(token_ids), self.config.max_model_len
        if params.max_tokens == 0 and length > most:
            has, hint = describe_length(prompt)
            room = room_for(self.config, length)
            raise ValueError(f"{name} has {has}: must be at most max_model_len={most}; {room}{hint}")
        if params.max_tokens != 0 and length >= most:
            has, hint = describe_length(prompt)
            raise ValueError(
                f"{name} has {has}: must be fewer than max_model_len={most}, to leave room for a token;"
                f" {room_for(self.config, length + 1)}{hint}"
            )
        if params.prompt_logprobs_start >= length:
            start = short(params.prompt_logprobs_start)
            raise ValueError(f"prompt_logprobs_start={start}: must be less than {length}, the tokens of {name}")
        return prompt if isinstance(prompt, MediaPrompt) else packed
