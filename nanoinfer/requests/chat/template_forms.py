"""Finds out what a chat template takes: it renders chats of a few words, and looks for these in the text.

Some templates print a message's content as it is, and others go through its parts. Some print the arguments of a tool
call, and others go through them or write them as JSON. No template says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Message = dict[str, Any]
Surroundings = tuple[tuple[str, ...], tuple[str, ...]]  # the roles before and behind a message

CALL = "tool call"  # stands for the role of a message that calls a tool

TEXTS = ("rowan7", "alder9")  # of a probe, also if a template writes them in capitals
UNREAD = "cedar2"  # a key of its parts, which a template prints only if it prints them as they are
ARGUMENTS = {"birch5": "Hazel3"}  # of its tool call
CALL_ID = "willow123"  # some templates want nine letters and digits

# Templates may want a system message, a user's, a tool's result, or roles that take turns.
PLACES: tuple[Surroundings, ...] = (
    ((), ()),
    ((), ("user",)),
    (("user",), ()),
    (("system",), ()),
    (("system", "user"), ()),
    (("user",), ("user",)),
    (("system", "user"), ("user",)),
    ((), ("assistant", "user")),
    (("system",), ("assistant", "user")),
)
PLACES_OF_CALLS: tuple[Surroundings, ...] = (*PLACES, (("user",), ("tool",)), (("system", "user"), ("tool",)))
PLACES_OF_RESULTS: tuple[Surroundings, ...] = ((("user", CALL), ()), (("system", "user", CALL), ()), *PLACES)


class Takes(NamedTuple):
    """The forms that a template renders right; neither: nobody knows.

    plain: content as a string, or a tool call's arguments as JSON
    structured: content as a list of parts, or a tool call's arguments as a mapping
    empty: what stands for the content of a message that calls a tool and has none
    whole: the template reads the first part alone, so that it must hold all of the text
    """

    plain: bool = False
    structured: bool = False
    empty: str | None = ""
    whole: bool = False

    def write(self, texts: list[str]) -> str | list[Message]:
        """Return content with these texts in a form that the template takes."""
        joined = "\n".join(texts)
        if self.plain or not self.structured:
            return joined
        return [{"type": "text", "text": text} for text in ([joined] if self.whole else texts)]


PLAIN, PARTS, ONE_PART = Takes(plain=True), Takes(structured=True), Takes(structured=True, whole=True)


class TemplateForms:
    """What one template takes of each role. It is tried when a message first has the role."""

    def __init__(self) -> None:
        self._found: dict[str, Takes] = {}

    def find(self, role: str, render: Callable[[list[Message]], str]) -> Takes:
        """Return what the template takes of a role, or of CALL. If it shows nothing of a role, the user's forms count.

        render: applies the template; it raises an error if the template does
        """
        if role not in self._found:
            probe = _Probe(self, render)
            takes = probe.try_calls() if role == CALL else probe.try_content(role)
            if takes is None and not probe.has_rendered:
                return Takes()  # this chat may lack an argument of the template, and the next one may have it
            if takes is None:
                takes = Takes() if role in (CALL, "user") else self.find("user", render)
            self._found[role] = takes
        return self._found[role]


class _Probe:
    """Tries one role. has_rendered: the template has rendered some chat without an error."""

    def __init__(self, forms: TemplateForms, render: Callable[[list[Message]], str]) -> None:
        self._forms, self._render = forms, render
        self.has_rendered = False

    def try_content(self, role: str) -> Takes | None:
        """Return the forms in which the template shows content; None: it shows none."""
        is_known = role in ("system", "user", "assistant")
        for place in PLACES if is_known else PLACES_OF_RESULTS:
            shown = [form for form in (PLAIN, PARTS, ONE_PART) if self._shows_content(role, form, *place)]
            if shown:
                return Takes(PLAIN in shown, shown != [PLAIN], whole=PARTS not in shown)
        return None

    def try_calls(self) -> Takes | None:
        """Return the forms in which the template shows a tool call's arguments; None: it shows none."""
        as_json = json.dumps(ARGUMENTS)
        for place in PLACES_OF_CALLS:
            for empty in (None, ""):
                plain, structured = (self._shows_call(empty, form, *place) for form in (as_json, ARGUMENTS))
                if plain or structured:
                    return Takes(plain, structured, empty)
        return None

    def _shows_content(self, role: str, form: Takes, before: tuple[str, ...], behind: tuple[str, ...]) -> bool:
        content = form.write(list(TEXTS))
        if isinstance(content, list):
            content = [{**part, UNREAD: ""} for part in content]
        text = self._text(before, _message(role, content), behind, form).lower()
        first, second = map(text.find, TEXTS)
        return 0 <= first < second and UNREAD not in text

    def _shows_call(
        self, empty: str | None, arguments: str | Message, before: tuple[str, ...], behind: tuple[str, ...]
    ) -> bool:
        text = self._text(before, _call(empty, arguments), behind, self._forms.find("user", self._render))
        if empty is None and "None" in text:
            return False  # perhaps the content's
        if isinstance(arguments, str):
            return arguments in text
        return str(arguments) not in text and all(word in text for item in arguments.items() for word in item)

    def _text(self, before: tuple[str, ...], probe: Message, behind: tuple[str, ...], form: Takes) -> str:
        """Return the chat's text, or none if the template raises an error; form: the other messages' content."""
        messages = [*self._others(before, form), probe, *self._others(behind, form)]
        try:
            text = self._render(messages)
        except Exception:
            return ""
        self.has_rendered = True
        return text

    def _others(self, roles: tuple[str, ...], form: Takes) -> Iterator[Message]:
        for role in roles:
            if role == CALL:
                takes = self._forms.find(CALL, self._render)
                yield _call(takes.empty, ARGUMENTS if takes.structured else json.dumps(ARGUMENTS))
            else:
                yield _message(role, form.write(["so"]))


def _message(role: str, content: str | list[Message]) -> Message:
    result = {"tool_call_id": CALL_ID, "name": "look_up"} if role == "tool" else {}
    return {"role": role, **result, "content": content}


def _call(content: str | None, arguments: str | Message) -> Message:
    function = {"name": "look_up", "arguments": arguments}
    call = {"id": CALL_ID, "type": "function", "function": function, **function}  # templates read one or the other
    return {"role": "assistant", "content": content, "tool_calls": [call]}
