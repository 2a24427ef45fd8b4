"""Tensors that come by several calls of update_weights make weights whole again, as those of one call do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import Oracle, greedy, whole_only
from test_experts import stacked
from test_weights import INCOMPLETE, Tensors, breaking_off, changed, results, weights_of
from torch import Tensor
from transformers import PreTrainedModel

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.parallel import buckets, channel
from nanoinfer.replicas import weight_transfer
from nanoinfer.weights.finite import find_not_finite
from nanoinfer.weights.shards import Shard

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {"one rank": {}, "2 ranks": {"tensor_parallel_size": 2}, "2 replicas": {"data_parallel_size": 2}}
OPTIONS = {
    "device": "cpu",  # a machine may have one GPU, too few for two ranks
    "kvcache_block_size": 16,
    "max_model_len": 160,
    "num_kvcache_blocks": 32,
    "dtype": "float32",
}
PROMPTS = [[30], [31, 32, 33]]


@pytest.fixture(scope="module")
def folder(make_qwen3: Callable[..., str]) -> str:
    return make_qwen3()


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest, folder: str) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS, **KINDS[request.param]) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM, folder: str) -> LLM:
    """An LLM with the weights of the folder, whatever the test before has left."""
    shared.wake_up()
    shared.load_weights(folder)
    return shared


@pytest.fixture(scope="module")
def trainer(folder: str) -> Oracle:
    """Another model of the same shape."""
    trainer = Oracle(folder)
    changed(trainer.model)
    return trainer


@pytest.fixture(scope="module")
def tensors(trainer: Oracle) -> Tensors:
    return dict(trainer.model.named_parameters())


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, greedy(8, ignore_eos=True), use_tqdm=False)]


def expected_of(model: Oracle) -> list[list[int]]:
    return [model.greedy(prompt, 8, ignore_eos=True) for prompt in PROMPTS]


def send_each(llm: LLM, tensors: Tensors) -> list[int]:
    """Send the tensors one by one; returns the versions."""
    return [llm.update_weights([(name, tensor)], partial=True) for name, tensor in tensors.items()]


def check_missing(llm: LLM, names: list[str]) -> None:
    """Check that nothing computes, and that the error names what is missing."""
    for compute in (lambda: llm.generate([[5]]), lambda: llm.add_request([5]), llm.step):
        with pytest.raises(RuntimeError, match=INCOMPLETE) as caught:
            compute()
        told = str(caught.value)
        assert "partial=True" in told
        first = sorted(names)[:5]
        rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
        assert f"missing: {', '.join(first)}{rest};" in told or "missing: all tensors;" in told


def drop_weights(llm: LLM) -> None:
    llm.sleep(level=2)
    llm.wake_up()


class TestAfterTheyWereDropped:
    def test_as_grpo_trainer_does_with_sleep_mode(self, llm: LLM, trainer: Oracle) -> None:
        """Each time with other weights, which come while the KV cache sleeps."""
        start = llm.weights_version
        llm.sleep(level=2)
        for turn in (1, 2):
            changed(trainer.model, seed=turn)
            llm.wake_up(tags=["weights"])
            for name, parameter in trainer.model.named_parameters():
                llm.update_weights([(name, parameter)], partial=True)
            assert llm.reset_prefix_cache() is True
            llm.wake_up(tags=["kv_cache"])
            assert tokens_of(llm) == expected_of(trainer)
            assert llm.weights_version == start + turn
            llm.sleep(level=2)

    def test_the_last_tensor_makes_a_version(self, llm: LLM, tensors: Tensors, trainer: Oracle) -> None:
        drop_weights(llm)
        old, names = llm.weights_version, list(tensors)
        check_missing(llm, names)
        for count, (name, tensor) in enumerate(tensors.items(), start=1):
            version = llm.update_weights({name: tensor}, partial=True)
            assert version == llm.weights_version == old + (count == len(names))
            if count in (1, len(names) - 7, len(names) - 1):
                assert llm.update_weights([(name, tensor)], partial=True) == old  # again: it counts once
                check_missing(llm, names[count:])
        assert tokens_of(llm) == expected_of(trainer)

    def test_iterators_and_lists_of_several_tensors(self, llm: LLM, tensors: Tensors, trainer: Oracle) -> None:
        drop_weights(llm)
        old, pairs = llm.weights_version, list(tensors.items())
        assert llm.update_weights(iter(pairs[::3]), partial=True) == old
        assert llm.update_weights(pairs[1::3], partial=True) == old
        assert llm.update_weights((pair for pair in pairs[2::3]), partial=True) == old + 1
        assert tokens_of(llm) == expected_of(trainer)

    @pytest.mark.parametrize("way", ["a whole update", "files", "one part with all"])
    def test_all_at_once_in_the_middle(
        self, way: str, llm: LLM, folder: str, tensors: Tensors, trainer: Oracle
    ) -> None:
        drop_weights(llm)
        old = llm.weights_version
        send_each(llm, dict(list(weights_of(folder).items())[:5]))
        if way == "files":
            assert llm.load_weights(folder) == old + 1
            assert tokens_of(llm) == expected_of(Oracle(folder))
        else:
            assert llm.update_weights(tensors, partial=way == "one part with all") == old + 1
            assert tokens_of(llm) == expected_of(trainer)

    def test_only_a_deeper_sleep_lets_them_count_anew(self, llm: LLM, tensors: Tensors, trainer: Oracle) -> None:
        first, rest = dict(list(tensors.items())[:6]), dict(list(tensors.items())[6:])
        for level in (2, 1):
            drop_weights(llm)
            send_each(llm, first)
            llm.sleep(level)
            llm.wake_up()
            check_missing(llm, list(tensors if level == 2 else rest))
        send_each(llm, rest)
        assert tokens_of(llm) == expected_of(trainer)

    def test_the_cache_forgets_while_all_sleeps(self, llm: LLM) -> None:
        llm.sleep(level=2)
        assert llm.reset_prefix_cache() is True
        llm.wake_up(["kv_cache"])
        assert llm.reset_prefix_cache() is True
        with pytest.raises(RuntimeError, match="has lent its weights: call wake_up"):
            llm.update_weights({}, partial=True)


class TestAfterAnError:
    @pytest.fixture(autouse=True)
    def small_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replicas get some of the tensors before the rest breaks off."""
        monkeypatch.setattr(weight_transfer, "SEGMENT_BYTES", weight_transfer.LEAST_BYTES)

    def test_a_list_that_is_refused_changes_nothing(self, llm: LLM, tensors: Tensors) -> None:
        drop_weights(llm)
        pairs = list(tensors.items())
        llm.update_weights(pairs[:-1], partial=True)
        for wrong in ([*pairs[-1:], ("what", torch.ones(3))], [(pairs[-1][0], torch.ones(3))], [3], []):
            with pytest.raises(ValueError, match="named_tensors"):
                llm.update_weights(wrong, partial=True)
        check_missing(llm, [pairs[-1][0]])
        llm.update_weights(pairs[-1:], partial=True)
        assert tokens_of(llm)

    @pytest.mark.parametrize("were_whole", [False, True])
    def test_what_breaks_off_lets_all_tensors_come_anew(
        self, were_whole: bool, llm: LLM, tensors: Tensors, trainer: Oracle
    ) -> None:
        name, old = "model.norm.weight", llm.weights_version
        bad = {name: torch.full_like(tensors[name], torch.nan)}
        others = {other: tensor for other, tensor in tensors.items() if other != name}

        def begin() -> None:
            if not were_whole:
                drop_weights(llm)
                llm.update_weights(others, partial=True)

        begin()
        with pytest.raises(ZeroDivisionError):
            llm.update_weights(breaking_off(tensors, 3, ZeroDivisionError()), partial=True)
        check_missing(llm, list(tensors))
        send_each(llm, others)
        with pytest.raises(ValueError, match=f"{name} has numbers that are NaN or infinite"):
            llm.update_weights(bad, partial=True)
        check_missing(llm, list(tensors))
        assert send_each(llm, tensors) == [old] * len(others) + [old + 1]
        begin()
        with pytest.raises(ValueError, match=f"missing: {name}"):
            llm.update_weights(iter(others.items()))
        check_missing(llm, list(tensors))
        send_each(llm, tensors)
        assert tokens_of(llm) == expected_of(trainer)

    def test_requests_wait_and_go_on_with_the_new_weights(
        self, llm: LLM, folder: str, tensors: Tensors, trainer: Oracle
    ) -> None:
        old = llm.weights_version
        llm.add_request([30], greedy(40, ignore_eos=True))
        llm.step()
        with pytest.raises(ZeroDivisionError):
            llm.update_weights(breaking_off(tensors, 3, ZeroDivisionError()))
        with pytest.raises(RuntimeError, match="incomplete"):
            llm.step()
        send_each(llm, tensors)
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        (output,) = outputs
        versions = output.weights_versions
        assert [version for _, version in versions] == [old, old + 1] or llm.config.data_parallel_size > 1
        for (begin, version), (end, _) in pairwise([*versions, (40, None)]):  # a replica may have computed all before
            model = Oracle(folder) if version == old else trainer
            drawn = model.greedy([30, *output.token_ids[:begin]], end - begin, ignore_eos=True)
            assert output.token_ids[begin:end] == drawn


