"""Layers whose memory of the past is a state, compared with transformers' modules of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Lfm2Config, PretrainedConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.attention.context import Context, StateContext
from nanoinfer.kernels.delta.chunks import CHUNK, Chunks, cut
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.states.boundaries import begin_rows
from nanoinfer.kernels.states.memory import StateRows
from nanoinfer.layers.delta import GatedDelta, GatedDeltaMixer
from nanoinfer.layers.norm import Joint
from nanoinfer.layers.short_convolution import ShortConvolution, ShortConvolutionMixer
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.memory.state_pool import StateSpec
from nanoinfer.weights.formats.formats import PLAIN_FORMATS, Formats, all_in
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.matrix import Fp8Matrix
from nanoinfer.weights.shards import table_of
from nanoinfer.weights.sources import FileSource

HIDDEN = 48
DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4)
CONVOLUTION = ShortConvolution(HIDDEN, width=3)
LENGTHS = [96, 11, 156]  # of sequences, each in the slot of its number
Span = tuple[int, int, int]  # a sequence, and its first token in a step, and the end


def steps() -> Iterator[list[Span]]:
    """Prompts, of which the first comes in two chunks; then decode steps."""
    yield [(0, 0, 64), (1, 0, 5)]
    yield [(0, 64, 90), (2, 0, 150)]
    for step in range(6):
        yield [(0, 90 + step, 91 + step), (2, 150 + step, 151 + step), (1, 5 + step, 6 + step)]


class Passing(Joint):
    """A joint whose output is its input."""

    def __init__(self) -> None:
        super().__init__(None, None, TensorParallel())

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Pass x on."""
        return x, x


def rank(index: int, size: int) -> TensorParallel:
    """A rank that sums nothing."""
    tp = TensorParallel()
    tp.rank, tp.size = index, size
    return tp


def delta_config(kind: type[PretrainedConfig]) -> PretrainedConfig:
    return kind(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=DELTA.key_heads,
        linear_num_value_heads=DELTA.value_heads,
        linear_key_head_dim=DELTA.key_dim,
        linear_value_head_dim=DELTA.value_dim,
        linear_conv_kernel_dim=DELTA.width,
    )


def make_oracle(name: str) -> tuple[nn.Module, GatedDelta | ShortConvolution]:
    """Make transformers' module, with random weights, and its sizes."""
    torch.manual_seed(0)
    sizes: GatedDelta | ShortConvolution
    if name == "qwen3.5":
        module, sizes = Qwen3_5GatedDeltaNet(delta_config(Qwen3_5TextConfig), 0), DELTA
    elif name == "qwen3-next":
        module, sizes = Qwen3NextGatedDeltaNet(delta_config(Qwen3NextConfig), 0), replace(DELTA, layout="heads")
    else:
        sizes = replace(CONVOLUTION, bias=name == "lfm2 biases")
        config = Lfm2Config(hidden_size=HIDDEN, conv_bias=sizes.bias, layer_types=["conv"], num_hidden_layers=1)
        module = Lfm2ShortConv(config, 0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5 if parameter.ndim == 1 else parameter[0].numel() ** -0.5)
    return module, sizes


