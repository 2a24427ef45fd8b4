"""Checkpoint: reads a model from its folder, all but its weights."""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoinfer.checks import as_int, check_choice, check_settings
from nanoinfer.generation_config import read_generation_config
from nanoinfer.gguf.config import config_of
from nanoinfer.gguf.header import GGUF, is_gguf, read_header
from nanoinfer.gguf.tensors.modules import quantization_of
from nanoinfer.hub import reason_of
from nanoinfer.models import check_architectures, describe
from nanoinfer.models.description import EMBEDDING, HEAD, Description
from nanoinfer.models.ranks import check_ranks
from nanoinfer.models.reading.classes import ALL_CLASSIFIERS, READERS, read_only
from nanoinfer.pooling.files import makes_embeddings
from nanoinfer.process.collector import no_collection
from nanoinfer.weights.bitsandbytes.files import modules_of
from nanoinfer.weights.formats.bitsandbytes import MODULES
from nanoinfer.weights.formats.table import quantized_as_loaded
from nanoinfer.weights.safetensors_files import SafetensorsFiles
from nanoinfer.weights.sources import FileSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMED = {"kimi_k2": "deepseek_v3"}  # a config.json's model_type, if its own code alone knows it: transformers'
log = logging.getLogger("nanoinfer")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
GENERATE, POOLING = "generate", "pooling"  # what the option runner may ask for
MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """The settings that a checkpoint's own files give.

    folder: where they are, or the path of a GGUF file
    hf_config: config.json, as transformers reads it, or what a GGUF file's metadata say
    eos_token_ids: every end-of-sequence id that config.json or generation_config.json names
    generation_config: generation_config.json itself
    """

    folder: str
    hf_config: PretrainedConfig
    eos_token_ids: frozenset[int]
    generation_config: dict[str, Any]

    @classmethod
    def open(cls, folder: str, settings: str | None = None) -> Checkpoint:
        """Read a folder, or a GGUF file. Raises ValueError if a file is missing or cannot be read.

        settings: the folder of config.json and generation_config.json, if that is another one
        """
        where = settings or folder
        hf_config = _read_gguf_config(folder) if is_gguf(where) else _read_config(where)
        if is_gguf(folder):
            hf_config.quantization_config = quantization_of(read_header(folder))
        else:
            _name_modules(folder, hf_config)
        generation = read_generation_config(where)
        ends = _find_eos_token_ids(where, hf_config, generation)
        return cls(folder, hf_config, ends, generation)

    def describe(self, runner: str, quantization: str | None, ranks: int, is_loaded: bool, sees: bool) -> Description:
        """Describe the model as these options have it; raises ValueError if it cannot be so.

        is_loaded: the weights come from the folder; sees: the LLM has the tower
        """
        model = describe(self.hf_config)
        if (labels := self._count_labels(runner)) is not None:
            model = read_only(model, labels)
        elif model.is_encoder:
            raise ValueError(
                "model: use_bidirectional_attention=True in its config: must be False to generate; with"
                " runner='pooling', its texts are read"
            )
        model = replace(model, has_tower=True) if sees else model.without_media()
        if quantization is not None:
            model = replace(model, formats=quantized_as_loaded(model.formats, quantization))
            model.check_formats(f"quantization={quantization!r}")
        check_ranks(model, ranks)
        if model.tied and is_loaded:
            # Some configs call a head tied that the files hold as another tensor. Like transformers, use that tensor.
            own_head = FileSource(self.folder, model.beside).has_own_head(f"{HEAD}.weight", f"{EMBEDDING}.weight")
            model = replace(model, tied=not own_head)
        if model.tied and model.formats.rotates(HEAD):
            raise ValueError(
                f"model: quantization_config has a transform_config that rotates {HEAD}: the checkpoint must have a"
                f" {HEAD}.weight beside its {EMBEDDING}.weight"
            )
        return model

    @property
    def has_whole_images(self) -> bool:
        """Whether each token of an image sees the whole image; raises ValueError as `describe` does."""
        return any(describe(self.hf_config).whole_images)

    def _count_labels(self, runner: str) -> int | None:
        """Return what Description has as labels. Raises ValueError if the model cannot generate, and is to."""
        (name, *_) = self.hf_config.architectures or [""]
        if name not in READERS:
            only_reads = runner == POOLING or (runner != GENERATE and makes_embeddings(self.folder))
            return 0 if only_reads else None
        if runner == GENERATE:
            raise ValueError(f"runner={runner!r}: must be left out: {name} has no head that gives logits of tokens")
        return self.hf_config.num_labels if name in ALL_CLASSIFIERS else 0

    def resolve_dtype(self, dtype: str | torch.dtype, device: str) -> str:
        """Return the name of the dtype that the option asks for; raises ValueError if there is none."""
        name = check_choice("dtype", dtype_name(dtype), ["auto", *DTYPES])
        if device == "cpu" and name == "bfloat16" and not _multiplies_bfloat16():
            log.warning("dtype='bfloat16': this CPU has no AVX512-BF16 and no AMX, and reads prompts faster in float32")
        if name != "auto":
            return name
        if device == "cpu":
            return "float32"
        stored = self.hf_config.dtype or self.hf_config.get_text_config().dtype or torch.float32
        name = dtype_name(stored)
        if name not in DTYPES:
            raise ValueError(f"dtype='auto': the checkpoint's is {name}; choose one of {', '.join(DTYPES)}")
        return name


