"""Chats: checks messages, and gives them to a chat template in the forms that it takes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from nanoinfer.checks import as_list, short
from nanoinfer.media.messages import is_bare
from nanoinfer.requests.chat.template_forms import CALL, Message, Takes, TemplateForms
from nanoinfer.requests.chat.template_names import TemplateNames

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("nanoinfer")

# In the keys of messages and prompts, such as image_url and images:
MEDIA = ("image", "video", "audio", "multi_modal", "mm_processor")
TEXT_ONLY = "this model is run as text only; LLM(images=True) sees, or says why it cannot"
TEXT_AND_IMAGES = (
    "must be texts, images as {'type': 'image', 'image': ...}, videos as {'type': 'video', 'video': [frame, ...]}, and"
    " audio as {'type': 'audio', 'audio': (array, rate)}"
)
MOST_SHOWN = 60  # characters of a message in an error message
MOST_TEMPLATES = 16  # so many are remembered


class ChatRenderer:
    """Renders chats by a tokenizer's chat templates. Raises ValueError for what is no chat or no text.

    sees: a part of a message may be bare, for which the template writes what stands for an image or a video
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sees: bool = False) -> None:
        self._tokenizer = tokenizer
        self._sees = sees
        self._forms_of = lru_cache(MOST_TEMPLATES)(_untried)
        self._names_of = lru_cache(MOST_TEMPLATES)(TemplateNames)
        self._warned: set[str] = set()  # names of arguments

    def check_arguments(self, given: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """Raise ValueError if the template does not read some of `given`; arguments: all of the template's."""
        names = self._names_of(self._find_template("messages", arguments))
        for name in names.unknown(given):
            raise ValueError(f"unknown argument {name!r}: the chat template does not read it; {names.hint(name)}")

    def render(self, name: str, messages: Iterable[Any], arguments: Mapping[str, Any]) -> str:
        """Return the text of a chat; the messages stay as they are.

        name: begins the messages of errors
        arguments: the template's; those that it does not read are left out, and a warning names each once

        Where the template takes a string, the texts of parts are joined by line breaks. Where it takes parts alone, a
        string becomes one. Arguments of tool calls become mappings or JSON, as the template takes them.
        """
        checked = [_check(name, message, self._sees) for message in messages]
        template = self._find_template(name, arguments)
        arguments = self._only_read(template, arguments)
        generates = not arguments.get("continue_final_message", False)
        apply = partial(self._apply, {"add_generation_prompt": generates, **arguments})
        probe = partial(self._apply, {**arguments, "add_generation_prompt": False, "continue_final_message": False})
        takes = partial(self._forms_of(template).find, render=probe)
        formed = [_form(f"{name}[{index}]", message, takes) for index, message in enumerate(checked)]
        with _named_errors(name):
            return apply(formed)

    def _find_template(self, name: str, arguments: Mapping[str, Any]) -> str:
        with _named_errors(name):
            return self._tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))

    def _only_read(self, template: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out the arguments that the template does not read, and warn of each once."""
        names = self._names_of(template)
        for name in names.unknown(arguments):
            if name not in self._warned:
                self._warned.add(name)
                log.warning("chat_template_kwargs has %r, which the chat template does not read: it is left out", name)
        read = {name: value for name, value in arguments.items() if names.known is None or name in names.known}
        return {**read, "chat_template": template}  # itself: tools, left out, may have chosen it

    def _apply(self, arguments: Mapping[str, Any], messages: list[Message]) -> str:
        # transformers itself leaves None out since 5.24.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return self._tokenizer.apply_chat_template(given, tokenize=False, **arguments)


def other_medium(keys: Iterable[Any]) -> str | None:
    """Return the first key that names something other than text; None if there is none."""
    return next((key for key in keys if isinstance(key, str) and any(medium in key for medium in MEDIA)), None)


def _untried(template: str) -> TemplateForms:
    return TemplateForms()


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}: the chat template does not take it: {error}") from error


def _check(name: str, message: Any, sees: bool) -> Message:
    """Return a copy of a message, with lists for any library's arrays, and without keys that have no value."""
    copy = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    for key in ("content", "tool_calls"):
        if (entries := as_list(copy.get(key))) is not None:
            copy[key] = entries
    if kind := _other_content(copy):
        raise ValueError(f"{name} has content of type {kind!r}: {TEXT_AND_IMAGES if sees else TEXT_ONLY}")
    is_content = isinstance(copy["content"], (str, list)) if "content" in copy else bool(copy.get("tool_calls"))
    if not isinstance(copy.get("role"), str) or not is_content:
        raise ValueError(f"{name} has {short(message, MOST_SHOWN)}: must be mappings with a role and content")
    return copy


def _other_content(message: Message) -> str | None:
    """Return the type of content that is neither text nor bare, or the key that names it; None if there is none."""
    content = message.get("content")
    entries = [content] if isinstance(content, Mapping) else content if isinstance(content, list) else []
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("type") not in (None, "text") and not is_bare(entry):
            return str(entry["type"])
    given = [key for item in (message, *entries) if isinstance(item, Mapping) for key in item if _is_given(item[key])]
    return other_medium(given)


def _is_given(value: Any) -> bool:
    """Whether a value is neither None, False nor empty; the truth of an array would raise an error."""
    return value is not None and value is not False and not (isinstance(value, (str, list, tuple)) and not value)


def _form(name: str, message: Message, takes: Callable[[str], Takes]) -> Message:
    """Return a message in forms that the template takes; takes: tells these for a role, or for CALL."""
    if calls := message.get("tool_calls"):
        forms = takes(CALL)
        content = message.get("content") or forms.empty  # an empty one is none, for which a template may look
        message = {**message, "content": content, "tool_calls": _form_calls(name, calls, forms)}
    content = message["content"]
    if content is None:
        return message
    forms = takes(message["role"])
    if isinstance(content, str):
        return message if forms.plain else {**message, "content": forms.write([content] if content else [])}
    parts = [_part(name, part) for part in content]
    if any(map(is_bare, parts)):
        if forms.plain and not forms.structured:
            raise ValueError(f"{name}: the chat template takes no images in a message of role {message['role']!r}")
        return {**message, "content": parts}
    texts = [part["text"] for part in parts]
    return {**message, "content": parts if forms.structured and not forms.whole else forms.write(texts)}


def _part(name: str, part: Any) -> dict[str, Any]:
    """Return a part of a message's content as templates expect it."""
    if is_bare(part):
        bare: dict[str, Any] = part
        return bare
    if isinstance(part, str):
        part = {"text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError(
            f"{name} has the part {short(part, MOST_SHOWN)}: must be a string, or a mapping whose 'text' is one"
        )
    return {"type": "text", **{key: value for key, value in part.items() if value is not None}}


def _form_calls(name: str, calls: Any, forms: Takes) -> Any:
    """Return tool calls with their arguments in a form that a template takes; what is no call is the template's."""
    if not isinstance(calls, list):
        return calls
    return [_form_call(f"{name}.tool_calls[{index}]", call, forms) for index, call in enumerate(calls)]


def _form_call(name: str, call: Any, forms: Takes) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(inner := call.get("function"), Mapping):  # as OpenAI and transformers nest it
        return {**call, "function": _form_call(f"{name}.function", {**inner}, forms)}
    if "arguments" not in call and forms.plain == forms.structured:
        return call
    return {**call, "arguments": _form_arguments(f"{name}.arguments", call.get("arguments"), forms)}


def _form_arguments(name: str, given: Any, forms: Takes) -> Any:
    """Return a tool call's arguments; for a template of which nobody knows, as a mapping, as transformers has them."""
    if forms.plain != forms.structured:
        return _parse(name, given) if forms.structured else _write(name, given)
    if not forms.plain and isinstance(given, str):
        with suppress(ValueError):
            return _parse(name, given)
    return given


def _parse(name: str, given: Any) -> Any:
    """Return a tool call's arguments as a mapping; those that are missing or an empty text are none."""
    if isinstance(given, Mapping):
        return given
    parsed: Any = {}
    if given is not None and given != "":
        parsed = None
        with suppress(ValueError, RecursionError, TypeError):
            parsed = json.loads(given)
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{name}={short(given, MOST_SHOWN)}: must be a mapping or a JSON object, as the chat template reads its"
            " entries"
        )
    return parsed


def _write(name: str, given: Any) -> Any:
    """Return a tool call's arguments as JSON; a string stays as it is."""
    if isinstance(given, str):
        return given
    try:
        return json.dumps({} if given is None else given, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}={short(given, MOST_SHOWN)}: must be JSON: {error}") from None
