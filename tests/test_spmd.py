"""LLMs inside a trainer's processes: the ranks of a group that exists share a model, and are called alike (SPMD)."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, build
from cases.drafters import Moody
from conftest import Oracle, assert_equal, different_settings, greedy, safetensors_of, whole_only
from safetensors.torch import load_file

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, RequestOutput, SamplingParams

RANKS = 2
OPTIONS: dict[str, Any] = {"max_num_seqs": 16, "kvcache_block_size": 16, "num_kvcache_blocks": 400, "dtype": "float32"}


def live(rank: int, device: str, meeting_place: str, pipe: Connection) -> None:
    """Live as one process of a trainer, which calls the functions that come."""
    OPTIONS.update(device=device, use_tqdm=rank == 0)  # ranks may differ in use_tqdm alone
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(meeting_place, RANKS)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=RANKS)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


class Trainer:
    """The processes of a trainer."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = device
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = mp.get_context("spawn")
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(rank, device, str(folder / "store"), theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Let every process call a function."""
        for pipe in self.pipes:
            pipe.send((function, args))

    def result(self, rank: int) -> Any:
        """Wait for what a process's function returns."""
        assert self.pipes[rank].poll(60), "it hangs"
        value, error = self.pipes[rank].recv()
        assert error is None, error
        return value

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Let every process call a function, all of which must return the same; returns that."""
        self.start(function, *args)
        first, *others = (self.result(rank) for rank in range(RANKS))
        for other in others:
            assert other == first
        return first

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(request.param, tmp_path_factory.mktemp("trainer"))
    yield trainer
    trainer.end()


@pytest.fixture
def make_one(make_llm: Callable[..., LLM], trainer: Trainer) -> Callable[..., LLM]:
    """Make such an LLM in this process alone."""
    return partial(make_llm, **{**OPTIONS, "device": trainer.device})


def make(model: str = BUNDLED_MODEL, **options: Any) -> LLM:
    """Make an LLM whose ranks are this trainer's processes."""
    return LLM(model, **{**OPTIONS, "tensor_parallel_group": dist.group.WORLD, **options})


def plain(outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    """Return what ranks must agree on, of plain types that pipes take."""

    def numbers(places: list[Any] | None) -> list[Any] | None:
        return places and [place and {token: float(value) for token, value in place.items()} for place in places]

    names = ("text", "token_ids", "finish_reason", "stop_reason", "weights_versions", "kept_tokens")
    return [
        {
            "samples": [
                {**{name: sample[name] for name in names}, "logprobs": numbers(sample["logprobs"])}
                for sample in output["samples"]
            ],
            "prompt_logprobs": numbers(output["prompt_logprobs"]),
            "num_cached_tokens": output["num_cached_tokens"],
        }
        for output in outputs
    ]


def generate(llm: LLM, prompts: list[Any], params: Any) -> list[dict[str, Any]]:
    return plain(llm.generate(prompts, params, use_tqdm=False))


def generate_each(options: dict[str, Any], calls: list[tuple[Any, Any]]) -> tuple[list[Any], int]:
    """Return the outputs of several calls of one LLM, and the number of preemptions."""
    with make(**options) as llm:
        return [generate(llm, *call) for call in calls], llm.engine.scheduler.num_preemptions


def search_beams(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.beam_search([[30, 31], [5]], BeamSearchParams(3, 8))
    return [[found.tokens for found in output.sequences] for output in outputs]


def search_beams_with_peers() -> list[list[list[int]]]:
    with make() as llm:
        return search_beams(llm)


def guess_by_moods(prompts: list[list[int]]) -> tuple[list[dict[str, Any]], int]:
    """Return the outputs of an LLM with a drafter in each process, and how many guesses it has verified."""
    with make(speculation=Moody(), max_guesses=3) as llm:
        return generate(llm, prompts, greedy(16)), llm.stats().num_proposed_tokens


def sleep_and_wake_up() -> None:
    with make() as llm:
        before = generate(llm, [[30, 31]], greedy(8))
        llm.sleep()
        llm.wake_up()
        assert generate(llm, [[30, 31]], greedy(8)) == before
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        llm.load_weights(BUNDLED_MODEL)
        llm.wake_up()
        assert generate(llm, [[30, 31]], greedy(8))[0]["samples"][0]["text"] == before[0]["samples"][0]["text"]
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        versions = [
            llm.update_weights([pair], partial=True) for pair in load_file(safetensors_of(BUNDLED_MODEL)[0]).items()
        ]
        assert versions == [1] * (len(versions) - 1) + [2]
        llm.wake_up()
        assert generate(llm, [[30, 31]], greedy(8))[0]["samples"][0]["text"] == before[0]["samples"][0]["text"]


def tokens_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["samples"][0]["token_ids"] for output in outputs]


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[list[int]]:
    """Passages of the text that the bundled model knows."""
    text = oracle.greedy([30, 31], 200, ignore_eos=True)
    return [text[start : start + length] for start in (0, 20) for length in (1, 15, 16, 17, 150)]


class TestRanksThatAreCalledAlike:
    """All return the same, and that is what one process returns."""

    def test_fresh_then_prefix_cached_then_chunked_and_preempted(
        self, trainer: Trainer, prompts: list[list[int]], make_one: Callable[..., LLM]
    ) -> None:
        call = prompts, greedy(20)
        expected = tokens_of(generate(make_one(), *call))
        (fresh, cached), _ = trainer.run(generate_each, {}, [call, call])
        assert tokens_of(fresh) == tokens_of(cached) == expected
        assert sum(output["num_cached_tokens"] for output in cached) > 0
        tight = {"max_model_len": 200, "num_kvcache_blocks": 24, "max_num_batched_tokens": 100}
        (outputs,), num_preemptions = trainer.run(generate_each, tight, [call])
        assert tokens_of(outputs) == expected
        assert num_preemptions > 0

    def test_every_setting(self, trainer: Trainer, make_one: Callable[..., LLM], prompts: list[list[int]]) -> None:
        params = [
            *different_settings(len(prompts) - 2),
            SamplingParams(n=5, max_tokens=20, top_p=0.9, kept_tokens=True),  # no seed
            SamplingParams(max_tokens=20, stop=["ve", "th"], temperature=0.5),
        ]
        expected = generate(make_one(), prompts, params)
        (outputs,), _ = trainer.run(generate_each, {"speculation": "auto"}, [(prompts, params)])
        assert_equal(outputs, expected)

    def test_guesses_are_those_of_rank_0(self, trainer: Trainer, oracle: Oracle) -> None:
        outputs, num_proposed = trainer.run(guess_by_moods, [[30, 31], [5]])
        assert tokens_of(outputs) == [oracle.greedy(prompt, 16) for prompt in ([30, 31], [5])]
        assert num_proposed > 0

    def test_structured_outputs(self, trainer: Trainer, make_one: Callable[..., LLM]) -> None:
        pytest.importorskip("llguidance")
        params = SamplingParams(max_tokens=30, seed=1, structured_outputs={"choice": ["never", "ever more", "no"]})
        expected = generate(make_one(), ["A", "B"], params)
        (outputs,), _ = trainer.run(generate_each, {}, [(["A", "B"], params)])
        assert_equal(outputs, expected)

    def test_streams_steps_scores_and_aborts(self, trainer: Trainer, oracle: Oracle) -> None:
        streamed, aborted, later, score, stop_reason = trainer.run(call_in_other_ways)
        assert streamed == later == oracle.greedy([30], 12)
        assert aborted == ("abort", 3)
        assert stop_reason in "aeiou"
        assert score == pytest.approx(
            float(oracle.logits([30, 31, 32]).log_softmax(1)[[0, 1], [31, 32]].sum()), abs=1e-4
        )

    def test_the_experts_of_each_token(self, trainer: Trainer, make_one: Callable[..., LLM], tmp_path: Path) -> None:
        build(CASES["mixtral"], tmp_path)
        (expected,) = make_one(str(tmp_path), routed_experts=True).generate([[5, 6, 7]], greedy(8), use_tqdm=False)
        assert trainer.run(experts_of_tokens, str(tmp_path)) == expected.routed_experts.tolist()

    def test_beam_search(self, trainer: Trainer, make_one: Callable[..., LLM]) -> None:
        assert trainer.run(search_beams_with_peers) == search_beams(make_one())

    def test_sleep(self, trainer: Trainer) -> None:
        trainer.run(sleep_and_wake_up)

    def test_new_weights(self, trainer: Trainer, make_qwen3: Callable[..., str]) -> None:
        old, new = make_qwen3(), make_qwen3(initializer_range=0.3)
        prompts = [[30], [31, 32, 33]]
        expected = [[Oracle(folder).greedy(prompt, 8) for prompt in prompts] for folder in (old, new, old, new)]
        assert trainer.run(change_weights, old, new, prompts) == expected


def call_in_other_ways() -> tuple[list[int], tuple[str, int], list[int], float, str]:
    with make() as llm:
        streamed = [token for new in llm.stream([[30]], greedy(12)) for token in new["token_ids"]]
        first, _ = llm.add_request([31], greedy(20)), llm.add_request([30], greedy(12))
        for _ in range(4):
            llm.step()
        llm.abort(first)
        llm.reset_prefix_cache()
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        aborted, later = sorted(outputs, key=lambda output: output["request_id"])
        (score,) = llm.score([30], [31, 32])
        vowels = SamplingParams(stop=set("aeiou"), max_tokens=100)  # each process has an order of its own
        (stopped,) = llm.generate([[30]], vowels, use_tqdm=False)
        aborted = aborted["finish_reason"], len(aborted["token_ids"])
        return streamed, aborted, later["token_ids"], score.logprob, stopped["stop_reason"]


def experts_of_tokens(folder: str) -> list[Any]:
    with make(folder, routed_experts=True) as llm:
        (output,) = llm.generate([[5, 6, 7]], greedy(8), use_tqdm=False)
        return output.routed_experts.tolist()


def change_weights(old: str, new: str, prompts: list[list[int]]) -> list[list[list[int]]]:
    tensors = [load_file(safetensors_of(folder)[0]) for folder in (old, new)]
    found = []
    with make(old) as llm:
        found.append(tokens_of(generate(llm, prompts, greedy(8))))
        llm.update_weights(tensors[1])
        found.append(tokens_of(generate(llm, prompts, greedy(8))))
        assert told(lambda: llm.update_weights(break_off(tensors[0])))[:2] == ("KeyError", "'no more'")
        assert "the weights are incomplete" in told(lambda: llm.generate(prompts))[1]
        llm.update_weights(tensors[0].items())
        found.append(tokens_of(generate(llm, prompts, greedy(8))))
        llm.load_weights(new)
        found.append(tokens_of(generate(llm, prompts, greedy(8))))
    return found


def break_off(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(tensors.items())[:3]
    raise KeyError("no more")


def rank() -> int:
    return dist.get_rank()


def told(call: Callable[[], object]) -> tuple[str, str, float]:
    """Return the error of a call: its type, its message, and the seconds until it came."""
    begin = time.monotonic()
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    raise AssertionError("no error")


def disagree(way: str) -> list[tuple[str, str]]:
    """Let the ranks differ; return both errors: that of the call, and that of the next one."""
    if way == "options":
        return [told(lambda: make(max_num_seqs=rank() + 1))[:2]]
    with make() as llm:
        bundled = load_file(safetensors_of(BUNDLED_MODEL)[0])
        names = list(bundled)
        wrong = {**bundled, names[1]: torch.zeros(1)} if rank() == 1 else bundled
        ways: dict[str, Callable[[], object]] = {
            "prompts": lambda: llm.generate([[30], [31 + rank()]], greedy(8), use_tqdm=False),
            "a prompt more": lambda: llm.generate([[30]] * (1 + rank()), greedy(8), use_tqdm=False),
            "settings": lambda: llm.generate([[30]], greedy(8 + rank()), use_tqdm=False),
            "a bad prompt": lambda: llm.generate([[30] * rank()], greedy(8), use_tqdm=False),
            "methods": lambda: (
                llm.generate([[30]], greedy(8), use_tqdm=False) if rank() else llm.update_weights(bundled)
            ),
            "tensors": lambda: llm.update_weights(wrong),
            "fates": lambda: llm.update_weights(bundled, in_flight=("keep", "recompute")[rank()]),
            "levels": lambda: llm.sleep(1 + 2 * rank()),
        }
        *error, seconds = told(ways[way])
        assert seconds < 10
        return [tuple(error), told(lambda: llm.generate([[30]]))[:2]]


class TestRanksThatAreCalledOtherwise:
    """All ranks are told what differs, and their LLMs are closed."""

    @pytest.mark.parametrize(
        ("way", "message"),
        [
            ("options", "rank 0 has max_num_seqs: 1; rank 1 has max_num_seqs: 2"),
            ("prompts", r"rank 0 has prompt: \[31\]; rank 1 has prompt: \[32\]"),
            ("a bad prompt", r"rank 0 has error: ValueError\('prompts\[0\] is empty.*; rank 1 has prompt: \[30\]"),
            ("methods", r"rank 0 has update_weights: 'recompute', False; rank 1 has prompt: \[30\]"),
            ("tensors", "rank 0 has tensor: .*; rank 1 has error: ValueError"),
            *whole_only(
                [
                    ("a prompt more", r"rank 0 has step: 1, \[\]; rank 1 has prompt: \[30\]"),
                    ("settings", r"rank 0 has settings: .*max_tokens=8.*; rank 1 has settings: .*max_tokens=9"),
                    (
                        "fates",
                        r"rank 0 has update_weights: 'keep', False; rank 1 has update_weights: 'recompute', False",
                    ),
                    ("levels", r"rank 0 has sleep: True; rank 1 has error: ValueError\('level=3: must be"),
                ]
            ),
        ],
    )
    def test_all_are_told_so(self, way: str, message: str, trainer: Trainer) -> None:
        (kind, found), *later = trainer.run(disagree, way)
        assert kind == "WorkerError"
        assert found.startswith("the ranks of tensor_parallel_group were not called alike: ")
        assert re.search(message, found)
        assert later in ([], [("WorkerError", f"this LLM is closed, make another: {found}")])

    def test_a_drafter_that_fails_at_rank_0(self, trainer: Trainer) -> None:
        trainer.start(fall_silent)
        (kind, message, seconds), (other, cause, later) = (trainer.result(rank) for rank in range(RANKS))
        assert (kind, other) == ("ValueError", "WorkerError")
        assert message.startswith("speculation: Silent.propose must return guesses of torch.int32")
        assert cause.startswith("a rank of tensor_parallel_group died")
        assert max(seconds, later) < 10

    def test_an_error_that_all_have_leaves_the_llm_open(self, trainer: Trainer, oracle: Oracle) -> None:
        errors, token_ids = trainer.run(fail_alike)
        assert errors[0][0] == errors[1][0] == "ValueError"
        assert errors[0][1].startswith(f"prompts[0] is <object object at 0x{'':.0}")
        assert "named_tensors do not fit the model" in errors[1][1]
        assert token_ids == oracle.greedy([30], 8)


class Silent:
    """Guesses nothing, and does not say so."""

    def propose(self, rows: Any, most: int) -> None:
        return None


def fall_silent() -> tuple[str, str, float]:
    def run() -> None:
        with make(speculation=Silent()) as llm:
            llm.generate([[30]], greedy(8), use_tqdm=False)

    return told(run)


def fail_alike() -> tuple[list[tuple[str, str]], list[int]]:
    with make() as llm:
        errors = [
            told(lambda: llm.generate([object()]))[:2],
            told(lambda: llm.update_weights({"what": torch.ones(1)}))[:2],
        ]
        errors[0] = errors[0][0], errors[0][1].partition("0x")[0] + "0x"  # addresses differ
        return errors, llm.generate([[30]], greedy(8), use_tqdm=False)[0]["token_ids"]


def count_what_is_open() -> tuple[int, int]:
    """Return how many threads and file descriptors this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def leave_nothing() -> None:
    """Close LLMs, and let others fail."""
    default, groups, before = dist.group.WORLD, dict(dist.distributed_c10d._world.pg_map), None
    num_threads = torch.get_num_threads()
    for _ in range(2):
        with make() as llm:
            llm.generate([[30]], greedy(2), use_tqdm=False)
        with make() as llm:
            told(lambda llm=llm: llm.generate([[30 + rank()]], use_tqdm=False))
        told(lambda: make(max_num_seqs=rank() + 1))
        assert torch.get_num_threads() == num_threads
        assert dist.group.WORLD is default
        assert dist.distributed_c10d._world.pg_map == groups
        now = count_what_is_open()
        before = before or now  # the first one starts torch's own threads
        assert now == before


def make_one_each(prompts: list[list[int]]) -> list[list[int]]:
    """Let each process have an LLM of its own beside the one that they share; return that one's tokens."""
    groups = [dist.new_group([number]) for number in range(RANKS)]
    alone, other = groups[rank()], groups[1 - rank()]
    with make(tensor_parallel_group=alone, max_model_len=512, num_kvcache_blocks=40) as own, make() as shared:
        assert own.engine.ranks.runner.device == shared.engine.ranks.runner.device
        own_prompts = prompts[rank() :]  # one more on the first rank
        found = tokens_of(generate(own, own_prompts, greedy(12)))
        outputs = tokens_of(generate(shared, prompts, greedy(12)))
        assert outputs[rank() :] == found
        refused = told(lambda: LLM(BUNDLED_MODEL, tensor_parallel_group=alone, tensor_parallel_size=2))
        assert refused[:2] == (
            "ValueError",
            "tensor_parallel_size=2: must be left out, or 1 as tensor_parallel_group has",
        )
        refused = told(lambda: LLM(BUNDLED_MODEL, tensor_parallel_group=other))
        assert refused[0] == "ValueError"
        assert "must be a torch.distributed.ProcessGroup that this process belongs to" in refused[1]
    dist.destroy_process_group(alone)
    refused = told(lambda: LLM(BUNDLED_MODEL, tensor_parallel_group=alone))
    assert "must be a group of torch.distributed that is not destroyed" in refused[1]
    return outputs


class TestGroups:
    def test_nothing_is_left_of_ours_and_nothing_of_the_trainers_is_touched(self, trainer: Trainer) -> None:
        trainer.run(leave_nothing)

    def test_groups_of_one_know_of_no_others(self, trainer: Trainer, oracle: Oracle) -> None:
        prompts = [[30], [31, 32]]
        assert trainer.run(make_one_each, prompts) == [oracle.greedy(prompt, 12) for prompt in prompts]

    def test_no_group(self) -> None:
        with pytest.raises(ValueError, match="tensor_parallel_group='world': must be a torch"):
            LLM(BUNDLED_MODEL, tensor_parallel_group="world")


def test_ranks_that_plan_otherwise_are_told_so(trainer: Trainer) -> None:
    kind, message = trainer.run(plan_otherwise)
    assert kind == "WorkerError"
    assert "rank 0 has step: 100, [(0, 0, 99, " in message
    assert "rank 1 has step: 100, [(1, 0, 99, " in message


def plan_otherwise() -> tuple[str, str]:
    with make() as llm:
        (seq,) = llm.engine.add_request([30], greedy(150, ignore_eos=True))
        for _ in range(90):
            llm.engine.step()
        seq.request_id = rank()
        return told(lambda: [llm.engine.step() for _ in range(10)])[:2]


def test_an_interrupt_of_one_rank_ends_all(trainer: Trainer) -> None:
    trainer.start(interrupt_the_last)
    assert [trainer.result(rank) for rank in range(RANKS)] == ["WorkerError", "KeyboardInterrupt"]


def interrupt_the_last() -> str:
    with make() as llm:
        if rank() == RANKS - 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return told(lambda: llm.generate([[30]] * 8, greedy(2000, ignore_eos=True), use_tqdm=False))[0]


def run_for_long(ready: str) -> tuple[str, str, float]:
    llm = make(worker_timeout=4)
    Path(f"{ready}{rank()}").touch()
    return told(lambda: llm.generate([[30]] * 8, greedy(2000, ignore_eos=True), use_tqdm=False))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def test_a_rank_that_hangs_or_dies_is_not_waited_for(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(device, tmp_path)

    def send(sent: signal.Signals) -> float:
        """Let the ranks generate, and send a signal to the last one; returns the seconds until the first gives up."""
        trainer.start(run_for_long, sent.name)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob(f"{sent.name}*"))) < RANKS and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)
        begin = time.monotonic()
        os.kill(trainer.processes[-1].pid, sent)
        kind, message, _ = trainer.result(0)
        assert kind == "WorkerError"
        assert "a rank of tensor_parallel_group" in message
        return time.monotonic() - begin

    assert 2 < send(signal.SIGSTOP) < 15
    os.kill(trainer.processes[-1].pid, signal.SIGCONT)
    assert trainer.result(RANKS - 1)[0] == "WorkerError"
    assert send(signal.SIGKILL) < 15
    trainer.end()
