"""Layers that lie in host memory: the same tokens as if they stayed on the device, whatever an LLM is asked for."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, build, save
from cases.tuned import ALPHA, Tuned
from conftest import greedy
from test_weights import changed, results, weights_of
from torch import nn

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.config import Config
from nanoinfer.process import host_memory
from nanoinfer.runner.memory import pinned_pages
from nanoinfer.runner.streaming.choice import hint
from nanoinfer.runner.streaming.plan import (
    BUFFERS,
    LayerSizes,
    Resources,
    least_gib,
    plan_bytes,
    plan_fastest,
    plans,
    spread,
)
from nanoinfer.runner.streaming.stream import LayerStream
from nanoinfer.weights.sources import FileSource

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 160}
ALL = 1.0  # GiB, more than a small model has
PROMPT = list(range(20, 60))
GIB = 1 << 30


class TestPlans:
    def test_streamed_layers_are_spread(self) -> None:
        for layers in range(1, 40):
            for count in range(1, layers + 1):
                chosen = spread(count, tuple(range(layers)))
                gaps = [later - layer for layer, later in zip(chosen, [*chosen[1:], layers], strict=True)]
                assert len(chosen) == count
                assert chosen[0] == 0
                assert max(gaps) - min(gaps) <= 1

    def test_a_plan_saves_memory_and_keeps_what_is_asked_for_in_the_host(self) -> None:
        draw = random.Random(0)
        for _ in range(200):
            sizes = LayerSizes(tuple(draw.randint(1, 9) * GIB // 8 for _ in range(draw.randint(1, 30))), GIB)
            asked = draw.uniform(0, 1.1) * sum(sizes.layers)
            plan = plan_bytes(sizes, asked)
            if plan is None:
                assert asked < BUFFERS * max(sizes.layers) or not plans(sizes)
                continue
            assert plan.saved_bytes(sizes) > 0
            assert plan.buffer_bytes == max(sizes.layers[layer] for layer in plan.layers)
            assert plan.streamed_bytes(sizes) >= asked or plan == plans(sizes)[-1]

    def test_the_least_that_makes_room_makes_it(self) -> None:
        draw = random.Random(1)
        for _ in range(200):
            sizes = LayerSizes((draw.randint(1, 10**9),) * draw.randint(3, 30), 0)
            lacking = draw.randint(1, sizes.total)
            gib = least_gib(sizes, lacking)
            if gib is None:
                assert lacking > sizes.total - BUFFERS * sizes.layers[0]
                continue
            plan = plan_bytes(sizes, gib * GIB)
            assert plan is not None
            assert plan.saved_bytes(sizes) >= lacking > plan.saved_bytes(sizes) - sizes.layers[0]

    def test_an_error_says_what_would_do_on_all_ranks_together(self) -> None:
        sizes = LayerSizes((GIB,) * 10, GIB)
        config = SimpleNamespace(weight_offload_gib=0.0, tensor_parallel_size=2)
        assert hint(config, sizes, 3 * GIB) == "set weight_offload_gib=10 or more, or 'auto'"
        assert hint(config, sizes, 9 * GIB) == ""
        config.weight_offload_gib = "auto"
        assert hint(config, sizes, 3 * GIB) == "set weight_offload_gib=10 or more"

    def test_small_layers_stay_where_large_ones_are_enough(self) -> None:
        sizes = LayerSizes((1, 100, 1, 100, 1, 100, 1, 100), 0)
        plan = plan_bytes(sizes, 300)
        assert plan is not None
        assert plan.layers == (1, 3, 5)
        assert plans(sizes)[-1].layers == tuple(range(8))

    def test_the_fastest(self) -> None:
        """A model that fits stays. Of one that does not, all layers go where the cache then has room for more rows."""
        sizes = LayerSizes((10,) * 60, 20)
        resources = Resources(2000, 4, 256, 4, link=50, memory=3000)
        resident = plan_fastest(sizes, resources)
        assert resident is not None
        assert resident.layers == ()
        tight = plan_fastest(sizes, Resources(400, 4, 256, 4, link=50, memory=3000))
        assert tight is not None
        assert len(tight.layers) == 60
        few = plan_fastest(sizes, Resources(400, 4, 8, 4, link=50, memory=3000))
        assert few is not None  # more than eight rows are never there
        assert 3 <= len(few.layers) < 60
        assert few.saved_bytes(sizes) >= sizes.total + 8 * 4 - 400 > few.saved_bytes(sizes) - 10
        assert plan_fastest(sizes, Resources(30, 4, 8, 4, link=50, memory=3000)) is None


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stream layers, from memory to memory, and keep no copies of weights in other forms."""
    monkeypatch.setattr(Config, "_check_offload", lambda config: None)
    monkeypatch.setattr("nanoinfer.weights.formats.plain.matrix.can_pack", lambda weight: False)
    monkeypatch.setattr("nanoinfer.weights.formats.groups.store.may_keep", lambda shape, dtype: False)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str]]:
    """Return a function that makes a case's folder, and one with other weights."""

    @functools.cache
    def make(name: str) -> tuple[str, str]:
        old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
        case = CASES[name]
        if name == "longcat":  # of two halves each, and so few
            case = replace(case, settings={**case.settings, "num_hidden_layers": 8})
        save(changed(build(case, old)), new)
        return str(old), str(new)

    return make


