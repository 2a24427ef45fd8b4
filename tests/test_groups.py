"""Weights in groups: how tensors of each published layout fill a store, and how plain ones are rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from cases import layouts as written
from cases.layouts import PUBLISHED, Tensors
from conftest import DEVICE
from torch import Tensor

from nanoinfer.kernels.fp8 import as_bytes
from nanoinfer.kernels.groups import E2M1, TABLES, pack, values_of
from nanoinfer.kernels.rounding import (
    RoundedMatrix,
    nearest,
    round_to_groups,
    round_to_groups_reference,
    round_to_groups_triton,
)
from nanoinfer.weights import together
from nanoinfer.weights.formats.experts import ExpertSizes, ExpertTensors
from nanoinfer.weights.formats.groups import layouts
from nanoinfer.weights.formats.groups.experts import GroupExperts
from nanoinfer.weights.formats.groups.layout import Layout
from nanoinfer.weights.formats.groups.matrix import GroupMatrix
from nanoinfer.weights.formats.groups.store import GroupStore
from nanoinfer.weights.formats.groups.tensors import shards_of
from nanoinfer.weights.shards import FLOATS, Section, Shard, Written
from nanoinfer.weights.together import write_all

OUTPUTS, INPUTS = 48, 96
LAYOUTS = {
    "int4 groups": layouts.pack_quantized(4, 32, True, False),
    "int4 with zeros": layouts.pack_quantized(4, 32, False, False),
    "int4 channels": layouts.pack_quantized(4, 0, True, False),
    "int4 act order": layouts.pack_quantized(4, 32, True, True),
    "int8 groups": layouts.pack_quantized(8, 32, True, False),
    "int8 with zeros, channels": layouts.pack_quantized(8, 0, False, False),
    "int8 one by one": layouts.int_quantized(0),
    "gptq": layouts.gptq(4, 32, True, False, True),
    "gptq with zeros": layouts.gptq(4, 32, False, False, True),
    "gptq act order": layouts.gptq(4, 32, True, True, True),
    "gptq act order with zeros": layouts.gptq(4, 32, False, True, True),
    "gptq v2": layouts.gptq(4, 32, False, False, False),
    "gptq of 8 bits, channels": layouts.gptq(8, 0, False, False, True),
    "awq": layouts.awq(32, False),
    "nvfp4": layouts.NVFP4,
    "modelopt": layouts.MODELOPT,
    "mxfp4": layouts.MXFP4,
}


def weight_of(outputs: int = OUTPUTS, inputs: int = INPUTS) -> Tensor:
    return torch.randn(outputs, inputs) * torch.exp2(torch.randint(-3, 3, (outputs, 1)))


def write_whole(shard: Shard, stored: Tensor) -> None:
    """As a file's tensors are written."""
    shard.target.copy_(stored if shard.takes_all else stored[shard.index])


def write_rows(shard: Shard, stored: Tensor) -> None:
    """As rows of a trainer's tensors are written that come in several parts."""
    if stored.dim() == 0:
        return write_whole(shard, stored)
    for first in range(0, len(stored), 5):
        if (meeting := shard.meet(stored[first : first + 5], first)) is not None:
            meeting[0].copy_(meeting[1])
    return None


def fill(store: GroupStore, tensors: dict[str, Tensor], write: Callable[[Shard, Tensor], None] = write_whole) -> None:
    """Write the tensors of modules, backwards."""
    shards = {shard.name: [] for shard in shards_of(store)}
    for shard in shards_of(store):
        shards[shard.name].append(shard)
    for name, stored in reversed(tensors.items()):
        for shard in shards.get(name, []):
            assert stored.shape in (shard.shape, ()), name
            write(shard, stored)
    store.finish()


