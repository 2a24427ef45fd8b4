"""Reads the quantization_config of a config.json: which matrices a checkpoint stores in FP8, and how.

Experts in MXFP4 are read in 16 bits (weights/mxfp4.py), so that the model has no format of its own for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.checks import short
from nanoinfer.weights.fp8_format import ROWS_TOGETHER, Fp8Format

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED = "supported are 'fp8', 'mxfp4', and 'compressed-tensors' of 8-bit floats ('float-quantized')"


def read_fp8(config: PretrainedConfig) -> Fp8Format | None:
    """Return the format of the checkpoint's matrices; None: they have the model's dtype once they are read.

    Raises ValueError, naming it, for one that is not supported.
    """
    own = getattr(config, "quantization_config", None)
    if own is None:
        return None
    own = own if isinstance(own, dict) else own.to_dict()
    method = own.get("quant_method")
    if method == "mxfp4":
        return None
    if method == "fp8":
        return _read_fp8(own)
    if method == "compressed-tensors":
        return _read_compressed(own)
    raise ValueError(f"model: quantization_config={short(own)} in its config is not supported; {SUPPORTED}")


def _read_fp8(own: dict[str, Any]) -> Fp8Format:
    """Read the config of Qwen and DeepSeek, whose blocks have scales, or that of AutoFP8, whose matrices have one."""
    if own.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"model: quantization_config has fmt={own['fmt']!r}: must be 'e4m3'")
    ignored = _ignored(own, "modules_to_not_convert", "ignored_layers")
    block = own.get("weight_block_size")
    if block is None:
        return Fp8Format((None, None), "weight_scale", ignored)
    return Fp8Format(_block("weight_block_size", block), "weight_scale_inv", ignored)


def _read_compressed(own: dict[str, Any]) -> Fp8Format | None:
    groups = list((own.get("config_groups") or {}).values())
    if not groups:
        return None  # only the KV cache is quantized
    if len(groups) > 1:
        raise ValueError(f"model: quantization_config has {len(groups)} config_groups: must be one")
    weights, targets = groups[0].get("weights") or {}, groups[0].get("targets")
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or targets != ["Linear"]:
        raise ValueError(
            f"model: quantization_config has weights={short(weights)} for targets={short(targets)}: must be 8-bit"
            " floats for ['Linear']"
        )
    strategy = weights.get("strategy")
    blocks: dict[Any, tuple[int | None, int | None]] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "block":
        blocks["block"] = _block("block_structure", weights.get("block_structure"))
    if strategy not in blocks:
        raise ValueError(
            f"model: quantization_config has strategy={strategy!r}: must be 'tensor', 'channel' or 'block'"
        )
    return Fp8Format(blocks[strategy], "weight_scale", _ignored(own, "ignore"))


def _ignored(own: dict[str, Any], *names: str) -> tuple[str, ...]:
    return tuple(entry for name in names for entry in own.get(name) or ())


def _block(name: str, block: Any) -> tuple[int, int]:
    is_pair = isinstance(block, (list, tuple)) and len(block) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 for size in block) or ROWS_TOGETHER % block[0]:
        raise ValueError(
            f"model: quantization_config has {name}={block!r}: must be two integers above 0, the first a divisor of"
            f" {ROWS_TOGETHER}"
        )
    return block[0], block[1]
