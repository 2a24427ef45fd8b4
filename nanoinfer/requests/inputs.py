"""Inputs: checks prompts, chats and settings before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoinfer.checks import as_int, as_list, check_none, short
from nanoinfer.config import Config
from nanoinfer.grammar import Grammar
from nanoinfer.requests.chat.renderer import ChatRenderer, other_medium
from nanoinfer.requests.settings import GivenSettings, Settings, SettingsReader
from nanoinfer.requests.text.spelling import whole_decoder
from nanoinfer.requests.text.texts import Texts
from nanoinfer.runner.memory.room import room_for
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.vllm_arguments import NO_LORA

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT, TOKEN_IDS = "prompt", "prompt_token_ids"  # the keys of a prompt that is a mapping, as vLLM names them
MESSAGES, TEMPLATE = "messages", "chat_template_kwargs"  # the keys of a prompt that is a chat
A_PROMPT = "a string or a list of token ids"
A_MAPPING = f"a mapping with {TEXT!r} or {TOKEN_IDS!r}, and nothing else"
MOST_SHOWN = 60  # characters of a prompt in an error message

Tokens = str | ListLike[int]
Prompt = Tokens | Mapping[str, object]
ChatMessage = Mapping[str, Any]
Chats = ListLike[ChatMessage] | ListLike[ListLike[ChatMessage]]


class Prepared(NamedTuple):
    """A prompt that can run.

    token_ids, params, grammar: its tokens, and its settings
    text: the text of these tokens, as the user or a template gave it; None if the user passed token ids alone
    seed, samples: as for LLMEngine.add_request
    """

    token_ids: list[int]
    text: str | None
    params: SamplingParams
    grammar: Grammar | None
    seed: int | None = None
    samples: range | None = None


class Inputs:
    """Turns prompts and chats into token ids, and checks these and settings. Raises ValueError if one cannot work."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.config = config
        self.texts = Texts(config, tokenizer)
        self._settings = SettingsReader(config, self.texts)
        self._chats = None if tokenizer is None else ChatRenderer(tokenizer)

    def check(
        self,
        prompts: Prompt | ListLike[Prompt],
        sampling_params: GivenSettings,
        lora_request: None = None,
    ) -> list[Prepared]:
        """Return the prompts of generate or stream, ready to run."""
        check_none("lora_request", lora_request, NO_LORA)
        is_one = isinstance(prompts, str) or _holds_prompt(prompts)
        items = [prompts] if is_one else _list("prompts", prompts, f"a string or a list of prompts, or {A_MAPPING}")
        if items and as_int(items[0]) is not None:
            raise ValueError(
                f"prompts={short(items, MOST_SHOWN)}: must be a list of prompts; pass one prompt's ids as [[...]]"
            )
        settings = self._settings.check(len(items), sampling_params)
        return [self._prepare(f"prompts[{i}]", item, settings[i]) for i, item in enumerate(items)]

    def check_one(self, prompt: Prompt, sampling_params: SamplingParams | None) -> Prepared:
        """Return the prompt of add_request, ready to run."""
        return self._prepare("prompt", prompt, self._settings.check_one(sampling_params))

    def check_continuations(self, prompt: Prompt, continuations: Tokens | ListLike[Tokens]) -> list[Prepared]:
        """Return the prompt with each of its continuations, ready to be scored."""
        name, given, _ = _unwrap("prompt", prompt)
        given = given if isinstance(given, str) else _token_ids(name, given)
        items = [continuations] if isinstance(continuations, str) else continuations
        entries = _list("continuations", items, f"{A_PROMPT}, or a list of these")
        if entries and as_int(entries[0]) is not None:
            entries = [entries]
        return [self._follow(name, given, f"continuations[{i}]", entry) for i, entry in enumerate(entries)]

    def _follow(self, prompt_name: str, prompt: Tokens, name: str, continuation: Tokens) -> Prepared:
        """Return a prompt with one continuation. LLM.score says where the tokens of two texts are divided."""
        if isinstance(prompt, str) and isinstance(continuation, str):
            first = self.texts.tokenize(prompt_name, prompt.rstrip())
            rest = self.texts.tokenize(name, prompt + continuation)[len(first) :]
        else:
            first = self._to_token_ids(prompt_name, prompt)
            rest = self._to_token_ids(name, continuation, add_special_tokens=False)
        if not first:
            raise ValueError(f"{prompt_name} is empty: it must have at least one token")
        if not rest:
            raise ValueError(f"{name} is {short(continuation, MOST_SHOWN)}: must add a token to the prompt's")
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(first))
        token_ids = self._check_token_ids(f"{prompt_name} + {name}", first + rest, params)
        return Prepared(token_ids, None, params, None)

    def check_chats(
        self,
        messages: Chats,
        sampling_params: GivenSettings,
        given: dict[str, Any],
        others: Mapping[str, Any] | None = None,
        lora_request: None = None,
    ) -> list[Prepared]:
        """Return the chats, ready to run.

        given, others: the template's arguments; it must read those of the first kind
        """
        check_none("lora_request", lora_request, NO_LORA)
        template = dict(_as_template(f"{TEMPLATE}=", others))
        template.update((key, value) for key, value in given.items() if value is not None or key not in template)
        self._check_template(template)
        if given and self._chats is not None:
            self._chats.check_arguments(given, template)
        chats = _list("messages", messages, "a list of messages, or of such lists")
        if chats and isinstance(chats[0], Mapping):
            chats = [chats]
        settings = self._settings.check(len(chats), sampling_params)
        return [self._prepare_chat(f"messages[{i}]", chat, template, settings[i]) for i, chat in enumerate(chats)]

    def _check_template(self, template: Mapping[str, Any]) -> None:
        """Raise ValueError if there is no chat template."""
        tokenizer = self.texts.tokenizer
        if tokenizer is None or not (tokenizer.chat_template or template.get("chat_template") is not None):
            raise ValueError(f"{self.texts.folder!r} has no chat template: use generate with prompts of your own")

    def _prepare_chat(self, name: str, chat: Any, template: Mapping[str, Any], settings: Settings) -> Prepared:
        assert self._chats is not None
        text = self._chats.render(name, _list(name, chat, "a list of messages"), template)
        token_ids = self.texts.tokenize(name, text, add_special_tokens=False)  # the template has written them
        return Prepared(self._check_token_ids(name, token_ids, settings.params), text, *settings)

    def tokenize(self, texts: str | ListLike[str]) -> list[int] | list[list[int]]:
        """Return the tokens of a text, or of each text in a list."""
        self.texts.known_tokenizer("tokenize")
        if isinstance(texts, str):
            return self.texts.tokenize("texts", texts)
        entries = _list("texts", texts, "a string or a list of strings")
        for index, entry in enumerate(entries):
            if not isinstance(entry, str):
                raise ValueError(f"texts[{index}] is {short(entry, MOST_SHOWN)}: must be a string")
        return [self.texts.tokenize(f"texts[{index}]", entry) for index, entry in enumerate(entries)]

    def detokenize(self, ids: ListLike[int] | ListLike[ListLike[int]]) -> str | list[str]:
        """Return the text of a list of tokens, or of each list in a list."""
        decode = whole_decoder(self.texts.known_tokenizer("detokenize"), skip_special_tokens=True)
        entries = _list("ids", ids, "a list of token ids, or a list of such lists")
        if not entries or as_int(entries[0]) is not None:
            return decode(self._check_ids("ids", entries))
        return [decode(self._check_ids(f"ids[{index}]", entry)) for index, entry in enumerate(entries)]

    def _check_ids(self, name: str, ids: object) -> list[int]:
        return self._check_range(name, _token_ids(name, ids, "a list of token ids"))

    def _prepare(self, name: str, prompt: object, settings: Settings) -> Prepared:
        if isinstance(prompt, Mapping) and MESSAGES in prompt:
            template = _template_of(name, prompt)
            self._check_template(template)
            return self._prepare_chat(f"{name}[{MESSAGES!r}]", prompt[MESSAGES], template, settings)
        name, prompt, text = _unwrap(name, prompt)
        token_ids = self._check_token_ids(name, self._to_token_ids(name, prompt), settings.params)
        return Prepared(token_ids, text, *settings)

    def _to_token_ids(self, name: str, prompt: object, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, str):
            return self.texts.tokenize(name, prompt, add_special_tokens)
        return _token_ids(name, prompt)

    def _check_token_ids(self, name: str, token_ids: list[int], params: SamplingParams) -> list[int]:
        if not token_ids:
            raise ValueError(f"{name} is empty: it must have at least one token")
        self._check_range(name, token_ids)
        length, most = len(token_ids), self.config.max_model_len
        if params.max_tokens == 0 and length > most:
            room = room_for(self.config, length)
            raise ValueError(f"{name} has {length} tokens: must be at most max_model_len={most}; {room}")
        if params.max_tokens != 0 and length >= most:
            raise ValueError(
                f"{name} has {length} tokens: must be fewer than max_model_len={most}, to leave room for a token;"
                f" {room_for(self.config, length + 1)}"
            )
        if params.prompt_logprobs_start >= length:
            start = short(params.prompt_logprobs_start)
            raise ValueError(f"prompt_logprobs_start={start}: must be less than {length}, the tokens of {name}")
        return token_ids

    def _check_range(self, name: str, token_ids: list[int]) -> list[int]:
        vocab_size = self.config.description.vocab_size
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} has token id {short(token_id)}: must be from 0 to {vocab_size - 1}")
        return token_ids


