"""The options of speculation: their check, and what they can be combined with."""

from __future__ import annotations

import pickle
from typing import Any

from nanoinfer.checks import check_choice, short
from nanoinfer.drafting.drafter import Drafter

AUTO, DRAFT = "auto", "draft"  # of `speculation`, which may have a draft model, and must have one
MTP = "mtp"  # the model's own prediction heads guess: multi-token prediction
KINDS = [AUTO, "suffix", DRAFT, MTP]
MOST_GUESSES = 15  # a kernel keeps a row's last token and its guesses in sixteen places


def check_speculation(value: Any, draft_model: Any, replicas: str | None = None) -> str | Drafter | None:
    """Return "auto", "suffix", "draft", "mtp", a Drafter or None; raises ValueError for anything else.

    draft_model: the option, which "draft" needs, and "auto" takes
    replicas: the option that asks for them, if there are some, which get copies of a Drafter
    """
    is_drafter = value is None or callable(getattr(value, "propose", None))
    if isinstance(value, type) and is_drafter:
        raise ValueError(f"speculation={short(value)}: must be an object of this class: {value.__name__}(...)")
    also = ", None, or an object with the method `propose` of a Drafter"
    speculation: str | Drafter | None = value if is_drafter else check_choice("speculation", value, KINDS, also)
    if speculation == DRAFT and draft_model is None:
        raise ValueError(
            f"draft_model={draft_model}: must be the folder or the Hugging Face Hub id of a small model of the same"
            f" vocabulary, with speculation={DRAFT!r}"
        )
    if speculation not in (AUTO, DRAFT) and draft_model is not None:
        raise ValueError(
            f"draft_model={short(draft_model)}: must be left out, or speculation must be {DRAFT!r} or {AUTO!r}"
        )
    if replicas is not None:
        _check_copies(speculation, replicas)
    return speculation


def _check_copies(drafter: object, replicas: str) -> None:
    """Raise ValueError if a Drafter cannot be copied into the processes of replicas."""
    try:
        pickle.dumps(drafter)
    except Exception as error:  # its own code may raise anything
        raise ValueError(
            f"speculation={short(drafter)}: must be an object that can be pickled, for each of"
            f" {replicas} replicas gets a copy: {error}"
        ) from error


def check_speculating(
    speculation: str | Drafter | None,
    draft_model: str | None,
    generates: bool,
    sees: bool,
) -> None:
    """Raise ValueError if a model, or another option, cannot have guesses verified."""
    if speculation is None:
        return
    if not generates:
        raise ValueError(
            f"speculation={short(speculation)}: must be left out: this LLM reads texts, and draws no token"
        )
    if draft_model is not None and sees:
        raise ValueError(
            f"draft_model={short(draft_model)}: must be left out, or images=False set: a draft model sees no images"
        )
    if speculation == MTP and sees:
        raise ValueError(
            f"speculation={MTP!r}: must be left out, or images=False set: a prediction head sees no images"
        )