def _multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16; True where nobody knows."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return torch's name of a dtype; a name stays as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def _read_config(folder: str) -> PretrainedConfig:
    file = Path(folder) / "config.json"
    if not file.is_file():
        named = sorted(other.name for other in Path(folder).glob(f"*{GGUF}"))
        other = f"; for its GGUF file, give gguf_file={named[0]!r}" if named else ", so it is no Hugging Face model"
        raise ValueError(f"model={folder!r}: the folder has no config.json{other}")
    try:
        settings = json.loads(file.read_text("utf-8"))
        architectures = settings.get("architectures") or []
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its config.json: {error}") from error
    check_architectures(architectures)  # first: transformers may not know it, and cannot say what we support
    with no_collection():
        from transformers import AutoConfig  # here, for ranks need not import it

    try:
        if (known := RENAMED.get(settings.get("model_type"))) is None:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(**{**settings, "model_type": known})
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its config.json: {reason_of(error)}") from error
    if getattr(config, "quantization_config", None) is None and (own := _read_modelopt_config(folder)) is not None:
        config.quantization_config = own
    return config


def _read_gguf_config(path: str) -> PretrainedConfig:
    """Return the config that a GGUF file's metadata say."""
    with no_collection():
        from transformers import AutoConfig  # here, for ranks need not import it

    try:
        return AutoConfig.for_model(**config_of(read_header(path)))
    except Exception as error:
        raise ValueError(f"model={path!r}: cannot read its metadata: {error}") from error


def _read_modelopt_config(folder: str) -> dict[str, Any] | None:
    """Return what older checkpoints of ModelOpt have in a file of their own; None: there is no such file."""
    file = Path(folder) / MODELOPT_FILE
    if not file.is_file():
        return None
    try:
        settings = dict(json.loads(file.read_text("utf-8")))
        own = {"quant_method": "modelopt", **settings["quantization"]}
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its {MODELOPT_FILE}: {error!r}") from error
    check_settings(f"model={folder!r}: its {MODELOPT_FILE}", settings, ("producer", "quantization"))
    return own


def _name_modules(folder: str, config: PretrainedConfig) -> None:
    """Add to a quantization_config of bitsandbytes which modules of the files it holds for, if there are files."""
    own = getattr(config, "quantization_config", None)
    if not isinstance(own, dict) or own.get("quant_method") != "bitsandbytes":
        return
    if any(Path(folder).glob("*.safetensors")):
        modules = modules_of(SafetensorsFiles(folder, f"model={folder!r}").tensors())
        config.quantization_config = {**own, MODULES: modules}


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
