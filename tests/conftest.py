"""Fixtures: the bundled model, random Qwen3s, and transformers as the oracle."""

from __future__ import annotations

import atexit
import gc
import math
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # behind what others register: the interpreter takes itself apart for seconds
    os.environ["OMP_NUM_THREADS"] = "1"  # of this process, and of those that tests start: other tests take cores

import pytest
import torch
from _pytest.mark import ParameterSet

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # set before the first kernel is defined: without a GPU Triton interprets them

from costs import Costs
from forking import fork_what_spawns, spawning
from interpreting import hasten
from mixed import Mixed
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from workers import BESIDE_OTHERS, Worker, count_workers

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.attention.cache_layout import CacheGroup, CacheLayout, Pages, lay_out, usual_block_size
from nanoinfer.benchmark.shapes import write_config
from nanoinfer.engine.admission.admission import Admission
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.prefixes.prefix_tree import PrefixTree
from nanoinfer.kernels.attention.decode.decode_plan import DecodePlan, plan_decode
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.process.collector import no_collection

DEVICE = "cuda" if HAS_CUDA else "cpu"
TESTS_THAT_RAN = count(1)
os.environ |= {"RAY_worker_niceness": "0"}  # else its actors, nice by 15, hardly run where other tests compute
fork_what_spawns()
if not HAS_CUDA:
    hasten()
torch.set_num_threads(1 if BESIDE_OTHERS else 2)  # the models are tiny: more threads wait for each other
torch.zeros(1).cos()  # the oracle computes cosines, too, and layers/rotary.py says why one number comes first
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore Ctrl-C


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run every combination, not one of each kind")
    parser.addoption("--model", help="a folder or Hub id, which test_checkpoint.py compares with transformers")
    parser.addoption("--fuzz", type=int, default=500, help="how many random requests test_fuzz.py makes, default 500")
    parser.addoption("--most-cpu", type=float, help="fail if a plain test takes more seconds of CPU time, see costs.py")


def pytest_configure(config: pytest.Config) -> None:
    if most := config.getoption("--most-cpu"):
        config.pluginmanager.register(Costs(most))
    if BESIDE_OTHERS:
        config.pluginmanager.register(Worker())
    if HAS_CUDA and config.option.tbstyle == "auto":
        config.option.tbstyle = "short"  # to show a tensor whose memory is gone leaves the process no device


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes run the tests: for tests that are named, this one alone."""
    is_named = config.args != config.getini("testpaths") or config.option.keyword
    return 0 if is_named else count_workers()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("whole"):
        left_out = [item for item in items if "whole" in item.keywords]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "whole" not in item.keywords]
    gpus = torch.cuda.device_count()
    for item in items:
        if "gpu" in item.keywords and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        for mark in item.iter_markers("multi_gpu"):
            (needed,) = mark.args or (2,)
            if gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, found {gpus}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave all that is imported, transformers above all, out of full collections: each LLM makes one when it ends."""
    with no_collection():
        result = yield
    gc.freeze()
    return result


def pytest_runtest_logfinish() -> None:
    """Leave what tests import and keep out of them, too."""
    if next(TESTS_THAT_RAN) % 50 == 0:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    if not BESIDE_OTHERS:  # whose process ends at once
        gc.unfreeze()  # or Triton's bindings tell of leaks when the process ends


def whole_only(cases: Iterable[Any]) -> list[Any]:
    """Mark cases of a parametrized test that run with --whole alone. A tuple has a value for each argument."""
    return [
        pytest.param(*case.values, marks=[*case.marks, pytest.mark.whole], id=case.id)
        if isinstance(case, ParameterSet)
        else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.whole)
        for case in cases
    ]


def of_each_kind(cases: Iterable[Any], *places: int) -> list[Any]:
    """Mark all cases but those at these places, as `whole_only` does. zip(cases) gives cases of one argument each."""
    cases = list(cases)
    kept = [pytest.param(*case) if type(case) is tuple else case for case in cases]
    return [kept[place] if place in places else case for place, case in enumerate(whole_only(cases))]


