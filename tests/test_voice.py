"""A start that takes long says on a terminal what it does; each start says in a line what has started."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from contextlib import nullcontext, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cases import CASES, build
from conftest import of_each_kind, whole_only
from safetensors.torch import load_file
from test_quantization import FP8_CONFIG, ONE_SCALE, write_checkpoint

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.config import Config
from nanoinfer.hub import name_of
from nanoinfer.process.bar import Bar
from nanoinfer.replicas.replicas import Replicas
from nanoinfer.replicas.transports.spawned import SpawnedProcess
from nanoinfer.runner.model_runner import ModelRunner
from nanoinfer.runner.start import voice
from nanoinfer.runner.start.voice import Voice
from nanoinfer.runner.steps.kinds import PLAIN, DecodeKind
from nanoinfer.weights.pinned import Uploads

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 128}
RANKS, REPLICAS = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
STORED = 5_509_504  # bytes of the bundled model's weights
LINE = r"shakespeare-qwen3 on the CPU with 1 thread, float32, torch, KV cache of 2,048 tokens, ready in \d+\.\d s"
SCRIPT = """
import sys
from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.runner.start import voice

voice.QUIET_SECONDS = 0.0

if __name__ == "__main__":
    options = {name: int(value) for name, value in (option.split("=") for option in sys.argv[1:])}
    LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=128, **options).close()
"""


class Terminal:
    """Inside its context, standard error is a terminal of 110 columns; shown: what has been written to it, later."""

    def __enter__(self) -> Terminal:
        resource_tracker.ensure_running()  # before: its process keeps what is standard error then
        self._master, end = os.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
        self._written = b""
        self._reader = threading.Thread(target=self._read)  # a terminal that nobody reads holds its writers up
        self._reader.start()
        self._before, sys.stderr = sys.stderr, open(end, "w", encoding="utf-8")
        return self

    def _read(self) -> None:
        with suppress(OSError):  # in the end, when nobody can write to it any more
            while data := os.read(self._master, 4096):
                self._written += data
        os.close(self._master)

    def __exit__(self, *error: object) -> None:
        sys.stderr.close()
        sys.stderr = self._before
        self._reader.join()
        self.shown = self._written.decode().replace("\r\n", "\n")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start takes long."""
    monkeypatch.setattr(voice, "QUIET_SECONDS", 0.0)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No start takes long."""
    monkeypatch.setattr(voice, "QUIET_SECONDS", 600.0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Each bar's name, what it has counted in the end, and what it has announced."""
    bars: list[tuple[str, int, int]] = []
    close = Bar.close

    def note_and_close(bar: Bar) -> None:
        if not bar.disable:
            bars.append((bar.desc, bar.n, bar.total))
        close(bar)

    monkeypatch.setattr(Bar, "close", note_and_close)
    return bars


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "ready in" in record.getMessage()]