def load(
    module: nn.Module,
    sizes: GatedDelta | ShortConvolution,
    folder: Path,
    tp: TensorParallel,
    formats: Formats = PLAIN_FORMATS,
) -> GatedDeltaMixer | ShortConvolutionMixer:
    """Make our layer from a checkpoint of transformers' module."""
    tensors = {f"mixer.{name}": tensor for name, tensor in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    if isinstance(sizes, GatedDelta):
        mixer = GatedDeltaMixer("mixer.", 0, sizes, HIDDEN, 1e-6, tp, formats)
    else:
        mixer = ShortConvolutionMixer("mixer.", 0, sizes, tp, formats)
    FileSource(str(folder)).fill(table_of(mixer))
    return mixer


def chunks_of(spans: list[Span]) -> Chunks:
    slots, starts, ends = (torch.tensor(column, dtype=torch.int32) for column in zip(*spans, strict=True))
    cu_lens = torch.cat([torch.zeros(1), (ends - starts).cumsum(0)]).int()
    cuts = cut((start, end, {}) for _, start, end in spans)
    seqs, first, snapshots, stretches = (torch.tensor(list(part), dtype=torch.int32) for part in cuts)
    initial = slots.where(starts > 0, -1)
    return Chunks(
        cu_lens, starts, initial, slots, seqs, first, snapshots, stretches, starts, standing=initial, may_fold=False
    )


def run(mixer: nn.Module, sizes: GatedDelta | ShortConvolution, ranks: int, sequences: list[Tensor]) -> list[Tensor]:
    """Run a layer over sequences, in steps; returns its results for each. At first, slots hold others' numbers."""
    state = sizes.state(ranks)
    layout = CacheLayout((), 64, 64, 0, 0, ((0, state),))
    pool = StateSpec(layout, torch.float32, torch.float32).allocate(len(sequences), torch.device("cpu"))
    inputs, recurrence, _ = pool.layers[0]
    for numbers in (inputs, *(recurrence or ())):
        numbers.normal_()
    results: list[list[Tensor]] = [[] for _ in sequences]
    for spans in steps():
        lens = [end - start for _, start, end in spans]
        slots = torch.tensor([slot for slot, *_ in spans], dtype=torch.int32)
        positions = torch.cat([torch.arange(start, end, dtype=torch.int32) for _, start, end in spans])
        states = StateContext(pool.layers)
        if max(lens) == 1:
            own, boundaries = begin_rows(slots, positions, pool.boundaries)
            states.rows = StateRows(own, positions, boundaries)
        else:
            states.chunks = chunks_of(spans)
            for slot, _, end in spans:
                pool.boundaries[slot] = end // CHUNK * CHUNK
        x = torch.cat([sequences[slot][start:end] for slot, start, end in spans])
        out, residual = mixer(x, None, Passing(), Context({}, [], positions, torch.empty(0), 0, states=states))
        assert residual is x
        for (slot, *_), part in zip(spans, out.split(lens), strict=True):
            results[slot].append(part)
    return [torch.cat(parts) for parts in results]


def check(module: nn.Module, sequences: list[Tensor], results: list[Tensor]) -> None:
    """Check that the results of all sequences are those of transformers' module."""
    for sequence, result in zip(sequences, results, strict=True):
        torch.testing.assert_close(result, module(sequence.unsqueeze(0))[0], atol=2e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "lfm2", "lfm2 biases"])
def test_a_layer_equals_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    """The parts of two ranks add up to the result."""
    module, sizes = make_oracle(name)
    sequences = [torch.randn(length, HIDDEN) for length in LENGTHS]
    mixers = [load(module, sizes, tmp_path, rank(index, ranks)) for index in range(ranks)]
    parts = [run(mixer, sizes, ranks, sequences) for mixer in mixers]
    check(module, sequences, [sum(of_ranks) for of_ranks in zip(*parts, strict=True)])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_in_fp8_what_decides_strengths_and_decays_keeps_its_dtype(name: str, tmp_path: Path) -> None:
    module, sizes = make_oracle(name)
    mixer = load(module, sizes, tmp_path, rank(0, 1), all_in(Fp8Format()))
    in_fp8 = {name for name, shards in table_of(mixer).items() if FP8 in shards[0].dtypes}
    wide = ("in_proj_qkvz",) if name == "qwen3-next" else ("in_proj_qkv", "in_proj_z")
    assert in_fp8 == {f"mixer.{part}.weight" for part in (*wide, "out_proj")}
    with torch.no_grad():  # transformers' module gets the numbers that FP8 has
        for part in (mixer.in_proj, mixer.out_proj):
            assert isinstance(part.matrix, Fp8Matrix)
            dense, first = part.matrix.store.dense(torch.float32), 0
            for section in part.matrix.store.sections:
                target = module.get_parameter(f"{section.name.removeprefix('mixer.')}.weight")
                target[section.start : section.start + section.rows] = dense[first : first + section.rows]
                first += section.rows
    sequences = [torch.randn(length, HIDDEN) for length in LENGTHS]
    check(module, sequences, run(mixer, sizes, 1, sequences))
