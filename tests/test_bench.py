"""bench.py and example.py, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import bench


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_default_workload_is_nano_vllms() -> None:
    work = bench.Workload.nano(256, 100, 1024, vocab_size=151936)
    assert (work.tokens_in, work.tokens_out) == (142_827, 133_966)
    assert work.prompts[0][:3] == [6311, 6890, 663]


def test_no_repeat_finds_the_last_ones_prefixes_cached() -> None:
    work = bench.Workload.nano(4, 10, 20, vocab_size=100)
    first, second = work.repeat(0, 100), work.repeat(1, 100)
    assert first == work.prompts
    assert all(a != b for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    assert max(max(prompt) for prompt in second) < 100


def test_the_floor_counts_what_must_be_read_and_computed() -> None:
    """One prompt of 3 tokens and 3 tokens out: two decode steps, over contexts of 4 and 5 tokens."""

    class Shape:
        hidden_size, intermediate_size, num_hidden_layers, vocab_size = 8, 16, 2, 100
        num_attention_heads, num_key_value_heads, head_dim = 4, 2, 4

    layer = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16  # q, k and v, o, MLP
    floor = bench.Floor.of(bench.Workload([[1, 2, 3]], [3]), Shape, max_num_seqs=8, itemsize=2)
    assert floor.decode_bytes == 2 * (2 * layer + 800) * 2 + (4 + 5) * (2 * 2 * 8 * 2)
    assert floor.prefill_flops == 2 * 2 * layer * 3 + 2 * 800 + 2 * 2 * 16 * 9
    assert floor.seconds(1e6, 2e6, 4) == pytest.approx((floor.decode_bytes / 1e6 + floor.prefill_flops / 2e6) / 4)


def test_too_few_rows_cost_more_steps() -> None:
    class Shape:
        hidden_size, intermediate_size, num_hidden_layers, vocab_size = 8, 16, 2, 100
        num_attention_heads, num_key_value_heads, head_dim = 4, 2, 4

    work = bench.Workload([[1]] * 8, [11] * 8)
    few, many = (bench.Floor.of(work, Shape, rows, itemsize=2).decode_bytes for rows in (2, 8))
    layer_bytes = (2 * (8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16) + 800) * 2
    assert few - many == (40 - 10) * layer_bytes


def test_random_weights_and_json(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    text = run(
        "bench.py", "--config", "tiny", "--num-seqs", "8", "--min-len", "4", "--max-len", "12", "--repeats", "3",
        "--device", "cpu", "--json", str(file),
    )  # fmt: skip
    figures = json.loads(file.read_text())
    assert {
        "config", "workload", "device", "num_seqs", "tokens_in", "tokens_out", "startup_seconds", "repeats", "seconds",
        "tokens_per_second", "floor_seconds", "fraction_of_floor", "versions",
    } <= set(figures)  # fmt: skip
    assert len(figures["repeats"]) == 3
    assert figures["seconds"] == sorted(figures["repeats"])[1]
    assert figures["tokens_per_second"] == pytest.approx(figures["tokens_out"] / figures["seconds"])
    assert 0 < figures["fraction_of_floor"] < 1
    assert {"torch", "triton"} <= set(figures["versions"])
    assert "tok/s" in text
    assert "floor" in text


def test_compare_with_transformers() -> None:
    text = run(
        "bench.py", "--num-seqs", "4", "--min-len", "4", "--max-len", "12", "--device", "cpu",
        "--compare", "transformers",
    )  # fmt: skip
    assert "times as fast" in text


def test_a_senseless_command_is_refused_before_the_run() -> None:
    for arguments in (
        ["--num-seqs", "0"],
        ["--min-len", "5", "--max-len", "4"],
        ["--repeats", "0"],
        ["--json", "/no/such/folder/file"],
    ):
        with pytest.raises(SystemExit):
            bench.parse_args(arguments)


def test_the_example_recites() -> None:
    text = run("example.py", "--temperature", "0", "--max-tokens", "24")
    assert "through yonder window breaks?" in text
    assert "of our discontent" in text


def test_the_example_uses_another_models_chat_template(tmp_path: Path) -> None:
    import shutil

    from nanoinfer import BUNDLED_MODEL

    shutil.copytree(BUNDLED_MODEL, tmp_path / "other")
    text = run("example.py", "--model", str(tmp_path / "other"), "--max-tokens", "4")
    assert "USER:\nintroduce yourself" in text
    assert text.count("ROMEO:") == 2
