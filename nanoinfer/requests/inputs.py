"""Inputs: checks prompts, chats and settings before anything runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from nanoinfer.checks import as_int, as_list, check_none, short
from nanoinfer.config import Config
from nanoinfer.hidden_layers import check_layers
from nanoinfer.media.messages import NO_MEDIA, take_media
from nanoinfer.media.spans import MediaPrompt
from nanoinfer.requests.chat.beside import MESSAGES, SALT, TEMPLATE, as_template, salt_of, template_of
from nanoinfer.requests.chat.renderer import TEXT_ONLY, ChatRenderer, other_medium
from nanoinfer.requests.embeds import EMBEDS, check_settings, read_embeds
from nanoinfer.requests.media import DATA, MediaInputs, WithMedia, take_beside
from nanoinfer.requests.prompts import (
    A_MAPPING,
    TEXT,
    TOKEN_IDS,
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
)
from nanoinfer.requests.reasoning.reasoning import Reasoning
from nanoinfer.requests.reasoning.thoughts import with_prompt
from nanoinfer.requests.settings import (
    NO_ADAPTERS,
    CallAdapters,
    GivenSettings,
    Settings,
    SettingsReader,
    check_generates,
)
from nanoinfer.requests.text.bound_tokenizer import BoundTokenizer
from nanoinfer.requests.text.spelling import whole_decoder
from nanoinfer.requests.text.texts import TextTokenizer, check_characters
from nanoinfer.requests.token_ids import A_PROMPT, MOST_SHOWN, pack_ids, pack_lists, token_ids_of
from nanoinfer.runner.memory.room import room_for
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WITH_IMAGES = f"{A_MAPPING} but {DATA!r}"
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
        self._chats = None if tokenizer is None else ChatRenderer(tokenizer, config.sees)

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
        return self._prepare([self._read(f"prompts[{i}]", item) for i, item in enumerate(items)], settings)

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
        return self._begin([change(self._read_text(f"{name}[{i}]", item)) for i, item in enumerate(items)], settings)

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
        asked = change(self._read_text(name, prompt))
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
        return self._coming(self._read("prompt", prompt), settings)

    def finish(self, coming: ComingRequest, packed: array[int] | None = None) -> Prepared:
        """Return a prompt ready to run, when its images are prepared. packed: its token ids, if they are known ones"""
        asked, settings = coming.asked, coming.settings
        prompt = self._tokens_of(asked, coming.seen) if packed is None else [*asked.prompt]
        checked, token_ids = self._check_tokens(asked.name, prompt, settings.params, packed), ids_of(prompt)
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

    def check_continuations(
        self, prompt: SomePrompts, continuations: Any, adapter: str | None, hidden_states: Iterable[int] | None
    ) -> tuple[CallPrompts, list[int] | None]:
        """Return prompts with each of their continuations, ready to be scored.

        Returns also how many continuations each prompt of a list has; None: there is one prompt.
        """
        check_generates(self.config)
        layers = self.check_hidden_states(hidden_states)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, adapter=adapter, hidden_states=layers)
        entries = None if isinstance(prompt, (str, Mapping)) else as_list(prompt)
        if not entries or as_int(entries[0]) is not None:
            one = prompt if entries is None else entries
            return CallPrompts(self._followed("", one, continuations, params), self.finish), None
        lists = list_of("continuations", continuations, "a list that has continuations for each prompt")
        if len(lists) != len(entries):
            raise ValueError(
                f"continuations has {len(lists)} entries for {len(entries)} prompts: give each its own list"
            )
        pairs = zip(entries, lists, strict=True)
        followed = [self._followed(f"[{i}]", entry, own, params) for i, (entry, own) in enumerate(pairs)]
        return CallPrompts([*chain.from_iterable(followed)], self.finish), list(map(len, followed))

    def _followed(self, index: str, prompt: Any, continuations: Any, params: SamplingParams) -> list[Prepared]:
        """Return a prompt with each of its continuations; index: where both stand in the lists of a call, if in such"""
        asked = self._unwrap(f"prompt{index}", prompt)
        if not isinstance(asked.prompt, str):
            asked = asked._replace(prompt=token_ids_of(asked.name, asked.prompt))
        if self._media is not None and any(asked.media):
            asked = asked._replace(media=self._media.open(asked.name, asked.media))
        items = [continuations] if isinstance(continuations, str) else continuations
        name = f"continuations{index}"
        entries = list_of(name, items, f"{A_PROMPT}, or a list of these")
        if entries and as_int(entries[0]) is not None:
            entries = [entries]
        return [self._follow(asked, f"{name}[{i}]", entry, params) for i, entry in enumerate(entries)]

    def _follow(self, asked: Asked, name: str, continuation: Tokens, params: SamplingParams) -> Prepared:
        """Return a prompt with one continuation. LLM.score says where the tokens of two texts are divided."""
        given = asked.prompt
        if isinstance(given, str) and isinstance(continuation, str):
            check_characters(name, continuation)  # the two are tokenized together
            both = asked._replace(name=name, prompt=given + continuation)
            asked = asked._replace(prompt=given.rstrip())
            first = self._tokens_of(asked, self._see(asked))
            rest = ids_of(self._tokens_of(both, self._see(both)))[len(ids_of(first)) :]
        else:
            first = self._tokens_of(asked, self._see(asked))
            rest = self._to_token_ids(name, continuation, add_special_tokens=False)
        if not first:
            raise ValueError(f"{asked.name} is empty: it must have at least one token")
        if not rest:
            raise ValueError(f"{name} is {short(continuation, MOST_SHOWN)}: must add a token to the prompt's")
        params = _salted(replace(params, prompt_logprobs_start=len(ids_of(first))), asked.cache_salt)
        prompt = first.followed_by(rest) if isinstance(first, MediaPrompt) else first + rest
        packed = self._check_tokens(f"{asked.name} + {name}", prompt, params)
        return Prepared(packed, ids_of(prompt), None, params, None)

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
        self._check_template(template)
        if given and self._chats is not None:
            self._chats.check_arguments(given, template)
        chats = list_of("messages", messages, "a list of messages, or of such lists")
        if chats and isinstance(chats[0], Mapping):
            chats = [chats]
        settings = self._settings.check_all(len(chats), sampling_params, adapters)
        asked = [self._read_chat(f"messages[{i}]", chat, template) for i, chat in enumerate(chats)]
        return self._prepare(asked, settings)

    def _check_template(self, template: Mapping[str, Any]) -> None:
        """Raise ValueError if there is no chat template."""
        tokenizer = self.texts.tokenizer
        if tokenizer is None or not (tokenizer.chat_template or template.get("chat_template") is not None):
            raise ValueError(f"{self.texts.folder!r} has no chat template: use generate with prompts of your own")

    def _read_chat(self, name: str, chat: Any, template: Mapping[str, Any]) -> Asked:
        assert self._chats is not None
        messages, media = list_of(name, chat, "a list of messages"), NO_MEDIA
        if self._media is not None:
            messages, media = take_media(name, messages)
            self._media.check_kinds(name, media)
        text = self._chats.render(name, messages, template)
        return Asked(name, text, text, media, is_chat=True)

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

    def _read(self, name: str, prompt: object) -> Asked:
        if isinstance(prompt, Mapping) and MESSAGES in prompt:
            template, salt = template_of(name, prompt), salt_of(name, prompt)
            self._check_template(template)
            chat = self._read_chat(f"{name}[{MESSAGES!r}]", prompt[MESSAGES], template)
            return chat._replace(cache_salt=salt)
        return self._unwrap(name, prompt)

    def _read_text(self, name: str, prompt: object) -> Asked:
        """Read a prompt that gets no token."""
        if isinstance(prompt, Mapping) and prompt.get(EMBEDS) is not None:
            raise ValueError(f"{name} has {EMBEDS!r}: must be text or token ids; prompts that generate take embeddings")
        return self._read(name, prompt)

    def _unwrap(self, name: str, prompt: Any) -> Asked:
        """Read a prompt that is text, token ids, or a mapping, which may hold both."""
        if not isinstance(prompt, Mapping):
            return Asked(name, prompt, prompt if isinstance(prompt, str) else None)
        if prompt.get(EMBEDS) is not None:
            embeds = read_embeds(name, prompt, self.config)
            return Asked(name, embeds.token_ids, None, cache_salt=salt_of(name, prompt), embeds=embeds)
        given = {key: value for key, value in prompt.items() if value is not None}
        media = NO_MEDIA if self._media is None else take_beside(name, given)
        known = A_MAPPING if self._media is None else WITH_IMAGES
        if self._media is None and (medium := other_medium(given)):
            raise ValueError(f"{name} has {medium!r}: {TEXT_ONLY}; pass {known}")
        kinds = [key for key in (TEXT, TOKEN_IDS) if key in (given or prompt)]
        if not kinds or not given.keys() <= {*kinds, SALT}:
            raise ValueError(f"{name} is {short(prompt, MOST_SHOWN)}: must be text, a list of token ids, or {known}")
        for key in kinds:
            if isinstance(prompt[key], str) != (key == TEXT):
                what = "a string" if key == TEXT else "a list of token ids"
                raise ValueError(f"{name}[{key!r}] is {short(prompt[key], MOST_SHOWN)}: must be {what}")
        salt = salt_of(name, given)
        return Asked(f"{name}[{kinds[-1]!r}]", prompt[kinds[-1]], given.get(TEXT), media, cache_salt=salt)

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
            settings = settings._replace(params=_salted(settings.params, asked.cache_salt))
        return ComingRequest(asked, settings, self._see(asked), output_of)

    def _see(self, asked: Asked) -> Future[MediaPrompt] | None:
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

    def _tokens_of(self, asked: Asked, seen: Future[MediaPrompt] | None) -> SomeTokens:
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
        return self._to_token_ids(asked.name, asked.prompt, not asked.is_chat)

    def _to_token_ids(self, name: str, prompt: object, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, str):
            return self.texts.tokenize(name, prompt, add_special_tokens)
        return token_ids_of(name, prompt)

    def _check_tokens(
        self, name: str, prompt: SomeTokens, params: SamplingParams, packed: array[int] | None = None
    ) -> PackedTokens:
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


def _salted(params: SamplingParams, salt: str | None) -> SamplingParams:
    """Return a request's settings with its prompt's cache_salt."""
    if salt is not None:
        params = copy(params)  # which other prompts have, too
        vars(params)[SALT] = salt
    return params
