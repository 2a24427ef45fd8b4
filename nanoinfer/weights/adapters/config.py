"""AdapterConfig: what PEFT's LoraConfig says of an adapter, as far as it changes results."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.checks import as_list, check_flag, check_int, check_number, check_settings, short

MERGE = "merge it into its base with PEFT's merge_and_unload(), and load that as a model"
ALL = "all-linear"  # targets all linear layers
# Settings that nanoinfer refuses unless they are empty, and what each one does.
REFUSED = {
    "use_dora": "DoRA scales the rows of the merged matrix",
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it changes embeddings",
    "lora_bias": "it adds biases",
    "layer_replication": "it makes a model of more layers",
    "alora_invocation_tokens": "it applies to the tokens behind an invocation alone",
    "use_qalora": "it sums groups of inputs",
    "use_bdlora": "its matrices are diagonals of blocks",
    "arrow_config": "it routes each token to adapters",
    "kasa_config": "it scales with a diagonal between its matrices",
    "monteclora_config": "it draws its weights at random",
}
READ = (
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "target_parameters", "bias", "init_lora_weights",
    # how it was made and trained:
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "velora_config", "qalora_group_size", "ensure_weight_tying", "runtime_config", "merge_weights",
    "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
)  # fmt: skip
STARTS = ("gaussian", "eva", "orthogonal", "mica")  # beside True and False: these change the adapter's own numbers
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # begin the names of what changes the base's weights, too
FIRST_LAYER_NUMBER = r".*?\.[^.]*\.(\d+)\."


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an adapter. None: not given; patterns are regular expressions for the end of a module's name.

    alpha: the numerator of the factor; use_rslora: its denominator is the rank's root (Kalajdzievski, 2023), not the
        rank
    rank_pattern, alpha_pattern: other ranks and alphas, by pattern
    target_modules, exclude_modules: a pattern of whole names, or ends of names
    layers: the numbers of the layers that target_modules means; layers_pattern: the names of their lists
    target_parameters: ends of the names of parameters
    """

    alpha: float
    rank: int | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers: list[int] | None = None
    layers_pattern: list[str] = field(default_factory=list)
    target_parameters: list[str] = field(default_factory=list)

    def rank_of(self, name: str) -> int | None:
        """Return the rank of a module or a parameter; None: any."""
        return _by_pattern(self.rank_pattern, name, self.rank)

    def scale(self, name: str, rank: int) -> float:
        """Return the factor of b a in a module or a parameter."""
        alpha = _by_pattern(self.alpha_pattern, name, self.alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def target_of(self, module: str) -> str | None:
        """Return what has the adapter's matrices for a module: its weight or itself, as patterns name it; None: none.

        exclude_modules does not hold for weights that are named as parameters.
        """
        if self.targets_parameter(weight := f"{module}.weight"):
            return weight
        return module if self.targets(module) else None

    def targets(self, module: str) -> bool:
        """Whether the adapter has matrices for a module, as PEFT decides it (check_target_module_exists)."""
        if _matches(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            return not self.target_parameters
        if self.target_modules == ALL:
            return True
        if not _matches(self.target_modules, module):
            return False
        return isinstance(self.target_modules, str) or module in self.target_modules or self._is_in_layers(module)

    def targets_parameter(self, parameter: str) -> bool:
        """Whether the adapter has matrices for a parameter, such as the stack of a layer's experts."""
        return _matches(self.target_parameters, parameter)

    def _is_in_layers(self, module: str) -> bool:
        if not self.layers:
            return True
        patterns = list(map(_before_number, self.layers_pattern)) or [FIRST_LAYER_NUMBER]
        found = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
        return found is not None and int(found[1]) in self.layers


def read_config(settings: Any, what: str) -> AdapterConfig:
    """Read the settings of a LoRA adapter. Raises ValueError, naming the setting, for those that nanoinfer refuses.

    settings: a mapping, as in adapter_config.json, or peft.LoraConfig; what: begins the messages of errors
    """
    settings = _as_mapping(settings, what)
    _check_supported(settings, what)

    def named(name: str) -> str:
        return f"{what}: {name}"

    def patterns(name: str) -> dict[str, Any]:
        return _read_mapping(named(name), settings.get(name))

    layers = settings.get("layers_to_transform")
    return AdapterConfig(
        alpha=check_alpha(named("lora_alpha"), settings.get("lora_alpha", 8)),
        rank=check_int(named("r"), settings.get("r", 8), 1),
        use_rslora=check_flag(named("use_rslora"), settings.get("use_rslora", False)),
        rank_pattern={key: check_int(named("rank_pattern"), one, 1) for key, one in patterns("rank_pattern").items()},
        alpha_pattern={key: check_alpha(named("alpha_pattern"), one) for key, one in patterns("alpha_pattern").items()},
        target_modules=_read_names(named("target_modules"), settings.get("target_modules")),
        exclude_modules=_read_names(named("exclude_modules"), settings.get("exclude_modules")),
        layers=None if layers is None else _read_layers(named("layers_to_transform"), layers),
        layers_pattern=_read_layers_pattern(named("layers_pattern"), settings.get("layers_pattern") or []),
        target_parameters=_list(named("target_parameters"), settings.get("target_parameters") or []),
    )


def _as_mapping(settings: Any, what: str) -> Mapping[str, Any]:
    needed = f"{what}: config={short(settings)}: must be a mapping as in adapter_config.json, or LoraConfig(...)"
    if hasattr(settings, "to_dict"):
        try:
            settings = settings.to_dict()
        except Exception as error:  # of code that is not ours, or of a class
            raise ValueError(f"{needed}: its to_dict fails: {error}") from error
    if not isinstance(settings, Mapping):
        raise ValueError(needed)
    return settings


def check_alpha(name: str, value: Any) -> float:
    """Return lora_alpha. Raises ValueError if it is no finite number."""
    most = sys.float_info.max
    return check_number(name, value, -most, most, "such as 16")


def _check_supported(settings: Mapping[str, Any], what: str) -> None:
    kind = settings.get("peft_type", "LORA")
    kind = getattr(kind, "value", kind)
    if kind != "LORA":
        raise ValueError(f"{what}: peft_type={short(kind)}: must be 'LORA'; of another type: {MERGE}")
    if (bias := settings.get("bias", "none")) != "none":
        raise ValueError(f"{what}: bias={short(bias)}: must be 'none': nanoinfer adds no biases; {MERGE}")
    for name, reason in REFUSED.items():
        if settings.get(name):
            raise ValueError(
                f"{what}: {name}={short(settings[name])}: nanoinfer has no such adapters: {reason}; {MERGE}"
            )
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGE_BASE):
        raise ValueError(
            f"{what}: init_lora_weights={start!r}: the adapter's base is not the model, as {start} changed its weights;"
            " save it with path_initial_model_for_weight_conversion"
        )
    if isinstance(start, str) and start.lower() not in STARTS:
        raise ValueError(f"{what}: init_lora_weights={short(start)}: must be a flag, or one of {', '.join(STARTS)}")
    check_settings(f"{what}: its config", settings, READ, dict.fromkeys(REFUSED, ()))


def _read_names(name: str, value: Any) -> str | list[str] | None:
    """Read a pattern of whole names, or a list of ends of names."""
    if not isinstance(value, str):
        return None if value is None else _list(name, value)
    _check_pattern(f"{name}={value!r}: must be a list of names or a regular expression", value)
    return ALL if value.lower() == ALL else value


def _list(name: str, value: Any) -> list[str]:
    strings = as_list(value, ordered=False)
    if strings is None or not all(isinstance(one, str) for one in strings):
        raise ValueError(f"{name}={short(value)}: must be a list of names")
    return strings


def _read_layers(name: str, value: Any) -> list[int]:
    numbers = as_list(value)
    return [check_int(name, one, 0) for one in ([value] if numbers is None else numbers)]


def _read_mapping(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name}={short(value)}: must be a mapping of names, or regular expressions, to numbers")
    for key in value or {}:
        needed = f"{name} has {short(key)}: must be a name or a regular expression"
        if not isinstance(key, str):
            raise ValueError(needed)
        _check_pattern(needed, _at_end(key))
    return dict(value or {})


def _read_layers_pattern(name: str, value: Any) -> list[str]:
    patterns = [value] if isinstance(value, str) else _list(name, value)
    for one in patterns:
        _check_pattern(f"{name} has {one!r}: must be a name or a regular expression", _before_number(one))
    return patterns


def _check_pattern(needed: str, pattern: str) -> None:
    """Raise ValueError, with what is needed, for what is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{needed}: {error}") from error


def _at_end(pattern: str) -> str:
    """Return the pattern of names that end as this one says, behind a dot if it is not all of the name."""
    return rf"(.*\.)?({pattern})$"


def _before_number(pattern: str) -> str:
    """Return the pattern of names in which a list of layers, as this one says, stands before a layer's number."""
    return rf"(?:.*?\.)?{pattern}\.(\d+)\."


def _by_pattern(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that fits the end of a name."""
    return next((value for key, value in patterns.items() if re.match(_at_end(key), name)), otherwise)


def _matches(names: str | Iterable[str] | None, name: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in names or ())