def stream_of(llm: LLM) -> LayerStream:
    stream = llm.engine.ranks.runner.holdings.stream
    assert stream is not None
    assert stream.num_bytes > 0
    return stream


@pytest.mark.usefixtures("on_cpu")
class TestOnTheCPU:
    @pytest.mark.parametrize(
        "name", ["qwen3", "qwen3moe", "gemma3", "glm4moe", "qwen3.5", "gptoss", "deepseek-v3", "longcat"]
    )
    def test_families(self, name: str, family: Callable, make_llm: Callable[..., LLM]) -> None:
        folder, _ = family(name)
        options = {**OPTIONS, "kvcache_block_size": CASES[name].small["kvcache_block_size"]}
        streamed = make_llm(folder, **options, weight_offload_gib=ALL)
        stream_of(streamed)
        assert results(streamed) == results(make_llm(folder, **options))

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("qwen3", {"quantization": "fp8"}),
            ("qwen3", {"quantization": "int8"}),
            ("qwen3", {"quantization": "nf4"}),
            ("qwen3moe", {"quantization": "int4"}),
            ("qwen3moe", {"quantization": "mxfp4"}),
            ("qwen3", {"deterministic": True}),
            ("qwen3", {"tensor_parallel_size": 2}),
            ("qwen3moe", {"tensor_parallel_size": 2, "quantization": "int4"}),
            ("qwen3", {"num_kvcache_blocks": 12, "max_num_batched_tokens": 32}),
            ("qwen3", {"speculation": "suffix"}),
            ("qwen3moe", {"load_format": "dummy_skewed"}),
        ],
        ids=str,
    )
    def test_options(self, name: str, options: dict[str, Any], family: Callable, make_llm: Callable[..., LLM]) -> None:
        folder, _ = family(name)
        streamed = make_llm(folder, **{**OPTIONS, **options}, weight_offload_gib=ALL)
        stream_of(streamed)
        assert results(streamed) == results(make_llm(folder, **{**OPTIONS, **options}))

    def test_some_layers_stay(self, family: Callable, make_llm: Callable[..., LLM]) -> None:
        folder, _ = family("qwen3")
        everything = make_llm(folder, **OPTIONS, weight_offload_gib=ALL)
        layer = stream_of(everything).num_bytes / 4
        some = make_llm(folder, **OPTIONS, weight_offload_gib=2.5 * layer / GIB)
        assert stream_of(some).num_bytes == 3 * layer
        assert (some.memory.streamed, everything.memory.streamed) == (3 * layer, 4 * layer)
        resident = make_llm(folder, **OPTIONS)
        assert resident.memory.used - some.memory.used == layer
        assert resident.memory.used - everything.memory.used == 2 * layer
        assert results(some) == results(everything) == results(resident)
        with pytest.raises(ValueError, match=r"2 buffers, which take .* GiB of each GPU themselves: it must be more"):
            make_llm(folder, **OPTIONS, weight_offload_gib=1.5 * layer / GIB)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_updates_in_place(self, ranks: int, family: Callable, make_llm: Callable[..., LLM]) -> None:
        """Tensors of the layers come in any order, and each layer keeps what it got."""
        old, new = family("qwen3moe")
        llm = make_llm(old, **OPTIONS, weight_offload_gib=ALL, tensor_parallel_size=ranks)
        first, second = results(llm), results(make_llm(new, **OPTIONS, tensor_parallel_size=ranks))
        assert first != second
        tensors = list(weights_of(new).items())
        random.Random(0).shuffle(tensors)
        llm.update_weights(dict(tensors))
        assert results(llm) == second
        llm.load_weights(old)
        assert results(llm) == first
        half = len(tensors) // 2
        llm.update_weights(dict(tensors[:half]), partial=True)
        llm.update_weights(dict(tensors[half:]), partial=True)
        assert results(llm) == second

    def test_files_are_read_straight_into_host_memory(
        self, family: Callable, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Plain weights do not come to the device for that, neither at the start nor later."""
        old, new = family("qwen3")
        brought, copied, bring, copy = [], [], LayerStream.bring, FileSource.copy

        def copying(source: FileSource, *args: Any) -> list[str]:
            before = len(brought)
            names = copy(source, *args)
            copied.append(len(brought) - before)
            return names

        monkeypatch.setattr(LayerStream, "bring", lambda *args: (brought.append(args), bring(*args)))
        monkeypatch.setattr(FileSource, "copy", copying)
        llm = make_llm(old, **OPTIONS, weight_offload_gib=ALL)
        results(llm)
        llm.load_weights(new)
        assert copied == [0, 0]
        assert brought
        assert results(llm) == results(make_llm(new, **OPTIONS))

    @pytest.mark.parametrize("seed", range(3))
    def test_places_in_host_memory_are_those_of_the_layer(
        self, seed: int, family: Callable, make_llm: Callable[..., LLM]
    ) -> None:
        """Whatever comes in between, what is written at home is what is brought."""
        stream = stream_of(make_llm(family("qwen3")[0], **OPTIONS, weight_offload_gib=ALL))
        draw = random.Random(seed)
        layers = {module: bring for module, bring in stream.away.items() if module in set(stream._of_module)}
        wanted = {}
        for number in range(60):
            module, bring = draw.choice(list(layers.items()))
            own = draw.choice([*module.parameters()])
            part = own[: draw.randint(1, len(own))].t() if own.dim() == 2 and draw.random() < 0.5 else own
            if draw.random() < 0.5:
                bring(True)
                own.fill_(number)
            else:
                bring.at_home(part).fill_(number)
                bring(False)
            wanted[own] = bring, own.clone()
            if draw.random() < 0.3:
                stream.rest()
        for own, (bring, numbers) in wanted.items():
            bring(False)
            assert torch.equal(own, numbers)
            assert torch.equal(bring.at_home(own), numbers)

    def test_numbers_that_are_not_finite_are_found(self, family: Callable, make_llm: Callable[..., LLM]) -> None:
        old, _ = family("qwen3")
        llm = make_llm(old, **OPTIONS, weight_offload_gib=ALL)
        name = "model.layers.2.mlp.down_proj.weight"
        tensor = weights_of(old)[name].clone()
        tensor[1, 2] = torch.nan
        with pytest.raises(ValueError, match=f"{re.escape(name)} has numbers that are NaN"):
            llm.update_weights({name: tensor}, partial=True)

    @pytest.mark.parametrize("level", [1, 2])
    def test_sleep(self, level: int, family: Callable, make_llm: Callable[..., LLM]) -> None:
        old, _ = family("qwen3")
        llm = make_llm(old, **OPTIONS, weight_offload_gib=ALL)
        before = results(llm)
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(weights_of(old))
        assert results(llm) == before

    def test_adapters_stay(self, make_llm: Callable[..., LLM]) -> None:
        options, tuned = {**OPTIONS, "max_adapters": 1}, Tuned(BUNDLED_MODEL, seed=1)
        found = []
        for gib in (0, ALL):
            llm = make_llm(**options, weight_offload_gib=gib)
            llm.load_adapter("red", tuned.tensors, alpha=ALPHA)
            params = [greedy(12), greedy(12, adapter="red")]
            found.append([output.token_ids for output in llm.generate([PROMPT] * 2, params, use_tqdm=False)])
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]

    def test_a_host_that_is_too_small(
        self, family: Callable, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is refused before a weight is read."""
        old, _ = family("qwen3")
        monkeypatch.setattr("nanoinfer.runner.weight_writer.FileSource.fill", lambda *_: pytest.fail("reads"))
        with monkeypatch.context() as patch:
            patch.setattr(pinned_pages, "free_bytes", lambda: 1 << 20)
            with pytest.raises(ValueError, match=r"no room to pin .*0.0 GiB are free, of which 1.0 GiB stay so.*int4"):
                make_llm(old, **OPTIONS, weight_offload_gib=ALL)
        monkeypatch.setattr("nanoinfer.config.check_host_memory", lambda name, gib, other="": gib)
        monkeypatch.setattr(host_memory, "total_bytes", lambda: 1000)
        with pytest.raises(ValueError, match=r"weight_offload_gib=1.0: .* GiB of layers would lie in host memory"):
            make_llm(old, **OPTIONS, weight_offload_gib=ALL)

    def test_a_step_that_ends_in_between_leaves_no_trace(
        self, family: Callable, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, _ = family("qwen3")
        llm = make_llm(old, **OPTIONS, weight_offload_gib=ALL)
        before, stream = results(llm), stream_of(llm)
        model = llm.engine.ranks.runner.holdings.model
        for stop in range(4):
            for number, _ in enumerate(model.pass_over(model.layers)):
                if number == stop:
                    break
            assert results(llm) == before
        with model.one_of_each():
            assert len(list(model.pass_over(model.layers))) < 4
        for _, bring in random.Random(0).choices(list(stream.away.items()), k=20):
            bring(False)
        assert results(llm) == before


def test_each_layer_is_there_in_its_turn(family: Callable, make_llm: Callable[..., LLM], on_cpu: None) -> None:
    """Streamed layers share memory, and each has its own numbers as it computes."""
    folder, _ = family("qwen3")
    llm = make_llm(folder, **OPTIONS, weight_offload_gib=ALL)
    model = llm.engine.ranks.runner.holdings.model
    own = weights_of(folder)

    def norm(layer: nn.Module) -> torch.Tensor:
        return next(own for name, own in layer.named_parameters() if name.endswith("mixer_joint.pre.weight"))

    assert norm(model.layers[0]).data_ptr() == norm(model.layers[2]).data_ptr() != norm(model.layers[1]).data_ptr()
    for _ in range(3):
        for number, layer in enumerate(model.pass_over(model.layers)):
            assert torch.equal(norm(layer), own[f"model.layers.{number}.input_layernorm.weight"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (4, "weight_offload_gib=4.0: must be 0 with device='cpu', which computes with what lies in host memory"),
        ("auto", "weight_offload_gib='auto': must be 0 with device='cpu'"),
        ("some", "weight_offload_gib='some': must be 'auto', or a number of GiB, at least 0"),
        (-1, "weight_offload_gib=-1: must be 'auto', or a number of GiB, at least 0"),
        (1e6, "weight_offload_gib=1000000.0: the host has"),
    ],
)
def test_values_that_cannot_be(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(BUNDLED_MODEL, device="cpu", weight_offload_gib=value)


@pytest.mark.parametrize("blocks", [None, 64])
def test_weights_that_do_not_fit(blocks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the option and the least that helps, whoever has chosen the size of the KV cache."""

    def full(_: object) -> None:
        raise torch.OutOfMemoryError("there is no room left")

    monkeypatch.setattr("nanoinfer.runner.memory.holdings.Holdings._build_model", full)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (GIB, GIB))
    lines = r"^model: its weights take .* of each GPU, .*or set weight_offload_gib=[\d.]+ or more, or 'auto'"
    with pytest.raises(ValueError, match=lines):
        LLM(BUNDLED_MODEL, **OPTIONS, num_kvcache_blocks=blocks)
