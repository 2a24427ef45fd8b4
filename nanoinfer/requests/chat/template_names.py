"""The names that a chat template reads: arguments by other names do nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nanoinfer.hints import nearest

RENDERS = frozenset({"chat_template", "add_generation_prompt", "continue_final_message"})
"""What transformers' apply_chat_template does something with, whatever the template reads."""

GENERATION = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")  # a tag of transformers' own
NOT_GIVEN = {"messages", "raise_exception", "strftime_now"}  # transformers gives these itself


class TemplateNames:
    """The arguments that one template takes; known: their names, or None if nobody can tell."""

    def __init__(self, template: str) -> None:
        read = _find(template)
        self.known = None if read is None else (read - NOT_GIVEN) | RENDERS

    def unknown(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of arguments that do nothing, but for None and empty lists, which ask for nothing."""
        if self.known is None:
            return []
        return [name for name, value in arguments.items() if name not in self.known and _asks(value)]

    def hint(self, name: str) -> str:
        """Say what may be meant by an unknown name."""
        return nearest(name, sorted(self.known or ()))


def _asks(value: Any) -> bool:
    return value is not None and not (isinstance(value, list) and not value)


def _find(template: str) -> set[str] | None:
    """Return the names that a template reads and does not define; None if it cannot be parsed."""
    from jinja2 import Environment, TemplateSyntaxError, meta  # here, for ranks read no templates

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
        return meta.find_undeclared_variables(tree)
    except TemplateSyntaxError:
        return None