def named(module: str, tensors: Tensors) -> Tensors:
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("write", [write_whole, write_rows], ids=["whole", "rows"])
@pytest.mark.parametrize("name", LAYOUTS)
class TestLayouts:
    def test_a_matrix(self, name: str, write: Callable[[Shard, Tensor], None]) -> None:
        tensors, dense = PUBLISHED[name].write(weight_of())
        store = GroupStore([Section("a", OUTPUTS, (OUTPUTS, INPUTS), 0)], INPUTS, LAYOUTS[name], "a format")
        fill(store, named("a", tensors), write)
        torch.testing.assert_close(store.dense(torch.float32), dense, rtol=1e-6, atol=0)
        assert store.weight is not None

    def test_rows_of_two_matrices(self, name: str, write: Callable[[Shard, Tensor], None]) -> None:
        """Sections begin within integers of the checkpoint."""
        (first, dense), (second, other) = (PUBLISHED[name].write(weight_of(outputs)) for outputs in (48, 24))
        sections = [
            Section("a", 18, (48, INPUTS), 6),
            Section("b", 12, (24, INPUTS), 12),
            Section("a", 8, (48, INPUTS), 40),
        ]
        store = GroupStore(sections, INPUTS, LAYOUTS[name], "a format")
        fill(store, {**named("a", first), **named("b", second)}, write)
        expected = torch.cat([dense[6:24], other[12:], dense[40:]])
        torch.testing.assert_close(store.dense(torch.float32), expected, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("share", [48, 36, 24, 18])
    def test_columns(self, share: int, name: str, write: Callable[[Shard, Tensor], None]) -> None:
        """A rank's inputs begin within groups, and within integers."""
        tensors, dense = PUBLISHED[name].write(weight_of())
        section = Section("a", OUTPUTS, (OUTPUTS, INPUTS), INPUTS - share, dim=1)
        store = GroupStore([section], share, LAYOUTS[name], "a format")
        fill(store, named("a", tensors), write)
        torch.testing.assert_close(store.dense(torch.float32), dense[:, INPUTS - share :], rtol=1e-6, atol=0)
        assert (store.weight is None) == ("act order" in name)


class TestTogether:
    """Tensors that are alike fill stores by the same launches."""

    def written(self, store: GroupStore, tensors: dict[str, Tensor]) -> list[tuple[Written, Tensor]]:
        pairs = ((shard, tensors[shard.name]) for shard in shards_of(store) if shard.name in tensors)
        return [(shard.target, stored if shard.takes_all else stored[shard.index]) for shard, stored in pairs]

    def alike(self, name: str, count: int) -> tuple[GroupStore, dict[str, Tensor]]:
        """A store of several modules, and tensors that fill it."""
        sections = [Section(str(number), OUTPUTS, (OUTPUTS, INPUTS), 0) for number in range(count)]
        tensors, _ = PUBLISHED[name].write(weight_of())
        store = GroupStore(sections, INPUTS, LAYOUTS[name], "a format")
        return store, {f"{number}.{end}": one for number in range(count) for end, one in tensors.items()}

    @pytest.mark.parametrize("at_once", [1, 4000, 1 << 20])
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_they_are_as_if_written_one_by_one(self, name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(together, "BYTES_TOGETHER", at_once)
        modules = "abcde"
        tensors: dict[str, Tensor] = {}
        for module in modules:
            tensors |= named(module, PUBLISHED[name].write(weight_of())[0])
        sections = [Section(module, 18, (OUTPUTS, INPUTS), 6) for module in modules]
        sections.append(Section("a", 9, (OUTPUTS, INPUTS), 35))
        ours, expected = (GroupStore(sections, INPUTS, LAYOUTS[name], "a format") for _ in range(2))
        fill(expected, tensors)
        write_all(self.written(ours, tensors))
        ours.finish()
        for one, other in zip(ours.parameters(), expected.parameters(), strict=True):
            assert torch.equal(as_bytes(one), as_bytes(other))

    def test_they_take_the_launches_of_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shapes: list[torch.Size] = []

        def spy(numbers: Tensor, bits: int) -> Tensor:
            shapes.append(numbers.shape)
            return pack(numbers, bits)

        monkeypatch.setattr("nanoinfer.weights.formats.groups.parts.pack", spy)
        write_all(self.written(*self.alike("awq", 9)))
        assert shapes == [(9, OUTPUTS, INPUTS)]

    def test_a_constant_among_others_is_named(self) -> None:
        store, tensors = self.alike("gptq", 5)
        tensors["3.g_idx"] = tensors["3.g_idx"].flip(0)
        with pytest.raises(ValueError, match=r"^3\.g_idx: its number 0 is 2: must be 0"):
            write_all(self.written(store, tensors))


@pytest.mark.parametrize("name", ["gptq", "gptq with zeros", "gptq act order with zeros", "awq"])
@pytest.mark.parametrize("start", [0, 32])
def test_inputs_that_the_group_does_not_divide(name: str, start: int) -> None:
    """The last group has fewer. A store's groups are smaller ones; in act order no kernel reads it."""
    tensors, dense = PUBLISHED[name].write(weight_of(inputs=80))
    section = Section("a", OUTPUTS, (OUTPUTS, 80), start, dim=1)
    store = GroupStore([section], 80 - start, LAYOUTS[name], "a format")
    fill(store, named("a", tensors))
    torch.testing.assert_close(store.dense(torch.float32), dense[:, start:], rtol=1e-6, atol=0)
    assert (store.weight is None) == ("order" in name)
    assert store.weight is None or store.weight.group == 16


def test_integers_are_read_in_as_many_bits_as_they_have() -> None:
    """Wider ones would take eight times the memory as a checkpoint loads."""
    one_by_one, zeros = layouts.int_quantized(0).fields[0], LAYOUTS["gptq with zeros"].fields[2]
    read = one_by_one.read(torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8))
    assert (read.dtype, read.tolist()) == (torch.uint8, [[0, 127, 128, 255]])
    read = zeros.read(torch.tensor([[0x7FFFFFFF]], dtype=torch.int32))  # each zero less one: the sum overflows
    assert (read.dtype, read.flatten().tolist()) == (torch.uint8, [0, 1, 1, 1, 1, 1, 1, 9])


def test_a_product_reads_the_parameters_themselves() -> None:
    """Each step asks each matrix: a view of each parameter would cost as much as the rest of it."""
    store = GroupStore([Section("a", OUTPUTS, (OUTPUTS, INPUTS), 0)], INPUTS, LAYOUTS["awq"], "a format")
    assert all(getattr(store, name) is getattr(store.weight, name) for name in ("words", "scales", "zeros", "factors"))


def test_parts_are_cut_once() -> None:
    """A layer of 128 experts would take eleven milliseconds for each token. In act order each product has its own."""
    tensors, sizes = ExpertTensors("{}", "gate", "up", "down", ()), ExpertSizes(2, 64, 96, 0, 96)
    for name, are_kept in (("awq", True), ("gptq act order", False)):
        experts = GroupExperts(tensors, sizes, LAYOUTS[name], "a format")
        matrix = GroupMatrix([Section("a", OUTPUTS, (OUTPUTS, INPUTS), 0)], INPUTS, False, LAYOUTS[name], "a format")
        for module in (experts, matrix):
            module.fix_parts()
            for tensor in (*module.parameters(), *(part.g_idx for part in module.modules() if hasattr(part, "g_idx"))):
                tensor.zero_()
            module.finish()
        assert (experts._weights()[0][1] is experts._weights()[0][1]) == are_kept
        assert (matrix.operand() is matrix.operand()) == are_kept


class TestOracle:
    """compressed-tensors packs as the tests' own writers do."""

    @pytest.mark.parametrize(("name", "bits", "symmetric"), [("int4 with zeros", 4, False), ("int8 groups", 8, True)])
    def test_integers(self, name: str, bits: int, symmetric: bool) -> None:
        pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install -e '.[test]'")
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        weight = weight_of()
        tensors, _ = PUBLISHED[name].write(weight)
        numbers, _, zeros, _ = written.round_groups(weight, 32, bits, symmetric, dtype=torch.bfloat16)
        half = 1 << bits - 1
        assert torch.equal(unpack_from_int32(tensors["weight_packed"], bits, weight.shape).int(), numbers.int() - half)
        if not symmetric:
            unpacked = unpack_from_int32(tensors["weight_zero_point"], bits, zeros.shape, packed_dim=0)
            assert torch.equal(unpacked.int(), zeros.int() - half)

    def test_pairs_of_e2m1(self) -> None:
        pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install -e '.[test]'")
        from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

        codes = torch.randint(16, (8, 32))
        assert torch.equal(pack_fp4_to_uint8(written.E2M1[codes]), written.bytes_of(codes))


def test_act_order_of_a_rank_with_all_inputs_is_that_of_the_store() -> None:
    """So a product reads groups of neighbours, and gathers its input."""
    tensors, dense = PUBLISHED["gptq act order"].write(weight_of())
    store = GroupStore([Section("a", OUTPUTS, (OUTPUTS, INPUTS), 0)], INPUTS, LAYOUTS["gptq act order"], "a format")
    for _ in range(2):
        fill(store, named("a", tensors))
        order = tensors["g_idx"].argsort(stable=True)
        assert torch.equal(store.order.columns, order.int())
        assert store.weight.group == 32
        torch.testing.assert_close(store.dense(torch.float32)[:, order], dense[:, order], rtol=1e-6, atol=0)


def test_act_orders_that_differ() -> None:
    (first, dense), (second, other) = (PUBLISHED["gptq act order"].write(weight_of()) for _ in range(2))
    shuffled = torch.randperm(INPUTS)
    second["g_idx"] = second["g_idx"][shuffled].contiguous()
    second["qweight"] = written.integers_of(unpacked_rows(second["qweight"])[shuffled], 4, 0)
    sections = [Section(name, OUTPUTS, (OUTPUTS, INPUTS), 0) for name in "ab"]
    store = GroupStore(sections, INPUTS, LAYOUTS["gptq act order"], "a format")
    fill(store, {**named("a", first), **named("b", second)})
    assert store.weight is None
    expected = torch.cat([dense, other[:, shuffled]])
    torch.testing.assert_close(store.dense(torch.float32), expected, rtol=1e-6, atol=0)


def unpacked_rows(words: Tensor) -> Tensor:
    return torch.stack([words >> 4 * place & 15 for place in range(8)], dim=1).flatten(0, 1)


class TestRounding:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("numbers", "more"), [("int4", 0.01), ("int8", 0.1)])
    def test_a_scale_is_about_as_good_as_the_best_of_600(self, numbers: str, more: float, dtype: torch.dtype) -> None:
        weight = torch.randn(64, 512)
        grouped = weight.unflatten(1, (-1, 64))
        end = grouped.abs().amax(-1, keepdim=True) / (8 if numbers == "int4" else 128)
        best = torch.full(grouped.shape[:2], torch.inf)
        for share in torch.linspace(0.6, 1.2, 300):
            for scale in (share * end, -share * end):
                dense = values_of(nearest(grouped / scale, numbers), numbers) * scale
                best = best.minimum((dense - grouped).square().sum(-1))
        rounded = round_to_groups(weight, 64, numbers, dtype)
        assert rounded.scales.dtype == dtype
        assert (dense_of(rounded, numbers) - weight).norm() < (1 + more) * best.sum().sqrt()

    def test_a_zero_is_about_as_good_as_the_best_of_all(self) -> None:
        weight = torch.randn(64, 512) + torch.randn(64, 8).repeat_interleave(64, 1)
        grouped = weight.unflatten(1, (-1, 64))
        reach = (grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)) / 15
        best = torch.full(grouped.shape[:2], torch.inf)
        for share, zero in product(torch.linspace(0.6, 1.1, 40), torch.arange(16)):
            dense = values_of(nearest(grouped / (share * reach), "int4", zero), "int4", zero) * share * reach
            best = best.minimum((dense - grouped).square().sum(-1))
        errors = [
            (dense_of(round_to_groups(weight, 64, "int4", torch.bfloat16, has_zeros), "int4") - weight).norm()
            for has_zeros in (True, False)
        ]
        assert errors[0] < 1.02 * best.sum().sqrt() < 0.9 * errors[1]

    def test_powers_of_two(self) -> None:
        """The largest numbers may be cut, if the others gain by it."""
        weight = torch.tensor([[7.9, 1.0, 2.0, 3.0, 4.0], [6.9, 1.0, 2.0, 3.0, 1.5]]) / 8
        found, scales, _ = round_to_groups(weight, 5, "e2m1", torch.uint8)
        assert scales.flatten().tolist() == [125, 124]
        assert values_of(found, "e2m1").tolist() == [[4.0, 0.5, 1.0, 1.5, 2.0], [6.0, 1.0, 2.0, 3.0, 1.5]]

    @pytest.mark.parametrize(
        ("numbers", "has_zeros"), [*product(("int4", "int8"), (False, True)), *((name, False) for name in TABLES)]
    )
    def test_what_is_in_the_format_stays(self, numbers: str, has_zeros: bool) -> None:
        codes = torch.randint(0, 256 if numbers == "int8" else 16, (8, 128))
        codes[:, ::32] = {"e2m1": 7, "fp4": 3}.get(numbers, 0)
        codes[:, 1::32] = 255 if numbers == "int8" else 15
        zeros = torch.randint(0, codes.max(), (8, 4)).repeat_interleave(32, 1) if has_zeros else None
        weight = values_of(codes, numbers, zeros) * 2.0 ** torch.arange(-4, 4).unsqueeze(1)
        dtype = torch.uint8 if numbers == "e2m1" else torch.float32
        assert torch.equal(dense_of(round_to_groups(weight, 32, numbers, dtype, has_zeros), numbers), weight)

    @pytest.mark.parametrize("has_zeros", [False, True])
    def test_zeros_and_what_is_not_finite(self, has_zeros: bool) -> None:
        others = [] if has_zeros else [("e2m1", torch.uint8), ("nf4", torch.float32), ("fp4", torch.float32)]
        for numbers, dtype in (("int4", torch.float32), *others):
            assert not dense_of(round_to_groups(torch.zeros(2, 32), 32, numbers, dtype, has_zeros), numbers).any()
            for bad in (math.nan, math.inf, -math.inf):
                for values in (torch.full((1, 32), bad), torch.cat([torch.full((1, 1), bad), torch.randn(1, 31)], 1)):
                    _, scales, _ = round_to_groups(values, 32, numbers, dtype, has_zeros)
                    assert (scales == 255).all() if dtype == torch.uint8 else not scales.isfinite().any()

    @pytest.mark.parametrize("sign", [1, -1])
    def test_a_group_may_lie_on_one_side_of_zero(self, sign: int) -> None:
        weight = sign * (torch.rand(4, 64) + 1)
        dense = dense_of(round_to_groups(weight, 64, "int4", torch.float32, True), "int4")
        assert (dense - weight).abs().max() < 2 / 15

    @pytest.mark.parametrize("numbers", ["nf4", "fp4"])
    def test_bitsandbytes_takes_the_largest_value_as_a_scale(self, numbers: str) -> None:
        weight = torch.randn(8, 128)
        found, scales, _ = round_to_groups(weight, 64, numbers, torch.float32)
        assert torch.equal(scales, weight.unflatten(1, (2, 64)).abs().amax(-1))
        wide = scales.repeat_interleave(64, 1)
        distances = (weight.unsqueeze(-1) - torch.tensor(TABLES[numbers]) * wide.unsqueeze(-1)).abs()
        chosen = distances.gather(-1, found.long().unsqueeze(-1))
        torch.testing.assert_close(chosen.squeeze(-1), distances.amin(-1), rtol=0, atol=1e-6)

    def test_ties_go_to_even(self) -> None:
        middles = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)])
        assert nearest(middles, "e2m1").tolist() == [0, 2, 2, 4, 4, 6, 6]
        assert nearest(-middles, "e2m1").tolist() == [8, 10, 10, 12, 12, 14, 14]

    @pytest.mark.parametrize("has_zeros", [False, True])
    @pytest.mark.parametrize("numbers", ["int4", "int8"])
    @pytest.mark.parametrize(("inputs", "group"), [(256, 128), (192, 64), (80, 40)])
    def test_the_kernel(self, inputs: int, group: int, numbers: str, has_zeros: bool) -> None:
        """Sums have other last bits than torch's, and so do float32 scales. The numbers are the same, but for ties."""
        weight = torch.randn(70, inputs, device=DEVICE)
        weight[0] = 0
        weight[1, 3], weight[2, 3] = math.nan, math.inf
        found = round_to_groups_triton(weight, group, numbers, torch.float32, has_zeros)
        expected = round_to_groups_reference(weight, group, numbers, torch.float32, has_zeros)
        assert (found.numbers[3:] != expected.numbers[3:]).float().mean() < 1e-3
        assert torch.equal(found.numbers[0], expected.numbers[0])
        torch.testing.assert_close(found.scales[3:], expected.scales[3:], rtol=1e-5, atol=0)
        assert torch.equal(found.scales[:3].isfinite(), expected.scales[:3].isfinite())
        if has_zeros:
            assert torch.equal(found.zeros[3:], expected.zeros[3:])

    @pytest.mark.parametrize("layout", [Layout("int4"), Layout("int8"), Layout("int4", group=64, zeros=True)])
    @pytest.mark.parametrize(("inputs", "group"), [(256, 128), (192, 64), (80, 64), (48, 48)])
    def test_ranks_round_alike(self, layout: Layout, inputs: int, group: int) -> None:
        weight = weight_of(16, inputs)
        assert layout.group_of(inputs) == min(group, layout.group or group)
        whole = GroupStore([Section("a", 16, (16, inputs), 0)], inputs, layout, "a format")
        fill(whole, {"a.weight": weight}, write_rows)
        for rank in range(2):
            share = inputs // 2
            column = GroupStore([Section("a", 8, (16, inputs), 8 * rank)], inputs, layout, "a format")
            row = GroupStore([Section("a", 16, (16, inputs), rank * share, dim=1)], share, layout, "a format")
            for store in (column, row):
                fill(store, {"a.weight": weight})
            dense = whole.dense(torch.float32)
            assert torch.equal(column.dense(torch.float32), dense[8 * rank : 8 * rank + 8])
            assert torch.equal(row.dense(torch.float32), dense[:, rank * share : (rank + 1) * share])


