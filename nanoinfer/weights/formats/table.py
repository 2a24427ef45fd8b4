"""The table of formats: what a checkpoint's config may say, and what the option `quantization` may ask for.

Experts in MXFP4 are read in 16 bits (weights/mxfp4.py), so that the model has no format of its own for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nanoinfer.checks import short
from nanoinfer.weights.formats.compressed_tensors import read_compressed
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, Formats
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.reading import fp8_formats, read_fp8

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# By the quant_method of a quantization_config: what reads it, and raises ValueError, naming the setting, for what is
# not supported.
READERS: dict[str, Callable[[Mapping[str, Any]], Formats]] = {
    "fp8": read_fp8,
    "mxfp4": lambda config: PLAIN_FORMATS,
    "compressed-tensors": read_compressed,
}
SUPPORTED = "supported are 'fp8', 'mxfp4', and 'compressed-tensors' of 8-bit floats ('float-quantized')"

# By the option's value: the formats of a model whose matrices are quantized as they load.
ON_THE_FLY: dict[str, Formats] = {"fp8": fp8_formats(Fp8Format())}


def read_formats(config: PretrainedConfig) -> Formats:
    """Return the formats of a checkpoint's matrices; raises ValueError, naming it, for one that is not supported."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return PLAIN_FORMATS
    own = own if isinstance(own, dict) else own.to_dict()
    method = own.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise ValueError(f"model: quantization_config={short(own)} in its config is not supported; {SUPPORTED}")
    return READERS[method](own)


def quantized_as_loaded(formats: Formats, quantization: str) -> Formats:
    """Return what matrices of these formats have if they are quantized as they load.

    quantization: a name in ON_THE_FLY. Matrices that a checkpoint stores in that format keep the checkpoint's own.
    Raises ValueError for those that it stores in another one.
    """
    made = ON_THE_FLY[quantization]
    if not formats.quantized:
        return made
    names = [format.name for format in formats.quantized]
    if names != [format.name for format in made.quantized]:
        raise ValueError(
            f"quantization={quantization!r}: the checkpoint's matrices are in {' and '.join(names)} already; leave it"
            " out"
        )
    return formats
