"""The option `speculation`: its check, and what it can be combined with."""

from __future__ import annotations

from typing import Any

from nanoinfer.checks import check_choice, short
from nanoinfer.drafting.drafter import Drafter

KINDS = ["auto", "suffix"]
COMING = ("draft", "mtp")  # named by others, and by those who ask
MOST_GUESSES = 15  # a kernel keeps a row's last token and its guesses in sixteen places


def check_speculation(value: Any) -> str | Drafter | None:
    """Return "auto", "suffix", a Drafter or None; raises ValueError for anything else."""
    if value is None or callable(getattr(value, "propose", None)):
        return value
    if isinstance(value, str) and value in COMING:
        names = " or ".join(map(repr, KINDS))
        raise ValueError(f"speculation={value!r}: nanoinfer has no such drafter yet; {names} guesses from earlier text")
    return check_choice("speculation", value, KINDS, ", None, or an object with the method `propose` of a Drafter")


def check_speculating(
    speculation: str | Drafter | None, generates: bool, has_states: bool, routed_experts: bool
) -> None:
    """Raise ValueError if a model, or another option, cannot have guesses verified."""
    if speculation is None:
        return
    if not generates:
        raise ValueError(
            f"speculation={short(speculation)}: must be left out: this LLM reads texts, and draws no token"
        )
    if has_states:
        raise ValueError(
            f"speculation={short(speculation)}: must be left out for this model: some of its layers keep a state, which"
            " cannot go back behind a guess that did not hold"
        )
    if routed_experts:
        raise ValueError(
            f"speculation={short(speculation)}: must be left out with routed_experts=True, which tells the experts of"
            " one token of each step"
        )