def _list(name: str, value: Any, what: str) -> list[Any]:
    entries = as_list(value)
    if entries is None:
        raise ValueError(f"{name}={short(value, MOST_SHOWN)}: must be {what}")
    return entries


def _holds_prompt(value: object) -> bool:
    return isinstance(value, Mapping) and any(key in value for key in (TEXT, TOKEN_IDS, MESSAGES))


def _template_of(name: str, prompt: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the template's arguments in a prompt that is a chat."""
    if others := [key for key, value in prompt.items() if key not in (MESSAGES, TEMPLATE) and value is not None]:
        raise ValueError(f"{name} has {short(others[0])}: must have {MESSAGES!r} alone, or {TEMPLATE!r} beside it")
    return _as_template(f"{name}[{TEMPLATE!r}] is ", prompt.get(TEMPLATE))


def _as_template(begin: str, template: Any) -> Mapping[str, Any]:
    """Return the template's arguments; None counts as none; begin: begins the message of an error."""
    if template is None:
        return {}
    if not isinstance(template, Mapping) or not all(isinstance(key, str) for key in template):
        raise ValueError(
            f"{begin}{short(template, MOST_SHOWN)}: must be a mapping from the template's arguments to values"
        )
    return template


def _unwrap(name: str, prompt: Any) -> tuple[str, Any, str | None]:
    """Return a prompt as text or token ids, its name, and its text if the user gave it; a mapping may hold both."""
    if not isinstance(prompt, Mapping):
        return name, prompt, prompt if isinstance(prompt, str) else None
    given = {key: value for key, value in prompt.items() if value is not None}
    if medium := other_medium(given):
        raise ValueError(f"{name} has {medium!r}: this model is run as text only; pass {A_MAPPING}")
    kinds = [key for key in (TEXT, TOKEN_IDS) if key in (given or prompt)]
    if not kinds or not given.keys() <= {*kinds}:
        raise ValueError(f"{name} is {short(prompt, MOST_SHOWN)}: must be text, a list of token ids, or {A_MAPPING}")
    for key in kinds:
        if isinstance(prompt[key], str) != (key == TEXT):
            what = "a string" if key == TEXT else "a list of token ids"
            raise ValueError(f"{name}[{key!r}] is {short(prompt[key], MOST_SHOWN)}: must be {what}")
    return f"{name}[{kinds[-1]!r}]", prompt[kinds[-1]], given.get(TEXT)


def _token_ids(name: str, prompt: Any, what: str = A_PROMPT) -> list[int]:
    entries = as_list(prompt)
    if entries is None:
        raise ValueError(f"{name} is {short(prompt, MOST_SHOWN)}: must be {what}")
    if set(map(type, entries)) <= {int}:  # most prompts are, and a long one should not cost more
        return entries
    token_ids = []
    for entry in entries:
        if (token_id := as_int(entry)) is None:
            shown, wrong = short(prompt, MOST_SHOWN), short(entry, MOST_SHOWN)
            raise ValueError(f"{name} is {shown}: must be {what}, and {wrong} is none")
        token_ids.append(token_id)
    return token_ids