@pytest.mark.usefixtures("slow")
class TestLongStart:
    """A terminal sees a bar, and then the line."""

    def test_a_bar_and_the_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with Terminal() as terminal:
            llm = LLM(BUNDLED_MODEL, **OPTIONS)
        llm.close()
        bar = r"\rWeights:   0%.*\rWeights: 100%\|█+\| 5\.51M/5\.51M \[[^\n]*B/s\]\n"
        assert re.fullmatch(bar + LINE + "\n", terminal.shown, re.DOTALL)
        assert terminal.shown.endswith(f"\n{llm!r}\n")
        assert logged(caplog) == []

    def test_a_line_that_the_log_shows_is_not_shown_twice(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with caplog.at_level(logging.INFO, logger="nanoinfer"), Terminal() as terminal:
            monkeypatch.setattr(voice.log, "handlers", [logging.StreamHandler(sys.stderr)])
            llm = LLM(BUNDLED_MODEL, **OPTIONS)
        llm.close()
        assert "Weights: 100%" in terminal.shown
        assert terminal.shown.count("ready in") == 1
        assert logged(caplog) == [repr(llm)]

    @pytest.mark.parametrize("kind", ["a file", "none", "warnings"])
    def test_a_log_that_the_terminal_does_not_show_takes_no_line_from_it(
        self, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with caplog.at_level(logging.INFO, logger="nanoinfer"), Terminal() as terminal:
            file, warnings = logging.FileHandler(tmp_path / "log"), logging.StreamHandler(sys.stderr)
            warnings.setLevel(logging.WARNING)
            handler = {"a file": file, "none": logging.NullHandler(), "warnings": warnings}[kind]
            monkeypatch.setattr(voice.log, "handlers", [handler])
            monkeypatch.setattr(voice.log, "propagate", False)
            Voice(Config(BUNDLED_MODEL, device="cpu")).tell("a line")
        file.close()
        assert terminal.shown == "a line\n"
        assert ("a line" in (tmp_path / "log").read_text("utf-8")) == (kind == "a file")

    def test_use_tqdm_silences_it(self) -> None:
        with Terminal() as terminal:
            LLM(BUNDLED_MODEL, **OPTIONS, use_tqdm=False).close()
        assert terminal.shown == ""

    def test_the_loggers_level_silences_it(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="nanoinfer"), Terminal() as terminal:
            LLM(BUNDLED_MODEL, **OPTIONS).close()
        assert terminal.shown == ""

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_what_breaks_off_ends_its_line(self, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(Uploads, "add", fail)
        with Terminal() as terminal, pytest.raises(error):
            LLM(BUNDLED_MODEL, **OPTIONS)
        assert "Weights:   0%" in terminal.shown
        assert terminal.shown.endswith("]\n")


@pytest.mark.usefixtures("fast")
class TestFastStart:
    """A terminal sees nothing."""

    def test_it_is_silent(self) -> None:
        with Terminal() as terminal:
            LLM(BUNDLED_MODEL, **OPTIONS).close()
        assert terminal.shown == ""

    def test_an_error_leaves_no_trace(self) -> None:
        with Terminal() as terminal, pytest.raises(ValueError, match="attention_backend"):
            LLM(BUNDLED_MODEL, **OPTIONS, **REPLICAS, attention_backend="none")
        assert terminal.shown == ""


@pytest.mark.usefixtures("slow")
class TestSeveralProcesses:
    """One process shows bars, which say whose they are; the LLM's own process says the line."""

    def test_ranks(self, counted: list[tuple[str, int, int]]) -> None:
        """Rank 0 of two reads half of the matrices, and the norms."""
        with Terminal() as terminal:
            LLM(BUNDLED_MODEL, **OPTIONS, **RANKS).close()
        assert set(re.findall(r"Weights.*?:", terminal.shown)) == {"Weights, rank 0 of 2:"}
        assert "float32, torch, 2 ranks, KV cache of" in terminal.shown.splitlines()[-1]
        ((_, count, total),) = counted
        assert count == total == pytest.approx(STORED / 2, rel=0.01)

    def test_the_first_replica_alone_shows_bars(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The others, and those that start again, do not."""
        begun: list[tuple[bool, int]] = []
        monkeypatch.setattr(SpawnedProcess, "begin", lambda process, config: begun.append(config.use_tqdm))
        monkeypatch.setattr(SpawnedProcess, "__init__", lambda *_: None)
        with Terminal():
            replicas = Replicas(Config(BUNDLED_MODEL, device="cpu", data_parallel_size=3))
            replicas.begin(Config(BUNDLED_MODEL, device="cpu", data_parallel_size=3))
        replicas.begin(Config(BUNDLED_MODEL, device="cpu", data_parallel_size=3))
        assert begun == [True, False, False, False, False, False]
        assert not replicas._config.use_tqdm
        replicas._processes.clear()

    def test_a_bar_of_a_replica_that_was_killed_is_cleared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(replicas: Replicas) -> None:
            sys.stderr.write("Weights, replica 0 of 2:  42%")
            raise KeyboardInterrupt

        monkeypatch.setattr(Replicas, "wait_until_ready", fail)
        with Terminal() as terminal, pytest.raises(KeyboardInterrupt):
            LLM(BUNDLED_MODEL, **OPTIONS, **REPLICAS)
        assert terminal.shown.endswith("42%\r\x1b[K")

    @pytest.mark.parametrize(
        ("options", "who", "what"),
        whole_only(
            [
                (REPLICAS, "replica 0 of 2", "2 replicas"),
                (REPLICAS | RANKS, "replica 0 of 2, rank 0 of 2", "2 replicas of 2 ranks"),
            ]
        ),
    )
    def test_replicas(self, options: dict[str, int], who: str, what: str, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT, encoding="utf-8")
        arguments = [f"{name}={value}" for name, value in options.items()]
        with Terminal() as terminal:
            subprocess.run([sys.executable, script, *arguments], check=True, stderr=sys.stderr)
        assert set(re.findall(r"Weights.*?:", terminal.shown)) == {f"Weights, {who}:"}
        assert re.search(
            r"100%\|█+\|[^\n]+\n[^\n]+, " + what + r", KV cache of 2,048 tokens each, [^\n]+ s\n$", terminal.shown
        )


class TestNoTerminal:
    """The line goes to the logger "nanoinfer", at level INFO."""

    @pytest.mark.parametrize("use_tqdm", [True, False])
    def test_the_log_has_the_line(self, use_tqdm: bool, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="nanoinfer"):
            llm = LLM(BUNDLED_MODEL, **OPTIONS, use_tqdm=use_tqdm)
        llm.close()
        assert logged(caplog) == [repr(llm)]
        assert {record.name for record in caplog.records} == {"nanoinfer"}

    @pytest.mark.parametrize("stderr", [None, object()])
    def test_programs_have_other_things_in_place_of_stderr(
        self, stderr: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert not Voice(Config(BUNDLED_MODEL)).is_heard

    def test_only_the_first_of_the_users_own_ranks_tells(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="nanoinfer"):
            for number in range(2):
                Voice(Config(BUNDLED_MODEL), number).tell(f"rank {number}")
        assert [record.getMessage() for record in caplog.records] == ["rank 0"]


class TestRepr:
    """repr(llm) is the line."""

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"kv_cache_dtype": "fp8"}, "float32, torch, KV cache of 2,048 tokens in fp8, ready"),
            ({"quantization": "fp8"}, "float32 with matrices in fp8, torch, KV cache of 2,048 tokens, ready"),
            ({"deterministic": True}, "on the CPU with 1 thread, float32, torch, KV"),
            (REPLICAS, "float32, torch, 2 replicas, KV cache of 2,048 tokens each, ready"),
        ],
    )
    def test_it_says_what_the_llm_is(self, options: dict[str, Any], says: str) -> None:
        with LLM(BUNDLED_MODEL, **OPTIONS, **options) as llm:
            assert says in repr(llm)

    def test_it_stays_while_the_llm_sleeps_and_when_it_is_closed(self) -> None:
        with LLM(BUNDLED_MODEL, **OPTIONS) as llm:
            line = repr(llm)
            assert re.fullmatch(LINE, line)
            llm.sleep(2)
            assert repr(llm) == line
        assert repr(llm) == line

    def test_an_llm_that_could_not_start_has_one_too(self) -> None:
        llm = LLM.__new__(LLM)
        with pytest.raises(ValueError, match="no such folder"):
            llm.__init__("/nowhere")
        assert repr(llm) == "an LLM that has not started"

    @pytest.mark.parametrize(
        ("folder", "name"),
        [
            ("/home/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0", "Qwen/Qwen3-0.6B"),
            ("/home/hub/models--gpt2/snapshots/607a30d7/", "gpt2"),
            ("/home/models/mine", "mine"),
            ("/home/models/mine/", "mine"),
            ("/home/models--mine/last", "last"),
        ],
    )
    def test_a_model_is_called_by_its_id_or_its_folder(self, folder: str, name: str) -> None:
        assert name_of(folder) == name

    def test_a_folder_may_be_the_current_one(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        assert name_of(".") == tmp_path.name


@pytest.mark.usefixtures("slow")
class TestCounts:
    """A bar counts exactly what it has announced."""

    @pytest.mark.parametrize(
        ("family", "config"),
        of_each_kind([("qwen3moe", FP8_CONFIG), ("qwen3moe", None), ("qwen3", ONE_SCALE), ("gemma3", None)], 0),
    )
    def test_the_bytes_of_a_file(
        self, family: str, config: dict[str, Any] | None, tmp_path: Path, counted: list[tuple[str, int, int]]
    ) -> None:
        """Of those in FP8, the scales too, but not the scales of inputs, which nobody reads."""
        build(CASES[family], tmp_path / "source")
        folder = tmp_path / "source"
        if config is not None:
            folder = tmp_path
            write_checkpoint(tmp_path / "source", folder, config)
        with Terminal():
            LLM(str(folder), **OPTIONS).close()
        ((_, count, total),) = counted
        stored = load_file(folder / "model.safetensors")
        assert count == total == sum(stored[name].nbytes for name in stored if not name.endswith("input_scale"))

    @pytest.mark.parametrize(
        "options", [{"quantization": "fp8"}, *whole_only([{}, RANKS, {"load_format": "dummy_skewed"}])]
    )
    def test_random_numbers(self, options: dict[str, Any], counted: list[tuple[str, int, int]]) -> None:
        with Terminal():
            LLM(BUNDLED_MODEL, **{**OPTIONS, "load_format": "dummy", **options}).close()
        ((_, count, total),) = counted
        assert count == total > 0

    def test_graphs(self, monkeypatch: pytest.MonkeyPatch, counted: list[tuple[str, int, int]]) -> None:
        for name in ("graph_pool_handle", "Stream", "synchronize", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
        config = Config(BUNDLED_MODEL, device="cpu")
        with Terminal() as terminal:
            sizes = {PLAIN: [1, 2, 4], DecodeKind(shares=True): [4]}
            steps = SimpleNamespace(**dict.fromkeys(("forward", "launched", "draw"), lambda *_: None))
            runner = SimpleNamespace(_graph_sizes=sizes, _voice=Voice(config), config=config, steps=steps)
            ModelRunner._capture(cast(ModelRunner, runner))
        assert counted == [("Graphs", 4, 4)]
        assert re.search(r"Graphs: 100%\|█+\| 4/4 \[.* graphs/s\]\n$", terminal.shown)

    def test_kernels_whose_number_nobody_knows(self) -> None:
        with Terminal() as terminal, Voice(Config(BUNDLED_MODEL, device="cpu")).bar("Kernels", " kernels", None) as on:
            for _ in range(12):
                on(1)
        assert re.search(r"Kernels: 12 kernels \[.* kernels/s\]\n$", terminal.shown)

    def test_threads_lose_nothing(self, counted: list[tuple[str, int, int]]) -> None:
        with Terminal(), Voice(Config(BUNDLED_MODEL, device="cpu")).bar("Weights", "B", 40_000) as advance:
            threads = [threading.Thread(target=lambda: [advance(1) for _ in range(5000)]) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert counted == [("Weights", 40_000, 40_000)]
