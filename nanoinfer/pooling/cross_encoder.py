"""CrossEncoder: how a checkpoint scores a query and a document, by what sentence-transformers has saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nanoinfer.checks import check_int, check_settings
from nanoinfer.pooling.activations import Vector, find_activation, sigmoid
from nanoinfer.pooling.files import MODULES_FILE, SETTINGS_FILE, Module, mapping_of, read_modules, read_settings
from nanoinfer.pooling.model_settings import SCORES, ModelSettings
from nanoinfer.pooling.read import Read
from nanoinfer.pooling.text_settings import CLASSIFIES, GENERATES, TextSettings

OF_CONFIG, OLD_ACTIVATION = "sentence_transformers", "sbert_ce_default_activation_function"  # in config.json
LABELS = Read("labels")


@dataclass(frozen=True)
class CrossEncoder:
    """How a pair becomes a score.

    read: the classifier's label; or the logits of a token that says yes, and of one that says no, if there is one
    activation: makes the score of the label, or of how much the first logit is above the second
    prompt: stands before the query
    texts: what becomes of pairs; None: they get the form of Qwen3-Reranker's model card
    """

    read: Read
    activation: Callable[[Vector], Vector] = sigmoid
    prompt: str = ""
    texts: TextSettings | None = field(default_factory=TextSettings)

    def score(self, logits: Vector) -> np.float32:
        """Return the score of what was read, [1] or [2] float32."""
        score: np.float32 = self.activation(logits[:1] - logits[1:2] if len(logits) > 1 else logits)[0]
        return score


def read_cross_encoder(folder: str, is_classifier: bool, vocab_size: int) -> CrossEncoder | None:
    """Read the files of a checkpoint; None: it is no classifier, and they do not say how it scores.

    Raises ValueError, naming it, for what nobody computes here.
    """
    modules = read_modules(folder)
    if not modules and not is_classifier:
        return None
    activation = _read_activation(Path(folder) / SETTINGS_FILE)
    if not modules:
        return CrossEncoder(LABELS, activation)
    kinds, needed = (
        [module.kind for module in modules],
        ["Transformer"] if is_classifier else ["Transformer", "LogitScore"],
    )
    if kinds != needed:
        raise ValueError(
            f"model={folder!r}: its {MODULES_FILE} has {', '.join(kinds)}: must be {', '.join(needed)} to score pairs"
        )
    read = LABELS if is_classifier else Read("tokens", _read_tokens(modules[1], vocab_size))
    settings = ModelSettings.read(folder, SCORES)
    texts = TextSettings.read(folder, CLASSIFIES if is_classifier else GENERATES)
    return CrossEncoder(read, settings.activation or activation, settings.prompt, texts)


def _read_activation(file: Path) -> Callable[[Vector], Vector]:
    """Return what config.json says, as versions from 4 and before have saved it; a sigmoid if it does not."""
    config = read_settings(file)
    where = f"{file}: {OF_CONFIG}"
    own = mapping_of(where, config.get(OF_CONFIG))
    check_settings(where, own, ("activation_fn", "version"))
    name, path = OLD_ACTIVATION, config.get(OLD_ACTIVATION)
    if "activation_fn" in own:
        name, path = f"{OF_CONFIG}: activation_fn", own["activation_fn"]
    return sigmoid if path is None else find_activation(f"{file}: {name}", path)


def _read_tokens(module: Module, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of LogitScore: the one that says yes, and the one that says no, if it is named."""
    file = module.settings_file
    config = read_settings(file)
    names = "true_token_id", "false_token_id"
    check_settings(str(file), config, names, {"module_input_name": ("causal_logits",)})
    yes, no = (config.get(name) for name in names)
    given = {names[0]: yes} if no is None else {names[0]: yes, names[1]: no}
    return tuple(check_int(f"{file}: {name}", token, 0, vocab_size - 1) for name, token in given.items())
