"""Replicas in Ray actors do what spawned ones do, and the death of an actor or of a machine loses no request."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import alive, greedy, wait_until

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, RequestOutput, SamplingParams, WorkerError
from nanoinfer.config import Config
from nanoinfer.parallel import devices, ray_cluster
from nanoinfer.replicas import weight_transfer
from nanoinfer.replicas.transports.ray_actor import check_files
from nanoinfer.replicas.transports.tcp import Listener, connect, shut

OPTIONS: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 400, "max_num_seqs": 8}
PROMPTS = [[30 + i % 7, 40] for i in range(60)]


def make(**options: Any) -> LLM:
    return LLM(BUNDLED_MODEL, **{**OPTIONS, **options})


def make_on_ray(**options: Any) -> LLM:
    return make(**{"data_parallel_size": 2, "data_parallel_backend": "ray", **options})


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


class TestTcp:
    def test_a_connection_takes_messages_and_ends_when_it_is_shut(self) -> None:
        with Listener("127.0.0.1") as listener:
            ours, theirs = connected_pair(listener)
        ours.send({"long": b"x" * 300_000})
        assert theirs.recv() == {"long": b"x" * 300_000}
        shut(theirs)
        with pytest.raises(EOFError):
            ours.recv()
        ours.close()
        theirs.close()

    def test_whoever_lacks_the_key_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nanoinfer.replicas.transports.tcp.GREETING_SECONDS", 0.2)
        with Listener("127.0.0.1") as listener:
            silent = socket.create_connection(listener.address)
            gone = socket.create_connection(listener.address)
            gone.close()
            stranger = threading.Thread(target=refused, args=(listener.address,))
            stranger.start()
            ours, theirs = connected_pair(listener)
            stranger.join()
        ours.send("hello")
        assert theirs.recv() == "hello"
        for connection in (silent, ours, theirs):
            connection.close()

    def test_a_listener_without_the_key_is_left(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=lambda: server.accept()[0].sendall(bytes(64))).start()
            with pytest.raises(ConnectionRefusedError, match="does not know the key"):
                connect(server.getsockname(), bytes(32))

    def test_who_waits_asks_whether_to_go_on(self) -> None:
        def check() -> None:
            raise WorkerError("it has died")

        with Listener("127.0.0.1") as listener, pytest.raises(WorkerError, match="it has died"):
            listener.accept(check)


def connected_pair(listener: Listener) -> tuple[Connection, Connection]:
    """Both ends of a connection."""
    ends: list[Connection] = []
    thread = threading.Thread(target=lambda: ends.append(connect(listener.address, listener.key)))
    thread.start()
    ours = listener.accept(lambda: None)
    thread.join()
    return ours, ends[0]


def refused(address: tuple[str, int]) -> None:
    with pytest.raises(ConnectionError):
        connect(address, b"another key")


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"data_parallel_backend": "mpi"}, "data_parallel_backend='mpi': must be one of 'mp', 'ray'"),
            ({"placement_timeout": 0}, "placement_timeout=0: must be a number of seconds, at least 1"),
            ({"placement_timeout": math.nan}, "placement_timeout=nan"),
        ],
    )
    def test_bad_values(self, options: dict[str, Any], problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            Config(BUNDLED_MODEL, **options)

    def test_without_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"data_parallel_backend='ray': needs Ray: pip install 'nanoinfer\[ray\]'"):
            Config(BUNDLED_MODEL, data_parallel_backend="ray")

    @pytest.mark.parametrize(("gpus", "device"), [(True, "cuda"), (False, "cpu")])
    def test_the_device_is_what_the_cluster_has(self, gpus: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The LLM's own machine needs no GPU."""
        monkeypatch.setattr(devices, "has_gpus", lambda: gpus)
        assert Config(BUNDLED_MODEL, data_parallel_backend="ray", dtype="float32").device == device
        assert Config(BUNDLED_MODEL, data_parallel_backend="ray", device="cpu").device == "cpu"

    @pytest.mark.parametrize(
        ("cpus", "replicas", "share"),
        [
            ([16, 16], 2, 8),
            ([16, 16], 3, 4),
            ([16, 4], 2, 4),
            ([6], 1, 3),
            ([12], 2, 3),
            ([1, 1], 2, 1),
            ([2], 8, 1),
            ([], 1, 1),
        ],
    )
    def test_replicas_share_the_cpus_of_the_machines(
        self, cpus: list[int], replicas: int, share: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray_cluster, "_machines", lambda: [{"CPU": float(own)} for own in cpus])
        assert ray_cluster.share_of_replica("cpu", 1, replicas) == {"num_gpus": 0, "num_cpus": share}
        assert ray_cluster.share_of_replica("cuda", 4, replicas) == {"num_gpus": 4, "num_cpus": 1}

    def test_a_machine_without_the_model_says_so(self, tmp_path: Path) -> None:
        here: Any = SimpleNamespace(model=str(tmp_path), tokenizer=None, draft_model=None)
        check_files(here)
        here.draft_model = str(tmp_path / "missing")
        with pytest.raises(ValueError, match=r"draft_model='.*missing': the machine .* has no such folder; with"):
            check_files(here)


class Machines:
    """A cluster of two machines, which are processes here, with a CPU each."""

    def __init__(self, ray: Any) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.cluster.add_node(num_cpus=1)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    def add(self) -> None:
        self.others.append(self.cluster.add_node(num_cpus=1))

    def remove(self) -> None:
        """Let a machine vanish with all that runs there."""
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)


@pytest.fixture(scope="class")
def machines() -> Iterator[Machines]:
    """They have a folder of their own: ray.init() of tests beside this one would find them otherwise."""
    ray = pytest.importorskip("ray", reason="needs ray: pip install -e '.[ray]'")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("RAY_TMPDIR", folder)
        machines = Machines(ray)
        yield machines
        ray.shutdown()
        machines.cluster.shutdown()


