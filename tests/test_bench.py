"""bench.py and example.py, run as a user runs them."""

from __future__ import annotations

import io
import json
import math
import random
import re
import resource
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import build
from cases.heads import QWEN
from conftest import alike, of_each_kind
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import bench
from example import QUESTIONS
from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.benchmark.eyes.families import internvl3, smolvlm
from nanoinfer.benchmark.eyes.shapes import EYES
from nanoinfer.benchmark.least_steps import StepSum, decode_steps
from nanoinfer.benchmark.output import status_line
from nanoinfer.benchmark.output.files import check_writable
from nanoinfer.benchmark.output.plot import binned_rate, plot
from nanoinfer.benchmark.output.status_line import StatusLine
from nanoinfer.benchmark.repeats import Repeat, count_steps
from nanoinfer.benchmark.speculation.repeating import Successors, let_head_agree, write_repeating_weights
from nanoinfer.benchmark.workloads import draw_length
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.drafting.drafter import RowTexts
from nanoinfer.engine.results.step_result import StepResult
from nanoinfer.kernels.experts.route import Routing
from nanoinfer.layers.delta import GatedDelta
from nanoinfer.layers.latent_attention import LatentSizes
from nanoinfer.layers.layer_inputs import LayerInputSizes
from nanoinfer.layers.mamba import Mamba2
from nanoinfer.layers.mamba_beside_attention import BesideAttention
from nanoinfer.media.tower.grids import derive
from nanoinfer.models import describe
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.description import Description, NoMixer
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.experts import MoEConfig
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, all_in
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.plain.format import PLAIN


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark measures of the machine, for tests of what else it does."""
    for name, value in (("measure_bandwidth", 1e11), ("measure_flops", 1e12), ("measure_rates", {})):
        monkeypatch.setattr(bench, name, lambda *_, value=value: value)


def test_weights_times_updates_and_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.json"
    command = "bench.py --config tiny --device cpu --weights --repeats 2 --json"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(file)])
    bench.main()
    printed = capsys.readouterr().out
    rows = {row["what"]: row for row in json.loads(file.read_text())["weights"]}
    assert {what.split(",")[0] for what in rows} == {
        "sleep", "wake_up", "update_weights", "load_weights from the page cache",
    }  # fmt: skip
    (update,) = (row for what, row in rows.items() if what.startswith("update_weights"))
    assert len(update["seconds"]) == 2
    assert update["num_bytes"] > 100_000
    assert all(what in printed for what in rows)


@pytest.mark.parametrize(
    ("name", "num_seqs", "tokens_in", "tokens_out", "longest"),
    [
        ("nano", 256, 142_827, 133_966, 2011),
        ("refill", 1024, 580_663, 583_802, 2004),
        ("tight", 256, 142_827, 133_966, 2011),
        ("stream", 1, 128, 512, 128 + 512),
        ("prefix", 256, 142_827 + 256 * 1024, 133_966, 1024 + 2011),
        ("long", 8, 8 * 32768, 8 * 256, 32768 + 256),
        ("chat", 1000, 222_867, 190_906, 2544),
        ("answers", 32, 32 * 128, 32 * 8192, 128 + 8192),
        ("embed", 10_000, 10_000 * 200, 0, 200),
        ("images", 256, 256 * 1090, 256 * 128, 1090 + 128),
        ("same-images", 256, 256 * 1090, 256 * 128, 1090 + 128),
        ("repeat", 1, 128, 512, 128 + 512),
        ("rollouts", 32, 32 * 512, 32 * 16 * 4096, 512 + 4096),
    ],
)
def test_the_workloads(name: str, num_seqs: int, tokens_in: int, tokens_out: int, longest: int) -> None:
    recipe = bench.WORKLOADS[name]
    work = recipe.draw(151936, EYES["qwen3-vl-2b"])
    assert len(work.prompts) == len(work.output_lens) == num_seqs
    assert (work.tokens_in, work.tokens_out) == (tokens_in, tokens_out)
    assert max(len(prompt) + out for prompt, out in zip(work.prompts, work.output_lens, strict=True)) == longest
    assert recipe.max_model_len == {"long": 33024, "rollouts": 4608, "answers": 8320}.get(name, 4096) >= longest
    assert recipe.max_num_seqs == (256 if name == "refill" else 512)


def test_lengths_of_chats_have_their_means_and_half_are_shorter_than_six_tenths_of_these() -> None:
    source = random.Random(0)
    lens = sorted(draw_length(source, (1, 1_000_000), 215) for _ in range(100_000))
    assert sum(lens) / len(lens) == pytest.approx(215, rel=0.02)
    assert lens[50_000] == pytest.approx(215 * math.exp(-1 / 2), rel=0.02)
    assert {draw_length(source, (4, 8), 215) for _ in range(100)} <= set(range(4, 9))


def test_nanos_requests_are_nano_vllms_and_prefix_has_them_behind_its_prefix() -> None:
    nano, prefix = (bench.WORKLOADS[name].draw(vocab_size=151936) for name in ("nano", "prefix"))
    assert nano.prompts[0][:3] == [6311, 6890, 663]
    assert prefix.output_lens == nano.output_lens
    assert [prompt[1024:] for prompt in prefix.prompts] == nano.prompts
    assert len({tuple(prompt[:1024]) for prompt in prefix.prompts}) == 1


@pytest.mark.parametrize("name", [name for name, recipe in bench.WORKLOADS.items() if not recipe.images])
def test_every_repeat_has_other_tokens(name: str) -> None:
    work = replace(bench.WORKLOADS[name], num_seqs=4).draw(vocab_size=100)
    first, second = work.repeat(0, 100), work.repeat(1, 100)
    assert first == work.prompts
    assert all(a != b for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    assert max(max(prompt) for prompt in second) < 100


def test_samples_of_rollouts_end_by_chance() -> None:
    work = bench.WORKLOADS["rollouts"].draw(vocab_size=151936)
    assert len(set(work.stop_ids)) / 151936 == pytest.approx(1 / 512, rel=0.01)
    lens = [17 * prompt + sample for prompt in range(32) for sample in range(16)]
    ended = work.as_it_ended(lens)
    assert (ended.tokens_out, ended.samples, len(ended.prompts)) == (sum(lens), 1, 512)
    for number, (prompt, out) in enumerate(zip(ended.prompts, ended.output_lens, strict=True)):
        assert (prompt, out) == (work.prompts[number % 32], 17 * (number % 32) + number // 32)
    nano = bench.WORKLOADS["nano"].draw(vocab_size=151936)
    assert nano.as_it_ended(nano.output_lens) is nano


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_text_repeats_at_the_rate_that_a_workload_asks_for(
    rate: float, tmp_path: Path, make_llm: Callable[..., LLM]
) -> None:
    bench.write_config("tiny", str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    llm = make_llm(str(tmp_path), device="cpu", load_format="dummy", max_num_seqs=4)
    write_repeating_weights(llm, rate)
    params = SamplingParams(max_tokens=250, temperature=0.6, ignore_eos=True)
    outputs = llm.generate([[token] for token in (5, 600, 1200, 1800)], params, use_tqdm=False)
    held = [after == (token + 1) % 2048 for out in outputs for token, after in pairwise(out.outputs[0].token_ids)]
    assert sum(held) / len(held) == pytest.approx(rate, abs=0.06)


def test_a_prediction_head_agrees_with_such_weights(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """One of random weights never does."""
    case = QWEN["qwen3.5"]
    build(replace(case, settings={**case.settings, "vocab_size": 2048, "hidden_size": 64}), tmp_path)
    options = {"device": "cpu", "load_format": "dummy", "max_num_seqs": 4, "speculation": "mtp", "max_guesses": 1}
    llm = make_llm(str(tmp_path), **options, max_model_len=128)
    write_repeating_weights(llm, 0.7)
    params, shares = SamplingParams(max_tokens=40, temperature=0.6, ignore_eos=True), list[float]()
    for agrees in (False, True):
        if agrees:
            let_head_agree(llm)
        llm.reset_stats()
        llm.generate([[token] for token in (5, 600, 1200, 1800)], params, use_tqdm=False)
        shares.append(llm.stats().num_accepted_tokens / llm.stats().num_proposed_tokens)
    assert shares[0] < 0.1
    assert shares[1] > 0.9


def test_the_drafter_of_the_benchmark_guesses_successors() -> None:
    tokens = torch.tensor([[7, 2047, 0], [3, 4, 5], [0, 0, 0]], dtype=torch.int32)
    ints = partial(torch.tensor, dtype=torch.int32)
    rows = RowTexts(tokens, ints([2, 3, 0]), ints([[-1] * 16]), ints([1, 0, -1]), ints([-1, -1, -1]))
    guesses, counts = Successors(2048).propose(rows, 3)
    assert guesses[:2].tolist() == [[6, 7, 8], [0, 1, 2]]
    assert counts.tolist() == [3, 3, 0]


@pytest.mark.parametrize(
    "command",
    [
        "--workload repeat",
        "--workload repeat --config 0.6b",
        "--speculation successors",
        "--speculation successors --config 8b",
    ],
)
def test_text_repeats_where_there_is_a_head_to_change(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(command.split())
    assert "such as 8b" in capsys.readouterr().err


@pytest.fixture
def tiny(tmp_path: Path, make_llm: Callable[..., LLM]) -> LLM:
    """An engine with a single row, so that a request starts only once the previous request's blocks are cached."""
    bench.write_config("tiny", str(tmp_path))
    return make_llm(str(tmp_path), device="cpu", load_format="dummy", max_num_seqs=1)


