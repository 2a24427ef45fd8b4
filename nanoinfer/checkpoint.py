"""Checkpoint: reads a model from its folder or from the Hugging Face Hub, all but its weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoConfig, PretrainedConfig

from nanoinfer.checks import as_int, short
from nanoinfer.hints import ELSEWHERE
from nanoinfer.models import check_architectures

GENERATION_SETTINGS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "stop_strings",
)  # fmt: skip
NEEDED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Checkpoint:
    """The settings that a checkpoint's own files give.

    folder: the folder that holds the files
    hf_config: config.json, as transformers reads it
    eos_token_ids: every end-of-sequence id that config.json or generation_config.json names
    generation_defaults: the settings of generation_config.json, as SamplingParams names them
    """

    folder: str
    hf_config: PretrainedConfig
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, Any]

    @classmethod
    def open(cls, model: str) -> Checkpoint:
        """Read a folder, or download a Hub id first. Raises ValueError if a file is missing or cannot be read."""
        folder = _resolve_folder(model)
        hf_config = _read_config(folder)
        generation = _read_generation_config(folder)
        return cls(
            folder, hf_config, _find_eos_token_ids(folder, hf_config, generation), _find_generation_defaults(generation)
        )


def _resolve_folder(model: str) -> str:
    if not isinstance(model, (str, Path)) or not str(model):
        raise ValueError(f"model={short(model)}: must be a folder's path or a Hugging Face Hub id")
    try:
        folder = Path(model).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError, ValueError):  # the path is too long, has a null character, or is another user's
        is_folder = is_file = False
    if is_folder:
        return str(folder)
    if is_file:
        raise ValueError(f"model={str(model)!r}: is a file; give the folder that holds the model's files")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        raise ValueError(
            f"model={str(model)!r}: no such folder, nor is it a Hugging Face Hub id such as 'Qwen/Qwen3-0.6B'"
        )
    try:
        return snapshot_download(str(model), allow_patterns=NEEDED_FILES)
    except Exception as error:
        raise ValueError(
            f"model={str(model)!r}: no such folder, and the Hugging Face Hub did not provide it: {error}"
        ) from error


def _read_config(folder: str) -> PretrainedConfig:
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"model={folder!r}: the folder has no config.json, so it is no Hugging Face model")
    try:
        architectures = json.loads(file.read_text()).get("architectures") or []
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its config.json: {error}") from error
    check_architectures(architectures)  # first: transformers may not know it, and cannot say what we support
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its config.json: {error}") from error


def _read_generation_config(folder: str) -> dict[str, Any]:
    """Read the file itself: transformers would add its own defaults, which are not the checkpoint's."""
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its generation_config.json: {error}") from error


def _find_generation_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        ELSEWHERE.get(name, name): generation[name] for name in GENERATION_SETTINGS if generation.get(name) is not None
    }
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _find_eos_token_ids(folder: str, hf_config: PretrainedConfig, generation: dict[str, Any]) -> frozenset[int]:
    """Collect all end-of-sequence ids but those outside the vocabulary, such as a -1 that stands for none."""
    text_config = hf_config.get_text_config()
    ids: set[int] = set()
    for source in (hf_config.to_dict(), text_config.to_dict(), generation):
        eos = source.get("eos_token_id")
        found = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if any(as_int(token_id) is None for token_id in found):
            raise ValueError(
                f"model={folder!r}: eos_token_id={eos!r} in its configs: must be an integer or a list of them"
            )
        ids.update(found)
    return frozenset(token_id for token_id in ids if 0 <= token_id < text_config.vocab_size)