@pytest.fixture(scope="class")
def expected() -> list[list[list[int]]]:
    with make() as one:
        return token_ids(one.generate(PROMPTS, settings(), use_tqdm=False))


def settings() -> list[SamplingParams]:
    return [SamplingParams(temperature=0.8, max_tokens=20 + i % 30, seed=i, n=1 + i % 2) for i in range(len(PROMPTS))]


def serves(llm: LLM) -> bool:
    return bool(llm.generate(PROMPTS[:1], greedy(2), use_tqdm=False))


class TestCluster:
    def test_actors_do_what_spawned_replicas_do(
        self, machines: Machines, make_qwen3: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Requests, streams, weights in pieces, adapters, sleep, figures and errors."""
        from cases.tuned import ALPHA, Tuned

        monkeypatch.setattr(weight_transfer, "SEGMENT_BYTES", 1 << 16)  # tensors are cut
        params = settings()[:12]
        red, options = Tuned(BUNDLED_MODEL, seed=1), {"max_adapters": 1, "dtype": "float32"}
        trained = {name: weight.detach() * 1.1 for name, weight in red.model.named_parameters()}

        def results(llm: LLM) -> list[Any]:
            found = [token_ids(llm.generate(PROMPTS[:12], params, use_tqdm=False))]
            llm.load_adapter("red", red.tensors, alpha=ALPHA)
            found += [token_ids(llm.generate(PROMPTS[:4], greedy(8, adapter="red"), use_tqdm=False))]
            found += ["".join(new.text for new in llm.stream("ROMEO:\n", greedy(12)))]
            assert llm.update_weights(iter(trained.items())) == 1
            found += [token_ids(llm.generate(PROMPTS[:12], params, use_tqdm=False))]
            llm.sleep()
            llm.wake_up()
            assert llm.load_weights(BUNDLED_MODEL) == 2
            return [*found, token_ids(llm.generate(PROMPTS[:12], params, use_tqdm=False))]

        with make(**options) as one, make_on_ray(**options) as two:
            assert two.engine.ready == [0, 1]
            assert len({*two.engine.pids.values(), os.getpid()}) == 3
            assert results(two) == results(one)
            assert two.stats().num_generated_tokens == one.stats().num_generated_tokens
            with pytest.raises(ValueError, match="do not fit"):
                two.update_weights(iter([("lost", next(iter(trained.values())))]))
            with pytest.raises(ValueError, match="data_parallel_size=2: beam_search runs on an engine in this process"):
                two.beam_search(["ROMEO:\n"], BeamSearchParams(beam_width=2, max_tokens=2))
            pids = list(two.engine.pids.values())
        assert wait_until(lambda: not any(alive(pid) for pid in pids), 20)

    def test_what_the_cluster_lacks_is_said_after_a_while(self, machines: Machines) -> None:
        with pytest.raises(
            WorkerError,
            match=r"replica [01] was not placed within 1 s \(placement_timeout\): a replica asks for 2 GPUs and 1 CPU"
            r" of one machine, and the cluster has 0 GPUs \(0 free\) and \d CPUs \(\d free\) on \d machines",
        ):
            make_on_ray(device="cuda", tensor_parallel_size=2, dtype="float32", placement_timeout=1)

    def test_an_engine_that_cannot_start_tells_why(self, machines: Machines) -> None:
        with pytest.raises(ValueError, match=r"MiB.*num_kvcache_blocks"):
            make_on_ray(data_parallel_size=1, kvcache_block_size=1 << 20, num_kvcache_blocks=None)

    @pytest.mark.whole
    def test_actors_that_die_and_hang_lose_nothing(self, machines: Machines, expected: list[list[list[int]]]) -> None:
        with make_on_ray(restart_replicas=True, worker_timeout=3) as llm:
            for index, sent in enumerate((signal.SIGKILL, signal.SIGSTOP)):
                before = llm.engine.pids
                threading.Timer(random.uniform(0, 1), os.kill, (before[index], sent)).start()
                assert token_ids(llm.generate(PROMPTS, settings(), use_tqdm=False)) == expected
                assert wait_until(lambda: serves(llm) and not alive(before[index]), 60)  # noqa: B023  # it ends here
                assert wait_until(lambda: serves(llm) and len(llm.engine.ready) == 2, 60)
            assert token_ids(llm.generate(PROMPTS, settings(), use_tqdm=False)) == expected

    @pytest.mark.whole
    def test_machines_come_and_vanish(
        self, machines: Machines, expected: list[list[list[int]]], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A replica waits until the cluster has grown, and says so. Others compute what a machine that vanishes had."""
        with ThreadPoolExecutor() as pool:
            future = pool.submit(make_on_ray, data_parallel_size=3)
            with pytest.raises(TimeoutError):
                future.result(timeout=15)
            assert re.search(r"replica \d is not there yet: a replica asks for 1 CPU", caplog.text)
            machines.add()
            llm = future.result()
        with llm:
            assert llm.engine.ready == [0, 1, 2]
            threading.Timer(random.uniform(0, 1), machines.remove).start()
            assert token_ids(llm.generate(PROMPTS, settings(), use_tqdm=False)) == expected
            assert wait_until(lambda: serves(llm) and len(llm.engine.ready) == 2, 60)

    @pytest.mark.whole
    def test_the_last_one_that_dies_ends_the_llm(self, machines: Machines) -> None:
        llm = make_on_ray(data_parallel_size=1)
        os.kill(llm.engine.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="no replica is left: replica 0 died: The actor is dead"):
            llm.generate(PROMPTS, greedy(20), use_tqdm=False)
        llm.close()
