"""An LLM that sleeps gives its memory away, and wakes up as it was; nothing computes on what is not there."""

from __future__ import annotations

import dis
import functools
import gc
import linecache
import os
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from cases import CASES, build
from conftest import HAS_CUDA, of_each_kind
from test_weights import GPU_OPTIONS, INCOMPLETE, OPTIONS, PROMPTS, held_by, results, weights_of

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.process import host_memory
from nanoinfer.runner.memory import holdings

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = [
    pytest.param({**OPTIONS}, id="cpu"),
    pytest.param({**GPU_OPTIONS}, id="gpu", marks=pytest.mark.gpu),
    pytest.param({**OPTIONS, "tensor_parallel_size": 2}, id="cpu, 2 ranks"),
    pytest.param({**GPU_OPTIONS, "enforce_eager": True}, id="gpu, eager", marks=pytest.mark.gpu),
    pytest.param({**GPU_OPTIONS, "tensor_parallel_size": 2}, id="gpu, 2 ranks", marks=pytest.mark.multi_gpu),
]
EACH = pytest.mark.parametrize("llm", DEVICES, indirect=True)
ONE_RANK = pytest.mark.parametrize("llm", of_each_kind(DEVICES, 0, 1), indirect=True)  # the others with --whole
SLEEPS = "this LLM sleeps.*call wake_up"


@pytest.fixture
def llm(request: pytest.FixtureRequest, make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(**request.param)


@EACH
def test_it_wakes_up_as_it_was(llm: LLM) -> None:
    before = results(llm)
    llm.sleep()
    assert llm.is_sleeping
    llm.wake_up()
    assert not llm.is_sleeping
    assert results(llm) == before
    llm.sleep()
    llm.wake_up(["kv_cache"])
    assert llm.is_sleeping
    llm.wake_up({"weights"})
    assert results(llm) == before
    assert llm.weights_version == 0


@EACH
def test_level_2_drops_the_weights(llm: LLM) -> None:
    before = results(llm)
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(RuntimeError, match=INCOMPLETE):
        llm.generate([[5]])
    assert llm.update_weights(weights_of(BUNDLED_MODEL)) == 1
    assert results(llm) == before


@EACH
def test_new_weights_may_come_before_the_kv_cache(llm: LLM) -> None:
    before = results(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.load_weights(BUNDLED_MODEL)
    with pytest.raises(RuntimeError, match=r"lent its kv_cache: call wake_up"):
        llm.generate([[5]])
    llm.update_weights({"model.norm.weight": weights_of(BUNDLED_MODEL)["model.norm.weight"]}, partial=True)
    llm.wake_up(tags=["kv_cache"])
    assert results(llm) == before


@ONE_RANK
def test_every_order(llm: LLM) -> None:
    """Sleeping and waking twice, deeper and less deep, with new weights between."""
    before = results(llm)
    llm.wake_up()
    llm.sleep()
    llm.sleep()
    llm.wake_up()
    llm.wake_up()
    assert results(llm) == before
    for levels in ((1, 2), (2, 1), (2, 2)):
        for level in levels:
            llm.sleep(level)
        llm.wake_up(["kv_cache"])
        llm.sleep(1)
        llm.wake_up()
        with pytest.raises(RuntimeError, match=INCOMPLETE):
            llm.generate([[5]])
        llm.load_weights(BUNDLED_MODEL)
        assert results(llm) == before
    llm.sleep()
    llm.wake_up(["weights"])
    llm.sleep()
    llm.wake_up()
    assert results(llm) == before
    llm.sleep()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.wake_up()


@ONE_RANK
def test_nothing_runs_while_it_sleeps(llm: LLM) -> None:
    llm.sleep()
    for compute in (
        lambda: llm.generate([[5]]),
        lambda: llm.stream([[5]]),
        lambda: llm.score([5], [[6]]),
        lambda: llm.add_request([5]),
        llm.step,
        lambda: llm.update_weights(weights_of(BUNDLED_MODEL)),
        lambda: llm.load_weights(BUNDLED_MODEL),
    ):
        with pytest.raises(RuntimeError, match=SLEEPS):
            compute()
    assert llm.tokenizer is not None
    assert llm.detokenize(llm.tokenize("to be")) == "to be"
    llm.reset_prefix_cache()


@ONE_RANK
def test_it_forgets_what_it_has_computed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    prompt = list(range(40))
    llm.generate([prompt], params, use_tqdm=False)
    assert llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens == 32
    llm.sleep()
    llm.wake_up()
    assert llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens == 0


def test_requests_keep_it_awake(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS)
    llm.add_request([5], SamplingParams(max_tokens=3))
    llm.step()
    with pytest.raises(RuntimeError, match="requests of add_request have not ended"):
        llm.sleep()
    while llm.has_unfinished_requests():
        llm.step()
    stream = llm.stream([[5]])
    next(stream)
    with pytest.raises(RuntimeError, match="a stream is open"):
        llm.sleep()
    stream.close()
    llm.sleep()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.sleep(3), "level=3: must be an integer from 1 to 2"),
        (lambda llm: llm.sleep("deep"), "level='deep': must be an integer from 1 to 2"),
        (lambda llm: llm.wake_up(["kv"]), r"tags=\['kv'\]: must be a list of any of 'weights', 'kv_cache'"),
        (lambda llm: llm.wake_up("weights"), "tags='weights': must be a list of any of 'weights', 'kv_cache'"),
    ],
)
def test_wrong_arguments(call: Callable[[LLM], None], message: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS)
    with pytest.raises(ValueError, match=message):
        call(llm)
    assert not llm.is_sleeping