class TestNames:
    def test_a_tied_matrix_counts_under_either_name(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm(**OPTIONS)
        before = results(llm)
        weights = weights_of(BUNDLED_MODEL)
        rest = {name: tensor for name, tensor in weights.items() if name != "model.embed_tokens.weight"}
        matrix = weights["model.embed_tokens.weight"]
        drop_weights(llm)
        send_each(llm, rest)
        assert llm.update_weights([("lm_head.weight", matrix)], partial=True) == 1
        assert results(llm) == before
        drop_weights(llm)
        send_each(llm, {"lm_head.weight": matrix, **weights, "model.norm.weight": weights["model.norm.weight"]})
        llm.reset_prefix_cache()
        assert results(llm) == before

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_head_unlike_the_embedding_of_a_tied_model(self, ranks: int, make_llm: Callable[..., LLM]) -> None:
        llm, weights = make_llm(tensor_parallel_size=ranks, **OPTIONS), weights_of(BUNDLED_MODEL)
        embedding = "model.embed_tokens.weight"
        drop_weights(llm)
        send_each(llm, {embedding: weights[embedding], "model.norm.weight": weights["model.norm.weight"]})
        with pytest.raises(ValueError, match=rf"lm_head.weight and {embedding} differ, but this model has one"):
            llm.update_weights([("lm_head.weight", weights[embedding] + 1)], partial=True)
        check_missing(llm, list(weights))
        send_each(llm, {embedding: weights[embedding] + 1})
        drop_weights(llm)
        send_each(llm, {"lm_head.weight": weights[embedding], **weights})
        assert tokens_of(llm)

    @pytest.mark.parametrize("quantization", [None, *whole_only(["fp8"])])
    @pytest.mark.parametrize("ranks", [1, *whole_only([2])])
    @pytest.mark.parametrize("name", ["phi3", "qwen3moe", "gemma3 multimodal", *whole_only(["qwen3-vl", "mixtral"])])
    def test_of_each_family(
        self, name: str, ranks: int, quantization: str | None, make_llm: Callable[..., LLM], tmp_path: Path
    ) -> None:
        """Fused matrices, stacks of experts, and tensors of other models, which count for nothing."""
        check_family(make_llm, tmp_path, name, tensor_parallel_size=ranks, quantization=quantization)

    def test_in_fp8(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        check_family(make_llm, tmp_path, "qwen3moe", quantization="fp8")

    def test_experts_one_by_one_and_stacked(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        build(CASES["qwen3moe"], tmp_path)
        single = weights_of(str(tmp_path))
        stacks = stacked(single, "gate_proj", "up_proj", "down_proj", "mlp")
        gate_up = {name: tensor for name, tensor in stacks.items() if name.endswith("gate_up_proj")}
        downs = {name: tensor for name, tensor in single.items() if name.endswith("down_proj.weight")}
        others = {name: tensor for name, tensor in stacks.items() if name in single}
        llm = make_llm(str(tmp_path), **OPTIONS)
        before = results(llm)
        for sent in (single, stacks, {**gate_up, **downs, **others}, {**single, **gate_up}):
            drop_weights(llm)
            send_each(llm, sent)
            llm.reset_prefix_cache()
            assert results(llm) == before
        assert llm.weights_version >= 4


def check_family(make_llm: Callable[..., LLM], folder: Path, name: str, **options: Any) -> None:
    """Check that a trainer's single tensors give the bits that its whole update gives."""
    model: PreTrainedModel = changed(build(CASES[name], folder))
    llm = make_llm(str(folder), **{**OPTIONS, **options})
    llm.update_weights(model.named_parameters())
    expected = results(llm)
    drop_weights(llm)
    ends = [llm.update_weights([pair], partial=True) for pair in model.named_parameters()]
    assert ends[-1] == llm.weights_version
    assert llm.weights_version == 2
    assert results(llm) == expected
    if "multimodal" in name:
        others = [pair for pair in model.named_parameters() if "vision_tower" in pair[0]]
        assert llm.update_weights(others, partial=True) == llm.update_weights(iter(others), partial=True) == 2
        assert [o.num_cached_tokens for o in llm.generate([[5, 6] * 20], greedy(1), use_tqdm=False)] == [32]


class TestTheCostOfASingleTensor:
    """It does not depend on how much there is beside it."""

    @pytest.fixture
    def sizes(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The bytes of each segment that passes tensors to other processes."""
        made: list[int] = []

        def make_segment(num_bytes: int, least: int) -> Any:
            made.append(num_bytes)
            return channel.make_segment(num_bytes, least)

        for module in (buckets, weight_transfer):
            monkeypatch.setattr(module, "make_segment", make_segment)
        return made

    def test_it_reserves_no_more_shared_memory_than_it_needs(
        self, llm: LLM, tensors: Tensors, sizes: list[int]
    ) -> None:
        send_each(llm, tensors)
        processes = llm.config.tensor_parallel_size * llm.config.data_parallel_size
        assert len(sizes) == (len(tensors) if processes > 1 else 0)
        for size, tensor in zip(sizes, tensors.values(), strict=False):
            assert size <= max(tensor.nbytes + buckets.ALIGNMENT, weight_transfer.LEAST_BYTES)
        sizes.clear()
        llm.update_weights(iter(tensors.items()))  # nobody knows how many they are
        assert all(size > 1 << 24 for size in sizes)

    def test_tensors_of_any_size_fit_one_part(self) -> None:
        tensors = [torch.randn(rows, 3) for rows in (1, 5, 127, 128, 129, 192, 300)] + [torch.randn(7, 5, 3)]
        found: dict[tuple[str, int | None], Tensor] = {}
        reader = buckets.BucketReader(torch.device("cpu"))
        sent: list[buckets.Bucket] = []
        shared = buckets.SharedBuckets(sent.append)
        shared.open(sum(map(buckets.room_for, tensors)))
        for number, tensor in enumerate(tensors):
            shared.put(str(number), tensor, is_stack=tensor.ndim == 3)
        shared.flush()
        (bucket,) = sent
        reader.read(bucket, lambda piece, rows: found.update({(piece.name, piece.entry): rows.clone()}))
        reader.close()
        shared.close()
        for number, tensor in enumerate(tensors[:-1]):
            assert torch.equal(found[str(number), None], tensor)
        assert all(torch.equal(found["7", entry], rows) for entry, rows in enumerate(tensors[-1]))

    def test_no_number_is_read_but_its_own(self) -> None:
        """An expert's matrix is one of hundreds in a parameter."""

        class Part(SimpleNamespace):
            shape = torch.Size([2])

            @property
            def whole(self) -> object:
                raise AssertionError("all parts are read")

            def unpacked(self) -> Tensor:
                return self.values

        table = {
            name: [Shard(name, Part(values=torch.tensor([1.0, last])), (2,))]
            for name, last in (("a", 2.0), ("b", math.inf))
        }
        assert find_not_finite(table, ["a"]) is None
        assert find_not_finite(table, ["a", "b"]) == "b"