@pytest.mark.parametrize(("name", "num_shared"), [("nano", 0), ("prefix", 1024)])
def test_prefixes_are_cached_within_a_repeat_and_not_beyond_it(tiny: LLM, name: str, num_shared: int) -> None:
    recipe = replace(bench.WORKLOADS[name], num_seqs=3, prompt_lens=(257, 300), output_lens=(1, 3))
    work = recipe.draw(vocab_size=2048)
    for index in range(3):
        steps = bench.time_repeat(tiny, work, index, bench.SAMPLING, StatusLine()).steps
        assert sum(step.num_prefill_tokens for step in steps) == work.tokens_in - 2 * num_shared


def test_the_engine_tells_its_observer_what_each_step_found(tiny: LLM) -> None:
    work = bench.Workload([[1] * 300, [2] * 3], [3, 2])
    repeat = bench.time_repeat(tiny, work, 0, bench.SAMPLING, StatusLine())
    blocks = len(tiny.engine.scheduler.block_manager.blocks)
    assert [(step.num_prefill_tokens, step.num_decode_tokens) for step in repeat.steps] == [
        (300, 0), (0, 1), (0, 1), (3, 0), (0, 1),
    ]  # fmt: skip
    assert [step.num_running for step in repeat.steps] == [1] * 5
    assert [step.num_waiting for step in repeat.steps] == [1, 1, 1, 0, 0]
    assert [step.blocks_used * blocks for step in repeat.steps] == pytest.approx([19, 19, 19, 1, 1])
    times = [step.ready_at for step in repeat.steps]
    assert repeat.start < times[0]
    assert times == sorted(times)
    assert times[-1] <= repeat.start + repeat.seconds


def test_there_are_as_many_rows_as_the_plan_of_the_memory_says(tiny: LLM) -> None:
    for rows in (3, 8):
        llm = SimpleNamespace(config=tiny.config, memory=replace(tiny.memory, rows=rows))
        assert bench.limits_of(llm).rows == rows


class WeightShape:
    hidden_size, intermediate_size, num_layers, vocab_size = 8, 16, 2, 100
    num_heads, output_gate, experts, is_gated, is_encoder = 4, False, None, True, False
    mixers = attention_windows = (None, None)
    attending = (KVHeads(2, 4),) * 2
    mlp_sizes, layer_inputs, latent = (16, 16), None, None
    names, formats, head_format, generates = ModuleNames(), PLAIN_FORMATS, PLAIN, True
    expert_format = classmethod(Description.expert_format)


LAYER = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16  # q, k and v, o, MLP
HEAD = 100 * 8
MATRICES = 2 * LAYER + HEAD
KV_BYTES = 2 * 2 * 8 * 2  # of a token: two layers, keys and values, two heads of four numbers, in two bytes
MACHINE = bench.Machine(bandwidth=1000, rate=4000)
AMPLE = bench.Limits(rows=8, tokens=1000, blocks=1000, groups=alike(4).groups)


class Sparse(WeightShape):
    """One of two layers has 4 experts of 6, of which a token uses 1, and a shared one of 5."""

    experts = MoEConfig((True, False), count=4, size=6, routing=Routing(used=1), shared_size=5)
    mlp_sizes = (0, 16)


EXPERT, ROUTER = 3 * 6 * 8, 4 * 8
EVERY = 2 * (LAYER - 3 * 8 * 16) + 3 * 8 * 16 + 3 * 5 * 8  # attention, the MLP, the shared expert


def with_fp8(model: type) -> type:
    return type("InFp8", (model,), {"formats": all_in(Fp8Format())})


def floor_of(
    work: bench.Workload, limits: bench.Limits = AMPLE, model: type = WeightShape, **sizes: int
) -> bench.Floor:
    return bench.Floor.of(work, model, limits, itemsize=2, **sizes)


def bytes_of(floor: bench.Floor) -> float:
    """All bytes that are read: the seconds of a device that computes in no time."""
    return floor.seconds(bench.Machine(1, math.inf))


def operations_of(floor: bench.Floor) -> float:
    """All operations: the seconds of a device that reads in no time."""
    return floor.seconds(bench.Machine(math.inf, 1))


def test_the_floor_counts_what_must_be_read_and_computed() -> None:
    """A prompt of 3 tokens gets 3 output tokens: there are two decode steps, over contexts of 4 and 5 tokens."""
    floor = floor_of(bench.Workload([[1, 2, 3]], [3]))
    assert bytes_of(floor) == (1 + 2) * MATRICES * 2 + (4 + 5) * KV_BYTES
    prompt = 2 * 2 * LAYER * 3 + 2 * HEAD + 2 * 2 * 16 * 9
    assert operations_of(floor) == prompt + 2 * 2 * MATRICES
    assert floor.seconds(bench.Machine(1e6, math.inf, 4)) == pytest.approx(bytes_of(floor) / 1e6 / 4)
    in_layers = 2 * 2 * LAYER * (3 + 2)
    in_fp8 = (operations_of(floor) - in_layers) / 2e6 + in_layers / 3e6
    floor = floor_of(bench.Workload([[1, 2, 3]], [3]), model=with_fp8(WeightShape))
    assert floor.seconds(bench.Machine(math.inf, 2e6, rates={Fp8Format(): 3e6})) == pytest.approx(in_fp8)


def test_with_prompts_beside_decode_steps_reading_and_computing_add_up_apart() -> None:
    floor = floor_of(bench.Workload([[1, 2, 3]], [3]))
    balanced = operations_of(floor) / bytes_of(floor)  # of a machine whose reading takes as long as its computing
    for rate in (0.5 * balanced, balanced, 2 * balanced):
        reading, computing = bytes_of(floor), operations_of(floor) / rate
        machine = bench.Machine(1, rate)
        assert floor.overlapped_seconds(machine) == pytest.approx(max(reading, computing))
        assert floor.overlapped_seconds(machine) <= floor.seconds(machine) <= reading + computing
    slow = bench.Machine(math.inf, math.inf, copying=10.0)
    assert floor.overlapped_seconds(slow) == floor.seconds(slow) == 10.0 * (2 + 1)


