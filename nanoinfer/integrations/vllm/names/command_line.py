"""EngineArgs: an LLM's options as one object, and as arguments of a command line."""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nanoinfer.config import Config
from nanoinfer.hints import hints_for
from nanoinfer.integrations.vllm.arguments import ARGUMENTS
from nanoinfer.integrations.vllm.methods import ModelConfig
from nanoinfer.integrations.vllm.spellings import OTHER_NAMES

MODEL = "Qwen/Qwen3-0.6B"  # of who names none, as in vLLM
OURS = {field.name: str(field.type) for field in fields(Config) if field.init}
OPTIONS = dict.fromkeys((*OURS, *ARGUMENTS["LLM"], *OTHER_NAMES["LLM"]))
PYTHONS = {"None": None, "True": True, "False": False}
SHORT = {"tensor_parallel_size": "-tp", "data_parallel_size": "-dp", "quantization": "-q"}

Made = TypeVar("Made", bound="Options")


class Options:
    """The options of an LLM, ours and vLLM's, each an attribute; None: nobody has said it."""

    model: str

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser, async_args_only: bool = False) -> ArgumentParser:
        """Let a parser read the options, --max-model-len for max_model_len; returns it.

        async_args_only: True adds none, for nothing here is for asyncio alone

        A value is read as JSON, or else is a string. An option without a value is True, and --no-... is False.
        """
        for name in () if async_args_only else OPTIONS:
            word, short = name.replace("_", "-"), [SHORT[name]] if name in SHORT else []
            read: Any = str if OURS.get(name, "").startswith("str") else _read
            default = MODEL if name == "model" else None
            parser.add_argument(*short, f"--{word}", dest=name, nargs="?", const=True, type=read, default=default)
            parser.add_argument(f"--no-{word}", dest=name, action="store_const", const=False, help=SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls: type[Made], args: Namespace) -> Made:
        """Make one of what a parser has read; what is no option is left out."""
        return cls(**{name: value for name, value in vars(args).items() if name in OPTIONS})

    def create_model_config(self) -> ModelConfig:
        """Return the model's settings, without its weights. Raises ValueError for an option that cannot work."""
        return ModelConfig(Config(**vars(self)))


def _read(text: str) -> Any:
    """Return the value of an option: JSON, None, True, False, or the text itself."""
    if text in PYTHONS:
        return PYTHONS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


if TYPE_CHECKING:

    class EngineArgs(Options):
        """The options of an LLM."""

        def __init__(self, model: str = MODEL, **options: Any) -> None: ...

else:
    EngineArgs = hints_for("LLM", ())(
        make_dataclass(
            "EngineArgs",
            [("model", str, MODEL), *((name, Any, None) for name in OPTIONS if name != "model")],
            bases=(Options,),
            namespace={"__module__": __name__},
        )
    )
    EngineArgs.__doc__ = "The options of an LLM."


class AsyncEngineArgs(EngineArgs):
    """The options of an AsyncLLMEngine."""


class FlexibleArgumentParser(ArgumentParser):
    """argparse's parser, for which --max_model_len is --max-model-len."""

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for what a namespace may be
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse arguments; returns the namespace, and those that are unknown."""
        options = self._option_string_actions
        known = {option.replace("_", "-"): option for option in options}

        def own(arg: str) -> str:
            word, equals, value = arg.partition("=")
            is_other = word.startswith("--") and word not in options
            return known.get(word.replace("_", "-"), word) + equals + value if is_other else arg

        return super().parse_known_args(list(map(own, sys.argv[1:] if args is None else args)), namespace)
