"""Kernels compiled for cards that need not be there: they fit a card's shared memory and its registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from cards import CARDS
from launches import GROUPINGS, LAUNCHES, MAKES_WAY
from triton import knobs
from triton.backends import backends

from nanoinfer.kernels.fp8 import HAS_FP8

SCRIPT = Path(__file__).parent / "cases" / "card_compiler.py"
WIDE_TYPES = "torch.float32", "tiny"  # how names of launches in float32 end
WIDEST = 16  # bytes that a thread copies at once
IN_SUMS = "q4_k, qkv of 8", "q5_k, qkv of 8"  # minima multiply sums of few vectors: both are too few for wide copies
L1_BYTES = 48 << 10  # of shared memory, with which a program leaves its successor the L1 cache
LIKE_OTHERS = "RTX 3090"  # it has the instructions of an A100 and the shared memory of an RTX 4090
SPILLED = {  # bytes of an H100's thread that found no register, at most, by Triton 3.6 or 3.9; of all launches, or one
    "_decode_kernel": 24,
    "_expand_kernel": 36,  # in float32, of rank 128
    "_delta_rows_kernel": 8,
    "_go_through_kernel": 172,
    "_group_kernel": 20,
    "_meet_kernel": 408,  # 60 queries and heads, 64 at most 192
    "_paged_decode_kernel": 20,  # heads of 256, guesses and shared prefixes, by Triton 3.9; others at most 16
    "_paged_prefill_kernel": 40,
    "_prefill_kernel": 1264,  # in order, with heads of 256
    "_prefix_kernel": 640,  # heads of 512 in FP8
    "_norm_kernel": 16,
    "_shared_kernel": 416,  # as many
    "_shrink_kernel": 20,  # in float32
    "_tiles_kernel: fp8 of 4000 without gates": 16,
    "_tiles_kernel: int4 g64 zeros of 4000 in torch.bfloat16": 12,  # by Triton 3.9
    "_tiles_kernel: int4 g64 zeros of 4000 without gates": 32,
    "_tiles_kernel: int4, experts of 4000 with adapters": 44,
    "_tiles_kernel: int4 g128, down of 300 in torch.bfloat16": 20,
    "_tiles_kernel: int4 g32, down of 300 in torch.bfloat16": 60,
    "_tiles_kernel: int4 g64 zeros, down of 300 in torch.bfloat16": 368,
    "_tiles_kernel: int4 rows, down of 300 in torch.bfloat16": 20,
    "_tiles_kernel: mxfp4, down of 300 in torch.bfloat16": 48,
    "_tiles_kernel: mxfp4, down of 300 in torch.float16": 68,
    "_tiles_kernel: fp4, down of 300 in torch.bfloat16": 80,
    "_tiles_kernel: nf4, down of 300 in torch.bfloat16": 80,
    "_tiles_kernel: nvfp4 of 4000 in torch.float32": 24,
    "_tiles_kernel: plain of 200 in torch.float32": 8,
    "_tiles_kernel: q4_k of 4000 in torch.bfloat16": 8,
    "_tiles_kernel: q6_k of 4000 in torch.bfloat16": 24,
    "_tiles_kernel: q6_k, down of 300 in torch.bfloat16": 24,
    "_tiles_kernel: plain of 300 in torch.float32, in order": 16,
    "_mamba_rows_kernel": 84,  # of 256 numbers a state's input
    "_walk_delta_kernel": 20,  # OLMo Hybrid
    "_walk_mamba_kernel": 232,  # of 256 numbers a state's input; of 128: 104
    "delta_guesses_kernel": 540,  # OLMo Hybrid, by Triton 3.9; by 3.6 420
    "look_within_kernel: Mamba2 in float32": 1564,
    "mamba_guesses_kernel": 1300,  # of 256 numbers a state's input; of 128: 108
    "walk_stretch_kernel": 356,  # of 256 numbers a state's input; of 128: 128
    "walk_stretch_kernel: Mamba2 in float32": 2844,  # by Triton 3.9; by 3.6 748
}
SPILLED_ELSEWHERE = SPILLED | {  # most on an RTX 5090; of these cards' tensor cores, only an H100's read shared memory
    "_go_through_kernel": 1284,
    "_look_within_kernel": 348,
    "_look_within_kernel: delta rule of OLMo Hybrid, is_prefill=True": 352,
    "_paged_decode_kernel": 88,
    "_tiles_kernel: plain of 4000 in torch.bfloat16": 188,
    "walk_stretch_kernel": 456,
    "walk_stretch_kernel: Mamba2 in float32": 972,
}

Ask = Callable[[str, list[str], list[str]], dict[str, Any]]  # as Compiler.compile


def lacks() -> str:
    """Return what this machine lacks for compiling; "": nothing."""
    if "nvidia" not in backends:
        return "this Triton compiles for no NVIDIA GPU"
    try:
        return "" if knobs.nvidia.ptxas.path else "there is no ptxas"
    except RuntimeError as error:
        return str(error)


def cases() -> Iterator[Any]:
    """Yield for each case a card, rooms, and those of their launches that are compiled, as Launch.often says."""
    for card in list(CARDS)[1:]:
        yield pytest.param(card, list(LAUNCHES), ["always"], id=card)
        if card != LIKE_OTHERS:
            yield pytest.param(card, list(LAUNCHES), ["often"], id=f"{card}, more", marks=pytest.mark.whole)
    for room in LAUNCHES:
        yield pytest.param("H100", [room], ["always", "often"], id=f"H100, {room}")
        yield pytest.param("H100", [room], ["seldom"], id=f"H100, more of {room}", marks=pytest.mark.whole)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Ask a process that compiles."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "TRITON_DISABLE_LINE_INFO": "1",  # of no use here
    }
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, SCRIPT], env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(*question: object) -> dict[str, Any]:
            print(json.dumps(question), file=requests, flush=True)
            answer = answers.readline()
            assert answer, f"the process that compiles has ended with {process.wait()}"
            return dict(json.loads(answer))

        yield ask
        process.kill()  # it has nothing to keep, and would end for seconds


@pytest.mark.skipif(bool(lacks()), reason=lacks())
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("card", "rooms", "often"), list(cases()))
def test_kernels_fit(card: str, rooms: list[str], often: list[str], ask: Ask) -> None:
    answer, most = ask(card, rooms, often), SPILLED if card == "H100" else SPILLED_ELSEWHERE
    kernels, errors = answer["kernels"], answer["errors"]
    if CARDS[card].capability < HAS_FP8:
        errors = {launch: error for launch, error in errors.items() if not is_refusal(error)}
    assert not errors
    assert kernels
    shared_bytes = CARDS[card].shared_bytes
    assert not [one for one in kernels if one["shared"] > shared_bytes or one["spilled"] > allowed(one, most)]
    in_sums = [one for one in kernels if one["launch"].startswith(IN_SUMS)]
    tiles = [one for one in kernels if one["name"] == "_tiles_kernel" and one not in in_sums]
    assert all(one["narrowest"] == WIDEST for one in tiles)
    if card == "H100":  # numbers of few bits go from registers to a tensor core, as long as they have 16 there
        in_groups = [one for one in kernels if one["launch"].startswith(tuple(GROUPINGS)) and one not in in_sums]
        assert not [one for one in in_groups if one["moved"] and not one["launch"].endswith(WIDE_TYPES)]
    assert all(one["shared"] <= L1_BYTES for one in kernels if one["launch"].startswith(MAKES_WAY))


def allowed(kernel: dict[str, Any], most: dict[str, int]) -> int:
    """Return how many bytes may find no register: those of a kernel's launch, or of all its launches."""
    name = kernel["name"]
    return most.get(f"{name}: {kernel['launch']}", most.get(name, 0))


def is_refusal(error: str) -> bool:
    """Return whether a user would be told that a GPU lacks FP8."""
    return error.startswith("ValueError: ") and "8.9" in error