@pytest.fixture(scope="session")
def is_whole(pytestconfig: pytest.Config) -> bool:
    """Whether --whole asks for all that a test can try."""
    return bool(pytestconfig.getoption("whole"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The bits of a product may depend on how many threads share it, and two wait long where something else runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spawned() -> Iterator[None]:
    """Ranks and replicas start as those of users do, and import for seconds."""
    with spawning():
        yield


def alive(pid: int) -> bool:
    """Whether a process still runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def plan_ahead(*args: Any, **options: Any) -> DecodePlan:
    """Call plan_decode. A decode kernel loads the plan early, so another kernel must run in between, as in a step."""
    plan = plan_decode(*args, **options)
    launch_in_between(plan.shares.device)
    return plan


class Oracle:
    """transformers' greedy generate in float32 on the CPU, one prompt at a time."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).float().eval()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
        ids = torch.tensor([prompt])
        eos = {"eos_token_id": None} if ignore_eos else {}
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **eos
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """The logits after each token, [tokens, vocabulary]."""
        return self.model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def mixed_prompts() -> list[list[int]]:
    """32 prompts of 1 to 300 tokens."""
    return Mixed.read().prompts


@pytest.fixture(scope="session")
def mixed_expected() -> list[list[int]]:
    """transformers' greedy tokens behind the mixed prompts."""
    return Mixed.read().expected


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Make LLM(...) in float32 with a small cache, so that several fit one device; closes them after the test."""
    made: list[LLM] = []

    def make(model: str = BUNDLED_MODEL, **options: object) -> LLM:
        usual = usual_block_size(str(options.get("device", DEVICE)), has_states=False)
        blocks = 1 + (1 << 15) // int(options.get("kvcache_block_size", usual))
        llm = LLM(model, **{"dtype": "float32", "num_kvcache_blocks": blocks, **options})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def make_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Save a random-weight Qwen3 of a given shape; returns its folder."""

    def make(shards: int = 1, **shape: object) -> str:
        torch.manual_seed(1)
        config = Qwen3Config(
            **{
                "vocab_size": 512,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "max_position_embeddings": 512,
                "initializer_range": 0.2,
                "eos_token_id": 1,
                "bos_token_id": None,
                "pad_token_id": 0,
                **shape,
            }
        )
        folder = tmp_path_factory.mktemp("qwen3")
        model = Qwen3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)  # ones would hide a norm weight that is not applied
        size = sum(p.numel() * 4 for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=size // shards + 1)
        return str(folder)

    return make


def alike(block_size: int, window: int | None = None) -> CacheLayout:
    """Return the layout of a model whose layers are alike."""
    return lay_out([Pages(1, 1, window)], block_size, block_size)


def layout_of(*groups: tuple[int, int | None]) -> CacheLayout:
    """Return the layout of a model with a layer in each group; groups: the tokens of a block, and the window."""
    kinds = [CacheGroup((layer,), Pages(1 + layer, 1, window), size) for layer, (size, window) in enumerate(groups)]
    prefix_size = math.lcm(*(size for size, _ in groups))
    return CacheLayout(tuple(kinds), prefix_size, prefix_size, slice_numbers=prefix_size, slices=2)


class AmidBlocks(CacheLayout):
    """A layout whose states are kept at each second token, also amid blocks."""

    grid = snapshot_grid = 2  # type: ignore[assignment]


def amid_blocks(layout: CacheLayout) -> CacheLayout:
    """Let states of a layout be kept amid blocks."""
    return AmidBlocks(**{field.name: getattr(layout, field.name) for field in fields(layout)})


class CollidingTree(PrefixTree):
    """A tree of nodes of which many have the same hash: it is cut to two bits."""

    @staticmethod
    def _hash(content: bytes) -> int:
        return PrefixTree._hash(content) & 3


class CollidingBlockManager(BlockManager):
    """A BlockManager whose nodes' hashes collide."""

    make_tree = CollidingTree


def write_random_checkpoint(name: str, folder: Path) -> None:
    """Write a checkpoint of a published shape with random weights, which are drawn on the GPU."""
    write_config(name, str(folder))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)


@pytest.fixture
def no_foresight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are let in as if all fitted, so that blocks run out."""
    monkeypatch.setattr(Admission, "is_roomy", True)


def greedy(max_tokens: int = 32, **settings: Any) -> SamplingParams:
    """SamplingParams of a greedy request."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **settings)


def different_settings(count: int) -> list[SamplingParams]:
    """Return `count` SamplingParams, each with another mixture of settings."""
    generator = torch.Generator().manual_seed(3)

    def pick(values: list) -> object:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    return [
        SamplingParams(
            temperature=pick([0, 0.6, 1.0, 1.7]),
            max_tokens=pick([5, 20, 40]),
            seed=i,
            top_k=pick([0, 1, 7, 50]),
            top_p=pick([1.0, 0.4, 0.9]),
            min_p=pick([0.0, 0.05]),
            repetition_penalty=pick([1.0, 1.0, 1.2]),
            presence_penalty=pick([0.0, 0.5]),
            frequency_penalty=pick([0.0, 0.0, 0.3]),
            logit_bias=pick([None, {14: -5.0, 201: 1.5}]),
            stop=pick([None, "the", [" and", "\n\n"]]),
            stop_token_ids=pick([None, [16]]),
            min_tokens=pick([0, 0, 5]),
            logprobs=pick([None, None, 0, 4]),
            prompt_logprobs=pick([None, None, 1]),
            ignore_eos=pick([True, False]),
        )
        if i % 4
        else SamplingParams(temperature=1.0, seed=i, max_tokens=30)
        for i in range(count)
    ]


SPEAKERS = (
    "ROMEO",
    "JULIET",
    "GLOUCESTER",
    "MENENIUS",
    "LEONTES",
    "PAULINA",
    "PETRUCHIO",
    "PROSPERO",
    "ISABELLA",
    "CAPULET",
)


@pytest.fixture(scope="session")
def recited() -> list[RequestOutput]:
    """Speeches that the bundled model knows by heart, each from the role's name to its end, in float32."""
    with LLM(BUNDLED_MODEL, device="cpu", kvcache_block_size=16, max_model_len=400) as llm:
        return llm.generate([f"{speaker}:\n" for speaker in SPEAKERS], greedy(230), use_tqdm=False)


def assert_equal(outputs: list[RequestOutput], expected: list[RequestOutput], rounding: float = 1e-4) -> None:
    """Check that outputs are equal; log-probabilities may differ by rounding."""
    for output, wanted in zip(outputs, expected, strict=True):
        assert_close(output["prompt_logprobs"], wanted["prompt_logprobs"], rounding)
        for sample, wanted_sample in zip(output["samples"], wanted["samples"], strict=True):
            for field in ("token_ids", "text", "finish_reason", "stop_reason"):
                assert sample[field] == wanted_sample[field]
            assert_close(sample["logprobs"], wanted_sample["logprobs"], rounding)


def assert_close(logprobs: list | None, expected: list | None, rounding: float = 1e-4) -> None:
    assert (logprobs is None) == (expected is None)
    for ours, theirs in zip(logprobs or [], expected or [], strict=True):
        assert (ours is None) == (theirs is None)
        assert (ours or {}) == pytest.approx(theirs or {}, abs=rounding)


def safetensors_of(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))
