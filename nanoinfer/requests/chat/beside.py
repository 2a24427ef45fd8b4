"""What may stand in a prompt that is a mapping beside its text, tokens or messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.checks import short

MESSAGES, TEMPLATE = "messages", "chat_template_kwargs"  # the keys of a prompt that is a chat
SALT = "cache_salt"  # of any prompt
MOST_SHOWN = 60  # characters of a value in an error message


def salt_of(name: str, prompt: Mapping[Any, Any]) -> str | None:
    """Return a prompt's cache_salt; None: it has none. Raises ValueError for one that is no name of a cache."""
    salt = prompt.get(SALT)
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"{name}[{SALT!r}] is {short(salt, MOST_SHOWN)}: must be a non-empty string")
    return salt


def template_of(name: str, prompt: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the template's arguments in a prompt that is a chat."""
    if others := [key for key, value in prompt.items() if key not in (MESSAGES, TEMPLATE, SALT) and value is not None]:
        raise ValueError(f"{name} has {short(others[0])}: must have {MESSAGES!r} alone, or {TEMPLATE!r} beside it")
    return as_template(f"{name}[{TEMPLATE!r}] is ", prompt.get(TEMPLATE))


def as_template(begin: str, template: Any) -> Mapping[str, Any]:
    """Return the template's arguments; None counts as none; begin: begins the message of an error."""
    if template is None:
        return {}
    if not isinstance(template, Mapping) or not all(isinstance(key, str) for key in template):
        raise ValueError(
            f"{begin}{short(template, MOST_SHOWN)}: must be a mapping from the template's arguments to values"
        )
    return template
