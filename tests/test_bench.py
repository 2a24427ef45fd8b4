"""bench.py and example.py, run as a user runs them."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import bench
from example import QUESTIONS
from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.models import describe
from nanoinfer.models.description import Experts


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_weights_times_updates_and_sleep(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    options = ["--config", "tiny", "--device", "cpu", "--weights", "--repeats", "2", "--json"]
    printed = run("bench.py", *options, str(file))
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
        ("stream", 1, 128, 512, 128 + 512),
        ("prefix", 256, 142_827 + 256 * 1024, 133_966, 1024 + 2011),
        ("long", 8, 8 * 32768, 8 * 256, 32768 + 256),
    ],
)
def test_the_workloads(name: str, num_seqs: int, tokens_in: int, tokens_out: int, longest: int) -> None:
    recipe = bench.WORKLOADS[name]
    work = recipe.draw(vocab_size=151936)
    assert len(work.prompts) == len(work.output_lens) == num_seqs
    assert (work.tokens_in, work.tokens_out) == (tokens_in, tokens_out)
    assert max(len(prompt) + out for prompt, out in zip(work.prompts, work.output_lens, strict=True)) == longest
    assert recipe.max_model_len == (33024 if name == "long" else 4096) >= longest
    assert recipe.max_num_seqs == (256 if name == "refill" else 512)


def test_nanos_requests_are_nano_vllms_and_prefix_has_them_behind_its_prefix() -> None:
    nano, prefix = (bench.WORKLOADS[name].draw(vocab_size=151936) for name in ("nano", "prefix"))
    assert nano.prompts[0][:3] == [6311, 6890, 663]
    assert prefix.output_lens == nano.output_lens
    assert [prompt[1024:] for prompt in prefix.prompts] == nano.prompts
    assert len({tuple(prompt[:1024]) for prompt in prefix.prompts}) == 1


@pytest.mark.parametrize("name", bench.WORKLOADS)
def test_every_repeat_has_other_tokens(name: str) -> None:
    work = replace(bench.WORKLOADS[name], num_seqs=4).draw(vocab_size=100)
    first, second = work.repeat(0, 100), work.repeat(1, 100)
    assert first == work.prompts
    assert all(a != b for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    assert max(max(prompt) for prompt in second) < 100


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
        steps = bench.time_repeat(tiny, work, index, bench.SAMPLING).steps
        assert sum(step.num_prefill_tokens for step in steps) == work.tokens_in - 2 * num_shared


def test_the_engine_tells_its_observer_what_each_step_found(tiny: LLM) -> None:
    work = bench.Workload([[1] * 300, [2] * 3], [3, 2])
    repeat = bench.time_repeat(tiny, work, 0, bench.SAMPLING)
    blocks = len(tiny.engine.scheduler.block_manager.blocks)
    assert [(step.num_prefill_tokens, step.num_decode_tokens) for step in repeat.steps] == [
        (300, 0), (0, 1), (0, 1), (3, 0), (0, 1),
    ]  # fmt: skip
    assert [step.num_running for step in repeat.steps] == [1] * 5
    assert [step.blocks_used * blocks for step in repeat.steps] == pytest.approx([2, 2, 2, 1, 1])
    times = [step.ready_at for step in repeat.steps]
    assert repeat.start < times[0]
    assert times == sorted(times)
    assert times[-1] <= repeat.start + repeat.seconds


class Shape:
    hidden_size, intermediate_size, num_layers, vocab_size = 8, 16, 2, 100
    num_heads, num_kv_heads, head_dim, windows, experts = 4, 2, 4, (None, None), None


LAYER = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16  # q, k and v, o, MLP


def test_the_floor_counts_what_must_be_read_and_computed() -> None:
    """A prompt of 3 tokens gets 3 output tokens: there are two decode steps, over contexts of 4 and 5 tokens."""
    floor = bench.Floor.of(bench.Workload([[1, 2, 3]], [3]), Shape, max_num_seqs=8, itemsize=2)
    assert floor.decode_bytes == 2 * (2 * LAYER + 800) * 2 + (4 + 5) * (2 * 2 * 8 * 2)
    assert floor.prefill_flops == 2 * 2 * LAYER * 3 + 2 * 800 + 2 * 2 * 16 * 9
    assert floor.seconds(1e6, 2e6, 4) == pytest.approx((floor.decode_bytes / 1e6 + floor.prefill_flops / 2e6) / 4)
    others = floor.prefill_flops - floor.matrix_flops
    in_fp8 = (floor.decode_bytes / 1e6 + others / 2e6 + floor.matrix_flops / 3e6) / 4
    assert floor.seconds(1e6, 2e6, 4, matrix_rate=3e6) == pytest.approx(in_fp8)
    assert floor.matrix_flops == 2 * 2 * LAYER * 3


def test_the_floor_counts_the_bytes_of_a_smaller_cache() -> None:
    floor = bench.Floor.of(bench.Workload([[1, 2, 3]], [3]), Shape, max_num_seqs=8, itemsize=2, cache_itemsize=1)
    small = bench.Floor.of(bench.Workload([[1, 2, 3]], [3]), Shape, 8, itemsize=2, matrix_itemsize=1)
    assert small.decode_bytes == 2 * (2 * LAYER + 800 * 2) + (4 + 5) * (2 * 2 * 8 * 2)
    assert floor.decode_bytes == 2 * (2 * LAYER + 800) * 2 + (4 + 5) * (2 * 2 * 8)


def test_too_few_rows_cost_more_steps() -> None:
    work = bench.Workload([[1]] * 8, [11] * 8)
    few, many = (bench.Floor.of(work, Shape, rows, itemsize=2).decode_bytes for rows in (2, 8))
    assert few - many == (40 - 10) * (2 * LAYER + 800) * 2


def test_a_prompt_of_several_samples_is_read_once_a_step_and_computed_once() -> None:
    """A prompt of 3 tokens has 4 samples of 3 tokens: in two decode steps, each reads its own first and second."""
    floor = bench.Floor.of(bench.Workload([[1, 2, 3]], [3], samples=4), Shape, max_num_seqs=8, itemsize=2)
    assert floor.decode_bytes == 2 * (2 * LAYER + 800) * 2 + (2 * 3 + 4 * (1 + 2)) * (2 * 2 * 8 * 2)
    assert floor.prefill_flops == 2 * 2 * LAYER * 3 + 2 * 800 + 2 * 2 * 16 * 9


def test_a_shared_prefix_is_read_once_a_step_and_computed_once() -> None:
    """Two prompts share 2 tokens, have 1 and 2 more tokens of their own, and get 3 and 2 output tokens.

    So decode reads 2 and then 3 tokens that the first alone has, and 3 that the second alone has.
    """
    work = bench.Workload([[1, 2, 3], [1, 2, 4, 5]], [3, 2], prefix_len=2)
    weights, kv_token = (2 * LAYER + 800) * 2, 2 * 2 * 8 * 2
    floor = bench.Floor.of(work, Shape, max_num_seqs=8, itemsize=2)
    assert floor.decode_bytes == 2 * weights + (2 * 2 + 2 + 3 + 3) * kv_token
    # A suffix attends to the prefix and, causally, to itself.
    assert floor.prefill_flops == 2 * 2 * LAYER * (2 + 1 + 2) + 2 * 800 * 2 + 2 * 2 * 16 * (4 + (4 + 1) + (8 + 4))
    one_row = bench.Floor.of(work, Shape, max_num_seqs=1, itemsize=2)
    assert one_row.decode_bytes == floor.decode_bytes + weights + 2 * kv_token


def test_a_prefix_that_nobody_shares_saves_nothing() -> None:
    whole, split = (bench.Workload([[1, 2, 3, 4, 5]], [4], prefix_len) for prefix_len in (0, 3))
    assert bench.Floor.of(whole, Shape, 8, 2) == bench.Floor.of(split, Shape, 8, 2)


def test_a_window_bounds_what_a_layer_reads_and_computes() -> None:
    """One of two layers sees 3 tokens. A prompt of 4 tokens gets 3: decode has contexts of 5 and 6 tokens."""

    class Windowed(Shape):
        windows = (None, 3)

    floor = bench.Floor.of(bench.Workload([[1, 2, 3, 4]], [3]), Windowed, max_num_seqs=8, itemsize=2)
    assert floor.decode_bytes == 2 * (2 * LAYER + 800) * 2 + (5 + 6 + 3 + 3) * (2 * 8 * 2)
    # Within the window, the first 3 queries see a triangle of keys, and the fourth sees 3.
    assert floor.prefill_flops == 2 * 2 * LAYER * 4 + 2 * 800 + 4 * 16 * (4 * 4 / 2 + 3 * 3 / 2 + 3)


def test_the_floor_counts_the_experts_that_the_rows_of_a_step_use() -> None:
    """One of two layers has 4 experts of 6, of which a token uses 1, and a shared one of 5."""

    class Sparse(Shape):
        experts = Experts((True, False), count=4, used=1, size=6, normalised=True, shared_size=5)

    expert = 3 * 6 * 8
    every = 2 * (LAYER - 3 * 8 * 16) + 3 * 8 * 16 + 4 * 8 + 3 * 5 * 8  # attention, the MLP, the router, the shared one
    work = bench.Workload([[1, 2, 3], [4]], [3, 2])  # a step of two rows, and one of one
    floor = bench.Floor.of(work, Sparse, max_num_seqs=8, itemsize=2)
    keys = (4 + 5) + 2
    read = 4 * expert * ((1 - 0.75**2) + (1 - 0.75))
    assert floor.decode_bytes == (2 * (every + 800) + read) * 2 + keys * (2 * 2 * 8 * 2)
    assert floor.prefill_flops == 2 * (every + expert) * 4 + 2 * 800 * 2 + 2 * 2 * 16 * (9 + 1)
    waiting = bench.Floor.of(bench.Workload([[1]] * 3, [3] * 3), Sparse, max_num_seqs=2, itemsize=2)
    assert waiting.decode_bytes == (3 * (every + 800) + 4 * expert * (1 - 0.75**2) * 3) * 2 + 15 * (2 * 2 * 8 * 2)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("0.6b", 0.596), ("8b", 8.19), ("32b", 32.8), ("llama-1b", 1.24), ("llama-8b", 8.03), ("qwen2.5-7b", 7.62),
        ("mistral-7b", 7.24), ("mistral-24b", 23.57), ("phi4-14b", 14.66), ("gemma3-12b", 11.77), ("olmo2-7b", 7.30),
        ("30b-a3b", 30.5), ("olmoe-7b", 6.92),
    ],
)  # fmt: skip
def test_a_published_shape_has_as_many_parameters_as_its_name_says(name: str, billions: float, tmp_path: Path) -> None:
    bench.write_config(name, str(tmp_path))
    model = describe(Checkpoint.open(str(tmp_path)).hf_config)
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    experts = model.experts
    mlp = 3 * model.intermediate_size if experts is None else experts.count * (3 * experts.size + 1)
    layers = model.num_layers * model.hidden_size * (heads + mlp)
    matrices = layers + model.vocab_size * model.hidden_size * (1 if model.tied else 2)
    assert matrices / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("model", [[], ["--config", "8b"]])
def test_skewed_routing_of_a_model_without_experts(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args([*model, "--routing", "skewed"])
    assert "--routing skewed: needs a --config with experts" in capsys.readouterr().err


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
    assert figures["workload"] == "nano 4-12 in, 4-12 out"
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


def test_binned_rates_keep_every_token() -> None:
    rates, edges = bench.binned_rate([0.0, 1.0, 4.0], [10, 60], bins=4)
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert rates.tolist() == [10, 20, 20, 20]


def test_the_command_line_overrides_the_workload() -> None:
    assert bench.parse_args([]).recipe == bench.WORKLOADS["nano"]
    short = bench.parse_args(["--workload", "prefix", "--num-seqs", "4", "--max-len", "200"]).recipe
    assert short == replace(bench.WORKLOADS["prefix"], num_seqs=4, prompt_lens=(100, 200), output_lens=(100, 200))
    assert str(short) == "1024 + 100-200 in, 100-200 out"
    limits = bench.parse_args(["--workload", "stream", "--max-num-seqs", "1", "--max-model-len", "640"]).recipe
    assert limits == replace(bench.WORKLOADS["stream"], max_num_seqs=1, max_model_len=640)
    assert str(limits) == "128 in, 512 out"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--num-seqs 0", "--num-seqs 0: must be at least 1"),
        ("--max-num-seqs 0", "--max-num-seqs 0: must be at least 1"),
        ("--min-len 5 --max-len 4", "--max-len 4 is less than --min-len 5"),
        ("--max-len 50", "--max-len 50 is less than --min-len 100"),
        ("--workload long --max-len 50", "--workload long has fixed lengths"),
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
            bench.check_writable("json", file)
    assert old.read_text() == "{}"
    assert not new.exists()


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


def test_figures_are_printed_before_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "bench.py --config tiny --num-seqs 3 --min-len 4 --max-len 12 --device cpu --compare transformers"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(bench, "run_transformers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main()
    assert "tok/s" in capsys.readouterr().out


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


def test_a_workload_beyond_the_models_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--workload", "prefix", "--num-seqs", "8", "--device", "cpu"])
    with pytest.raises(
        SystemExit, match=r"a request needs \d+ tokens, max_model_len is 2048.*this model has 2048 at most"
    ):
        bench.main()


def test_the_example_recites() -> None:
    text = run("example.py", "--temperature", "0", "--max-tokens", "24")
    assert "through yonder window breaks?" in text
    assert "of our discontent" in text


def test_the_example_uses_another_models_chat_template(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_MODEL, tmp_path / "other")
    text = run("example.py", "--model", str(tmp_path / "other"), "--max-tokens", "12", "--temperature", "0")
    with LLM(BUNDLED_MODEL) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        assert f"--- {question}\n{output['text']}\n" in text
