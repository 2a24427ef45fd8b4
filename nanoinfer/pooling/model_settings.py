"""ModelSettings: what config_sentence_transformers.json says of a model as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nanoinfer.checks import check_int, check_settings, short
from nanoinfer.pooling.activations import Vector, find_activation
from nanoinfer.pooling.files import mapping_of, read_settings

FILE = "config_sentence_transformers.json"
EMBEDS, SCORES = "SentenceTransformer", "CrossEncoder"  # model_type
KNOWN = ("__version__", "model_type", "prompts", "default_prompt_name", "requirements")
# Which similarity others should compute, and which layers stay in float32, changes no embedding and no score here.
OWN = {EMBEDS: ("truncate_dim", "similarity_fn_name"), SCORES: ("activation_fn", "keep_in_fp32_modules")}


@dataclass(frozen=True)
class ModelSettings:
    """What holds for a model as a whole.

    prompts: what may stand before a text, by the name that asks for it
    default_prompt: the name that counts if none is given; None: no prompt stands there then
    truncate_dim: an embedding keeps so many first numbers, whose length does not become 1 again; None: all
    activation: makes a score of a pair's logit; None: the file does not say
    """

    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    truncate_dim: int | None = None
    activation: Callable[[Vector], Vector] | None = None

    @property
    def prompt(self) -> str:
        """What stands before a text if no name is given."""
        return "" if self.default_prompt is None else self.prompts[self.default_prompt]

    @classmethod
    def read(cls, folder: str, kind: str) -> ModelSettings:
        """Read a checkpoint's. kind: what it must be, EMBEDS or SCORES. Raises ValueError for what is not known."""
        file = Path(folder) / FILE
        said = read_settings(file)
        found = said.get("model_type", EMBEDS)  # as older files leave it out
        if found != kind:
            raise ValueError(f"{file}: model_type={short(found)}: must be {kind!r} for this call")
        check_settings(str(file), said, (*KNOWN, *OWN[kind]))
        prompts = {name: text or "" for name, text in mapping_of(f"{file}: prompts", said.get("prompts")).items()}
        if not all(isinstance(text, str) for text in prompts.values()):
            raise ValueError(f"{file}: prompts={short(prompts)}: must be a mapping of names to strings")
        default = said.get("default_prompt_name")
        if default is not None and default not in prompts:
            known = ", ".join(prompts) or "none"
            raise ValueError(f"{file}: default_prompt_name={short(default)}: must be one of prompts, {known}")
        cut, path = said.get("truncate_dim"), said.get("activation_fn")
        return cls(
            prompts,
            default,
            None if cut is None else check_int(f"{file}: truncate_dim", cut, 1),
            None if path is None else find_activation(f"{file}: activation_fn", path),
        )
