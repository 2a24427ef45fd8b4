"""The gated delta rule, its convolution and its norm: against transformers, and against one step after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from nanoinfer.kernels.delta.chunks import CHUNK, Chunks, cut
from nanoinfer.kernels.delta.convolution import convolve_chunks_reference, convolve_rows_reference
from nanoinfer.kernels.delta.decode import delta_rows_reference
from nanoinfer.kernels.delta.gated_norm import gated_norm_reference
from nanoinfer.kernels.delta.prefill import delta_chunks_reference

WIDTH = 4
STALE = 1e4  # what slots have of an earlier owner: whoever reads it shows


class Layer:
    """Random parameters and slots of a layer: key heads, value heads, key dim and value dim as the shape has them."""

    def __init__(self, shape: tuple[int, int, int, int], slots: int = 8, dtype: torch.dtype = torch.float32) -> None:
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = shape
        self.channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        self.weight = torch.randn(self.channels, WIDTH).to(dtype)
        self.log_decay = torch.empty(self.value_heads).uniform_(0.01, 16).log()
        self.dt_bias = torch.empty(self.value_heads).uniform_(-6, 1)  # decays near 1 and near 0
        self.inputs = torch.full((slots, WIDTH, self.channels), STALE, dtype=dtype)
        self.matrices = torch.full((slots, self.value_heads, self.value_dim, self.key_dim), STALE)

    def draw(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return qkv, a and b of some tokens, each some columns of one projection."""
        sizes = (self.channels, self.value_heads, self.value_heads)
        qkv, a, b = torch.randn(tokens, sum(sizes)).to(self.weight.dtype).split(sizes, dim=1)
        return qkv, a, 4 * b


def chunks_of(
    *spans: tuple[int, int], initial: list[int], final: list[int], snapshots: dict[int, int] | None = None
) -> Chunks:
    """Return the Chunks of spans (first position, end); snapshots: of the first span, position -> slot."""
    cuts = cut((start, end, (snapshots or {}) if seq == 0 else {}) for seq, (start, end) in enumerate(spans))
    lengths = torch.tensor([0, *(end - start for start, end in spans)])
    starts = [start for start, _ in spans]
    tensors = [lengths.cumsum(0), starts, initial, final, *(list(part) for part in cuts)]
    return Chunks(*(torch.as_tensor(x, dtype=torch.int32) for x in tensors))


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def recur(layer: Layer, qkv: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rule as it is defined, in float64 and one token after another, for qkv that is convolved already.

    Returns the results, [tokens, value heads, value dim], and the states behind each token.
    """
    sizes = [layer.key_heads * layer.key_dim] * 2 + [layer.value_heads * layer.value_dim]
    q, k, v = (
        x.unflatten(1, (-1, dim))
        for x, dim in zip(qkv.double().split(sizes, 1), [layer.key_dim] * 2 + [layer.value_dim], strict=True)
    )
    q, k = (oracle.l2norm(x).repeat_interleave(layer.value_heads // layer.key_heads, dim=1) for x in (q, k))
    decay = torch.exp(-layer.log_decay.double().exp() * F.softplus(a.double() + layer.dt_bias))
    strength = b.double().sigmoid()
    state = torch.zeros(layer.value_heads, layer.value_dim, layer.key_dim) if state is None else state
    state, outs, states = state.double(), [], []
    for t in range(len(qkv)):
        state = state * decay[t, :, None, None]
        miss = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("h,hv,hk->hvk", strength[t], miss, k[t])
        outs.append(torch.einsum("hvk,hk->hv", state, q[t]) * layer.key_dim**-0.5)
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def convolved(x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    """transformers' convolution of one sequence from its beginning, [tokens, channels]."""
    return oracle.causal_conv1d_fn(x.T[None], weight, activation="silu" if silu else None)[0].T


SHAPES = [(1, 1, 16, 16), (2, 4, 8, 16)]


@pytest.mark.parametrize("silu", [True, False])
def test_a_convolution_is_transformers_in_chunks_and_in_rows(silu: bool) -> None:
    layer = Layer((2, 4, 8, 8))
    x = layer.draw(200)[0]
    expected = convolved(x, layer.weight, silu)
    first = chunks_of((0, 128), initial=[-1], final=[3])
    ys = [convolve_chunks_reference(x[:128], layer.weight, layer.inputs, first, silu)]
    behind = chunks_of((128, 195), initial=[3], final=[3])
    ys.append(convolve_chunks_reference(x[128:195], layer.weight, layer.inputs, behind, silu))
    for t in range(195, 200):
        ys.append(convolve_rows_reference(x[t : t + 1], layer.weight, layer.inputs, ints(3), ints(t), silu))
    torch.testing.assert_close(torch.cat(ys), expected)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65])
