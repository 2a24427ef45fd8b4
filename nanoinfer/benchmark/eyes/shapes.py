"""The published shapes that see, by their names among bench.py's, but for the tiny one."""

from __future__ import annotations

from nanoinfer.benchmark.eyes.eyes import Eyes
from nanoinfer.benchmark.eyes.families import internvl3, qwen3_vl, smolvlm

EYES: dict[str, Eyes] = {
    "tiny-vl": qwen3_vl(64, 128, 2, 2, 64, [0]),
    "qwen3-vl-2b": qwen3_vl(1024, 4096, 24, 16, 2048, [5, 11, 17]),
    "qwen3-vl-8b": qwen3_vl(1152, 4304, 27, 16, 4096, [8, 16, 24]),
    "internvl3-8b": internvl3(1024, 4096, 24, 16, 3584),
    "smolvlm-2b": smolvlm(1152, 4304, 27, 16, 2048),
}
