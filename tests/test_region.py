"""Memory that is lent to the driver and taken back, behind the same addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nanoinfer.runner.memory.region import STEP, FromRegion, Region

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture
def region() -> Iterator[Region]:
    torch.zeros(1, device=CUDA)  # makes the device's context
    region = Region(CUDA, 1 << 40)
    yield region
    torch.cuda.synchronize()
    region.close()


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(CUDA)[0]


def test_tensors_are_apart_and_hold_what_is_written(region: Region) -> None:
    shapes = [((3, 5), torch.bfloat16), ((1,), torch.float32), ((7, 1 << 20), torch.float32), ((0, 4), torch.int8)]
    tensors = [region.tensor(shape, dtype) for shape, dtype in shapes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype, tensor.device) == (shape, dtype, CUDA)
        assert tensor.data_ptr() % 256 == 0 or not tensor.numel()
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number + 1).all()


@pytest.mark.alone
def test_the_driver_gets_every_page_and_gives_others_behind_the_same_addresses(region: Region) -> None:
    before = free()
    tensors = [region.tensor((300 << 20,), torch.uint8) for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    taken = before - free()
    assert taken >= 900 << 20
    assert taken <= (900 << 20) + 3 * STEP
    for _ in range(3):
        region.lend()
        assert region.is_lent
        assert abs(before - free()) < 4 << 20
        region.take_back()
        assert not region.is_lent
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert [int(tensor.max()) for tensor in tensors] == [0, 1, 2]


def test_a_graph_that_was_captured_before_is_valid_after(region: Region) -> None:
    x, out = region.tensor((1 << 22,), torch.float32), torch.empty(1 << 22, device=CUDA)
    x.fill_(1)
    torch.add(x, 1, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(x, 1, out=out)
    for number in range(5):
        region.lend()
        region.take_back()
        x.fill_(number)
        graph.replay()
        assert out.eq(number + 1).all()


def test_content_can_be_kept_in_host_memory(region: Region) -> None:
    x = region.tensor((1000, 1000), torch.bfloat16).normal_()
    expected, host = x.cpu(), region.content().cpu()
    region.lend()
    region.take_back()
    x.zero_()
    region.content().copy_(host)
    assert torch.equal(x.cpu(), expected)


def test_a_model_is_built_in_a_region(region: Region) -> None:
    with CUDA, FromRegion(region):
        model = nn.Linear(64, 32, dtype=torch.bfloat16)
    start, end = region.content().data_ptr(), region.content().data_ptr() + region.num_bytes
    assert all(start <= parameter.data_ptr() < end for parameter in model.parameters())
    x = torch.randn(2, 64, device=CUDA).bfloat16()
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))


def test_too_much_is_an_error_of_memory(region: Region) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"GiB left: cuMemCreate failed .* out of memory"):
        region.tensor((1 << 39,), torch.uint8)
    assert region.tensor((10,), torch.uint8).fill_(3).eq(3).all()