def dense_of(rounded: RoundedMatrix, numbers: str) -> Tensor:
    """The matrix that was rounded, as its numbers, scales and zeros have it."""
    found, scales, zeros = rounded
    wide = torch.ldexp(torch.ones(scales.shape), scales.int() - 127) if numbers == "e2m1" else scales.float()
    group = found.shape[1] // scales.shape[1]
    of_zeros = None if zeros is None else zeros.repeat_interleave(group, 1)
    return values_of(found, numbers, of_zeros) * wide.repeat_interleave(group, 1)


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "dtypes"),
        [
            ("mxfp4", {torch.uint8}),
            ("nvfp4", {torch.float8_e4m3fn}),
            ("gptq", FLOATS),
            ("int4 groups", FLOATS),
        ],
    )
    def test_scales_of_another_kind(self, name: str, dtypes: set[torch.dtype]) -> None:
        """Bytes are powers of two where the layout has such scales, and no numbers elsewhere."""
        store = GroupStore([Section("a", OUTPUTS, (OUTPUTS, INPUTS), 0)], INPUTS, LAYOUTS[name], "a format")
        (shard,) = (shard for shard in shards_of(store) if shard.name in ("a.weight_scale", "a.scales"))
        assert shard.dtypes == dtypes

    def test_a_constant_that_comes_in_parts(self) -> None:
        tensors, _ = PUBLISHED["gptq"].write(weight_of())
        tensors["g_idx"][41] = 7
        store = GroupStore([Section("a", OUTPUTS, (OUTPUTS, INPUTS), 0)], INPUTS, LAYOUTS["gptq"], "a format")
        with pytest.raises(ValueError, match=r"a\.g_idx: its number 41 is 7: must be 1"):
            fill(store, named("a", tensors), write_rows)

    def test_no_kernel_adds_up_groups_that_are_no_neighbours(self) -> None:
        """As in act order: of matrices whose inputs ranks cut, and of all experts."""
        section = Section("a", OUTPUTS, (OUTPUTS, INPUTS), 48, dim=1)
        matrix = GroupMatrix([section], 48, False, LAYOUTS["gptq act order"], "GPTQ")
        with pytest.raises(
            ValueError, match="False with GPTQ whose groups are no neighbours here; device='cpu' takes all"
        ):
            matrix.fix_order([1])
        tensors, sizes = ExpertTensors("{}", "gate", "up", "down", ()), ExpertSizes(2, 64, 96, 0, 96)
        experts = GroupExperts(tensors, sizes, LAYOUTS["gptq act order"], "GPTQ")
        with pytest.raises(ValueError, match=r"with experts in GPTQ.* here 32 of 64 and 32 of 96 share one"):
            experts.fix_order(2, "silu")

    @pytest.mark.parametrize(
        ("field", "number", "message"),
        [
            ("qzeros", 0, "a.qzeros: its number 0 is 1: must be 8"),
            ("g_idx", 2, "a.g_idx: its number 0 is 2: must be 0"),
        ],
    )
    def test_constants(self, field: str, number: int, message: str) -> None:
        tensors, _ = PUBLISHED["gptq"].write(weight_of())
        tensors[field].fill_(number)
        store = GroupStore([Section("a", OUTPUTS, (OUTPUTS, INPUTS), 0)], INPUTS, LAYOUTS["gptq"], "a format")
        with pytest.raises(ValueError, match=message):
            fill(store, named("a", tensors))
