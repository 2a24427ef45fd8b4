"""The gated delta rule, its convolution and its norm: against transformers, and against one step after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, HAS_CUDA, of_each_kind
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks, cut
from nanoinfer.kernels.delta.convolution import (
    convolve_chunks_reference,
    convolve_chunks_triton,
    convolve_rows_reference,
    convolve_rows_triton,
)
from nanoinfer.kernels.delta.decode import delta_rows_reference, delta_rows_triton
from nanoinfer.kernels.delta.gated_norm import gated_norm_reference, gated_norm_triton
from nanoinfer.kernels.delta.inverse import invert_reference
from nanoinfer.kernels.delta.prefill import delta_chunks_reference, delta_chunks_triton
from nanoinfer.kernels.launch import launch_in_between
from nanoinfer.kernels.states.boundaries import begin_rows
from nanoinfer.kernels.states.memory import LayerStates, Recurrence, StateRows, inputs_length, ring_length
from nanoinfer.kernels.states.since import read

SHORT = torch.bfloat16 if HAS_CUDA else torch.float16  # the interpreter's products of bfloat16 are wrong
DTYPES = [torch.float32, SHORT]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
STALE = 1e4  # what slots have of an earlier owner: whoever reads it shows


class Layer:
    """Random parameters and slots of a layer: key heads, value heads, key dim and value dim as the shape has them.

    bias: the range of dt_bias; far below 0, states are kept, far above, they are forgotten at once
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        slots: int = 8,
        dtype: torch.dtype = torch.float32,
        bias: tuple[float, float] = (-6, 1),
        width: int = 4,
        largest: float = 1.0,
        guesses: int = 0,
    ) -> None:
        self.largest, self.most = largest, guesses
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = shape
        self.channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        self.weight = (torch.randn(self.channels, width) / 2).to(dtype)
        self.log_decay = torch.empty(self.value_heads).uniform_(0.01, 16).log()
        self.dt_bias = torch.empty(self.value_heads).uniform_(*bias)
        self.inputs = torch.full((slots, inputs_length(width, guesses), self.channels), STALE, dtype=dtype)
        self.matrices = torch.full((slots, self.value_heads, self.key_dim, self.value_dim), STALE)
        ring = slots, ring_length(guesses)
        self.keys = torch.full((*ring, self.key_heads, self.key_dim), STALE, dtype=dtype)
        self.updates = torch.full((*ring, self.value_heads, self.value_dim), STALE, dtype=dtype)
        self.decays = torch.full((*ring, self.value_heads), STALE)

    def draw(self, tokens: int, strengths: float = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return qkv, a and b of some tokens, each some columns of one projection; strengths: the mean of b."""
        sizes = (self.channels, self.value_heads, self.value_heads)
        projected = torch.randn(tokens, sum(sizes))
        projected[:, -self.value_heads :] += strengths
        qkv, a, b = projected.to(self.weight.dtype).split(sizes, dim=1)
        return qkv, a, b

    @property
    def recurrence(self) -> Recurrence:
        return Recurrence(self.matrices, self.keys, self.updates, self.decays)

    def fill(self, *slots: int) -> None:
        """Let sequences have been in some slots: their matrices, and tokens that may stand beside these."""
        for slot in slots:
            self.inputs[slot] = torch.randn_like(self.inputs[slot])
            self.matrices[slot] = torch.randn_like(self.matrices[slot]) / 4
            self.keys[slot] = torch.randn_like(self.keys[slot])
            self.updates[slot] = torch.randn_like(self.updates[slot]) / self.key_dim
            self.decays[slot] = -torch.rand_like(self.decays[slot]).cumsum(0) / 50

    def state(self, *spot: int) -> Tensor:
        return state_of(self.recurrence, *spot)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, [tokens, key heads, key dim], and v, [tokens, value heads, value dim]."""
        dims = (self.key_dim, self.key_dim, self.value_dim)
        heads = (self.key_heads, self.key_heads, self.value_heads)
        parts = qkv.split([head * dim for head, dim in zip(heads, dims, strict=True)], dim=1)
        q, k, v = (part.unflatten(1, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
        return q, k, v

    def log_gates(self, a: Tensor) -> Tensor:
        return -self.log_decay.exp() * F.softplus(a.float() + self.dt_bias)

    def convolve(self, function: Callable[..., Tensor], x: Tensor, *where: object) -> Tensor:
        return function(x, self.weight, self.inputs, *where)

    def chunks(self, function: Callable[..., Tensor], qkv: Tensor, a: Tensor, b: Tensor, chunks: Chunks) -> Tensor:
        return function(qkv, a, b, self.log_decay, self.dt_bias, self.recurrence, chunks, self.largest)

    def rows(self, function: Callable[..., Tensor], qkv: Tensor, a: Tensor, b: Tensor, rows: StateRows) -> Tensor:
        parameters = (self.weight, self.log_decay, self.dt_bias)
        return function(qkv, a, b, *parameters, LayerStates(self.inputs, self.recurrence), rows, self.largest)

    def copy(self, device: str = "cpu") -> Layer:
        """Return a layer of the same numbers, and slots of its own."""
        layer = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(layer, name, value.to(device, copy=True))
        return layer


def state_of(recurrence: Recurrence, slot: int, boundary: int, end: int) -> Tensor:
    """The state before a position, in float64: what stands at the boundary, and beside it."""
    device = recurrence.matrices.device
    since = read(recurrence, *(ints(number).to(device) for number in (slot, boundary, end)))
    factors = (since.before[0].double()[:, None] - since.decays[0]).exp().unsqueeze(-1)
    beside = since.keys[0].double().mT @ (factors * since.updates[0])
    return since.before[0].double().exp()[:, None, None] * since.matrices[0] + beside


def chunks_of(
    *spans: tuple[int, int],
    initial: list[int],
    final: list[int],
    snapshots: dict[int, int] | None = None,
    boundaries: list[int] | None = None,
    device: str = "cpu",
) -> Chunks:
    """Return the Chunks of spans (first position, end).

    snapshots: of the first span, position -> slot; boundaries: where the matrices of `initial` stand; None: there
    """
    cuts = cut((start, end, (snapshots or {}) if seq == 0 else {}) for seq, (start, end) in enumerate(spans))
    lengths = torch.tensor([0, *(end - start for start, end in spans)])
    starts = [start for start, _ in spans]
    stand = boundaries or starts
    standing = [own if at == start else to for own, to, at, start in zip(initial, final, stand, starts, strict=True)]
    tensors = [lengths.cumsum(0), starts, initial, final, *(list(part) for part in cuts), stand, standing]
    return Chunks(*(torch.as_tensor(x, dtype=torch.int32, device=device) for x in tensors), boundaries is not None)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def rows_of(
    slots: list[int], positions: list[int], boundaries: list[int] | None = None, device: str = "cpu"
) -> StateRows:
    """Return rows without guesses; boundaries: None: they are where prompts that just ended left them."""
    if boundaries is None:
        boundaries = [position - position % CHUNK for position in positions]
    return StateRows(*(ints(*numbers).to(device) for numbers in (slots, positions, boundaries)))


def recur(layer: Layer, qkv: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rule as it is defined, in float64 and one token after another, for qkv that is convolved already.

    Returns the results, [tokens, value heads, value dim], and the state behind the last token.
    """
    q, k, v = layer.split(qkv.double())
    q, k = (oracle.l2norm(x).repeat_interleave(layer.value_heads // layer.key_heads, dim=1) for x in (q, k))
    decays = torch.exp(-layer.log_decay.double().exp() * F.softplus(a.double() + layer.dt_bias))[..., None, None]
    strengths = layer.largest * b.double().sigmoid()[..., None]
    state = v.new_zeros(*k.shape[1:], layer.value_dim) if state is None else state.double()
    outs = []
    for t in range(len(qkv)):
        state = state * decays[t]
        update = strengths[t] * (v[t] - (state * k[t].unsqueeze(2)).sum(dim=1))
        state = state + k[t].unsqueeze(2) * update.unsqueeze(1)
        outs.append((state * q[t].unsqueeze(2)).sum(dim=1) * layer.key_dim**-0.5)
    return torch.stack(outs), state


def convolved(x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    """transformers' convolution of one sequence from its beginning, [tokens, channels]."""
    return oracle.causal_conv1d_fn(x.T[None], weight, activation="silu" if silu else None)[0].T


def assert_near(out: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Check the relative error of a whole tensor."""
    error = (out.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[dtype], error


REAL = (16, 32, 128, 128)  # Qwen3.5-9B's
REAL_SIZES = [(REAL, 1.0), ((30, 30, 96, 192), 2.0)]  # and OLMo Hybrid's, whose strengths have another limit
SHAPES = [(1, 1, 16, 16), (2, 4, 8, 16), (1, 3, 12, 24)]
OLMO = (1, 1, 96, 192)  # a head of OLMo Hybrid's
LARGEST = [(shape, 1.0) for shape in SHAPES] + [(OLMO, 2.0)]  # and the limit of strengths
SPANS = ((0, 64), (64, 214), (128, 129), (0, 3))
BOUNDARIES, ENDS = {0: 64, 3: 192, 6: 0}, {0: 64, 3: 214, 6: 3}  # of the slots that get states
SLOTS = {"initial": [-1, 3, 4, -1], "final": [0, 3, -1, 6], "snapshots": {64: 2}}


@pytest.mark.parametrize(("width", "silu"), [(4, True), (3, False)])
def test_a_convolution_is_transformers_in_chunks_and_in_rows(width: int, silu: bool) -> None:
    layer = Layer((2, 4, 8, 8), width=width)
    x = layer.draw(200)[0]
    first = chunks_of((0, 128), initial=[-1], final=[3])
    behind = chunks_of((128, 195), initial=[3], final=[3])
    ys = [
        layer.convolve(convolve_chunks_reference, x[:128], first, silu),
        layer.convolve(convolve_chunks_reference, x[128:195], behind, silu),
        *(layer.convolve(convolve_rows_reference, x[[t]], rows_of([3], [t]), silu) for t in range(195, 200)),
    ]
    torch.testing.assert_close(torch.cat(ys), convolved(x, layer.weight, silu))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65])
def test_what_lies_before_a_sequence_counts_as_zero(length: int) -> None:
    layer = Layer((1, 1, 8, 8))
    x = layer.draw(length + 4)[0]
    expected = convolved(x, layer.weight, False)
    chunks = chunks_of((0, length), initial=[-1], final=[0])
    ys = [
        layer.convolve(convolve_chunks_reference, x[:length], chunks, False),
        *(layer.convolve(convolve_rows_reference, x[[t]], rows_of([0], [t]), False) for t in range(length, length + 4)),
    ]
    torch.testing.assert_close(torch.cat(ys), expected)
    ys = [layer.convolve(convolve_rows_reference, x[[t]], rows_of([5], [t]), False) for t in range(5)]
    torch.testing.assert_close(torch.cat(ys), expected[:5])  # the slot has an earlier owner's inputs


@pytest.mark.parametrize(("shape", "largest"), LARGEST)
def test_the_rule_in_chunks_is_the_rule_step_by_step(shape: tuple[int, int, int, int], largest: float) -> None:
    layer = Layer(shape, largest=largest)
    layer.fill(3, 4)
    before = layer.matrices.clone()
    qkv, a, b = layer.draw(64 + 150 + 1 + 3)
    out = layer.chunks(delta_chunks_reference, qkv, a, b, chunks_of(*SPANS, **SLOTS))
    ends = [0, 64, 214, 215, 218]
    for i, j, initial, final in zip(ends[:-1], ends[1:], SLOTS["initial"], SLOTS["final"], strict=True):
        expected, state = recur(layer, qkv[i:j], a[i:j], b[i:j], before[initial] if initial >= 0 else None)
        torch.testing.assert_close(out[i:j].double(), expected, rtol=1e-4, atol=1e-5)
        if final >= 0:
            ours = layer.state(final, BOUNDARIES[final], ENDS[final])
            torch.testing.assert_close(ours, state, rtol=1e-4, atol=1e-5)
    assert layer.matrices[2].equal(layer.matrices[0])  # the snapshot
    assert layer.matrices[[1, 4, 5, 7]].equal(before[[1, 4, 5, 7]])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rule_is_transformers(shape: tuple[int, int, int, int]) -> None:
    layer = Layer(shape)
    x, a, b = layer.draw(140)
    qkv = convolved(x, layer.weight, True)
    q, k, v = layer.split(qkv)
    expected, state = oracle.torch_chunk_gated_delta_rule(
        *(part.repeat_interleave(layer.value_heads // part.shape[1], dim=1)[None] for part in (q, k, v)),
        g=layer.log_gates(a)[None],
        beta=b[None].sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    chunks = chunks_of((0, 128), initial=[-1], final=[1])
    layer.convolve(convolve_chunks_reference, x[:128], chunks, True)
    outs = [layer.chunks(delta_chunks_reference, qkv[:128], a[:128], b[:128], chunks)]
    for t in range(128, 140):  # beside an empty row
        rows = [torch.stack([y[t], torch.full_like(y[t], STALE)]) for y in (x, a, b)]
        outs.append(layer.rows(delta_rows_reference, *rows, rows_of([1, -1], [t, -1]))[:1])
    torch.testing.assert_close(torch.cat(outs), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.state(1, 128, 140).float(), state[0], rtol=1e-4, atol=1e-5)
    assert (layer.matrices[[0, *range(2, 8)]] == STALE).all()
    assert (layer.inputs[[0, *range(2, 8)]] == STALE).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gated_norm_is_transformers(dtype: torch.dtype) -> None:
    norm = oracle.Qwen3_5RMSNormGated(24, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(5, 3, 24).to(dtype), torch.randn(5, 88).to(dtype)[:, 16:]
    expected = norm(x, gate.unflatten(1, (3, 24))).flatten(1)
    torch.testing.assert_close(gated_norm_reference(x, gate, norm.weight, 1e-6), expected)
    if dtype in DTYPES:
        out = gated_norm_triton(x.to(DEVICE), gate.to(DEVICE), norm.weight.to(DEVICE), 1e-6)
        torch.testing.assert_close(out.cpu(), expected)


@pytest.mark.parametrize("keys", ["random", "alike"])
def test_an_inverse(keys: str) -> None:
    k = torch.randn(5, CHUNK, 32) + (10 if keys == "alike" else 0)
    k = F.normalize(k, dim=-1)
    below = (k @ k.mT).tril(-1)
    exact = torch.linalg.inv(torch.eye(CHUNK) + below.double())
    torch.testing.assert_close(invert_reference(below).double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "silu"), [(4, True), (3, False)])
def test_kernels_convolve(width: int, silu: bool, dtype: torch.dtype) -> None:
    layer = Layer((1, 2, 12, 8), dtype=dtype, width=width)
    layer.fill(3, 4, 5)
    x = layer.draw(218)[0]
    ours = layer.copy(DEVICE)
    expected = layer.convolve(convolve_chunks_reference, x, chunks_of(*SPANS, **SLOTS), silu)
    out = ours.convolve(convolve_chunks_triton, x.to(DEVICE), chunks_of(*SPANS, **SLOTS, device=DEVICE), silu)
    assert_near(out, expected, dtype)
    assert ours.inputs.cpu().equal(layer.inputs)
    where = [3, -1, 4, 5], [77, -1, 128, 2]
    expected = layer.convolve(convolve_rows_reference, x[:4], rows_of(*where), silu)
    launch_in_between(ours.inputs.device)
    out = ours.convolve(convolve_rows_triton, x[:4].to(DEVICE), rows_of(*where, device=DEVICE), silu)
    assert_near(out[[0, 2, 3]], expected[[0, 2, 3]], dtype)
    assert ours.inputs.cpu().equal(layer.inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "largest"), of_each_kind(LARGEST, 2, 3))
def test_the_kernels_of_chunks(shape: tuple[int, int, int, int], largest: float, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype=dtype, largest=largest)
    layer.fill(3, 4)
    ours = layer.copy(DEVICE)
    qkv, a, b = layer.draw(218)
    expected = layer.chunks(delta_chunks_reference, qkv, a, b, chunks_of(*SPANS, **SLOTS))
    moved = [x.to(DEVICE) for x in (qkv, a, b)]
    out = ours.chunks(delta_chunks_triton, *moved, chunks_of(*SPANS, **SLOTS, device=DEVICE))
    assert_near(out, expected, dtype)
    assert_near(ours.matrices[2], layer.matrices[2], dtype)
    for slot in (0, 3, 6):
        assert_near(
            ours.state(slot, BOUNDARIES[slot], ENDS[slot]), layer.state(slot, BOUNDARIES[slot], ENDS[slot]), dtype
        )
    assert not ours.matrices[6].any()
    assert ours.matrices[[1, 4, 5, 7]].cpu().equal(layer.matrices[[1, 4, 5, 7]])


@pytest.mark.parametrize("shape", [(1, 2, 8, 16), pytest.param(REAL, marks=pytest.mark.gpu)])
def test_a_sequence_in_steps_and_company_has_the_same_bits(shape: tuple[int, int, int, int]) -> None:
    layer = Layer(shape, dtype=SHORT).copy(DEVICE)
    x, a, b = (y.to(DEVICE) for y in layer.copy().draw(300))

    def compute(*parts: slice, **where: Any) -> Tensor:
        """The results of spans of the tokens, of which the first one counts."""
        chunks = chunks_of(*((part.start, part.stop) for part in parts), **where, device=DEVICE)
        xs, decays, strengths = (torch.cat([y[part] for part in parts]) for y in (x, a, b))
        qkv = layer.convolve(convolve_chunks_triton, xs, chunks, True)
        return layer.chunks(delta_chunks_triton, qkv, decays, strengths, chunks)[: parts[0].stop - parts[0].start]

    alone = compute(slice(0, 300), initial=[-1], final=[0])
    company = [slice(0, 70)] * 5  # with so many, programs are others on a GPU
    first = compute(slice(0, 128), *company, initial=[-1] * 6, final=[1, 2, 3, 4, 5, 6])
    second = compute(slice(128, 300), slice(64, 99), initial=[1, 2], final=[1, -1])
    assert torch.cat([first, second]).equal(alone)
    assert layer.matrices[1].equal(layer.matrices[0])
    assert layer.inputs[1].equal(layer.inputs[0])
    for ring in layer.recurrence[1:]:
        tail = torch.arange(256, 300) % ring.shape[1]
        assert ring[1, tail].equal(ring[0, tail])


@pytest.mark.parametrize("boundary", [64, 9])
@pytest.mark.parametrize("shape", [(1, 2, 8, 16), pytest.param(REAL, marks=pytest.mark.gpu)])
def test_a_row_in_company_has_the_same_bits(shape: tuple[int, int, int, int], boundary: int) -> None:
    layer = Layer(shape, dtype=SHORT)
    layer.fill(*range(8))
    alone, together = layer.copy(DEVICE), layer.copy(DEVICE)
    rows = [x.to(DEVICE) for x in layer.draw(8)]
    own = range(8), range(70, 78), [64] * 3 + [boundary] * 5
    launch_in_between(rows[0].device)
    out = together.rows(delta_rows_triton, *rows, rows_of(*map(list, own), device=DEVICE))
    launch_in_between(rows[0].device)
    one = rows_of([3], [73], [boundary], device=DEVICE)
    assert alone.rows(delta_rows_triton, *(x[3:4] for x in rows), one).equal(out[3:4])
    for one, all_rows in zip(alone.recurrence, together.recurrence, strict=True):
        assert one[3].equal(all_rows[3])


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "largest"), of_each_kind(LARGEST, 2, 3))
def test_the_kernel_of_rows(shape: tuple[int, int, int, int], largest: float, states: torch.dtype) -> None:
    """Of the rows, one is empty, one has just begun, some have tokens beside their matrices, one folds these."""
    layer = Layer(shape, largest=largest)
    layer.fill(1, 3, 4, 5, 6)
    layer.matrices = layer.matrices.to(states)
    ours = layer.copy(DEVICE)
    rows, where = layer.draw(6), ([3, -1, 4, 5, 1, 6], [77, -1, 128, 2, 127, 200], [64, 0, 128, 0, 64, 136])
    expected = layer.rows(delta_rows_reference, *rows, rows_of(*where))
    launch_in_between(ours.inputs.device)
    out = ours.rows(delta_rows_triton, *(x.to(DEVICE) for x in rows), rows_of(*where, device=DEVICE))
    assert out.isfinite().all()
    assert_near(out[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
    assert_near(out[5], expected[5], states)  # behind a fold, which rounds what it keeps
    for kept, wanted in zip(ours.recurrence, layer.recurrence, strict=True):
        torch.testing.assert_close(kept[:6].cpu(), wanted[:6], rtol=1e-4, atol=1e-5)
        assert_near(kept[6], wanted[6], states)
    assert ours.inputs.cpu().equal(layer.inputs)


@pytest.mark.parametrize("largest", [1.0, 2.0])
@pytest.mark.parametrize(("bias", "strengths"), [((-25, -15), 0), ((8, 9), 0), ((-6, 1), 15), ((-6, 1), -15)])
def test_gates_near_their_limits(bias: tuple[float, float], strengths: float, largest: float) -> None:
    layer = Layer((1, 1, 16, 16), bias=bias, largest=largest)
    qkv, a, b = layer.draw(128, strengths)
    expected, state = recur(layer, qkv, a, b)
    for device, function in (("cpu", delta_chunks_reference), (DEVICE, delta_chunks_triton)):
        ours = layer.copy(device)
        chunks = chunks_of((0, 128), initial=[-1], final=[1], device=device)
        out = ours.chunks(function, *(x.to(device) for x in (qkv, a, b)), chunks)
        assert_near(out, expected)
        assert_near(ours.state(1, 128, 128), state)


REFERENCES = (convolve_chunks_reference, delta_chunks_reference, delta_rows_reference)
KERNELS = (convolve_chunks_triton, delta_chunks_triton, delta_rows_triton)


@pytest.mark.parametrize(("functions", "device"), [(REFERENCES, "cpu"), (KERNELS, DEVICE)], ids=["torch", "kernels"])
def test_what_is_not_finite_stays_in_its_sequence(functions: tuple[Callable[..., Tensor], ...], device: str) -> None:
    """And what a slot has of an earlier owner stays there."""
    convolve, in_chunks, in_rows = functions
    layer = Layer((1, 2, 8, 16)).copy(device)
    for kept in (layer.inputs, *layer.recurrence):
        kept.fill_(torch.nan)
    x, a, b = (y.to(device) for y in layer.copy().draw(100))
    x[:40] = torch.nan
    chunks = chunks_of((0, 40), (0, 59), (0, 1), initial=[-1] * 3, final=[0, 1, 2], device=device)
    qkv = layer.convolve(convolve, x, chunks, True)
    out = layer.chunks(in_chunks, qkv, a, b, chunks)
    assert out[40:].isfinite().all()
    assert layer.matrices[1:3].isfinite().all()
    for t in range(59, 65):  # the last one of them folds
        launch_in_between(x.device)
        where = rows_of([0, 1, -1, 2], [t - 19, t, -1, t - 58], [0] * 4, device=device)
        rows = layer.rows(in_rows, x[50:54], a[50:54], b[50:54], where)
        assert rows[[1, 3]].isfinite().all()
    assert layer.matrices[1:3].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 64, 512])
@pytest.mark.parametrize(("shape", "largest"), REAL_SIZES)
def test_rows_of_real_sizes(shape: tuple[int, int, int, int], largest: float, rows: int, dtype: torch.dtype) -> None:
    """Rows of mixed fill, some of which fold."""
    with torch.device(DEVICE):
        layer = Layer(shape, rows, dtype, largest=largest)
        layer.fill(*range(rows))
        qkv, a, b = layer.draw(rows)
    slots, boundaries = torch.randperm(rows), torch.randint(0, 9999, (rows,))
    positions = boundaries + 4 + torch.arange(rows) * 17 % (CHUNK - 3)
    if rows > 1:
        slots[rows // 2] = -1
    where = rows_of(slots.tolist(), positions.tolist(), boundaries.tolist(), device=DEVICE)
    layers = [layer, *(layer.copy(DEVICE) for _ in range(2))]
    tried = sorted({0, rows // 3, rows - 1})
    spots = [(int(slots[row]), int(boundaries[row]), int(positions[row])) for row in tried]
    before = [layer.state(*spot) for spot in spots]
    out = layers[0].rows(delta_rows_triton, qkv, a, b, where)
    expected = layers[1].rows(delta_rows_reference, qkv, a, b, where)
    filled = (slots >= 0).to(DEVICE)
    assert_near(out[filled], expected[filled].cpu(), dtype)
    for kept, wanted in zip(layers[0].recurrence, layers[1].recurrence, strict=True):
        assert_near(kept, wanted.cpu(), dtype)
    assert layers[0].inputs.equal(layers[1].inputs)
    convolved = layers[2].convolve(convolve_rows_reference, qkv, where, True)
    for row, state, (slot, boundary, position) in zip(tried, before, spots, strict=True):
        answer, behind = recur(layer, convolved[[row]], a[[row]], b[[row]], state)
        assert_near(out[[row]], answer.cpu(), dtype)
        boundary += CHUNK * (position - boundary >= CHUNK)
        assert_near(layers[0].state(slot, boundary, position + 1), behind.cpu(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1,), (63,), (64,), (65,), (4096,), (1, 500, 64, 1027)])
@pytest.mark.parametrize(("shape", "largest"), REAL_SIZES)
def test_chunks_of_real_sizes(
    shape: tuple[int, int, int, int], largest: float, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    count = len(lengths)
    with torch.device(DEVICE):
        layer = Layer(shape, 2 * count, dtype, largest=largest)
        layer.fill(*range(count))
        x, a, b = layer.draw(sum(lengths))
    layers = [layer, layer.copy(DEVICE)]
    slots = [-1, *range(1, count)]
    chunks = chunks_of(
        *((64 * (slot >= 0), 64 * (slot >= 0) + length) for slot, length in zip(slots, lengths, strict=True)),
        initial=slots,
        final=list(range(count)),
        snapshots={64: count} if lengths[0] >= 64 else {},
        device=DEVICE,
    )
    before = layer.matrices.clone()
    qkv = layers[0].convolve(convolve_chunks_triton, x, chunks, True)
    assert_near(qkv, layers[1].convolve(convolve_chunks_reference, x, chunks, True).cpu(), dtype)
    assert layers[0].inputs.equal(layers[1].inputs)
    out = layer.chunks(delta_chunks_triton, qkv, a, b, chunks)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for seq, (end, length, slot) in enumerate(zip(ends, lengths, slots, strict=True)):
        span = slice(end - length, end)
        answer, behind = recur(layer, qkv[span], a[span], b[span], before[slot] if slot >= 0 else None)
        assert_near(out[span], answer.cpu(), dtype)
        position = 64 * (slot >= 0) + length
        assert_near(layer.state(seq, position - position % CHUNK, position), behind.cpu(), dtype)
    if lengths[0] >= 64:
        assert_near(layer.matrices[count], recur(layer, qkv[:64], a[:64], b[:64])[1].cpu(), dtype)


@pytest.mark.parametrize(
    ("functions", "device"),
    [
        pytest.param(REFERENCES, "cpu", marks=pytest.mark.whole),
        pytest.param(KERNELS, DEVICE, marks=pytest.mark.gpu),
    ],
    ids=["references", "kernels"],
)
def test_many_steps_do_not_drift_from_chunks(functions: tuple[Callable[..., Tensor], ...], device: str) -> None:
    """Over 32,768 tokens on a GPU, as transformers' two forms do not. Each rounds in its own places: hardly farther."""
    convolve, in_chunks, in_rows = functions
    tokens = 1 << 15 if device == "cuda" else 1 << 13
    layer = Layer((1, 2, 16, 16), bias=(-12, -4)).copy(device)
    x, a, b = (y.to(device) for y in layer.copy().draw(tokens))
    chunks = chunks_of((0, tokens), initial=[-1], final=[0], device=device)
    qkv = layer.convolve(convolve, x, chunks, True)
    out = layer.chunks(in_chunks, qkv, a, b, chunks)
    layer.matrices[1] = 0
    slots, positions = ints(1).to(device), torch.arange(tokens, dtype=torch.int32, device=device)
    boundaries, steps = torch.zeros(2, dtype=torch.int32, device=device), []
    for t in range(tokens):
        launch_in_between(x.device)
        rows = StateRows(slots, positions[[t]], begin_rows(slots, positions[[t]], boundaries)[1])
        steps.append(layer.rows(in_rows, x[[t]], a[[t]], b[[t]], rows))
    layer = layer.copy()
    states = layer.state(0, tokens, tokens), layer.state(1, tokens - CHUNK, tokens)
    settings = {"g": layer.log_gates(a.cpu())[None], "beta": b.cpu()[None].sigmoid()}
    theirs = [
        function(
            *(part[None] for part in layer.split(qkv.cpu())),
            **settings,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        for function in (oracle.torch_chunk_gated_delta_rule, oracle.torch_recurrent_gated_delta_rule)
    ]
    for ours, (chunked, recurrent) in (
        ((out.cpu(), torch.cat(steps).cpu()), (theirs[0][0], theirs[1][0])),
        (states, (theirs[0][1], theirs[1][1])),
    ):
        assert (ours[0] - ours[1]).norm() <= 1.25 * (chunked - recurrent).norm()
