"""PromptReader: what callers give as a prompt or a chat, in the form that all prompts have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.media.messages import NO_MEDIA, take_media
from nanoinfer.requests.chat.beside import MESSAGES, SALT, salt_of, template_of
from nanoinfer.requests.chat.renderer import TEXT_ONLY, ChatRenderer, other_medium
from nanoinfer.requests.prompts.embeds import EMBEDS, read_embeds
from nanoinfer.requests.prompts.media import DATA, MediaInputs, take_beside
from nanoinfer.requests.prompts.stages import A_MAPPING, TEXT, TOKEN_IDS, Asked, list_of
from nanoinfer.requests.prompts.token_ids import MOST_SHOWN
from nanoinfer.requests.text.texts import TextTokenizer

WITH_IMAGES = f"{A_MAPPING} but {DATA!r}"


class PromptReader:
    """Reads prompts and chats; token ids, texts' characters and images come later. Raises ValueError, by name.

    name, in all methods: begins the messages of errors
    """

    def __init__(
        self, config: Config, texts: TextTokenizer, chats: ChatRenderer | None, media: MediaInputs | None
    ) -> None:
        """chats: None: the LLM has no tokenizer; media: None: it sees no images"""
        self._config, self._texts, self._chats, self._media = config, texts, chats, media

    def read(self, name: str, prompt: object) -> Asked:
        """Read a prompt, or a mapping that holds a chat."""
        if isinstance(prompt, Mapping) and MESSAGES in prompt:
            template, salt = template_of(name, prompt), salt_of(name, prompt)
            self._check_template(template)
            chat = self.read_chat(f"{name}[{MESSAGES!r}]", prompt[MESSAGES], template)
            return chat._replace(cache_salt=salt)
        return self.unwrap(name, prompt)

    def read_whole(self, name: str, prompt: object) -> Asked:
        """Read a prompt that is read alone: it gets no token."""
        if isinstance(prompt, Mapping) and prompt.get(EMBEDS) is not None:
            raise ValueError(f"{name} has {EMBEDS!r}: must be text or token ids; prompts that generate take embeddings")
        return self.read(name, prompt)

    def unwrap(self, name: str, prompt: Any) -> Asked:
        """Read a prompt that is text, token ids, or a mapping, which may hold both."""
        if not isinstance(prompt, Mapping):
            return Asked(name, prompt, prompt if isinstance(prompt, str) else None)
        if prompt.get(EMBEDS) is not None:
            embeds = read_embeds(name, prompt, self._config)
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

    def check_template(self, template: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Raise ValueError if there is no chat template, or it does not read these arguments of it."""
        self._check_template(template)
        if given and self._chats is not None:
            self._chats.check_arguments(given, template)

    def _check_template(self, template: Mapping[str, Any]) -> None:
        """Raise ValueError if there is no chat template."""
        tokenizer = self._texts.tokenizer
        if tokenizer is None or not (tokenizer.chat_template or template.get("chat_template") is not None):
            raise ValueError(f"{self._texts.folder!r} has no chat template: use generate with prompts of your own")

    def read_chat(self, name: str, chat: Any, template: Mapping[str, Any]) -> Asked:
        """Read a chat; template: the arguments of its template"""
        assert self._chats is not None
        messages, media = list_of(name, chat, "a list of messages"), NO_MEDIA
        if self._media is not None:
            messages, media = take_media(name, messages)
            self._media.check_kinds(name, media)
        text = self._chats.render(name, messages, template)
        return Asked(name, text, text, media, is_chat=True)