def test_the_floor_of_values_that_are_smaller_than_keys() -> None:
    """Values of two numbers, and keys of four: a layer's projections lose two numbers of each head and KV head."""
    small = type("Small", (WeightShape,), {"attending": (KVHeads(2, 4, value_dim=2),) * 2})
    floor = floor_of(bench.Workload([[1, 2, 3]], [3]), model=small)
    layer = LAYER - 8 * 2 * (4 + 2)
    assert bytes_of(floor) == (1 + 2) * (2 * layer + HEAD) * 2 + (4 + 5) * KV_BYTES * 3 / 4
    prompt = 2 * 2 * layer * 3 + 2 * HEAD + 2 * 2 * 16 * 9 * 3 / 4
    assert operations_of(floor) == prompt + 2 * 2 * (2 * layer + HEAD)


def test_the_floor_of_texts_that_are_read_has_no_logits_and_no_step_behind_their_prompts() -> None:
    reader = type("Reader", (WeightShape,), {"generates": False, "attention_windows": (None, 2)})
    floor = floor_of(bench.Workload([[1, 2, 3], [4, 5]], [0, 0]), model=reader)
    assert floor.decode_steps == 0
    assert bytes_of(floor) == 2 * LAYER * 2
    seen = 4 * 16 * (3 * 3 / 2 + 2 * 2 / 2 + 2 * (3 - 1) + 2 * (2 - 1))
    assert operations_of(floor) == 2 * 2 * LAYER * 5 + seen


def test_the_floor_counts_the_bytes_of_a_smaller_cache_and_of_smaller_matrices() -> None:
    work = bench.Workload([[1, 2, 3]], [3])
    assert bytes_of(floor_of(work, cache_itemsize=1)) == 3 * MATRICES * 2 + (4 + 5) * KV_BYTES / 2
    assert bytes_of(floor_of(work, model=with_fp8(WeightShape))) == 3 * (2 * LAYER + 2 * HEAD) + (4 + 5) * KV_BYTES
    sparse = floor_of(work, model=with_fp8(Sparse))  # a router is no smaller than the head
    reads = 4 * EXPERT * ((1 - 0.75**3) + 2 * (1 - 0.75))
    assert bytes_of(sparse) == pytest.approx(3 * (EVERY + 2 * ROUTER + 2 * HEAD) + reads + (4 + 5) * KV_BYTES)


# The device of these tests reads 1,000 bytes a second. At 4,000 operations a second, a matrix of two bytes a number
# takes as long to read as to multiply with 4 rows. The prompts have one token each, which attends to itself.
PROMPT_ATTENTION = 2 * 2 * 16 / 4000


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
def test_a_step_takes_the_longer_of_reading_and_multiplying(rows: int) -> None:
    """The prompts take a prefill step, and one decode step follows, in which each row reads two tokens."""
    floor = floor_of(bench.Workload([[1]] * rows, [2] * rows))
    step = MATRICES * 2 / 1000 if rows <= 4 else 2 * MATRICES * rows / 4000
    assert floor.seconds(MACHINE) == pytest.approx(2 * step + rows * (2 * KV_BYTES / 1000 + PROMPT_ATTENTION))


def test_each_steps_own_rows_decide_whether_it_reads_or_multiplies_longer() -> None:
    """8 rows, then 2: the longer of both sums would be less."""
    floor = floor_of(bench.Workload([[1]] * 8, [2] * 6 + [3] * 2))
    steps = 2 * (2 * MATRICES * 8 / 4000) + MATRICES * 2 / 1000
    keys = (8 * 2 + 2 * 3) * KV_BYTES / 1000
    assert floor.seconds(MACHINE) == pytest.approx(steps + keys + 8 * PROMPT_ATTENTION)


def test_matrices_in_fp8_are_read_in_one_byte_and_multiplied_at_their_own_rate() -> None:
    """At 6,000 operations a second, a matrix in one byte takes as long for 3 rows; the head, in two bytes, for 4."""
    floor = floor_of(bench.Workload([[1]] * 4, [2] * 4), model=with_fp8(WeightShape))
    step = 2 * 2 * LAYER * 4 / 6000 + HEAD * 2 / 1000
    expected = 2 * step + 4 * (2 * KV_BYTES / 1000 + PROMPT_ATTENTION)
    assert floor.seconds(bench.Machine(1000, 4000, rates={Fp8Format(): 6000})) == pytest.approx(expected)


def test_experts_are_read_by_all_rows_and_multiplied_by_some() -> None:
    """With 8 rows the other matrices are bound by arithmetic, and the experts, of which a row uses a quarter, are not.

    They would be with 16 rows.
    """
    for rows in (8, 16):
        floor = floor_of(bench.Workload([[1]] * rows, [2] * rows), replace(AMPLE, rows=16), Sparse)
        experts = 4 * EXPERT * (1 - 0.75**8) * 2 / 1000 if rows == 8 else 2 * EXPERT * 16 / 4000
        step = 2 * (EVERY + ROUTER + HEAD) * rows / 4000 + experts
        expected = 2 * step + rows * (2 * KV_BYTES / 1000 + PROMPT_ATTENTION)
        assert floor.seconds(MACHINE) == pytest.approx(expected)


def test_long_prompts_read_the_weights_as_often_as_they_need_steps() -> None:
    """Prompts of 7 and 8 tokens in steps of 4 need four, of which the last may be the only one that needs logits."""
    floor = floor_of(bench.Workload([[1] * 7, [2] * 8], [1, 1]), replace(AMPLE, tokens=4))
    assert bytes_of(floor) == (4 * 2 * LAYER + HEAD) * 2
    assert operations_of(floor) == 2 * 2 * LAYER * 15 + 2 * HEAD * 2 + 2 * 2 * 16 * (7 * 7 + 8 * 8)
    sparse = floor_of(bench.Workload([[1] * 7], [1]), replace(AMPLE, tokens=4), Sparse)
    reads = 4 * EXPERT * ((1 - 0.75**4) + (1 - 0.75**3))
    assert bytes_of(sparse) == pytest.approx((2 * (EVERY + ROUTER) + HEAD + reads) * 2)


def test_too_few_rows_cost_more_steps() -> None:
    work = bench.Workload([[1]] * 8, [11] * 8)
    few, many = (bytes_of(floor_of(work, replace(AMPLE, rows=rows))) for rows in (2, 8))
    assert few - many == (40 - 10) * MATRICES * 2


