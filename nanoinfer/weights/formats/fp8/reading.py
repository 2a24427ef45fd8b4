"""Reads which matrices of a checkpoint are in FP8, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.weights.formats.configs.settings import check_known, names_in
from nanoinfer.weights.formats.formats import Formats, all_in
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.shards import ROWS_TOGETHER

READ = (
    "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers",
    "dequantize",  # whether transformers computes so
)  # fmt: skip
IDLE = {  # how activations, keys and values are rounded, and the numbers of scales, which tensors tell
    "activation_scheme": ("dynamic", "static"),
    "kv_cache_scheme": ("static",),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}


def read_fp8(config: Mapping[str, Any]) -> Formats:
    """Read the config of Qwen and DeepSeek, whose blocks have scales, or that of AutoFP8, whose matrices have one.

    Raises ValueError, naming the setting, for one that is not supported.
    """
    check_known(config, READ, IDLE)
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"model: quantization_config has fmt={config['fmt']!r}: must be 'e4m3'")
    ignored = names_in(config, "modules_to_not_convert") + names_in(config, "ignored_layers")
    block = config.get("weight_block_size")
    if block is None:
        return all_in(Fp8Format((None, None), "weight_scale"), ignored)
    return all_in(Fp8Format(read_block("weight_block_size", block), "weight_scale_inv"), ignored)


def read_block(name: str, block: Any) -> tuple[int, int]:
    """Return a block's height and width; raises ValueError, naming the setting, if it is no such block."""
    is_pair = isinstance(block, (list, tuple)) and len(block) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 for size in block) or ROWS_TOGETHER % block[0]:
        raise ValueError(
            f"model: quantization_config has {name}={block!r}: must be two integers above 0, the first a divisor of"
            f" {ROWS_TOGETHER}"
        )
    return block[0], block[1]
