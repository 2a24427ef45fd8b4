"""Mamba2: kernels against one step after another in float64, in chunks, in company, on ranks; what configs may say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, SHAPE, Case, build
from cases.layouts import PUBLISHED
from conftest import DEVICE, of_each_kind, whole_only
from test_delta import DTYPES, STALE, TOLERANCE, chunks_of, rows_of, state_of
from test_four_bits import tokens_of, write_checkpoint
from test_models import run
from torch import Tensor
from transformers import AutoConfig

from nanoinfer import LLM
from nanoinfer.attention.cache_layout import Matrices, Pages, State
from nanoinfer.kernels.delta import chunks
from nanoinfer.kernels.delta.chunks import CHUNK, Chunks
from nanoinfer.kernels.delta.convolution import (
    convolve_chunks_reference,
    convolve_chunks_triton,
    convolve_rows_reference,
    convolve_rows_triton,
)
from nanoinfer.kernels.delta.gated_norm import (
    gated_norm_reference,
    gated_norm_triton,
    part_of_mean_squares_reference,
    part_of_mean_squares_triton,
)
from nanoinfer.kernels.mamba import prefill
from nanoinfer.kernels.mamba.decode import mamba_rows_reference, mamba_rows_triton
from nanoinfer.kernels.mamba.prefill import mamba_chunks_reference, mamba_chunks_triton
from nanoinfer.kernels.states.memory import LayerStates, Recurrence, StateRows, inputs_length, ring_length
from nanoinfer.models import check_architectures, describe
from nanoinfer.models.description import Description
from nanoinfer.models.ranks import check_ranks

Shape = tuple[int, int, int, int]  # heads, numbers of each, groups, and numbers that a state has for each input

SHAPES = [(4, 16, 2, 32), (6, 12, 1, 24), (2, 64, 2, 128)]
SPANS = [(0, 130), (64, 200), (17, 30)]
LIMITS = (0.02, 0.9)


class Layer:
    """Random parameters and slots of a layer, which have numbers of earlier owners."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, slots: int = 8, guesses: int = 0) -> None:
        self.heads, self.dim, self.groups, self.numbers = shape
        self.channels = self.heads * self.dim + 2 * self.groups * self.numbers
        self.weight, self.bias = (torch.randn(self.channels, 4) / 2).to(dtype), torch.randn(self.channels).to(dtype)
        self.log_decay = torch.empty(self.heads).uniform_(0.01, 16).log()
        self.dt_bias, self.skips = torch.empty(self.heads).uniform_(-6, 1), torch.randn(self.heads)
        self.inputs = torch.full((slots, inputs_length(4, guesses), self.channels), STALE, dtype=dtype)
        self.matrices = torch.full((slots, self.heads, self.numbers, self.dim), STALE)
        ring = slots, ring_length(guesses)
        self.keys = torch.full((*ring, self.groups, self.numbers), STALE, dtype=dtype)
        self.updates = torch.full((*ring, self.heads, self.dim), STALE, dtype=dtype)
        self.decays = torch.full((*ring, self.heads), STALE)
        self.most = guesses

    def draw(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return xbc and dt, some columns of one projection."""
        projected = torch.randn(tokens, self.channels + self.heads).to(self.weight.dtype)
        xbc, dt = projected.split([self.channels, self.heads], dim=1)
        return xbc, dt

    def convolve(self, function: Any, x: Tensor, *where: Any) -> Tensor:
        out: Tensor = function(x, self.weight, self.inputs, *where, True, self.bias)
        return out

    def chunks(self, function: Any, xbc: Tensor, dt: Tensor, chunks: Chunks) -> Tensor:
        parameters = self.log_decay, self.dt_bias, self.skips, self.recurrence
        out: Tensor = function(xbc, dt, *parameters, chunks, LIMITS)
        return out

    def rows(self, function: Any, xbc: Tensor, dt: Tensor, rows: StateRows) -> Tensor:
        parameters = self.weight, self.bias, self.log_decay, self.dt_bias, self.skips
        out: Tensor = function(xbc, dt, *parameters, LayerStates(self.inputs, self.recurrence), rows, LIMITS)
        return out

    @property
    def recurrence(self) -> Recurrence:
        return Recurrence(self.matrices, self.keys, self.updates, self.decays)

    def on_device(self) -> Layer:
        return self.on(DEVICE)

    def on(self, device: str) -> Layer:
        """Return a layer of the same numbers, and slots of its own."""
        layer = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(layer, name, value.to(device, copy=True))
        return layer


def recur(layer: Layer, xbc: Tensor, dt: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it is defined, in float64, for xbc that is convolved already.

    Returns the results, [tokens, heads, dim], and the state behind the last token.
    """
    inner = layer.heads * layer.dim
    x, b, c = xbc.double().split([inner] + [layer.groups * layer.numbers] * 2, dim=1)
    x = x.unflatten(1, (layer.heads, -1))
    b, c = (y.unflatten(1, (layer.groups, -1)).repeat_interleave(layer.heads // layer.groups, 1) for y in (b, c))
    steps = F.softplus(dt.double() + layer.dt_bias).clamp(*LIMITS)
    outs = []
    for t in range(len(x)):
        decay = (-layer.log_decay.double().exp() * steps[t]).exp()
        state = state * decay[:, None, None] + b[t][..., None] * (steps[t][:, None] * x[t])[:, None]
        outs.append((state * c[t][..., None]).sum(dim=1) + layer.skips[:, None] * x[t])
    return torch.stack(outs), state


def near(out: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    error = (out.double().cpu() - expected.double().cpu()).norm() / expected.double().norm()
    return bool(error < TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [mamba_chunks_reference, mamba_chunks_triton])
@pytest.mark.parametrize("shape", of_each_kind(zip(SHAPES), 0))
def test_chunks(shape: Shape, function: Any, dtype: torch.dtype) -> None:
    """One sequence begins, and leaves a snapshot; one goes on in its slot; one begins within a chunk, in another."""
    torch.manual_seed(0)
    layer = Layer(shape, dtype)
    layer.matrices[[1, 2]] = torch.randn_like(layer.matrices[[1, 2]])
    xbc, dt = layer.draw(sum(end - start for start, end in SPANS))
    on = DEVICE if function is mamba_chunks_triton else "cpu"
    used = layer.on_device() if on == DEVICE else layer
    chunks = chunks_of(*SPANS, initial=[-1, 1, 2], final=[0, 1, 3], snapshots={64: 5}, device=on)
    before = layer.matrices.double()
    out = used.chunks(function, xbc.to(on), dt.to(on), chunks)
    first = 0
    boundaries = 128, 192, 17
    for (start, end), initial, final, boundary in zip(SPANS, (None, 1, 2), (0, 1, 3), boundaries, strict=True):
        own = slice(first, first + end - start)
        state = torch.zeros_like(before[0]) if initial is None else before[initial]
        expected, state = recur(layer, xbc[own], dt[own], state)
        assert near(out[own], expected, dtype)
        assert near(state_of(used.recurrence, final, boundary, end), state, dtype)
        first = own.stop
    _, snapshot = recur(layer, xbc[:64], dt[:64], torch.zeros_like(before[0]))
    assert near(used.matrices[5], snapshot, dtype)
    assert used.matrices[4].eq(STALE).all()


@pytest.mark.parametrize("start", [0, 64])
def test_a_long_sequence_is_walked_in_stretches(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may go on in its slot, which gets the states behind it, as if it were walked at once."""
    monkeypatch.setattr(chunks, "STRETCH", 2)
    monkeypatch.setattr(prefill, "STRETCH", 2)
    torch.manual_seed(0)
    layer, spans = Layer((2, 12, 1, 16)), [(64, 100), (start, start + 5 * CHUNK + 7), (0, 20)]
    layer.log_decay.fill_(-6.0)  # so that states remember long
    layer.matrices[2] = torch.randn_like(layer.matrices[2])
    begin = layer.matrices[2].double() * (start > 0)
    ours, (xbc, dt) = layer.on_device(), layer.draw(sum(end - first for first, end in spans))
    slots = {"initial": [-1, 2 if start else -1, -1], "final": [0, 2, 1]}
    cut = chunks_of(*spans, **slots, snapshots={128: 3}, device=DEVICE)
    assert cut.stretches.tolist() == [1, 3, 5, 0, 7]
    out = ours.chunks(mamba_chunks_triton, xbc.to(DEVICE), dt.to(DEVICE), cut)
    first = 0
    for (begun, end), final, state in zip(spans, (0, 2, 1), (begin * 0, begin, begin * 0), strict=True):
        own = slice(first, first + end - begun)
        expected, state = recur(layer, xbc[own], dt[own], state)
        assert near(out[own], expected, torch.float32)
        first = own.stop
        assert near(state_of(ours.recurrence, final, end - end % CHUNK, end), state, torch.float32)


def test_short_sequences_have_no_sums() -> None:
    """Sums are as large as states, and a step may have hundreds of short sequences beside a long one."""
    lengths = [20] * 100 + [70 * CHUNK] + [20] * 100
    cut = chunks_of(*((0, length) for length in lengths), initial=[-1] * 201, final=[-1] * 201)
    assert cut.stretches.tolist() == [100, 132, 164, *range(100), *range(170, 270)]
    assert prefill.most_summed(cut) == 4
    assert prefill.most_summed(chunks_of((0, 9 * 64), (0, 20), initial=[-1] * 2, final=[-1] * 2)) == 0
    assert prefill.most_summed(chunks_of((64, 64 * 130), initial=[-1], final=[-1])) == 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", of_each_kind(zip(SHAPES), 0))
def test_steps_go_on_from_chunks(shape: Shape, dtype: torch.dtype) -> None:
    """The kernels' tokens are those of one long prompt; an empty row writes nothing."""
    torch.manual_seed(0)
    layer = Layer(shape, dtype)
    ours = layer.on_device()
    xbc, dt = layer.draw(75)
    convolved = layer.convolve(convolve_chunks_reference, xbc, chunks_of((0, 75), initial=[-1], final=[0]))
    expected, _ = recur(layer, convolved, dt, torch.zeros_like(layer.matrices[0]).double())
    first = chunks_of((0, 70), initial=[-1], final=[1], device=DEVICE)
    out = ours.convolve(convolve_chunks_triton, xbc[:70].to(DEVICE), first)
    outs = [ours.chunks(mamba_chunks_triton, out, dt[:70].to(DEVICE), first)]
    for t in range(70, 75):
        rows = (y[[t, 3]].to(DEVICE) for y in (xbc, dt))
        outs.append(ours.rows(mamba_rows_triton, *rows, rows_of([1, -1], [t, -1], device=DEVICE))[:1])
    assert near(torch.cat(outs), expected, dtype)
    assert ours.matrices[[0, 2]].eq(STALE).all()
    assert ours.inputs[[0, 2]].eq(STALE).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", of_each_kind(zip(SHAPES), 0))
def test_rows(shape: Shape, dtype: torch.dtype) -> None:
    """Rows at other positions, of which one begins, and one folds; the kernel leaves what the reference leaves."""
    torch.manual_seed(0)
    layer = Layer(shape, dtype)
    for kept in (layer.inputs, *layer.recurrence):
        kept[1:6] = torch.randn_like(kept[1:6]) / 4
    ours, (xbc, dt) = layer.on_device(), layer.draw(5)
    where = [3, 1, -1, 2, 5], [9, 64, -1, 2, 164], [0, 64, 0, 0, 100]
    expected = layer.rows(mamba_rows_reference, xbc, dt, rows_of(*where))
    out = ours.rows(mamba_rows_triton, xbc.to(DEVICE), dt.to(DEVICE), rows_of(*where, device=DEVICE))
    some = [0, 1, 3, 4]
    assert near(out[some], expected[some], dtype)
    for kept, wanted in zip(ours.recurrence, layer.recurrence, strict=True):
        assert near(kept[1:6], wanted[1:6], dtype)
    assert ours.inputs.cpu().equal(layer.inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolutions_have_biases(dtype: torch.dtype) -> None:
    layer = Layer(SHAPES[0], dtype)
    ours, (xbc, _), where = layer.on_device(), layer.draw(70), chunks_of((0, 70), initial=[-1], final=[1])
    on_device = chunks_of((0, 70), initial=[-1], final=[1], device=DEVICE)
    wide = F.pad(xbc.double().T, (3, 0)).unfold(1, 4, 1) * layer.weight.double()[:, None]
    expected = F.silu(wide.sum(-1).T + layer.bias.double())
    assert near(layer.convolve(convolve_chunks_reference, xbc, where), expected, dtype)
    assert near(ours.convolve(convolve_chunks_triton, xbc.to(DEVICE), on_device), expected, dtype)
    row = xbc[-1:].clone()
    expected = layer.convolve(convolve_rows_reference, row, rows_of([1], [70]))
    assert near(ours.convolve(convolve_rows_triton, row.to(DEVICE), rows_of([1], [70], device=DEVICE)), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_may_come_before_the_norm_of_a_group(dtype: torch.dtype) -> None:
    x, wide, weight = torch.randn(5, 3, 40).to(dtype), torch.randn(5, 200).to(dtype), torch.randn(120).to(dtype)
    gate = wide[:, 30:150]
    gated = (x.flatten(1).double() * F.silu(gate.double())).view(5, 3, 40)
    expected = F.rms_norm(gated, (40,), eps=1e-5).flatten(1) * weight.double()
    assert near(gated_norm_reference(x, gate, weight, 1e-5, True), expected, dtype)
    moved = (y.to(DEVICE) for y in (x, gate, weight))
    assert near(gated_norm_triton(*moved, 1e-5, True), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_may_come_behind_the_norm_of_a_group_or_be_alone(dtype: torch.dtype) -> None:
    x, gate, weight = torch.randn(5, 3, 40).to(dtype), torch.randn(5, 120).to(dtype), torch.randn(120).to(dtype)
    for own, normed in (
        (weight, F.rms_norm(x.double(), (40,), eps=1e-5).flatten(1) * weight.double()),
        (None, x.double().flatten(1)),
    ):
        expected = normed * F.silu(gate.double())
        assert near(gated_norm_reference(x, gate, own, 1e-5), expected, dtype)
        moved = None if own is None else own.to(DEVICE)
        assert near(gated_norm_triton(x.to(DEVICE), gate.to(DEVICE), moved, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates_first", [False, True])
def test_a_group_may_lie_on_several_ranks(gates_first: bool, dtype: torch.dtype) -> None:
    """Each has some of its numbers, and the mean square of all."""
    x, wide, weight = torch.randn(5, 3, 40).to(dtype), torch.randn(5, 200).to(dtype), torch.randn(120).to(dtype)
    gate = wide[:, 30:150]
    expected = gated_norm_reference(x.double(), gate.double(), weight.double(), 1e-5, gates_first)
    in_heads = x, gate.view(x.shape), weight.view(1, 3, 40)
    for part, norm, on in (
        (part_of_mean_squares_reference, gated_norm_reference, "cpu"),
        (part_of_mean_squares_triton, gated_norm_triton, DEVICE),
    ):
        ranks = [[y[..., own].contiguous().to(on) for y in in_heads] for own in (slice(0, 16), slice(16, 40))]
        squares = sum(part(x, gate.flatten(1) if gates_first else None, 40) for x, gate, _ in ranks)
        columns = F.pad(squares, (1, 2))[:, 1:4]
        outs = [norm(x, gate.flatten(1), own.flatten(), 1e-5, gates_first, columns) for x, gate, own in ranks]
        assert near(torch.cat([out.view(5, 3, -1) for out in outs], dim=2).flatten(1), expected, dtype)


def with_settings(name: str, **settings: Any) -> Case:
    return replace(CASES[name], settings={**CASES[name].settings, **settings})


SHARING = [
    ("bamba", {"mamba_n_groups": 1, "mamba_d_state": 25}, 2),
    ("falconh1 norm before the gate, biases", {"mamba_n_groups": 1}, 2),
    ("granitemoehybrid experts, rotated", {"mamba_n_groups": 1}, 2),
    ("falconh1 norm behind the gate", {"mamba_n_heads": 8, "mamba_d_ssm": 104}, 4),
    ("nemotronh", {"n_groups": 1}, 4),
    ("falconh1", {"mamba_n_heads": 8, "mamba_d_ssm": 96}, 4),
]


@pytest.mark.parametrize(("name", "settings", "ranks"), of_each_kind(SHARING, 0, 3))
def test_ranks_share_a_group(
    name: str, settings: dict[str, Any], ranks: int, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Its B and C, and their inputs of the convolution, are whole on each of these ranks."""
    case = with_settings(name, **settings)
    model = build(case, tmp_path)
    run(make_llm(str(tmp_path), device="cpu", tensor_parallel_size=ranks, **case.small), model)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("name", "settings"), [(name, settings) for name, settings, ranks in SHARING if ranks == 2])
def test_gpus_share_a_group(name: str, settings: dict[str, Any], make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Decode steps sum the mean squares in their graphs."""
    case = with_settings(name, **settings)
    model = build(case, tmp_path)
    run(make_llm(str(tmp_path), tensor_parallel_size=2, **case.small), model, prompt_logprobs=0)


FORMATS = [("int4 groups", 2), ("gptq act order with zeros", 2), ("awq", 4), ("mxfp4", 2), ("int8 groups", 4)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", of_each_kind(zip(["falconh1", "bamba"]), 0))
@pytest.mark.parametrize(("format", "ranks"), [FORMATS[0], *whole_only(FORMATS[1:])])
def test_ranks_share_a_group_of_a_quantized_file(
    name: str, format: str, ranks: int, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_state": 32, "mamba_n_groups": 1}
    case = with_settings(name, **sizes, **({"mamba_d_ssm": 128} if name == "falconh1" else {}))
    build(case, tmp_path / "source")
    dense = write_checkpoint(tmp_path / "source", tmp_path, PUBLISHED[format])
    llm = make_llm(str(tmp_path), device="cpu", tensor_parallel_size=ranks, **case.small)
    assert tokens_of(llm) == tokens_of(make_llm(str(dense), device="cpu", **case.small))


@pytest.mark.parametrize(
    ("name", "settings", "ranks", "message"),
    [
        ("bamba", {}, 3, "mamba_n_heads=8 is not divisible by it; use a divisor: 1, 2, 4, 8$"),
        ("nemotronh", {"mamba_num_heads": 9, "n_groups": 1}, 4, "mamba_num_heads=9 is not divisible by it"),
        ("bamba", {"mamba_n_heads": 12, "mamba_n_groups": 3}, 4, "mamba_n_groups=3 neither divides it nor is divided"),
        ("falconh1", {"mamba_n_heads": 12, "mamba_d_ssm": 144, "mamba_n_groups": 3}, 2, "mamba_n_groups=3 neither"),
    ],
)
def test_ranks_that_groups_and_heads_cannot_have(name: str, settings: dict[str, Any], ranks: int, message: str) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 96}
    with pytest.raises(ValueError, match=f"tensor_parallel_size={ranks}: {message}"):
        check_ranks(described(name, {**heads, **settings}), ranks)


def test_a_layer_may_have_pages_and_a_state() -> None:
    model = described("falconh1", {"mamba_n_heads": 8, "mamba_d_ssm": 96})
    assert model.has_states
    for ranks, (kv_heads, heads) in {1: (2, 8), 2: (1, 4), 4: (1, 2)}.items():
        state = State(heads * 12 + 2 * 24, 4, Matrices(1, heads, 24, 12))
        assert model.memory(ranks) == [(Pages(kv_heads, SHAPE["head_dim"]), state)] * model.num_layers


def described(name: str, settings: dict[str, Any]) -> Description:
    case = CASES[name]
    own = {**case.text_settings, **settings}
    if "hybrid_override_pattern" in own:
        del own["layer_types"]
    config = AutoConfig.for_model(case.model_type, **own)
    config.architectures = [case.architecture]
    return describe(config)


def test_configs_name_layers_in_older_ways() -> None:
    kinds = {"layer_types": ["mamba", "attention"] * 2}
    assert described("granitemoehybrid", kinds) == described("granitemoehybrid", {})
    assert described("nemotronh", {"hybrid_override_pattern": "M-*-"}) == described("nemotronh", {})
    assert described("nemotronh experts", {"hybrid_override_pattern": "ME*E-"}) == described("nemotronh experts", {})


def test_ranks_need_not_divide_the_size_of_mlps_that_no_layer_has() -> None:
    odd = {"intermediate_size": 63, "layer_types": ["moe", "full_attention", "linear_attention"]}
    check_ranks(described("nemotronh experts", odd), 2)
    with pytest.raises(ValueError, match="intermediate_size=63 is not divisible by it"):
        check_ranks(described("nemotronh experts", {**odd, "layer_types": ["moe", "full_attention", "mlp"]}), 2)


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("Zamba2ForCausalLM", "layers that share their weights"), ("JambaForCausalLM", "Mamba's first version")],
)
def test_what_a_relative_has_that_is_missing(name: str, lacking: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is not supported: nanoinfer has no .*{lacking}"):
        check_architectures([name])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bamba", {"mamba_n_groups": 3}, "mamba_n_groups=3 .* must be a divisor of mamba_n_heads=8"),
        ("bamba", {"mamba_d_conv": 65}, "mamba_d_conv=65 .* must be at most 64"),
        ("bamba", {"time_step_limit": [0.5, 0.5]}, "time_step_limit=.* must be two numbers"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("bamba", {"attn_layer_indices": []}, "some layer must be 'full_attention'"),
        ("falconh1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers=\[1.0\] .* must have 2 numbers"),
        ("falconh1", {"ssm_multipliers": [1.0] * 4 + [0.0]}, "ssm_multipliers=0.0 .* must be a number above 0"),
        ("falconh1", {"key_multiplier": None}, "key_multiplier=None .* must be a number above 0"),
        ("falconh1", {"mamba_n_groups": 4}, "mamba_n_groups=4 .* must be a divisor of mamba_n_heads=6"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi' .* rope, nope"),
        ("granitemoehybrid", {"num_local_experts": -1}, "num_local_experts=-1"),
        ("nemotronh experts", {"moe_latent_size": 0}, "moe_latent_size=0 .* must be an integer of at least 1"),
        ("nemotronh experts", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 .* at most the number of experts, 6"),
        ("nemotronh experts", {"n_group": 4, "topk_group": 2}, "n_group=4 .* must divide 6 experts into groups"),
        ("nemotronh", {"layer_types": ["linear_attention", "mlp"]}, "some layer must be 'full_attention'"),
        ("nemotronh", {"n_groups": 3}, "n_groups=3 .* must be a divisor of mamba_num_heads=8"),
    ],
)
def test_settings_that_no_model_has(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        described(name, settings)
