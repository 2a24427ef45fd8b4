"""SentenceModel: how a checkpoint makes an embedding of hidden states, by the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nanoinfer.checks import check_settings
from nanoinfer.pooling.dense import ON_EMBEDDINGS, Dense
from nanoinfer.pooling.files import MODULES_FILE, Module, read_modules, read_settings
from nanoinfer.pooling.layer_norm import LayerNorm
from nanoinfer.pooling.model_settings import EMBEDS, ModelSettings
from nanoinfer.pooling.read import What
from nanoinfer.pooling.text_settings import EMBEDS as TASK
from nanoinfer.pooling.text_settings import TextSettings

OLD_MODES = "pooling_mode_"  # begins the names of flags that have become one setting, pooling_mode
OLD_KINDS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
KNOWN = ("embedding_dimension", "word_embedding_dimension", "pooling_mode", *(OLD_MODES + kind for kind in OLD_KINDS))
POOLINGS: dict[str, What] = {
    "cls": "first", "lasttoken": "last", "mean": "mean", "max": "max", "weightedmean": "weighted",
}  # fmt: skip
BEHIND: dict[str, Callable[[Module], Dense | LayerNorm]] = {"Dense": Dense.open, "LayerNorm": LayerNorm.open}


@dataclass(frozen=True)
class SentenceModel:
    """What comes before the first layer and behind the last norm.

    what: how hidden states become one
    behind: applied to it, one after another
    normalises: the embedding's length becomes 1
    settings: prompts and a cut of the first numbers
    texts: what becomes of texts; None: the tokenizer decides alone
    """

    what: What = "last"
    behind: tuple[Dense | LayerNorm, ...] = ()
    normalises: bool = True
    settings: ModelSettings = field(default_factory=ModelSettings)
    texts: TextSettings | None = None


def read_sentence_model(folder: str, usual: What = "last") -> SentenceModel:
    """Read the files of a checkpoint; one without modules.json has the usual hidden state, of length 1.

    Raises ValueError, naming it, for what nobody computes here.
    """
    modules = read_modules(folder)
    if not modules:
        return SentenceModel(usual)
    kinds = [module.kind for module in modules]
    normalises = kinds[-1] == "Normalize"
    behind = modules[2:-1] if normalises else modules[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(module.kind not in BEHIND for module in behind):
        raise ValueError(
            f"model={folder!r}: its {MODULES_FILE} has {', '.join(kinds)}: must be Transformer, Pooling, Dense or"
            " LayerNorm modules, and Normalize, of which the last two may be missing"
        )
    if normalises:
        file = modules[-1].settings_file
        check_settings(str(file), read_settings(file), (), ON_EMBEDDINGS)
    what, opened = _read_pooling(modules[1]), tuple(BEHIND[module.kind](module) for module in behind)
    return SentenceModel(what, opened, normalises, ModelSettings.read(folder, EMBEDS), TextSettings.read(folder, TASK))


def _read_pooling(module: Module) -> What:
    file = module.settings_file
    config = read_settings(file)
    check_settings(str(file), config, (*KNOWN, "include_prompt"))
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [name.removeprefix(OLD_MODES) for name, is_on in config.items() if name.startswith(OLD_MODES) and is_on]
        modes = [mode.removesuffix("_token").removesuffix("_tokens") for mode in modes] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(f"{file}: pooling_mode={', '.join(modes)}: must be one of {', '.join(POOLINGS)}")
    if not config.get("include_prompt", True):
        raise ValueError(f"{file}: include_prompt=false: must be true: a prompt's tokens count here")
    return POOLINGS[modes[0]]
