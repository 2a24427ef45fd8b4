"""The table of formats: what a checkpoint's config may say, and what the option `quantization` may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nanoinfer.checks import short
from nanoinfer.hub import CONVERT
from nanoinfer.weights.bitsandbytes.matrix import BLOCK
from nanoinfer.weights.formats.bitsandbytes import read_bitsandbytes
from nanoinfer.weights.formats.configs.compressed_tensors import read_compressed
from nanoinfer.weights.formats.configs.gptq import read_auto_round, read_awq, read_gptq
from nanoinfer.weights.formats.configs.modelopt import read_modelopt
from nanoinfer.weights.formats.configs.settings import check_known, names_in
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import ALL, KEPT, PLAIN_FORMATS, Formats, all_in
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.reading import read_fp8
from nanoinfer.weights.formats.gguf import read_gguf
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layout import GROUP, Layout
from nanoinfer.weights.formats.groups.layouts import GPT_OSS, MXFP4_GROUP
from nanoinfer.weights.formats.groups.reading import beginning
from nanoinfer.weights.formats.plain.format import PLAIN

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GPT_OSS_EXPERTS = r"re:.*\.experts\b"


def _read_gpt_oss(config: Mapping[str, Any]) -> Formats:
    """Read the config of gpt-oss, whose experts alone are quantized; raises ValueError, naming what is unknown."""
    check_known(config, ("modules_to_not_convert", "dequantize"))
    ignored = tuple(map(beginning, names_in(config, "modules_to_not_convert")))
    return Formats(((ignored, PLAIN), ((GPT_OSS_EXPERTS,), GroupFormat("MXFP4", GPT_OSS))))


# By the quant_method of a quantization_config: what reads it, and raises ValueError, naming the setting, for what is
# not supported.
READERS: dict[str, Callable[[Mapping[str, Any]], Formats]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "mxfp4": _read_gpt_oss,
    "bitsandbytes": read_bitsandbytes,
    "gguf": read_gguf,  # of a file, which gguf.modules says
}

INT8 = GroupFormat("int8", Layout("int8"))
INT4 = GroupFormat("int4", Layout("int4", group=GROUP, zeros=True))
MXFP4 = GroupFormat("MXFP4", Layout("e2m1", group=MXFP4_GROUP, scales=torch.uint8))
NF4 = GroupFormat("NF4", Layout("nf4", group=BLOCK, scales=torch.float32))
# Attention, and what a recurrence has in its place, which bear less noise than MLPs.
ATTENTION = r"re:.*\b(self|linear)_attn\."


def _in_four_bits(format: Format) -> Formats:
    """Return the formats of a model whose matrices have one of four bits, but for attention."""
    return Formats(((KEPT, PLAIN), ((ATTENTION,), INT8), ((ALL,), format)))


# By the option's value: the formats of a model whose matrices are quantized as they load.
ON_THE_FLY: dict[str, Formats] = {
    "fp8": all_in(Fp8Format()),
    "int4": _in_four_bits(INT4),
    "int8": all_in(INT8),
    "mxfp4": _in_four_bits(MXFP4),
    "nf4": all_in(NF4),
}


def read_formats(config: PretrainedConfig) -> Formats:
    """Return the formats of a checkpoint's matrices; raises ValueError, naming it, for one that is not supported."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return PLAIN_FORMATS
    own = own if isinstance(own, dict) else own.to_dict()
    method = own.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise ValueError(
            f"model: quantization_config={short(own)} in its config is not supported; supported are"
            f" {', '.join(map(repr, READERS))}; {CONVERT}"
        )
    formats = READERS[method](own)
    formats.check_patterns()
    return formats


def quantized_as_loaded(formats: Formats, quantization: str) -> Formats:
    """Return what matrices of these formats have if they are quantized as they load.

    quantization: a name in ON_THE_FLY. Matrices that a checkpoint stores in that format keep the checkpoint's own.
    Raises ValueError for those that it stores in another one.
    """
    made = replace(ON_THE_FLY[quantization], rotations=formats.rotations)
    if not formats.quantized:
        return made
    names = list(dict.fromkeys(format.name for format in formats.quantized))
    own = [format.name for format in made.quantized]
    if not set(names) <= set(own) or own[-1] not in names:
        raise ValueError(
            f"quantization={quantization!r}: the checkpoint's matrices are in {' and '.join(names)} already; leave it"
            " out"
        )
    return formats
