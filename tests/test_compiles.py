"""Kernels compiled for an H100, which need none: they fit its shared memory and its registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from launches import LAUNCHES, MAKES_WAY
from triton import knobs
from triton.backends import backends

H100 = Path(__file__).parent / "cases" / "h100.py"
SHARED_BYTES = 232_448  # that a program of an H100 can have
L1_BYTES = 48 << 10  # of shared memory, with which a program leaves its successor the L1 cache
SPILLED = {  # bytes of a thread that found no register, at most, by Triton 3.6 or 3.9
    "_decode_kernel": 24,
    "_delta_rows_kernel": 48,
    "_expand_kernel": 36,  # in float32, of rank 128
    "_expert_kernel": 48,
    "_go_through_kernel": 84,
    "_group_kernel": 20,
    "_group_tiles_kernel": 24,  # NVFP4 in float32
    "_group_wave_kernel": 380,  # more than 64 tokens, and groups of 32 or 64
    "_in_order_kernel": 16,
    "_paged_decode_kernel": 20,  # heads of 256, guesses and shared prefixes, by Triton 3.9; others at most 16
    "_paged_prefill_kernel": 40,
    "_prefill_kernel": 1264,  # in order, with heads of 256
    "_prefix_kernel": 640,  # heads of 512 in FP8
    "_rms_norm_kernel": 16,
    "_shrink_kernel": 20,  # in float32
}


def lacks() -> str:
    """Return what this machine lacks for compiling; "": nothing."""
    if "nvidia" not in backends:
        return "this Triton compiles for no NVIDIA GPU"
    try:
        return "" if knobs.nvidia.ptxas.path else "there is no ptxas"
    except RuntimeError as error:
        return str(error)


@pytest.mark.skipif(bool(lacks()), reason=lacks())
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("room", LAUNCHES)
def test_kernels_fit_an_h100(room: str, is_whole: bool, tmp_path: Path) -> None:
    command = [sys.executable, H100, room, *(["--whole"] if is_whole else [])]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    assert kernels
    unfit = [one for one in kernels if one["shared"] > SHARED_BYTES or one["spilled"] > SPILLED.get(one["kernel"], 0)]
    assert not unfit
    assert all(one["shared"] <= L1_BYTES for one in kernels if one["launch"].startswith(MAKES_WAY))