def test_too_few_blocks_cost_more_steps() -> None:
    """Two requests each hold one block of 4 tokens for 3 steps, and two for 4: 22 in sum. 4 blocks hold all at once."""
    work = bench.Workload([[1], [2]], [8, 8])
    weights = [bytes_of(floor_of(work, replace(AMPLE, blocks=blocks))) for blocks in (4, 3, 2)]
    steps = [(total - 2 * sum(range(2, 9)) * KV_BYTES) / (MATRICES * 2) - 1 for total in weights]
    assert steps == [7, -(-22 // 3), 11]


def test_what_requests_share_takes_blocks_once() -> None:
    """Six sequences share 2 blocks of 4 tokens, and hold 1 more each for 3 steps."""
    prefix = bench.Workload([[1] * 9] * 6, [4] * 6, prefix_len=8)
    samples = bench.Workload([[1] * 9], [4], samples=6)
    for work in (prefix, samples):
        few, many = (decode_steps(work, replace(AMPLE, blocks=blocks), 0) for blocks in (4, 8))
        assert many == [StepSum(3, 18, 0)]
        assert few[0].rows == 18
    # The prefix takes its blocks in every step, the samples' prompt only while they run.
    assert decode_steps(prefix, replace(AMPLE, blocks=4), 0)[0].count == 18 / 2
    assert decode_steps(samples, replace(AMPLE, blocks=4), 0)[0].count == (18 + 2 * 3) / 4


def test_a_window_of_all_layers_bounds_the_blocks() -> None:
    """At lengths of 10 to 15 a query sees 4 tokens, in the two or one blocks of 4 tokens that the sequence holds."""
    work = bench.Workload([[1] * 9] * 4, [7] * 4)
    held = [2, 2, 1, 2, 2, 2]
    (steps,) = decode_steps(work, replace(AMPLE, blocks=3, groups=alike(4, window=4).groups), 0)
    assert (steps.count, steps.rows) == (-(-4 * sum(held) // 3), 24)
    assert decode_steps(work, replace(AMPLE, blocks=8, groups=alike(4, window=4).groups), 0) == [StepSum(6, 24, 0)]


def test_experts_are_read_by_the_fewest_rows_that_fill_a_short_cache() -> None:
    """A row holds up to 3 blocks of 4 tokens, so that at least 2 rows hold 6."""
    work = bench.Workload([[1] * 8] * 8, [5] * 8)
    (steps,) = decode_steps(work, replace(AMPLE, blocks=6), used=0.25)
    assert steps == StepSum(-(-3 * 32 // 6), 32, 16 * (1 - 0.75**2))


def test_the_steps_of_a_short_cache_by_nano_vllms_workload() -> None:
    """Its sequences hold 539,232 blocks in sum: 674 while prefill gives the first tokens, and the others in decode.

    A cache for 110,000 tokens has 430 blocks of 256. So they need 1,253 decode steps; the longest output needs 1,023.
    """
    work = bench.WORKLOADS["nano"].draw(vocab_size=151936)
    first = sum(-(-len(prompt) // 256) for prompt in work.prompts)
    assert first + 538_558 == 539_232
    ample, short = (bench.Limits(512, 16384, blocks, alike(256).groups) for blocks in (791, 430))
    (steps,) = decode_steps(work, short, 0)
    assert (steps.count, steps.rows) == (-(-538_558 // 430), 133_966 - 256)
    assert steps.count == 1253
    together = decode_steps(work, ample, 0)
    assert sum(steps.count for steps in together) == 1023
    assert sum(steps.rows for steps in together) == 133_966 - 256
    assert len(decode_steps(work, replace(ample, blocks=790), 0)) == 1  # one block less: not all at once


def test_tight_is_nano_with_the_fewest_blocks_that_hold_110_000_tokens() -> None:
    """429 blocks of 256 hold 109,824. Its floor: 538,558 = 1,252 * 430 + 198, so that 1,253 steps decode."""
    nano, tight = bench.WORKLOADS["nano"], bench.WORKLOADS["tight"]
    assert replace(tight, kv_tokens=None) == nano
    assert (tight.num_blocks(256), tight.num_blocks(100), nano.num_blocks(256)) == (430, 1100, None)
    assert str(tight) == "100-1024 in, 100-1024 out, 110,000 in the KV cache"
    limits = bench.Limits(tight.max_num_seqs, 16384, 430, alike(256).groups)
    assert floor_of(tight.draw(vocab_size=151936), limits).decode_steps == 1253


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_the_requests_takes_less_than_the_least_steps(seed: int) -> None:
    """Begin requests in random order, each as soon as its row and all its blocks are free."""
    rand = random.Random(seed)
    prefix, used = rand.choice([0, 9]), 0.3
    lens = [(prefix + rand.randint(1, 20), rand.randint(1, 20)) for _ in range(rand.randint(5, 30))]
    work = bench.Workload([[1] * prompt for prompt, _ in lens], [out for _, out in lens], prefix)
    limits = bench.Limits(rows=rand.randint(1, 12), tokens=100, blocks=rand.randint(16, 40), groups=alike(4).groups)
    waiting = [(out - 1, -(-(prompt + out) // 4) - prefix // 4) for prompt, out in lens if out > 1]
    rand.shuffle(waiting)
    running: list[tuple[int, int]] = []
    rows = []
    while waiting or running:
        free = limits.blocks - prefix // 4 - sum(blocks for _, blocks in running)
        while waiting and len(running) < limits.rows and waiting[-1][1] <= free:
            running.append(waiting.pop())
            free -= running[-1][1]
        rows.append(len(running))
        running = [(left - 1, blocks) for left, blocks in running if left > 1]
    least = decode_steps(work, limits, used)
    assert sum(steps.count for steps in least) <= len(rows)
    assert sum(steps.rows for steps in least) == sum(rows)
    reads = sum(1 - (1 - used) ** count for count in rows)
    assert sum(steps.expert_reads for steps in least) <= reads * (1 + 1e-9)


def test_a_prompt_of_several_samples_is_read_once_a_step_and_computed_once() -> None:
    """A prompt of 3 tokens has 4 samples of 3 tokens: in two decode steps, each reads its own first and second."""
    floor = floor_of(bench.Workload([[1, 2, 3]], [3], samples=4))
    assert bytes_of(floor) == 3 * MATRICES * 2 + (2 * 3 + 4 * (1 + 2)) * KV_BYTES
    assert operations_of(floor) == 2 * 2 * LAYER * 3 + 2 * HEAD + 2 * 2 * 16 * 9 + 2 * MATRICES * 8


def test_a_shared_prefix_is_read_once_a_step_and_computed_once() -> None:
    """Two prompts share 2 tokens, have 1 and 2 more tokens of their own, and get 3 and 2 output tokens.

    So decode reads 2 and then 3 tokens that the first alone has, and 3 that the second alone has.
    """
    work = bench.Workload([[1, 2, 3], [1, 2, 4, 5]], [3, 2], prefix_len=2)
    floor = floor_of(work)
    assert bytes_of(floor) == (1 + 2) * MATRICES * 2 + (2 * 2 + 2 + 3 + 3) * KV_BYTES
    # A suffix attends to the prefix and, causally, to itself.
    prompts = 2 * 2 * LAYER * (2 + 1 + 2) + 2 * HEAD * 2 + 2 * 2 * 16 * (4 + (4 + 1) + (8 + 4))
    assert operations_of(floor) == prompts + 2 * MATRICES * 3
    one_row = floor_of(work, replace(AMPLE, rows=1))
    assert bytes_of(one_row) == bytes_of(floor) + MATRICES * 2 + 2 * KV_BYTES


def test_a_prefix_that_nobody_shares_saves_nothing() -> None:
    whole, split = (bench.Workload([[1, 2, 3, 4, 5]], [4], prefix_len) for prefix_len in (0, 3))
    assert floor_of(whole) == floor_of(split)


def test_a_window_bounds_what_a_layer_reads_and_computes() -> None:
    """One of two layers sees 3 tokens. A prompt of 4 tokens gets 3: decode has contexts of 5 and 6 tokens."""

    class Windowed(WeightShape):
        attention_windows = (None, 3)

    floor = floor_of(bench.Workload([[1, 2, 3, 4]], [3]), model=Windowed)
    assert bytes_of(floor) == 3 * MATRICES * 2 + (5 + 6 + 3 + 3) * KV_BYTES / 2
    # Within the window, the first 3 queries see a triangle of keys, and the fourth sees 3.
    attention = 4 * 16 * (4 * 4 / 2 + 3 * 3 / 2 + 3)
    assert operations_of(floor) == 2 * 2 * LAYER * 4 + 2 * HEAD + attention + 2 * 2 * MATRICES


def test_the_floor_counts_the_experts_that_the_rows_of_a_step_use() -> None:
    work = bench.Workload([[1, 2, 3], [4]], [3, 2])  # a step of two rows, and one of one
    floor = floor_of(work, model=Sparse)
    every = EVERY + ROUTER + HEAD
    read = 4 * EXPERT * ((1 - 0.75**4) + (1 - 0.75**2) + (1 - 0.75))
    assert bytes_of(floor) == pytest.approx((3 * every + read) * 2 + (4 + 5 + 2) * KV_BYTES)
    prompts = 2 * (EVERY + ROUTER + EXPERT) * 4 + 2 * HEAD * 2 + 2 * 2 * 16 * (9 + 1)
    assert operations_of(floor) == prompts + 2 * (every + EXPERT) * 3
    wide = type("Wide", (Sparse,), {"experts": replace(Sparse.experts, float32_router=True)})
    assert bytes_of(floor_of(work, model=wide)) - bytes_of(floor) == pytest.approx(3 * ROUTER * 2)
    waiting = floor_of(bench.Workload([[1]] * 3, [3] * 3), replace(AMPLE, rows=2), Sparse)
    read = 4 * EXPERT * ((1 - 0.75**3) + 3 * (1 - 0.75**2))
    assert bytes_of(waiting) == pytest.approx((4 * every + read) * 2 + 15 * KV_BYTES)


def test_the_floor_counts_experts_without_gates_and_their_latents() -> None:
    """Two matrices for each of four experts, one of which a token uses; and for the MLP, and the shared expert."""
    latent = replace(Sparse.experts, latent_size=3)
    for experts, expert, around in ((Sparse.experts, 2 * 6 * 8, 0), (latent, 2 * 6 * 3, 2 * 8 * 3)):
        ungated = type("Ungated", (Sparse,), {"experts": experts, "is_gated": False})
        floor = floor_of(bench.Workload([[1, 2, 3]], [1]), model=ungated)
        every = EVERY - 8 * 16 - 5 * 8 + around + ROUTER
        read = 4 * expert * (1 - 0.75**3)
        assert bytes_of(floor) == pytest.approx((every + read + HEAD) * 2)
        assert operations_of(floor) == 2 * (every + expert) * 3 + 2 * HEAD + 2 * 2 * 16 * 9


class OfLatents(WeightShape):
    """Each layer has latents of 6 numbers, beside keys of 2, and heads of 3 + 2, with values of 4."""

    latent = LatentSizes(heads=4, latent=6, plain=3, turning=2, value=4, query_latent=7)
    attending = (KVHeads(1, 8),) * 2


def test_the_floor_counts_latents_once_and_keys_that_are_made_of_them() -> None:
    floor = floor_of(bench.Workload([[1, 2, 3]], [3]), model=OfLatents)
    attention = 8 * (7 + 6 + 2 + 4 * 4) + 7 * 4 * 5 + 6 * 4 * (3 + 4)
    matrices = 2 * (attention + 3 * 8 * 16) + HEAD
    assert bytes_of(floor) == (1 + 2) * matrices * 2 + (4 + 5) * 2 * 8 * 2
    pairs = 2 * 4 * (3 + 2 + 4) * 2 * 4.5
    assert operations_of(floor) == 2 * 3 * (matrices - HEAD) + 2 * HEAD + pairs + 2 * 2 * matrices


class Mixed(WeightShape):
    """The second layer has one head of eight, whose values are its keys, and an MLP twice as wide."""

    attending = (KVHeads(2, 4), KVHeads(1, 8, values_are_keys=True))
    mlp_sizes, layer_inputs = (16, 32), LayerInputSizes(5, *6 * ("",))


def test_the_floor_counts_what_each_layer_has() -> None:
    """The second layer's queries and outputs are twice as wide, and it has half of the projections of keys.

    For each layer's input, there are a projection of the embedding, a gate, and the way back.
    """
    floor = floor_of(bench.Workload([[1, 2, 3]], [3]), model=Mixed)
    layers = 2 * LAYER + 2 * 8 * 16 - 8 * 8 + 3 * 8 * 16 + 2 * 3 * 8 * 5
    assert bytes_of(floor) == (1 + 2) * (layers + HEAD) * 2 + (4 + 5) * KV_BYTES
    assert operations_of(floor) == 2 * layers * 3 + 2 * HEAD + 2 * (16 + 32) * 9 + 2 * 2 * (layers + HEAD)


class Recurrent(WeightShape):
    """One of two layers attends, with an output gate; the other has two heads of three values and five keys."""

    mixers = (GatedDelta(key_heads=1, value_heads=2, key_dim=5, value_dim=3, width=4), None)
    attention_windows, attending, output_gate = (None,), (KVHeads(2, 4),), True


def test_the_floor_counts_states() -> None:
    """A prompt of 3 tokens gets 3 output tokens. Both decode steps read a state of four bytes a number.

    They also read half of the 64 tokens that may stand beside it, of which each writes one, and a 64th of a fold.
    """
    floor = floor_of(bench.Workload([[1, 2, 3]], [3]), model=Recurrent)
    channels, values, state = 2 * 5 + 2 * 3, 2 * 3, 2 * 3 * 5
    layers = 2 * LAYER - (8 * 16 + 2 * 8 * 8 + 16 * 8) + 8 * 16 + 8 * (channels + values + 2 * 2) + values * 8
    token = (5 + 2 * 3) * 2 + 2 * 4
    read = 2 * (4 * channels * 2 + (1 + 2 / 64) * state * 4 + (32 + 1) * token)
    assert bytes_of(floor) == (1 + 2) * (layers + HEAD) * 2 + (4 + 5) * KV_BYTES / 2 + read
    halved = floor_of(bench.Workload([[1, 2, 3]], [3]), model=Recurrent, state_itemsize=2)
    assert bytes_of(floor) - bytes_of(halved) == 2 * (1 + 2 / 64) * state * 2
    computed = (3 + 2) * 6 * state
    prompt = 2 * layers * 3 + 2 * HEAD + 2 * 16 * 9
    assert operations_of(floor) == prompt + 2 * 2 * (layers + HEAD) + computed


class SideBySide(WeightShape):
    """One of two layers has four heads of three inputs and states of five numbers beside attention."""

    mixers = (BesideAttention(Mamba2(heads=4, dim=3, numbers=5, groups=2, width=4)), None)


def test_the_floor_counts_states_beside_keys() -> None:
    floor = floor_of(bench.Workload([[1, 2, 3]], [3]), model=SideBySide)
    channels, state = 4 * 3 + 2 * 2 * 5, 4 * 3 * 5
    layers = 2 * LAYER + 8 * (channels + 4 * 3 + 4) + 4 * 3 * 8
    token = (2 * 5 + 4 * 3) * 2 + 4 * 4
    read = 2 * (4 * channels * 2 + (1 + 2 / 64) * state * 4 + (32 + 1) * token)
    assert bytes_of(floor) == (1 + 2) * (layers + HEAD) * 2 + (4 + 5) * KV_BYTES + read


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("0.6b", 0.596), ("8b", 8.19), ("32b", 32.8), ("llama-1b", 1.24), ("llama-8b", 8.03), ("qwen2.5-7b", 7.62),
        ("mistral-7b", 7.24), ("mistral-24b", 23.57), ("phi4-14b", 14.66), ("gemma3-12b", 11.77), ("olmo2-7b", 7.30),
        ("30b-a3b", 30.5), ("olmoe-7b", 6.92), ("qwen3.5-0.8b", 0.752), ("qwen3.5-4b", 4.21), ("qwen3.5-9b", 8.95),
        ("qwen3.5-27b", 26.9), ("qwen3.5-35b-a3b", 34.7), ("qwen3-next-80b", 79.7),
        ("granite-4-h-tiny", 6.94), ("falcon-h1-7b", 7.59),
        ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8),
        ("glm-4.5-air", 106.9), ("deepseek-v2-lite", 15.7), ("glm-4.7-flash", 29.9),
        ("gemma4-12b", 11.91), ("gemma4-26b-a4b", 25.23), ("nemotron-3-nano", 31.57),
        ("qwen3-vl-2b", 1.72), ("qwen3-vl-8b", 8.19), ("internvl3-8b", 7.61), ("smolvlm-2b", 1.81),
    ],
)  # fmt: skip
def test_a_published_shape_has_as_many_parameters_as_its_name_says(name: str, billions: float, tmp_path: Path) -> None:
    bench.write_config(name, str(tmp_path))
    model = describe(Checkpoint.open(str(tmp_path)).hf_config)
    queries = (3 if model.output_gate else 2) * model.num_heads
    attention = sum(
        (queries + (1 if heads.values_are_keys else 2) * heads.count) * heads.dim for heads in model.attending
    )
    recurrent = (mixer for mixer in model.mixers if mixer is not None and not isinstance(mixer, NoMixer))
    mixers, of_latents, parts = attention + sum(mixer.projected for mixer in recurrent), 0, 3 if model.is_gated else 2
    if model.latent is not None:
        mixers, of_latents = model.num_layers * model.latent.projected, model.num_layers * model.latent.query_weights
        of_latents += model.num_layers * model.latent.made_weights
    experts, mlps = model.experts, parts * sum(model.mlp_sizes)
    if experts is not None:
        mlps += sum(experts.layers) * (experts.count * (parts * experts.size + 1) + parts * (experts.shared_size or 0))
    layers = model.hidden_size * (mixers + mlps) + of_latents
    matrices = layers + model.vocab_size * model.hidden_size * (1 if model.tied else 2)
    assert matrices / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("name", "tokens"), [("qwen3-vl-2b", 1024), ("internvl3-8b", 2560), ("smolvlm-2b", 1377)])
def test_prompts_with_images_have_the_tokens_that_the_floor_counts(name: str, tokens: int, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from cases.vision import processor_of

    bench.write_config(name, str(tmp_path))
    config, eyes = Checkpoint.open(str(tmp_path)).hf_config, EYES[name]
    processor, size = processor_of(str(tmp_path), config), config.get_text_config().vocab_size
    assert eyes.seen.count(config.image_token_id) == eyes.tower.embeddings == tokens
    for images, keys in ((4, 4), (2, 2)):
        work = replace(bench.WORKLOADS["images"], num_seqs=4, images=images).draw(size, eyes)
        first, second = (
            [processor.prepare("prompt", each["prompt_token_ids"], each["multi_modal_data"]["image"]) for each in given]
            for given in (work.repeat(0, size), work.repeat(1, size))
        )
        assert [prompt.token_ids for prompt in first] == work.prompts
        assert all(one.token_ids != other.token_ids for one, other in zip(first, second, strict=True))
        assert len({span.key for prompt in (*first, *second) for span in prompt.spans}) == 2 * keys


@pytest.mark.parametrize(("name", "millions"), [("qwen3-vl-2b", 404.6), ("qwen3-vl-8b", 574.9)])
def test_the_floor_of_a_tower(name: str, millions: float, tmp_path: Path) -> None:
    """Its operations are those that torch counts, of an image of 64 x 64 patches."""
    bench.write_config(name, str(tmp_path))
    vision, counted = Checkpoint.open(str(tmp_path)).hf_config.vision_config, EYES[name].tower
    assert counted.weights / 1e6 == pytest.approx(millions, rel=0.005)
    with torch.device("meta"):
        tower = AutoModel.from_config(vision)
        patches = torch.empty(4096, 1536)
    grid = torch.tensor([[1, 64, 64]])
    ends, derived = derive(tower, grid)
    with FlopCounterMode(display=False) as counter:
        tower(patches, grid_thw=grid, **ends, **{name: tensor.to("meta") for name, tensor in derived.items()})
    assert counted.operations == counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "tiles", "side", "millions"), [("internvl3-8b", 10, 448, 330.1), ("smolvlm-2b", 17, 384, 433.1)]
)
def test_the_floor_of_a_tower_of_tiles(name: str, tiles: int, side: int, millions: float, tmp_path: Path) -> None:
    """Its operations are those that torch counts, its numbers those of the matrices in transformers' tower."""
    bench.write_config(name, str(tmp_path))
    counted = EYES[name].tower
    with torch.device("meta"):
        model = AutoModel.from_config(Checkpoint.open(str(tmp_path)).hf_config)
        pixels = torch.empty(tiles, 3, side, side)
    tower = model.vision_tower if name == "internvl3-8b" else model.vision_model
    projector = model.multi_modal_projector if name == "internvl3-8b" else model.connector
    matrices = [own for part in (tower, projector) for key, own in part.named_parameters() if "position" not in key]
    assert counted.weights == sum(own.numel() for own in matrices if own.ndim > 1 and own.shape[0] > 1)
    assert counted.weights / 1e6 == pytest.approx(millions, rel=0.005)
    with FlopCounterMode(display=False) as counter:
        if name == "internvl3-8b":
            seen = model.get_image_features(pixels, return_dict=True).pooler_output
        else:  # part by part, for the whole reads a mask, which has no numbers here
            patches = tower.embeddings.patch_embedding(pixels).flatten(2).mT
            seen = projector(tower.post_layernorm(tower.encoder(patches).last_hidden_state))
    assert seen.flatten(0, 1).shape == (counted.embeddings, model.config.text_config.hidden_size)
    assert counted.operations == counter.get_total_flops()


def test_prompts_of_several_prefixes_are_computed_and_read_once_each() -> None:
    """Two prefixes of 8 tokens, of two prompts each, and so twice what one of them takes alone, but for weights."""
    one = floor_of(bench.Workload([[1] * 9] * 2, [4] * 2, prefix_len=8))
    two = floor_of(bench.Workload([[1] * 9] * 4, [4] * 4, prefix_len=8, prefixes=2))
    for load, other in zip([*one.decoding, *one.prompts], [*two.decoding, *two.prompts], strict=True):
        assert other.operations == 2 * load.operations
    assert two.decoding[0].num_bytes == 2 * one.decoding[0].num_bytes > 0


@pytest.mark.parametrize("name", of_each_kind(["tiny-vl", "internvl3-8b", "smolvlm-2b"], 1, 2))
def test_images_of_each_family(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their images have the published numbers of tiles and tokens; hidden states are small."""
    pytest.importorskip("PIL")
    file = tmp_path / "figures.json"
    monkeypatch.setattr(bench, "measure_bandwidth", lambda _: 1e11)
    monkeypatch.setattr(bench, "measure_flops", lambda *_: 1e12)
    monkeypatch.setitem(EYES, "internvl3-8b", internvl3(32, 64, 1, 2, 64))
    monkeypatch.setitem(EYES, "smolvlm-2b", smolvlm(32, 64, 1, 2, 64))
    for tiled in ("internvl3-8b", "smolvlm-2b"):
        sizes, family = bench.SHAPES[tiled]
        monkeypatch.setitem(bench.SHAPES, tiled, ((64, 128, 2, 2, 2, 32, *sizes[6:]), family))
    monkeypatch.setitem(bench.WORKLOADS, "images", replace(bench.WORKLOADS["images"], output_lens=(8, 8)))
    command = f"bench.py --config {name} --workload images --num-seqs 2 --device cpu --json {file}"
    monkeypatch.setattr(sys, "argv", command.split())
    bench.main()
    figures = json.loads(file.read_text())
    assert figures["tokens_in"] == 2 * (len(EYES[name].seen) + 64)
    assert figures["tokens_out"] == 2 * 8
    assert 2 * EYES[name].tower.operations / 1e12 < figures["floor_seconds"] < figures["seconds"]
    assert "one of 256 images of 1024 x 1024 + 64 in, 8 out: 2 requests" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--config", "8b"], ["--config", "qwen3-vl-2b", "--compare", "transformers"]])
def test_images_for_a_model_that_does_not_see(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(["--workload", "images", *options])
    assert "--workload images: needs --config tiny-vl or qwen3-vl-2b or qwen3-vl-8b or" in capsys.readouterr().err


@pytest.mark.parametrize("model", [[], ["--config", "8b"]])
def test_skewed_routing_of_a_model_without_experts(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args([*model, "--routing", "skewed"])
    assert "--routing skewed: needs a --config with experts" in capsys.readouterr().err


def test_random_weights_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    command = "bench.py --config tiny --num-seqs 8 --min-len 4 --max-len 12 --repeats 3 --device cpu --json"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(file)])
    monkeypatch.setattr(status_line, "ELSEWHERE", 1000)
    bench.main()
    told = capsys.readouterr()
    figures = json.loads(file.read_text())
    assert {
        "command", "kv_cache_tokens",
        "config", "workload", "device", "num_seqs", "tokens_in", "tokens_out", "startup_seconds", "repeats", "seconds",
        "tokens_per_second", "floor_seconds", "fraction_of_floor", "overlapped_floor_seconds", "versions",
    } <= set(figures)  # fmt: skip
    assert figures["command"].startswith("--config tiny --num-seqs 8 ")
    assert figures["workload"] == "nano 4-12 in, 4-12 out"
    assert figures["routing"] is None
    assert "routers" not in told.out
    assert len(figures["repeats"]) == 3
    assert figures["seconds"] == sorted(figures["repeats"])[1]
    assert figures["tokens_per_second"] == pytest.approx(figures["tokens_out"] / figures["seconds"])
    assert 0 < figures["fraction_of_overlapped_floor"] <= figures["fraction_of_floor"] < 1
    assert {"torch", "triton"} <= set(figures["versions"])
    assert "tok/s" in told.out
    assert "floor" in told.out
    assert figures["preemptions"] == figures["recomputed_tokens"] == figures["recomputed_share"] == 0
    assert figures["decode_steps"] == figures["floor_decode_steps"]
    assert f"\ndecode steps: {figures['decode_steps']}, at least {figures['decode_steps']}\n" in told.out
    assert told.err.splitlines() == [
        "starting tiny", "warming up", "repeat 1 of 3", "repeat 2 of 3", "repeat 3 of 3",
        "measuring the memory's bandwidth and the matrix rate",
    ]  # fmt: skip


@pytest.mark.usefixtures("known_speeds")
def test_embed_tells_the_rate_of_the_tokens_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    command = "--config tiny --workload embed --num-seqs 6 --device cpu --json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *command.split(), str(file)])
    bench.main()
    figures = json.loads(file.read_text())
    assert figures["workload"] == "embed 200 in, embedded"
    assert (figures["tokens_in"], figures["tokens_out"], figures["decode_steps"]) == (1200, 0, 0)
    assert figures["tokens_per_second"] == pytest.approx(1200 / figures["seconds"])
    assert 0 < figures["fraction_of_floor"] < 1
    for other in ("--compare transformers", "--adapters 1", "--weights"):
        with pytest.raises(SystemExit):
            bench.parse_args(["--workload", "embed", *other.split()])
    assert "--workload embed: generates nothing" in capsys.readouterr().err


@pytest.mark.usefixtures("known_speeds")
def test_requests_name_adapters_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, named = tmp_path / "figures.json", list[str | None]()
    generate = LLM.generate

    def watched(self: LLM, prompts: list[list[int]], params: Any, **options: Any) -> Any:
        named.extend(own.adapter for own in (params if isinstance(params, list) else [params]))
        return generate(self, prompts, params, **options)

    monkeypatch.setattr(LLM, "generate", watched)
    command = "--config tiny --num-seqs 5 --max-len 12 --min-len 4 --device cpu --adapters 2 --max-adapters 3 --json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *command.split(), str(file)])
    bench.main()
    figures = json.loads(file.read_text())
    assert named == [None, "adapter-0", "adapter-1", "adapter-0", "adapter-1", "adapter-0"]
    assert (figures["adapters"], figures["max_adapters"], figures["max_adapter_rank"]) == (2, 3, 16)
    assert figures["load_adapter_seconds"] > 0
    assert "\nadapters: 2 of rank 16, in 3 slots; to load one takes " in capsys.readouterr().out


def test_more_adapters_than_slots(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(["--adapters", "3", "--max-adapters", "2"])
    assert "--adapters 3: must be 0 to --max-adapters 2" in capsys.readouterr().err


@pytest.mark.usefixtures("no_foresight", "known_speeds")
def test_a_short_cache_shows_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three requests of 300 tokens in and 300 out begin with two blocks each, and end with three of the seven."""
    file = tmp_path / "figures.json"
    command = "bench.py --config tiny --num-seqs 3 --min-len 300 --max-len 300 --kv-tokens 1700 --device cpu --json"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(file)])
    bench.main()
    figures = json.loads(file.read_text())
    again = figures["recomputed_tokens"]
    assert figures["kv_cache_tokens"] == 7 * 256
    assert figures["workload"] == "nano 300 in, 300 out, 1,700 in the KV cache"
    assert figures["preemptions"] >= 1
    assert 256 <= again < 600
    assert figures["recomputed_share"] == again / 900
    assert figures["decode_steps"] > figures["floor_decode_steps"] == 299
    assert capsys.readouterr().out.splitlines()[2] == (
        f"decode steps: {figures['decode_steps']}, at least 299; preemptions: {figures['preemptions']},"
        f" tokens computed again: {again}, {again / 900:.1%} of those in"
    )


def test_the_steps_are_those_of_the_median_repeat() -> None:
    prompt = StepResult(num_prefill_tokens=9, num_recomputed_tokens=4, num_preemptions=1)
    repeats = [Repeat(0.0, 1.0, [prompt] * again + [StepResult()] * 10 * again, [1]) for again in (2, 5, 1)]
    assert count_steps(repeats, tokens_in=80) == {
        "decode_steps": 20, "preemptions": 2, "recomputed_tokens": 8, "recomputed_share": 0.1,
    }  # fmt: skip


@pytest.mark.whole
def test_compare_with_transformers() -> None:
    text = run(
        "bench.py", "--num-seqs", "4", "--min-len", "4", "--max-len", "12", "--device", "cpu",
        "--compare", "transformers",
    )  # fmt: skip
    assert "times as fast" in text


@pytest.mark.usefixtures("known_speeds")
def test_plot_writes_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    from matplotlib.image import imread

    file = tmp_path / "run.png"
    command = "bench.py --config tiny --workload prefix --num-seqs 3 --min-len 4 --max-len 12 --device cpu --plot"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(file)])
    bench.main()
    assert file.read_bytes().startswith(b"\x89PNG")
    height, width, _ = imread(file).shape
    assert min(height, width) >= 500


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_plot_tells_what_each_line_is(replicas: int, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    steps = [StepResult(num_decode_tokens=1, ready_at=float(1 + index), replica=index) for index in range(replicas)]
    file = tmp_path / "run.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot(Repeat(0.0, 2.0, steps, [1]), "a title", str(file))
    texts = re.findall(r">([a-zA-Z][^<]*)</text>", file.read_text(encoding="utf-8"))
    of = [""] if replicas == 1 else [" on replica 0", " on replica 1"]
    assert sorted(texts) == sorted([
        "a title", "tokens per second", "prefill", "decode", "sequences", "KV-cache blocks held, %",
        "tokens computed again", "seconds", *(f"{what}{which}" for what in ("running", "waiting") for which in of),
    ])  # fmt: skip


def test_binned_rates_keep_every_token() -> None:
    rates, edges = binned_rate([0.0, 1.0, 4.0], [10, 60], bins=4)
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert rates.tolist() == [10, 20, 20, 20]


def test_the_command_line_overrides_the_workload() -> None:
    assert bench.parse_args(["--workload", "nano"]).recipe == bench.WORKLOADS["nano"]
    short = bench.parse_args(["--workload", "prefix", "--num-seqs", "4", "--max-len", "200"]).recipe
    assert short == replace(bench.WORKLOADS["prefix"], num_seqs=4, prompt_lens=(100, 200), output_lens=(100, 200))
    assert str(short) == "1024 + 100-200 in, 100-200 out"
    limits = bench.parse_args(["--workload", "stream", "--max-num-seqs", "1", "--max-model-len", "640"]).recipe
    assert limits == replace(bench.WORKLOADS["stream"], max_num_seqs=1, max_model_len=640)
    assert str(limits) == "128 in, 512 out"
    tight = bench.parse_args(["--workload", "stream", "--kv-tokens", "700"]).recipe
    assert tight == replace(bench.WORKLOADS["stream"], kv_tokens=700)


def test_without_options_the_cpu_runs_few_requests_and_a_gpu_all(monkeypatch: pytest.MonkeyPatch) -> None:
    few, whole = replace(bench.WORKLOADS["nano"], num_seqs=bench.SEQS_ON_CPU), bench.WORKLOADS["nano"]
    assert few.num_seqs < whole.num_seqs
    for gpus, on_auto in ((0, few), (1, whole)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert bench.parse_args([]).recipe == on_auto
        assert bench.parse_args(["--device", "cpu"]).recipe == few
        assert bench.parse_args(["--device", "cuda"]).recipe == whole
        assert bench.parse_args(["--max-num-seqs", "8"]).recipe == replace(on_auto, max_num_seqs=8)


@pytest.mark.parametrize("options", ["--workload nano", "--num-seqs 256", "--workload prefix", "--num-seqs 4"])
def test_on_the_cpu_options_mean_what_they_say(options: str) -> None:
    args = bench.parse_args(["--device", "cpu", *options.split()])
    assert args.recipe.num_seqs == int(options.split()[1] if "--num-seqs" in options else 256)
    assert not args.is_short


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--num-seqs 0", "--num-seqs 0: must be at least 1"),
        ("--max-num-seqs 0", "--max-num-seqs 0: must be at least 1"),
        ("--min-len 5 --max-len 4", "--max-len 4 is less than --min-len 5"),
        ("--max-len 50", "--max-len 50 is less than --min-len 100"),
        ("--workload long --max-len 50", "--workload long has fixed lengths"),
        ("--kv-tokens 0", "--kv-tokens 0: must be at least 1"),
        ("--kv-tokens 1e5", "argument --kv-tokens: invalid int value: '1e5'"),
        ("--repeats 0", "--repeats 0: must be at least 1"),
        ("--top-p 2", "top_p=2.0: must be a number above 0, at most 1"),
        ("--json /no/such/folder/file", "--json /no/such/folder/file: No such file"),
        ("--json /", "--json /: Is a directory"),
        ("--json /etc/passwd/file", "--json /etc/passwd/file: Not a directory"),
        (f"--json /tmp/{'a' * 300}", "aaa: File name too long"),
    ],
)
def test_a_senseless_command_is_refused_before_the_run(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(command.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kv-tokens 512", "a request needs 640 tokens, max_model_len is 512: raise --kv-tokens to 640"),
        ("--kv-tokens 512 --max-model-len 640", "num_kvcache_blocks=2: one sequence of max_model_len=640 needs 3"),
        ("--kv-tokens 1000000000000", "num_kvcache_blocks=3906250000: must be at most 8388608"),
    ],
)
def test_a_cache_that_is_too_short_or_too_large_is_refused(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"bench.py --config tiny --workload stream --device cpu {options}"
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit, match=f"bench.py: error: {message}"):
        bench.main()


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit every file to a thousand bytes, but only inside a test, because pytest itself may write to a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_noticed_before_the_run(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for file in (old, new):
        with full_disk(), pytest.raises(ValueError, match=f"--json {file}: No space left on device"):
            check_writable("json", file)
    assert old.read_text() == "{}"
    assert not new.exists()


@pytest.mark.usefixtures("known_speeds")
def test_a_disk_that_fills_up_costs_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    figure = tmp_path / "run.png"
    command = (
        f"bench.py --config tiny --num-seqs 3 --min-len 4 --max-len 12 --device cpu --json /dev/full --plot {figure}"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit, match="--json /dev/full: No space left on device: the figures were printed"):
        bench.main()
    told = capsys.readouterr().out
    assert told.index("tok/s") < told.index("{")
    assert json.loads(told[told.index("{") :])["num_seqs"] == 3
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("known_speeds")
def test_figures_are_printed_before_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And they say that the run was short."""
    command = "bench.py --config tiny --min-len 4 --max-len 12 --device cpu --compare transformers"
    monkeypatch.setattr(bench, "SEQS_ON_CPU", 3)
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(bench, "run_transformers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main()
    workload = "workload nano 4-12 in, 4-12 out: 3 requests"
    begin = ["tiny on cpu", workload, "decode steps", "on the CPU 3 requests run", "floor: ", "floor of prompts"]
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(start) for line, start in zip(lines, begin, strict=True))
    assert "tok/s" in lines[1]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("/no/such/folder/run.png", "--plot /no/such/folder/run.png: No such file"),
        ("run.txt", "--plot run.txt: matplotlib does not write 'txt' files, only"),
        ("run", "--plot run: matplotlib does not write '' files, only"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_run(
    file: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    with pytest.raises(SystemExit):
        bench.parse_args(["--plot", file])
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(SystemExit):
        bench.parse_args(["--plot", "run.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_long_repeat_shows_how_far_it_is(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = bench.Workload([[1] * 300, [2] * 3], [3, 2])
    status = StatusLine()
    status.begin("repeat 1 of 1")
    bench.time_repeat(tiny, work, 0, bench.SAMPLING, status)
    assert capsys.readouterr().err == "repeat 1 of 1\n"  # the repeat took less time than lies between two lines
    monkeypatch.setattr(status_line, "ELSEWHERE", 0)
    status = StatusLine()
    status.begin("repeat 1 of 1")
    bench.time_repeat(tiny, work, 1, bench.SAMPLING, status)
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"repeat 1 of 1: {prefill} tokens of prefill, {generated} of 5 generated"
        for prefill, generated in ((300, 1), (300, 2), (300, 3), (303, 4), (303, 5))
    ]


def test_a_terminal_has_one_line_that_is_replaced_and_taken_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    replace_line = "\r\x1b[K"
    with StatusLine() as status:
        status.begin("warming up")
        assert not status.is_due
        status.tell("so far that it does not fit")
    assert capsys.readouterr().err == f"{replace_line}warming up{replace_line}warming up: so far {replace_line}"


@pytest.mark.parametrize("how", ["closed", "full"])
def test_progress_that_nobody_can_hear_ends_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", None if how == "closed" else io.TextIOWrapper(full, write_through=True))
        with StatusLine() as status:
            status.begin("warming up")
            status.tell("so far")
    assert capsys.readouterr().out == ""


def test_a_workload_beyond_the_models_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--workload", "prefix", "--num-seqs", "8", "--device", "cpu"])
    with pytest.raises(
        SystemExit, match=r"a request needs \d+ tokens, max_model_len is 2048.*this model has 2048 at most"
    ):
        bench.main()


def test_the_example_recites(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py", "--temperature", "0", "--max-tokens", "24", "--stats"])
    runpy.run_path(str(ROOT / "example.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert "through yonder window breaks?" in text
    assert "of our discontent" in text
    assert "\nrequests: 3 in " in text


@pytest.mark.whole
def test_the_example_uses_another_models_chat_template(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_MODEL, tmp_path / "other")
    text = run("example.py", "--model", str(tmp_path / "other"), "--max-tokens", "12", "--temperature", "0")
    with LLM(BUNDLED_MODEL) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        assert f"--- {question}\n{output['text']}\n" in text
