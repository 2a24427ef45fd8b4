"""Which part of a size a rank holds. Weights in FP8 are cut between blocks of 128, which kernels multiply at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import CASES, build
from cases.case import Case
from conftest import Oracle, greedy, whole_only
from safetensors.torch import load_file
from test_loader import rank
from test_quantization import FP8_CONFIG, write_checkpoint

from nanoinfer import LLM
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.kernels.fp8 import BLOCK, HAS_FP8, Fp8Weight
from nanoinfer.kernels.linear.fp8 import linear as fp8_linear
from nanoinfer.models import describe
from nanoinfer.models.description import Description
from nanoinfer.models.mlps import make_mlp
from nanoinfer.models.ranks import check_ranks, check_ranks_in_order
from nanoinfer.parallel.shares import deal, share_of
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, all_in
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.store import Fp8Store

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 64}
PROMPTS = [[7], list(range(20, 50)), [5, 6] * 15]
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}  # two ranks can share them, and three
SIZES = {**HEADS, "intermediate_size": 5 * 128, "moe_intermediate_size": 3 * 128}
FAMILIES = {  # a dense layer, experts and a shared one; gates and ups in one tensor; biases
    "glm4moe": {"num_hidden_layers": 2, "n_routed_experts": 3, "num_experts_per_tok": 2},
    "phi3": {"num_hidden_layers": 2},
    "llama biases, llama3 rope": {"num_hidden_layers": 2},
}


def case_of(family: str) -> Case:
    case = CASES[family]
    return replace(case, settings={**case.settings, **SIZES, **FAMILIES[family]})


@pytest.mark.parametrize(
    ("size", "ranks", "unit", "shares"),
    [
        (8, 2, 1, [range(4), range(4, 8)]),
        (32, 4, 16, [range(16), range(16), range(16, 32), range(16, 32)]),  # as heads of keys
        (1408, 2, 128, [range(640), range(640, 1408)]),
        (1408, 3, 128, [range(384), range(384, 896), range(896, 1408)]),
        (512, 4, 128, [range(128), range(128, 256), range(256, 384), range(384, 512)]),
    ],
)
def test_shares_are_runs_of_whole_units(size: int, ranks: int, unit: int, shares: list[range]) -> None:
    assert [share_of(size, rank, ranks, unit) for rank in range(ranks)] == shares


@pytest.mark.parametrize(
    ("costs", "dealt"),
    [
        ([], [[], []]),
        ([7], [[0], []]),
        ([2, 2, 2, 2], [[0, 2], [1, 3]]),
        ([1, 5, 1, 1, 3], [[1, 3], [4, 0, 2]]),
        ([4, 1, 3, 2], [[0], [2], [3, 1]]),
    ],
)
def test_tasks_are_dealt_to_who_has_the_least(costs: list[int], dealt: list[list[int]]) -> None:
    assert deal(costs, len(dealt)) == dealt


class TestUnits:
    """How many neighbours a format keeps together."""

    @pytest.mark.parametrize("block", [(128, 128), (None, None), (1, None), (64, 256)])
    def test_blocks_that_suffice_for_all_ranks(self, block: tuple[int | None, int | None]) -> None:
        format = Fp8Format(block)
        assert format.inputs_together(1408, 2) == format.inputs_together(1408, 8) == BLOCK.value

    def test_too_few_blocks(self) -> None:
        assert Fp8Format().inputs_together(384, 4) == 1

    def test_a_size_with_half_a_block(self) -> None:
        """No kernel takes the last one, on whichever rank."""
        assert Fp8Format().inputs_together(10944, 2) == 1

    def test_blocks_that_no_kernel_takes(self) -> None:
        assert Fp8Format((128, 64)).inputs_together(1408, 2) == 1


@pytest.fixture
def glm(tmp_path: Path) -> Description:
    build(case_of("glm4moe"), tmp_path)
    return replace(describe(Checkpoint.open(str(tmp_path)).hf_config), formats=all_in(Fp8Format()))


class TestLayers:
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_kernels_take_every_ranks_down_projections(
        self, ranks: int, glm: Description, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fp8_linear, "capability", lambda device: HAS_FP8)
        apart, held = replace(glm, joins_shared=False), {"dense": 0, "experts": 0, "shared": 0, "joined": 0}
        for index in range(ranks):
            dense, mixture = (make_mlp(apart, layer, rank(index, ranks)) for layer in range(2))
            joined = make_mlp(glm, 1, rank(index, ranks))
            stores = {
                "dense": dense.down_proj.matrix.store,
                "experts": mixture.experts.down,
                "shared": mixture.shared.down_proj.matrix.store,
                "joined": joined.experts.down,
            }
            for name, store in stores.items():
                assert fp8_linear.can_multiply_fp8(torch.bfloat16, Fp8Weight(store.weight, store.scales))
                held[name] += store.weight.shape[1]
        assert held == {"dense": 640, "experts": 384, "shared": 384, "joined": 384}

    def test_gates_and_ups_are_cut_where_downs_are(self, glm: Description) -> None:
        for index, size in enumerate((256, 384)):
            dense = make_mlp(glm, 0, rank(index, 2))
            assert [len(part.own[0]) for part in dense.gate_up_proj.matrix.store.parts] == [size, size]
            assert dense.down_proj.matrix.store.weight.shape[1] == size

    def test_ranks_that_gather_have_equal_shares(self, glm: Description) -> None:
        for index in range(2):
            tp = rank(index, 2)
            tp.keeps_order = True
            store: Fp8Store = make_mlp(glm, 0, tp).gate_up_proj.matrix.store
            assert [len(part.own[0]) for part in store.parts] == [320, 320]


class TestNumbersOfRanks:
    def test_blocks_need_not_be_divisible(self, glm: Description) -> None:
        check_ranks(glm, 3)
        with pytest.raises(ValueError, match="tensor_parallel_size=3: intermediate_size=640 is not divisible by it"):
            check_ranks(replace(glm, formats=PLAIN_FORMATS), 3)

    @pytest.mark.parametrize("on_cpu", [False, True])
    def test_ranks_that_gather_need_equal_shares(self, on_cpu: bool, glm: Description) -> None:
        with pytest.raises(ValueError, match="intermediate_size=640 is not divisible by the number of ranks"):
            check_ranks_in_order(replace(glm, formats=all_in(Fp8Format((None, None)))), 3, on_cpu)


@pytest.mark.parametrize("ranks", [3, *whole_only([2])])
@pytest.mark.parametrize("family", ["glm4moe", *whole_only(["phi3", "llama biases, llama3 rope"])])
def test_tokens_are_those_of_one_rank(family: str, ranks: int, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """From files in FP8, and from others that are quantized as they load, also after an update."""
    source = tmp_path / "source"
    build(case_of(family), source)
    dense = write_checkpoint(source, tmp_path, FP8_CONFIG)
    oracle = Oracle(str(dense))
    expected = [oracle.greedy(prompt, 8, ignore_eos=True) for prompt in PROMPTS]

    def tokens_of(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(PROMPTS, greedy(8, ignore_eos=True), use_tqdm=False)]

    options = {**OPTIONS, "tensor_parallel_size": ranks}
    assert tokens_of(make_llm(str(tmp_path), **options)) == expected
    llm = make_llm(str(source), **options, quantization="fp8")
    assert tokens_of(llm) == expected
    weights = load_file(source / "model.safetensors")
    llm.update_weights({name: tensor.flip(0) for name, tensor in weights.items()})
    assert tokens_of(llm) != expected
    llm.update_weights(weights)
    assert tokens_of(llm) == expected
