"""Rules: what vLLM's options of an LLM say of the settings of all its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoinfer.checks import as_list, check_flag, check_int
from nanoinfer.sampling_params import SamplingParams

MOST, NO_SPACE = "max_logprobs", "disable_any_whitespace"
FORMS, OLD = "structured_outputs_config", f"guided_decoding_{NO_SPACE}"  # which have NO_SPACE, and are it


class Rules(NamedTuple):
    """max_logprobs: the most that a request may ask for; None: any. disable_any_whitespace: of all JSON."""

    max_logprobs: int | None
    disable_any_whitespace: bool

    @classmethod
    def take(cls, options: dict[str, Any]) -> Rules:
        """Take the rules out of an LLM's options. Raises ValueError for values that are none."""
        most, has_no_space, forms = options.pop(MOST, None), options.pop(OLD, None), options.get(FORMS)
        if isinstance(forms, Mapping) and NO_SPACE in forms:
            options[FORMS] = {name: value for name, value in forms.items() if name != NO_SPACE}
            has_no_space = forms[NO_SPACE]
        if most is not None and check_int(MOST, most, -1) == -1:
            most = None
        return cls(most, has_no_space is not None and check_flag(NO_SPACE, has_no_space))

    def apply(self, given: Any) -> Any:
        """Return the settings of a call as they are to be, one or a list. Raises ValueError for too many logprobs."""
        if not isinstance(given, SamplingParams):
            listed = as_list(given)
            return given if listed is None else list(map(self.apply, listed))
        for name in ("logprobs", "prompt_logprobs"):
            count, most = getattr(given, name), self.max_logprobs
            if count is not None and most is not None and not 0 <= count <= most:
                raise ValueError(f"{name}={count}: must be an integer from 0 to {most}, as LLM({MOST}=...) says")
        form = given.structured_outputs
        if self.disable_any_whitespace and form is not None:
            given = given.clone()
            given.structured_outputs = {**form, NO_SPACE: True}
        return given
