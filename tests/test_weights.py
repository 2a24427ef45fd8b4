"""Weights that change in place: an updated LLM equals a fresh one bit by bit, and none is ever half new."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import itertools
import os
import pickle
import re
import signal
import sys
import threading
import time
import timeit
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import test_lifecycle
import torch
from cases import CASES, build, save
from conftest import assert_close, greedy, whole_only
from safetensors.torch import load_file, save_file
from test_lifecycle import HOST_FILES, Interrupt
from test_models import LAST_OF_CLASSES, OF_KINDS
from torch import Tensor
from transformers import PreTrainedModel

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.engine.client import InFlightPolicy
from nanoinfer.engine.free_blocks import FreeBlocks
from nanoinfer.engine.ranks.workers import WorkerError
from nanoinfer.parallel import buckets, channel

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, Tensor]
OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160}
GPU_OPTIONS = {"kvcache_block_size": 16, "max_model_len": 160, "max_num_seqs": 4, "num_kvcache_blocks": 64}
PROMPTS = [[7], list(range(20, 60)), [5, 6] * 20]
WRITER = "weight_writer.py"
INCOMPLETE = "weights are incomplete.*update_weights.*partial=False, or by load_weights"


@torch.no_grad()
def changed(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """Change all weights of a model, each norm and bias too."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str, PreTrainedModel]]:
    """Return a function that makes a case's folder, a folder with other weights, and transformers' model of these."""

    @functools.cache
    def make(name: str) -> tuple[str, str, PreTrainedModel]:
        old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
        model = changed(build(CASES[name], old))
        save(model, new)
        return str(old), str(new), model

    return make


def weights_of(folder: str) -> Tensors:
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


def results(llm: LLM) -> list[Any]:
    """All that the weights decide: tokens, log-probabilities to the last bit; and what came from the cache.

    The bits of attention depend on which blocks lie side by side, so blocks are handed out in a fresh LLM's order.
    """
    manager = llm.engine.scheduler.block_manager
    free, manager.free_blocks = sorted(manager.free_blocks), FreeBlocks(len(manager.blocks), num_eager=0)
    for block_id in free:
        assert manager.free_blocks.hand_out() == block_id
    for block_id in free:
        manager.free_blocks.add(block_id, is_kept=True)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(o.token_ids, o.logprobs, o.prompt_logprobs, o.num_cached_tokens) for o in outputs]