def test_what_lies_before_a_sequence_counts_as_zero(length: int) -> None:
    layer = Layer((1, 1, 8, 8))
    x = layer.draw(length + 4)[0]
    expected = convolved(x, layer.weight, False)
    ys = [
        convolve_chunks_reference(
            x[:length], layer.weight, layer.inputs, chunks_of((0, length), initial=[-1], final=[0]), False
        )
    ]
    for t in range(length, length + 4):
        ys.append(convolve_rows_reference(x[t : t + 1], layer.weight, layer.inputs, ints(0), ints(t), False))
    torch.testing.assert_close(torch.cat(ys), expected)
    alone = Layer((1, 1, 8, 8))  # rows from the beginning: the ring has an earlier owner's numbers
    ys = [convolve_rows_reference(x[t : t + 1], layer.weight, alone.inputs, ints(5), ints(t), False) for t in range(5)]
    torch.testing.assert_close(torch.cat(ys), expected[:5])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rule_in_chunks_is_the_rule_step_by_step(shape: tuple[int, int, int, int]) -> None:
    layer = Layer(shape)
    qkv, a, b = layer.draw(64 + 150 + 1)
    spans = ((0, 64), (0, 150), (0, 1))
    chunks = chunks_of(*spans, initial=[-1] * 3, final=[0, 1, -1], snapshots={64: 2})
    out = delta_chunks_reference(qkv, a, b, layer.log_decay, layer.dt_bias, layer.matrices, chunks, layer.key_heads)
    for seq, (i, j) in enumerate([(0, 64), (64, 214), (214, 215)]):
        expected, states = recur(layer, qkv[i:j], a[i:j], b[i:j])
        torch.testing.assert_close(out[i:j].double(), expected, rtol=1e-4, atol=1e-5)
        if seq < 2:
            torch.testing.assert_close(layer.matrices[seq].double(), states[-1], rtol=1e-4, atol=1e-5)
    assert layer.matrices[2].equal(layer.matrices[0])
    assert (layer.matrices[3:] == STALE).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rule_is_transformers(shape: tuple[int, int, int, int]) -> None:
    layer = Layer(shape)
    x, a, b = layer.draw(140)
    qkv = convolved(x, layer.weight, True)
    sizes = [layer.key_heads * layer.key_dim] * 2 + [layer.value_heads * layer.value_dim]
    q, k, v = (
        part.unflatten(1, (-1, dim))[None]
        for part, dim in zip(qkv.split(sizes, 1), [layer.key_dim] * 2 + [layer.value_dim], strict=True)
    )
    g = -layer.log_decay.exp() * F.softplus(a + layer.dt_bias)
    expected, state = oracle.torch_chunk_gated_delta_rule(
        q, k, v, g=g[None], beta=b[None].sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    chunks = chunks_of((0, 128), initial=[-1], final=[1])
    out = [
        delta_chunks_reference(
            qkv[:128], a[:128], b[:128], layer.log_decay, layer.dt_bias, layer.matrices, chunks, layer.key_heads
        )
    ]
    convolve_chunks_reference(x[:128], layer.weight, layer.inputs, chunks, True)
    for t in range(128, 140):  # beside an empty row
        rows = [torch.cat([y[t : t + 1], torch.full_like(y[:1], STALE)]) for y in (x, a, b)]
        out.append(
            delta_rows_reference(
                *rows,
                layer.weight,
                layer.log_decay,
                layer.dt_bias,
                layer.inputs,
                layer.matrices,
                ints(1, -1),
                ints(t, -1),
                layer.key_heads,
            )[:1]
        )
    torch.testing.assert_close(torch.cat(out), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.matrices[1], state[0].mT, rtol=1e-4, atol=1e-5)
    assert (layer.matrices[[0, *range(2, 8)]] == STALE).all()
    assert (layer.inputs[[0, *range(2, 8)]] == STALE).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_norm_is_transformers(dtype: torch.dtype) -> None:
    norm = oracle.Qwen3_5RMSNormGated(16, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 80).to(dtype)[:, 16:]
    expected = norm(x, gate.unflatten(1, (4, 16))).flatten(1)
    torch.testing.assert_close(gated_norm_reference(x, gate, norm.weight, 1e-6), expected)


def test_a_chunk_is_as_long_as_transformers() -> None:
    assert CHUNK == 64