def test_a_model_that_cannot_be_built_again_yet(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(**OPTIONS)
    before = results(llm)
    llm.sleep(level=2)

    def fail(*_: object) -> None:
        raise MemoryError("too little")

    with monkeypatch.context() as patch:
        patch.setattr(holdings, "WeightWriter", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device has no memory for the weights: too little"):
                llm.wake_up()
    llm.wake_up()
    llm.load_weights(BUNDLED_MODEL)
    assert results(llm) == before


@pytest.mark.parametrize("name", ["qwen3moe", "gemma3 multimodal", "qwen3-vl"])
def test_families(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Also in inference mode, and with the experts that tokens took."""
    model = build(CASES[name], tmp_path)
    llm = make_llm(str(tmp_path), routed_experts=name == "qwen3moe", **(GPU_OPTIONS if HAS_CUDA else OPTIONS))
    before = results(llm)
    for level in (1, 2):
        with torch.inference_mode():
            llm.sleep(level)
            llm.wake_up()
        if level == 2:
            llm.update_weights(model.named_parameters())
        assert results(llm) == before
    output = llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0]
    assert (output.routed_experts is None) == (name != "qwen3moe")


def test_the_cpu_gives_its_memory_back(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**OPTIONS)
    holdings = llm.engine.ranks.runner.holdings
    cache, model = weakref.ref(holdings.kv_cache), weakref.ref(holdings.model)
    llm.sleep()
    gc.collect()
    assert cache() is None
    assert model() is not None
    llm.sleep(level=2)
    gc.collect()
    assert model() is None


@functools.cache
def is_of_package(file: str) -> bool:
    return "nanoinfer" in Path(file).parts


class Signal:
    """A trace function that sends the process a SIGINT at one of the lines that it executes in the package."""

    def __init__(self, line: int | None = None) -> None:
        self.line = line
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Signal | None:
        if event == "call":
            return self if is_of_package(frame.f_code.co_filename) else None
        if event == "line" and not leaves_with(frame):
            self.count += 1
            if self.count == self.line:
                signal.raise_signal(signal.SIGINT)
        return self


def leaves_with(frame: FrameType) -> bool:
    """Whether a `with` block has ended, and its __exit__ comes next. Python handles a signal behind a call or a jump.

    So no signal comes there, where it would leave a lock locked.
    """
    is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
    return is_with and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "LOAD_CONST"


@pytest.mark.whole
@pytest.mark.parametrize("level", [1, 2])
def test_an_interrupt_at_any_line_can_be_mended(level: int, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**(GPU_OPTIONS if HAS_CUDA else OPTIONS))
    before = results(llm)

    def nap(trace: Signal) -> None:
        sys.settrace(trace)
        try:
            llm.sleep(level)
            llm.wake_up()
        finally:
            sys.settrace(None)

    nap(Signal())
    whole = Signal()
    nap(whole)
    llm.load_weights(BUNDLED_MODEL)
    for line in range(1, whole.count, max(1, whole.count // 60)):
        with pytest.raises(KeyboardInterrupt):
            nap(Signal(line))
        llm.wake_up()
        if level == 2:
            llm.load_weights(BUNDLED_MODEL)
        assert results(llm) == before


@pytest.mark.whole
@pytest.mark.alone
@EACH
def test_a_hundred_sleeps_do_not_grow(llm: LLM) -> None:
    tensors = weights_of(BUNDLED_MODEL)

    def nap(number: int) -> None:
        llm.sleep(1 + number % 2)
        llm.wake_up()
        if number % 2:
            llm.update_weights(tensors)

    before = results(llm)
    for number in range(10):
        nap(number)
    pages, others = held_by(llm)
    free = torch.cuda.mem_get_info()[0] if llm.config.device == "cuda" else 0
    for number in range(100):
        nap(number)
    pages_after, others_after = held_by(llm)
    for after, old in zip(others_after, others, strict=True):
        assert after == old
    grown = max(after - old for after, old in zip(pages_after, pages, strict=True)) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 8 << 20
    assert not free or free - torch.cuda.mem_get_info()[0] < 8 << 20
    assert results(llm) == before


@pytest.mark.gpu
@pytest.mark.alone
class TestMemoryOfAGPU:
    @pytest.mark.parametrize("level", [1, 2])
    def test_nearly_all_of_it_goes_back_to_the_driver(self, level: int, make_llm: Callable[..., LLM]) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        llm = make_llm(num_kvcache_blocks=4 << 30 >> 20, kvcache_block_size=256)
        llm.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)
        held = before - torch.cuda.mem_get_info()[0]
        llm.sleep(level)
        assert before - torch.cuda.mem_get_info()[0] < 0.05 * held
        llm.wake_up()
        assert before - torch.cuda.mem_get_info()[0] == pytest.approx(held, rel=0.1)

    def test_others_may_have_taken_it(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(**GPU_OPTIONS)
        before = results(llm)
        llm.sleep()
        taken, size = [], torch.cuda.mem_get_info()[0]
        while size > 1 << 20:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
        with pytest.raises(RuntimeError, match=r"the device has no memory for the weights: .* GiB left"):
            llm.wake_up()
        assert llm.is_sleeping
        del taken
        torch.cuda.empty_cache()
        llm.wake_up()
        assert results(llm) == before

    def test_the_host_may_have_no_room(self, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
        llm = make_llm(**GPU_OPTIONS)
        before = results(llm)

        def refuse(*_: object, **__: object) -> None:
            raise OSError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(host_memory.mmap, "mmap", refuse)
            with pytest.raises(RuntimeError, match=r"no memory for the weights, of which sleep\(level=2\) keeps none"):
                llm.sleep()
        assert not llm.is_sleeping
        assert results(llm) == before
        llm.sleep()
        llm.wake_up()
        assert results(llm) == before