@pytest.fixture(scope="module")
def bundled() -> Tensors:
    return weights_of(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def other(bundled: Tensors) -> Tensors:
    """Other weights for the bundled model."""
    generator = torch.Generator().manual_seed(5)
    return {name: w * (1 + 0.3 * torch.randn(w.shape, generator=generator)) for name, w in bundled.items()}


@pytest.fixture(scope="module")
def expected(bundled: Tensors, other: Tensors, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The results of fresh LLMs on the bundled weights, and on the other ones."""
    folder = tmp_path_factory.mktemp("other")
    for file in Path(BUNDLED_MODEL).glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    torch.set_num_threads(1)
    found = []
    for model in (BUNDLED_MODEL, str(folder)):
        with LLM(model, num_kvcache_blocks=64, **OPTIONS) as llm:
            found.append(results(llm))
    assert found[0] != found[1]
    return found


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(**OPTIONS)


def breaking_off(tensors: Tensors, count: int, error: BaseException) -> Iterator[tuple[str, Tensor]]:
    """Give the first `count` tensors, and then raise an error."""
    yield from list(tensors.items())[:count]
    raise error


def trained(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's parameters, and those of its buffers that checkpoints store, such as routers' corrections."""
    stored = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {**dict(model.named_parameters()), **buffers}


class TestAnUpdatedLLMEqualsAFreshOne:
    @pytest.mark.parametrize("name", [*OF_KINDS, *whole_only(name for name in LAST_OF_CLASSES if name not in OF_KINDS)])
    def test_of_every_class(
        self, name: str, family: Callable[[str], tuple[str, str, PreTrainedModel]], make_llm: Callable[..., LLM]
    ) -> None:
        """The trainer's names are those of transformers' modules; the files may have others."""
        old, new, model = family(name)
        options = {**OPTIONS, **CASES[name].small}
        llm = make_llm(old, **options)
        before = results(llm)
        expected = results(make_llm(new, **options))
        assert llm.update_weights(trained(model)) == llm.weights_version == 1
        assert results(llm) == expected != before
        assert llm.load_weights(old) == 2
        assert results(llm) == before
        assert llm.load_weights(new) == 3
        assert results(llm) == expected

    @pytest.mark.parametrize(
        "name", ["phi3", "qwen2moe", *whole_only(["olmo2 biases", "qwen3next", "gemma3 multimodal"])]
    )
    def test_on_two_ranks(
        self, name: str, family: Callable[[str], tuple[str, str, PreTrainedModel]], make_llm: Callable[..., LLM]
    ) -> None:
        old, new, model = family(name)
        options = {**OPTIONS, **CASES[name].small, "tensor_parallel_size": 2}
        llm = make_llm(old, **options)
        before = results(llm)
        assert llm.update_weights(model.named_parameters()) == 1
        after = results(llm)
        assert llm.load_weights(old) == 2
        assert results(llm) == before
        assert llm.load_weights(new) == 3
        assert results(llm) == after != before
        llm.close()
        assert after == results(make_llm(new, **options))

    def test_constants_keep_their_numbers_unless_they_were_dropped(
        self, family: Callable[[str], tuple[str, str, PreTrainedModel]], make_llm: Callable[..., LLM]
    ) -> None:
        """Scales of Gemma 4's layers are buffers, which named_parameters() lack."""
        old, new, model = family("gemma4unified")
        llm = make_llm(old, **OPTIONS)
        assert llm.update_weights(model.named_parameters()) == 1
        expected = results(llm)
        assert expected == results(make_llm(new, **OPTIONS))
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.update_weights(model.named_parameters()) == 1
        with pytest.raises(RuntimeError, match=r"missing: model\.layers\.0\.layer_scalar"):
            llm.generate([[5]])
        buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")}
        assert llm.update_weights(buffers, partial=True) == 2
        assert results(llm) == expected

    def test_from_tensors_of_other_dtypes_and_strides(
        self, llm: LLM, other: Tensors, expected: list[list[Any]]
    ) -> None:
        llm.update_weights(
            (name, w.double().mT.contiguous().mT if w.ndim == 2 else w.double()) for name, w in other.items()
        )
        assert results(llm) == expected[1]

    def test_from_a_mapping_and_parameters_that_want_gradients(
        self, llm: LLM, other: Tensors, expected: list[list[Any]]
    ) -> None:
        llm.update_weights({name: torch.nn.Parameter(w) for name, w in other.items()})
        assert results(llm) == expected[1]

    def test_from_an_iterator_that_gives_one_memory_again_and_again(
        self, llm: LLM, other: Tensors, expected: list[list[Any]]
    ) -> None:
        memory = torch.empty(max(w.numel() for w in other.values()))

        class Again(OrderedDict):
            def items(self) -> Iterator[tuple[str, Tensor]]:
                return ((name, memory[: w.numel()].copy_(w.flatten()).view(w.shape)) for name, w in other.items())

        llm.update_weights(Again(other).items())
        assert results(llm) == expected[1]
        llm.update_weights(Again(other))
        llm.reset_prefix_cache()
        assert results(llm) == expected[1]

    @pytest.mark.parametrize("is_made_within", [False, True])
    def test_within_inference_mode_and_outside(
        self,
        is_made_within: bool,
        make_llm: Callable[..., LLM],
        bundled: Tensors,
        other: Tensors,
        expected: list[list[Any]],
    ) -> None:
        with torch.inference_mode(is_made_within):
            llm = make_llm(**OPTIONS)
        with torch.inference_mode():
            llm.update_weights((name, w.clone()) for name, w in other.items())
        assert results(llm) == expected[1]
        llm.update_weights(bundled)
        assert results(llm) == expected[0]

    def test_bit_by_bit_after_a_part_of_the_tensors(self, llm: LLM, other: Tensors, expected: list[list[Any]]) -> None:
        """Tensors that share a packed matrix come one by one, in any order."""
        names = sorted(other, key=lambda name: name[::-1])
        for version, some in enumerate([names[0::3], names[1::3], names[2::3]], start=1):
            assert llm.update_weights([(name, other[name]) for name in some], partial=True) == version
        assert results(llm) == expected[1]

    def test_when_a_tied_model_stores_its_matrix_twice_or_under_the_other_name(
        self, llm: LLM, other: Tensors, expected: list[list[Any]]
    ) -> None:
        matrix = other["model.embed_tokens.weight"]
        llm.update_weights([*other.items(), ("lm_head.weight", matrix.clone())])
        assert results(llm) == expected[1]
        llm.update_weights({"lm_head.weight": matrix * 0}.items(), partial=True)
        rest = [(name, w) for name, w in other.items() if w is not matrix]
        llm.update_weights([("lm_head.weight", matrix), *rest])
        assert results(llm) == expected[1]


@pytest.mark.gpu
class TestOnAGPU:
    """As above, under captured graphs."""

    @pytest.mark.parametrize(
        ("name", "enforce_eager"),
        [
            *((name, False) for name in OF_KINDS),
            (OF_KINDS[0], True),
            *whole_only((name, False) for name in LAST_OF_CLASSES if name not in OF_KINDS),
            *whole_only((name, True) for name in LAST_OF_CLASSES if name != OF_KINDS[0]),
        ],
    )
    def test_of_every_class(
        self,
        name: str,
        enforce_eager: bool,
        family: Callable[[str], tuple[str, str, PreTrainedModel]],
        make_llm: Callable[..., LLM],
    ) -> None:
        old, new, model = family(name)
        options = {**GPU_OPTIONS, **CASES[name].small, "dtype": "bfloat16", "enforce_eager": enforce_eager}
        llm = make_llm(old, **options)
        before = results(llm)
        expected = results(make_llm(new, **options))
        llm.update_weights((name, weight.cuda()) for name, weight in trained(model).items())
        assert results(llm) == expected != before
        llm.load_weights(old)
        assert results(llm) == before
        llm.update_weights(trained(model))
        assert results(llm) == expected

    @pytest.mark.multi_gpu
    @pytest.mark.parametrize("name", ["phi3", "qwen2moe", *whole_only(["olmo2 biases", "gemma3 multimodal"])])
    def test_on_two_ranks(
        self, name: str, family: Callable[[str], tuple[str, str, PreTrainedModel]], make_llm: Callable[..., LLM]
    ) -> None:
        old, new, model = family(name)
        options = {**GPU_OPTIONS, "dtype": "bfloat16", "tensor_parallel_size": 2}
        llm = make_llm(old, **options)
        before = results(llm)
        llm.update_weights((name, weight.cuda()) for name, weight in trained(model).items())
        after = results(llm)
        llm.load_weights(old)
        assert results(llm) == before
        llm.update_weights(model.named_parameters())
        assert results(llm) == after != before
        llm.close()
        assert after == results(make_llm(new, **options))


def test_the_parameters_stay_where_they_are(make_llm: Callable[..., LLM], other: Tensors) -> None:
    """CUDA graphs hold their addresses. bfloat16 is never packed."""
    llm = make_llm(dtype="bfloat16", **OPTIONS)
    model = llm.engine.ranks.runner.steps.model
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    llm.update_weights(other.items())
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert torch.equal(model.embedding.weight, other["model.embed_tokens.weight"].bfloat16())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_is_not_kept(ranks: int, make_llm: Callable[..., LLM], other: Tensors) -> None:
    llm = make_llm(tensor_parallel_size=ranks, **OPTIONS)

    def give() -> Iterator[tuple[str, Tensor]]:
        last: weakref.ref | None = None
        for name, weight in other.items():
            assert last is None or last() is None
            tensor = weight.clone()
            last = weakref.ref(tensor)
            yield name, tensor
            del tensor

    llm.update_weights(give())


class TestWrongTensors:
    """Each is refused before it is written: as the first of all, it leaves the weights as they were."""

    @pytest.mark.parametrize(
        ("name", "tensor", "message"),
        [
            (
                "model.layers.2.self_attn.qproj.weight",
                torch.zeros(3),
                r"unknown: model\.layers\.2\.self_attn\.qproj\.weight\. known names like that:"
                r" model\.layers\.2\.self_attn\.q_proj\.weight\.",
            ),
            ("model.layers.99.mlp.up_proj.weight", torch.zeros(3), r"like that: model\.layers\.\d+\.mlp\.up_p"),
            ("model.norm.weight", torch.zeros(3), r"model\.norm\.weight has shape \[3\], but the model needs \[192\]"),
            ("model.norm.weight", torch.zeros(192).int(), r"model\.norm\.weight has numbers of type int32"),
            ("model.norm.weight", torch.zeros(192).to(torch.float8_e4m3fn), r"has numbers of type float8_e4m3fn"),
            ("model.norm.weight", torch.zeros(192, device="meta"), r"model\.norm\.weight has no numbers to copy"),
            (b"model.norm.weight", torch.zeros(192), "must be pairs of a name and a torch.Tensor"),
            ("model.norm.weight", [1.0] * 192, "must be pairs of a name and a torch.Tensor"),
        ],
    )  # fmt: skip
    def test_a_tensor(
        self, name: str, tensor: Tensor, message: str, llm: LLM, other: Tensors, expected: list[list[Any]]
    ) -> None:
        with pytest.raises(ValueError, match=message):
            llm.update_weights([(name, tensor), *other.items()])
        assert llm.weights_version == 0
        assert results(llm) == expected[0]

    def test_a_tensor_twice(self, llm: LLM, other: Tensors) -> None:
        tensors = [*other.items(), ("model.norm.weight", other["model.norm.weight"])]
        for given in (tensors, iter(tensors)):
            llm.generate([[5]], use_tqdm=False)  # a list is checked before the first tensor is written
            with pytest.raises(ValueError, match=r"stored twice: model\.norm\.weight\."):
                llm.update_weights(given)
        with pytest.raises(RuntimeError, match=INCOMPLETE):
            llm.generate([[5]])

    @pytest.mark.parametrize("kind", [dict, list, tuple, OrderedDict])
    def test_what_is_held_is_checked_before_it_is_written(
        self, kind: type, llm: LLM, other: Tensors, expected: list[list[Any]]
    ) -> None:
        tensors = list(other.items())
        last = tensors[-1][0]
        with pytest.raises(ValueError, match=f"{last} has shape"):
            llm.update_weights(kind([*tensors[:-1], (last, torch.zeros(3, 3, 3))]))
        with pytest.raises(ValueError, match=f"missing: {last}"):
            llm.update_weights(kind(tensors[:-1]))
        assert results(llm) == expected[0]

    def test_a_split_tensor(self, llm: LLM, other: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
        class Split(Tensor):
            """Stands for a DTensor, of which only a process group can make one."""

        monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=Split))
        with pytest.raises(ValueError, match=r"model\.norm\.weight is a DTensor.*full_tensor\(\)"):
            llm.update_weights([("model.norm.weight", other["model.norm.weight"].as_subclass(Split))], partial=True)

    @pytest.mark.parametrize("named_tensors", [None, 3, "abc", [3], ["ab"], [()], {"a": 1}])
    def test_no_tensors_at_all(self, named_tensors: object, llm: LLM, expected: list[list[Any]]) -> None:
        with pytest.raises(ValueError, match=r"named_tensors.*must be pairs of a name and a torch\.Tensor"):
            llm.update_weights(named_tensors)
        assert results(llm) == expected[0]

    def test_a_generator_that_has_been_used(self, llm: LLM, other: Tensors) -> None:
        tensors = iter(other.items())
        llm.update_weights(tensors)
        with pytest.raises(ValueError, match=r"missing: .* and \d+ more"):
            llm.update_weights(tensors)
        with pytest.raises(ValueError, match="has no tensor; a generator gives its tensors only once"):
            llm.update_weights(tensors, partial=True)
        assert llm.weights_version == 1

    def test_arguments(self, llm: LLM, other: Tensors) -> None:
        with pytest.raises(ValueError, match="in_flight='drop': must be one of 'recompute', 'keep', 'abort'"):
            llm.update_weights(other.items(), in_flight="drop")
        with pytest.raises(ValueError, match="partial='yes': must be True or False"):
            llm.update_weights(other.items(), partial="yes")
        with pytest.raises(ValueError, match="model='no/such/folder': no such folder"):
            llm.load_weights("no/such/folder")

    def test_an_expert_and_its_stack(
        self, family: Callable[[str], tuple[str, str, PreTrainedModel]], make_llm: Callable[..., LLM]
    ) -> None:
        old, new, model = family("qwen3moe")
        llm, single = make_llm(old, **OPTIONS), weights_of(new)
        stack = {name: w for name, w in model.named_parameters() if "experts.down_proj" in name}
        assert stack.keys().isdisjoint(single)
        for tensors in ({**single, **stack}, {**stack, **single}):
            with pytest.raises(ValueError, match=r"stored twice: .*experts"):
                llm.update_weights(tensors)
        llm.load_weights(new)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_head_unlike_the_embedding_of_a_tied_model(
        self, ranks: int, make_llm: Callable[..., LLM], other: Tensors, tmp_path: Path
    ) -> None:
        llm = make_llm(tensor_parallel_size=ranks, **OPTIONS)
        for row in (0, -1):  # of the first rank alone, and of the last rank alone
            head = other["model.embed_tokens.weight"].clone()
            head[row] += 1
            tensors = {**other, "lm_head.weight": head}
            with pytest.raises(
                ValueError, match=r"lm_head.weight.*model.embed_tokens.weight.* differ, but this model has one"
            ):
                llm.update_weights(tensors)
        llm.update_weights(other)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match="has an output projection of its own"):
            llm.load_weights(str(tmp_path))
        assert llm.weights_version == 1

    def test_files_that_do_not_fit_change_nothing(
        self, llm: LLM, other: Tensors, expected: list[list[Any]], tmp_path: Path
    ) -> None:
        """The wrong tensor is the last of all."""
        save_file({**other, "model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[3\]"):
            llm.load_weights(str(tmp_path))
        assert results(llm) == expected[0]


class TestNeverHalfNew:
    """Once a tensor has been written, all must be, before the LLM computes again."""

    @pytest.fixture(params=[1, 2])
    def llm(self, request: pytest.FixtureRequest, make_llm: Callable[..., LLM]) -> LLM:
        return make_llm(tensor_parallel_size=request.param, **OPTIONS)

    def check_mends(self, llm: LLM, bundled: Tensors, version: int) -> None:
        """Check that every way to compute is refused, and that a whole update mends the weights."""
        for compute in (
            lambda: llm.generate([[5]]),
            lambda: llm.chat([{"role": "user", "content": "Hi"}]),
            lambda: llm.stream([[5]]),
            lambda: llm.score([5], [[6]]),
            lambda: llm.add_request([5]),
            llm.step,
        ):
            with pytest.raises(RuntimeError, match=INCOMPLETE):
                compute()
        assert llm.update_weights(bundled) == version
        assert len(llm.generate([[5]], greedy(4), use_tqdm=False)[0].token_ids) == 4

    def test_after_any_error(self, llm: LLM, bundled: Tensors, other: Tensors) -> None:
        before = results(llm)
        with pytest.raises(ZeroDivisionError):
            llm.update_weights(breaking_off(other, 3, ZeroDivisionError()))
        self.check_mends(llm, bundled, version=1)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(breaking_off(other, 7, KeyboardInterrupt()), partial=True)
        self.check_mends(llm, bundled, version=2)
        with pytest.raises(ValueError, match=r"missing: model\.norm\.weight\."):
            llm.update_weights((name, w) for name, w in other.items() if name != "model.norm.weight")
        self.check_mends(llm, bundled, version=3)
        bad = {**other, "model.layers.0.mlp.up_proj.weight": other["model.layers.0.mlp.up_proj.weight"].clone()}
        bad["model.layers.0.mlp.up_proj.weight"][-1, -1] = float("nan")  # the last rank's share
        with pytest.raises(
            ValueError, match=r"layers\.0\.mlp\.up_proj\.weight has numbers that are NaN or infinite as f"
        ):
            llm.update_weights(bad)
        self.check_mends(llm, bundled, version=4)
        llm.reset_prefix_cache()
        assert results(llm) == before

    def test_before_the_first_tensor_nothing_happens(self, llm: LLM, other: Tensors) -> None:
        before = results(llm)
        with pytest.raises(ZeroDivisionError):
            llm.update_weights(breaking_off(other, 0, ZeroDivisionError()))
        llm.reset_prefix_cache()
        assert results(llm) == before

    @pytest.mark.parametrize("first", [0, *whole_only([1, 2])])
    def test_interrupted_at_random_moments(self, first: int, llm: LLM, bundled: Tensors, other: Tensors) -> None:
        before = results(llm)
        seconds = min(timeit.repeat(lambda: llm.update_weights(other), number=1, repeat=2))
        broken = 0
        for number in itertools.count(first, 3):
            with pytest.raises(KeyboardInterrupt):
                self.update_interrupted(llm, other, seconds * number / 14)
            try:
                llm.engine.check_ready()
            except RuntimeError:
                broken += 1
                llm.update_weights(bundled)
            else:
                if number > 14:  # it came behind the end: other processes may have slowed the updates before
                    break
        assert broken > 0
        llm.update_weights(bundled)
        assert results(llm) == before

    def update_interrupted(self, llm: LLM, tensors: Tensors, seconds: float) -> None:
        """Send this process a SIGINT some time after the update begins, or when it has ended."""
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        llm.update_weights(tensors)
        time.sleep(10)

    @pytest.mark.parametrize("count", [0, 5, 99], ids=["at once", "in the middle", "in the end"])
    def test_closed_by_the_iterator(self, count: int, llm: LLM, other: Tensors) -> None:
        def give() -> Iterator[tuple[str, Tensor]]:
            yield from list(other.items())[:count]
            llm.close()
            yield from list(other.items())[count:]

        with pytest.raises(ValueError, match="this LLM is closed"):
            llm.update_weights(give())

    def test_generate_within_the_iterator(self, llm: LLM, other: Tensors) -> None:
        def give() -> Iterator[tuple[str, Tensor]]:
            yield from other.items()
            llm.generate([[5]])

        with pytest.raises(RuntimeError, match=INCOMPLETE):
            llm.update_weights(give())
        llm.update_weights(other)


MOST = 24  # tokens of a request


def request(seed: int = 1, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": seed, "max_tokens": MOST, "ignore_eos": True, **settings})


def test_equal_prompts_share_nothing_of_the_old_weights(llm: LLM, bundled: Tensors) -> None:
    prompt = [[5, 6, 7, 8] * 20]

    def cached() -> int:
        return llm.generate(prompt, greedy(2), use_tqdm=False)[0].num_cached_tokens

    assert [cached(), cached()] == [0, 64]
    llm.update_weights(bundled)
    assert [cached(), cached()] == [0, 64]
    llm.update_weights({"model.norm.weight": bundled["model.norm.weight"]}, partial=True)
    assert [cached(), cached()] == [0, 64]
    llm.reset_prefix_cache()
    assert [cached(), cached()] == [0, 64]


class TestRequestsThatRun:
    """Between two steps of a loop of one's own, the weights may change."""

    PROMPTS = ([5] * 40, [6, 7] * 20, [8])

    def begin(self, llm: LLM, steps: int, **settings: Any) -> list[int]:
        ids = [llm.add_request(prompt, request(seed, **settings)) for seed, prompt in enumerate(self.PROMPTS)]
        outputs = [output for _ in range(steps) for output in llm.step()]
        assert not outputs
        return ids

    def finish(self, llm: LLM) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        return sorted(outputs, key=lambda output: output.request_id)

    def test_recompute_draws_on_as_if_the_tokens_so_far_were_a_prompt(
        self, llm: LLM, make_llm: Callable[..., LLM], other: Tensors
    ) -> None:
        self.begin(llm, steps=10, logprobs=0)
        llm.update_weights(other)
        fresh = make_llm(**OPTIONS)
        fresh.update_weights(other)
        for seed, output in enumerate(self.finish(llm)):
            prompt, tokens = output.prompt_token_ids, output.token_ids
            (first, old), (start, new) = output.weights_versions
            assert (first, old, new) == (0, 0, 1)
            assert 5 < start < 12
            params = request(seed, logprobs=0, max_tokens=MOST - start)
            (again,) = fresh.generate([prompt + tokens[:start]], params, use_tqdm=False)
            assert tokens[start:] == again.token_ids
            assert logprobs_of(output)[start:] == pytest.approx(logprobs_of(again), abs=1e-4)

    def test_each_token_counts_for_the_version_that_drew_it(
        self, llm: LLM, make_llm: Callable[..., LLM], other: Tensors
    ) -> None:
        """The step in flight has been launched with the old weights."""
        old = self.reference(make_llm)
        self.begin(llm, steps=10)
        llm.update_weights(other)
        for output, expected in zip(self.finish(llm), old, strict=True):
            start = output.weights_versions[1][0]
            assert output.token_ids[:start] == expected.token_ids[:start]
            assert output.token_ids != expected.token_ids

    def reference(self, make_llm: Callable[..., LLM]) -> list[RequestOutput]:
        llm = make_llm(**OPTIONS)
        params = [request(seed) for seed in range(len(self.PROMPTS))]
        return llm.generate(list(self.PROMPTS), params, use_tqdm=False)

    def test_keep_goes_on_over_the_old_keys_and_values(
        self, llm: LLM, make_llm: Callable[..., LLM], bundled: Tensors, other: Tensors
    ) -> None:
        """With the same weights, it changes nothing. With others, tokens differ from those that recompute gives."""
        expected = self.reference(make_llm)
        self.begin(llm, steps=10)
        llm.update_weights(bundled, in_flight="keep")
        outputs = self.finish(llm)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert all(len(o.weights_versions) == 2 for o in outputs)
        found = []
        for in_flight in ("keep", "recompute"):
            self.begin(llm, steps=10, logprobs=0)
            llm.update_weights(other, in_flight=in_flight)
            assert llm.engine.scheduler.num_preemptions == 0
            found.append([logprobs_of(output) for output in self.finish(llm)])
            llm.update_weights(bundled)
        assert found[0] != found[1]

    def test_what_is_kept_is_never_shared(self, llm: LLM, make_llm: Callable[..., LLM], other: Tensors) -> None:
        """Blocks that a kept sequence fills later hang on old keys, too."""
        self.begin(llm, steps=10)
        llm.update_weights(other, in_flight="keep")
        outputs = self.finish(llm)
        prompts = [output.prompt_token_ids + output.token_ids for output in outputs]
        again = llm.generate(prompts, greedy(4), use_tqdm=False)
        assert [output.num_cached_tokens for output in again] == [0, 0, 0]
        fresh = make_llm(**OPTIONS)
        fresh.update_weights(other)
        expected = fresh.generate(prompts, greedy(4), use_tqdm=False)
        assert [o.token_ids for o in again] == [o.token_ids for o in expected]

    def test_abort_returns_what_there_is_and_it_goes_on_later(
        self, llm: LLM, make_llm: Callable[..., LLM], bundled: Tensors
    ) -> None:
        expected = self.reference(make_llm)
        ids = self.begin(llm, steps=10)
        llm.update_weights(bundled, in_flight="abort")
        outputs = sorted(llm.step(), key=lambda output: output.request_id)
        assert not llm.has_unfinished_requests()
        assert [output.request_id for output in outputs] == ids
        for seed, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
            assert output.finish_reason == "abort"
            assert output.weights_versions == [(0, 0)]
            done = output.token_ids
            assert 5 < len(done) < 12
            prompt = [*output.prompt_token_ids, *done]
            (rest,) = llm.generate([prompt], request(seed, max_tokens=MOST - len(done)), use_tqdm=False)
            assert done + rest.token_ids == whole.token_ids
            assert rest.weights_versions == [(0, 1)]

    @pytest.mark.parametrize("first", [1, *whole_only([3, 5])])
    @pytest.mark.parametrize("in_flight", ["recompute", *whole_only(["keep", "abort"])])
    def test_requests_in_every_state(
        self, in_flight: str, first: int, make_llm: Callable[..., LLM], bundled: Tensors
    ) -> None:
        """Some wait, one is half prefilled, some decode, some stop. New weights that equal the old change nothing."""
        options = {**OPTIONS, "max_num_batched_tokens": 24, "max_num_seqs": 4}
        params = [
            request(1, n=3, max_tokens=9),
            request(2, max_tokens=20, prompt_logprobs=0, logprobs=1),
            request(3, stop=["e", "t"]),
            request(4, max_tokens=3),
            request(5, max_tokens=0, prompt_logprobs=0),
        ]
        prompts = [[5] * 40, [6, 7] * 20, [8], list(range(20, 70)), [9, 5] * 25]
        expected = make_llm(**options).generate(prompts, params, use_tqdm=False)
        llm = make_llm(**options)
        manager = llm.engine.scheduler.block_manager
        for steps in range(first, 30, 6):
            llm.reset_prefix_cache()
            ids = [llm.add_request(prompt, settings) for prompt, settings in zip(prompts, params, strict=True)]
            outputs = [output for _ in range(steps) for output in llm.step()]
            llm.update_weights(bundled, in_flight=in_flight)
            outputs += self.finish(llm)
            assert manager.num_free == len(manager.blocks)
            assert sorted(output.request_id for output in outputs) == ids
            for output in outputs:
                self.check_beginning(output, expected[output.request_id - ids[0]], is_whole=in_flight != "abort")

    def test_prompt_logprobs_stay_when_a_request_starts_again_twice(
        self, make_llm: Callable[..., LLM], bundled: Tensors
    ) -> None:
        """The second update comes while its prompt is half computed again."""
        llm = make_llm(**OPTIONS, max_num_batched_tokens=24)
        prompt, params = [6, 7] * 30, request(2, prompt_logprobs=0)
        (expected,) = llm.generate([prompt], params, use_tqdm=False)
        llm.reset_prefix_cache()
        llm.add_request(prompt, params)
        for steps in (6, 1):
            assert not [llm.step() for _ in range(steps)][-1]
            llm.update_weights(bundled)
        (output,) = self.finish(llm)
        self.check_beginning(output, expected, is_whole=True)

    def check_beginning(self, output: RequestOutput, expected: RequestOutput, is_whole: bool) -> None:
        """Check that an output is the expected one, or if it is not whole, a beginning of it."""
        for sample, wanted in zip(output.samples, expected.samples, strict=True):
            count = len(wanted.token_ids) if is_whole else len(sample.token_ids)
            assert sample.token_ids == wanted.token_ids[:count]
            assert_close(sample.logprobs, wanted.logprobs and wanted.logprobs[:count])
        if is_whole:
            assert_close(output.prompt_logprobs, expected.prompt_logprobs)

    def test_a_request_that_has_not_begun_has_one_version(self, llm: LLM, bundled: Tensors) -> None:
        llm.add_request([5], greedy(3))
        for in_flight in ("keep", "recompute"):
            llm.update_weights(bundled, in_flight=in_flight)
        (output,) = self.finish(llm)
        assert output.weights_versions == [(0, 2)]

    def test_a_broken_update_keeps_them(self, llm: LLM, bundled: Tensors) -> None:
        self.begin(llm, steps=10)
        with pytest.raises(ZeroDivisionError):
            llm.update_weights(breaking_off(bundled, 5, ZeroDivisionError()))
        with pytest.raises(RuntimeError, match=INCOMPLETE):
            llm.step()
        llm.update_weights(bundled)
        assert [len(output.token_ids) for output in self.finish(llm)] == [MOST] * 3

    @pytest.mark.parametrize(
        ("in_flight", "files", "stride", "stride_near_end"),
        [
            *whole_only(
                (policy, (*HOST_FILES, "weights.py", "updater.py", "sources.py", "roll.py", WRITER), 587, 1)
                for policy in get_args(InFlightPolicy)
            ),
            *whole_only([("recompute", (WRITER,), 29, 1)]),
            ("recompute", (WRITER,), 307, 3),
        ],
    )
    def test_an_interrupt_at_any_line_leaves_no_mixture(
        self,
        in_flight: InFlightPolicy,
        files: tuple[str, ...],
        stride: int,
        stride_near_end: int,
        llm: LLM,
        bundled: Tensors,
        other: Tensors,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The test interrupts at every so many lines, and at more near the end, but where the lock is given back."""
        monkeypatch.setattr(test_lifecycle, "HOST_FILES", files)
        expected = results(llm)

        def update(trace: Interrupt) -> None:
            self.begin(llm, steps=5, max_tokens=8)
            sys.settrace(trace)
            try:
                llm.update_weights(other, in_flight=in_flight)
            finally:
                sys.settrace(None)

        llm.update_weights(bundled)  # the first update has more lines: some results are kept
        whole = Interrupt()
        update(whole)
        self.finish(llm)
        for line in [*range(1, whole.count - 15, stride), *range(whole.count - 15, whole.count - 1, stride_near_end)]:
            with pytest.raises(KeyboardInterrupt):
                update(Interrupt(line))
            before = llm.weights_version
            assert llm.update_weights(bundled, in_flight=in_flight) == before + 1
            self.finish(llm)
            llm.reset_prefix_cache()
            assert results(llm) == expected, f"interrupted at line {line}"

    def test_a_call_that_generates_is_not_disturbed(self, llm: LLM, bundled: Tensors) -> None:
        stream = llm.stream([[5]], greedy(4))
        assert next(stream).weights_versions == [(0, 0)]
        for change in (lambda: llm.update_weights(bundled), lambda: llm.load_weights(BUNDLED_MODEL)):
            with pytest.raises(RuntimeError, match="a stream is open"):
                change()
        with pytest.raises(RuntimeError, match="a stream is open"):
            llm.reset_prefix_cache()
        stream.close()
        assert llm.update_weights(bundled) == 1


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The segments for buckets that the test has made. Others' segments come and go, too."""
    made: list[Path] = []

    def make_segment(num_bytes: int, least: int) -> SharedMemory:
        memory = channel.make_segment(num_bytes, least)
        made.append(Path(channel.FOLDER) / memory.name)
        return memory

    monkeypatch.setattr(buckets, "make_segment", make_segment)
    return made


def logprobs_of(output: RequestOutput) -> list[float]:
    return [entry[token] for entry, token in zip(output.logprobs, output.token_ids, strict=True)]


def held_by(llm: LLM) -> tuple[list[int], list[Counter[str]]]:
    """Return for each process its pages of memory, and how many threads it runs and how often it opened each file."""
    processes = llm.engine.ranks.workers.processes if llm.engine.ranks.workers else []
    pids = [os.getpid(), *(process.pid for process in processes)]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or this process's heap would count with what it holds free
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return pages, [threads_and_files_of(pid) for pid in pids]


def threads_and_files_of(pid: int) -> Counter[str]:
    """Files count by name, so that a failure says which one was left open."""
    held = Counter(threads=len(os.listdir(f"/proc/{pid}/task")))
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that lists them
            held[re.sub(r"\[\d+]", "", os.readlink(descriptor))] += 1  # a socket's name has a number
    return held


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hundred_updates_do_not_grow(
    ranks: int, make_llm: Callable[..., LLM], bundled: Tensors, segments: list[Path]
) -> None:
    llm = make_llm(tensor_parallel_size=ranks, **OPTIONS)

    def update(number: int) -> None:
        tensors = list(bundled.items())
        if number % 3 == 0:
            llm.load_weights(BUNDLED_MODEL)
        elif number % 3 == 1:
            llm.update_weights(tensors)
        else:
            with pytest.raises(ZeroDivisionError):
                llm.update_weights(breaking_off(bundled, number % len(tensors), ZeroDivisionError()))
            llm.update_weights(bundled)

    before = results(llm)
    for number in range(10):
        update(number)
    pages, others = held_by(llm)
    for number in range(100):
        update(number)
    pages_after, others_after = held_by(llm)
    for after, old in zip(others_after, others, strict=True):
        assert after == old
    assert bool(segments) == (ranks > 1)
    assert not any(segment.exists() for segment in segments)
    assert (
        max(after - old for after, old in zip(pages_after, pages, strict=True)) * os.sysconf("SC_PAGE_SIZE") < 4 << 20
    )
    assert results(llm) == before


class TestBuckets:
    """Tensors reach the other ranks through shared memory."""

    def test_a_bucket_smaller_than_a_tensor(
        self, make_llm: Callable[..., LLM], bundled: Tensors, other: Tensors, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(buckets, "PART_BYTES", 30_000)
        monkeypatch.setattr(buckets, "LEAST_PART_BYTES", 30_000)
        llm = make_llm(tensor_parallel_size=2, **OPTIONS)
        llm.update_weights(other)
        small = results(llm)
        monkeypatch.undo()
        llm.update_weights(bundled)
        assert results(llm) != small
        llm.update_weights(other)
        assert results(llm) == small

    def test_a_stack_of_experts_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(buckets, "PART_BYTES", 1024)
        monkeypatch.setattr(buckets, "LEAST_PART_BYTES", 1024)
        sent: list[buckets.Bucket] = []
        found = torch.zeros(3, 50, 6, dtype=torch.float64)

        def send(bucket: buckets.Bucket) -> None:
            """Read a bucket two messages late, as a rank may."""
            sent.append(pickle.loads(pickle.dumps(bucket)))
            if len(sent) > 2:
                reader.read(sent.pop(0), take)

        def take(piece: buckets.Piece, rows: Tensor) -> None:
            assert piece.name == "stack"
            found[piece.entry, piece.first : piece.first + len(rows)] = rows

        stack = torch.randn(3, 50, 6, dtype=torch.float64)
        reader = buckets.BucketReader(torch.device("cpu"))
        shared = buckets.SharedBuckets(send)
        shared.open()
        shared.put("stack", stack, is_stack=True)
        shared.flush()
        for bucket in sent:
            reader.read(bucket, take)
        reader.close()
        shared.close()
        assert torch.equal(found, stack)

    def test_no_room_in_shared_memory(
        self, make_llm: Callable[..., LLM], bundled: Tensors, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing has been written then."""
        llm = make_llm(tensor_parallel_size=2, **OPTIONS)
        before = results(llm)

        def full(file: int, offset: int, num_bytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RuntimeError, match="processes share memory in /dev/shm, but it is full"):
            llm.update_weights(bundled)
        llm.reset_prefix_cache()
        assert results(llm) == before

    def test_a_rank_that_dies_is_named(
        self, make_llm: Callable[..., LLM], other: Tensors, segments: list[Path]
    ) -> None:
        llm = make_llm(tensor_parallel_size=2, **OPTIONS)

        def give() -> Iterator[tuple[str, Tensor]]:
            for number, pair in enumerate(other.items()):
                if number == 5:
                    llm.engine.ranks.workers.send("holdings.weights.no_such_method", ())
                yield pair

        with pytest.raises(WorkerError, match=r"(?s)rank 1 died: Traceback.*no_such_method"):
            llm.update_weights(give())
        with pytest.raises(WorkerError, match="this LLM is closed"):
            llm.update_weights(other)
        (segment,) = segments
        assert not segment.exists()
