"""Launches of kernels in the shapes of published models, for tensors that may have no memory; see card_compiler.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import torch
from decoder_rows import launch_row
from guess_launches import draft_and_accept
from latent_launches import GLM_HEAD, MINICPM3, V3, V3_HEAD, meet_keys, meet_latents, share_latents, store_latents
from torch import Tensor, empty

from nanoinfer.attention import choose_backend
from nanoinfer.kernels.adapters.experts import ExpertAdapters
from nanoinfer.kernels.adapters.one_row import RowAdapter
from nanoinfer.kernels.adapters.pairs import AdapterRows, Pairs
from nanoinfer.kernels.adapters.products import expand, expand_triton, pieces_for, shrink
from nanoinfer.kernels.attention.decode.bundles import bundle, queries_of_a_bundle
from nanoinfer.kernels.attention.decode.decode_plan import plan_decode
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_triton
from nanoinfer.kernels.attention.in_order.decode import decode_in_order, decode_programs
from nanoinfer.kernels.attention.in_order.prefill import prefill_in_order
from nanoinfer.kernels.attention.prefill.paged_prefill import paged_prefill_triton
from nanoinfer.kernels.attention.prefill.texts import attend_to_texts_triton
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.attention.prefixes.shared_prefix import attend_to_prefixes
from nanoinfer.kernels.attention.projected.qkv import norm_rotate_store
from nanoinfer.kernels.delta.chunks import CHUNK, Chunks
from nanoinfer.kernels.delta.convolution import convolve_chunks_triton
from nanoinfer.kernels.delta.decode import delta_rows
from nanoinfer.kernels.delta.gated_norm import gated_norm, part_of_mean_squares
from nanoinfer.kernels.delta.in_order import delta_in_order
from nanoinfer.kernels.delta.prefill import delta_chunks
from nanoinfer.kernels.experts.identities import add_identities
from nanoinfer.kernels.experts.operand import ExpertWeights
from nanoinfer.kernels.experts.products import expert_mlps
from nanoinfer.kernels.experts.route import Routes, Routing, route
from nanoinfer.kernels.fp8 import BLOCK, FP8, Fp8Tokens
from nanoinfer.kernels.groups import BITS, GroupWeight, Numbers, words_of
from nanoinfer.kernels.launch import recording
from nanoinfer.kernels.linear.activation import (
    Activation,
    AnyActivation,
    ClampedSwiGLU,
    Function,
    ScaledGate,
    Ungated,
    activate,
    rows_per_output,
    xielu,
)
from nanoinfer.kernels.linear.dispatch import AnyWeight, linear, norm_linear
from nanoinfer.kernels.linear.fp8.linear import Fp8LinearWeight, can_multiply_fp8
from nanoinfer.kernels.linear.groups.dense import dequantize
from nanoinfer.kernels.linear.groups.linear import GroupLinearWeight
from nanoinfer.kernels.linear.in_order.weight import (
    FEW_TOKENS,
    check_multiplies,
    fp8_in_order,
    group_in_order,
    in_order_triton,
)
from nanoinfer.kernels.linear.one_row import OneRowWeight, one_row_norm_linear
from nanoinfer.kernels.mamba.decode import mamba_rows
from nanoinfer.kernels.mamba.in_order import mamba_in_order
from nanoinfer.kernels.mamba.prefill import mamba_chunks
from nanoinfer.kernels.norm.norm import Norm, add_norm, norm_add_norm, normalize
from nanoinfer.kernels.ranks.send_receive import VectorLane
from nanoinfer.kernels.sampling.cutoff import find_cutoff
from nanoinfer.kernels.sampling.draw import DrawnLines, draw_lines_triton, draw_triton
from nanoinfer.kernels.sampling.entropy import entropies_triton, entropy_parts_triton
from nanoinfer.kernels.sampling.masks import apply_masks_triton
from nanoinfer.kernels.sampling.penalties import penalize_triton
from nanoinfer.kernels.sampling.sequences import ban_sequences_triton
from nanoinfer.kernels.states.in_order import COLUMNS, Spans
from nanoinfer.kernels.states.memory import (
    LayerStates,
    Recurrence,
    StateRows,
    TokenRings,
    inputs_length,
    ring_length,
)
from nanoinfer.kernels.steering import steer_triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLAMPED = ClampedSwiGLU(1.702, 7.0)  # of gpt-oss
QWEN3_8B = {"qkv": (6144, 4096), "gates and ups": (24576, 4096), "down": (4096, 12288)}
PARTS = {"qkv": (4096, 1024, 1024), "gates and ups": (12288, 12288), "down": (4096,)}
QWEN3_30B, GPT_OSS, TINY = (128, 8, 2048, 768), (32, 4, 2880, 2880), (6, 3, 64, 96)  # experts, used, sizes
NEMOTRON_3, RELU2 = (128, 6, 2688, 1856), Ungated("relu2")  # whose experts have no gates
LONGCAT = 128, 12, 6144, 2048
VOCABULARY = 151_936
GUESSES = 8  # of a row, at most
TOKENS, KEY_HEADS, VALUE_HEADS, HEAD = 4096, 16, 32, 128  # of the delta rule's layers, in Qwen3-Next
CHANNELS = 2 * KEY_HEADS * HEAD + VALUE_HEADS * HEAD
HEADS = 64, 128, 256, 512  # their dimensions
OTHER_VALUES = {192: 128}  # numbers of a value beside such keys, in MiMo-V2
MAKES_WAY = "decode of 1 that makes way"  # so do names begin of launches whose successors start early
SIZES = 1, 8, 200, 1000, 4000  # tokens that fill experts' tiles of each size

Often = Literal["always", "often", "seldom"]


@dataclass(frozen=True)
class Launch:
    """A call that launches what a card would, or raises the host's ValueError.

    often: how often it is compiled: "always" for each card; "often" for an H100, and with --whole for the others;
        "seldom" with --whole, for an H100
    """

    name: str
    call: Callable[[], object]
    often: Often = "seldom"


@dataclass(frozen=True)
class Grouping:
    """The form of a GroupWeight. group: 0: all of a row; block: inputs whose scales have a factor; 0: none have"""

    numbers: Numbers
    group: int
    scales: torch.dtype | None = None  # None: the tokens'
    zeros: torch.dtype | None = None  # of a floating type: minima
    factors: bool = False
    block: int = 0

    def parts(self, dtype: torch.dtype, *shape: int) -> tuple[Any, ...]:
        """Return a GroupWeight's fields for a shape, [..., rows, inputs]; dtype: the tokens'"""
        *rows, inputs = shape
        groups = inputs // (self.group or inputs)
        return (
            empty(*rows, words_of(inputs, BITS[self.numbers]), dtype=torch.int32),
            empty(*rows, groups, dtype=self.scales or dtype),
            empty(*rows, groups, dtype=self.zeros) if self.zeros else None,
            empty(*rows) if self.factors else None,
            self.numbers,
            inputs,
            empty(*rows, inputs // self.block, 2 if self.zeros else 1, dtype=FP16) if self.block else None,
        )

    def experts(self, dtype: torch.dtype, *shape: int) -> GroupWeight:
        return GroupWeight(*self.parts(dtype, *shape))

    def linear(self, dtype: torch.dtype, *shape: int) -> GroupLinearWeight:
        return GroupLinearWeight(*self.parts(dtype, *shape))


GROUPINGS = {
    "int4 g128": Grouping("int4", 128),
    "int4 g64 zeros": Grouping("int4", 64, FP16, zeros=torch.uint8),
    "int4 g32": Grouping("int4", 32),
    "int4 rows": Grouping("int4", 0),
    "int8 rows": Grouping("int8", 0),
    "nvfp4": Grouping("e2m1", 16, FP8, factors=True),
    "mxfp4": Grouping("e2m1", 32, torch.uint8),
    "nf4": Grouping("nf4", 64, FP32),
    "fp4": Grouping("fp4", 64, FP32),
    "q4_k": Grouping("int4", 32, BF16, zeros=BF16, block=256),
    "q5_k": Grouping("int6", 32, BF16, zeros=BF16, block=256),
    "q5_1": Grouping("int6", 32, FP16, zeros=FP16),
    "q6_k": Grouping("int6", 16, BF16, block=256),
}


WIDE = "int4 g64 zeros", "nvfp4"  # they take the most registers
AS_OTHERS = "int4 g128", "int4 g32", "int4 rows"  # for few tokens their kernels take less than those of `WIDE`
PRODUCTS = [*product(("down",), (1, 300), (BF16,)), *product(("qkv",), (1, 8), (BF16,)), ("gates and ups", 64, BF16)]


def numbers(*shape: int) -> Tensor:
    return empty(shape, dtype=torch.int32)


def in_fp8(*shape: int) -> Fp8LinearWeight:
    *count, rows, inputs = shape
    return Fp8LinearWeight(empty(shape, dtype=FP8), empty(*count, rows // BLOCK.value, inputs // BLOCK.value))


def fp8(dtype: torch.dtype, *shape: int) -> Fp8LinearWeight | Tensor:
    """Return what products with a weight in FP8 read."""
    weight = in_fp8(*shape)
    return weight if can_multiply_fp8(dtype, weight) else plain(dtype, *shape)


def norm_of(size: int, dtype: torch.dtype, centred: bool = False) -> Norm:
    return Norm(empty(size, dtype=dtype), 1e-6, centred=centred, bias=empty(size, dtype=dtype) if centred else None)


def multiply(weigh: Callable[..., AnyWeight], name: str, tokens: int, dtype: torch.dtype) -> None:
    """Multiply as a layer of Qwen3-8B does."""
    rows, inputs = QWEN3_8B[name]
    weight, x = weigh(dtype, rows, inputs), empty(tokens, inputs, dtype=dtype)
    activation: Activation | None = "silu" if name == "gates and ups" else None
    if name == "down":
        linear(x, weight, may_split=True)
    else:
        norm_linear(x, empty(tokens, inputs, dtype=dtype), norm_of(inputs, dtype), weight, activation=activation)


def multiply_centred(weigh: Callable[..., AnyWeight]) -> None:
    """Multiply a row behind a LayerNorm, in the launch that applies an activation, with gates or without."""
    rows, inputs = QWEN3_8B["gates and ups"]
    x, norm = empty(1, inputs, dtype=BF16), norm_of(inputs, BF16, centred=True)
    for activation in ("gelu", Ungated("gelu_tanh"), ScaledGate("silu", 0.6)):
        norm_linear(x, x, norm, weigh(BF16, rows, inputs), empty(rows), activation)


def multiply_lane(weigh: Callable[..., AnyWeight]) -> None:
    """Add up what two ranks have, and multiply."""
    rows, inputs = 6144, 2048
    x, norm = empty(1, inputs, dtype=BF16), norm_of(inputs, BF16)
    addresses = empty(2, dtype=torch.int64)
    lane = VectorLane(addresses, addresses, 0, numbers(1))
    norm_linear(x, x, norm, weigh(BF16, rows, inputs), lane=lane)


def multiply_few_outputs(tokens: int, inputs: int) -> None:
    """Multiply as a captured step of Qwen3-8B does."""
    with recording():
        linear(empty(tokens, inputs, dtype=BF16), empty(4096, inputs, dtype=BF16), empty(4096), may_split=True)


def multiply_in_order(weigh: Callable[..., Tensor | GroupWeight], tokens: int, dtype: torch.dtype) -> None:
    rows, inputs = QWEN3_8B["gates and ups"]
    weight, x = weigh(dtype, rows, inputs), empty(tokens, inputs, dtype=dtype)
    if isinstance(weight, GroupWeight):
        group_in_order(x, weight, None, "silu")
    else:
        in_order_triton(x, weight, activation="silu" if tokens <= FEW_TOKENS else None)


def multiply_captured(tokens: int) -> None:
    with recording():
        multiply(fp8, "qkv", tokens, BF16)


def multiply_fp8_in_order(tokens: int) -> None:
    rows, inputs = QWEN3_8B["qkv"]
    x, weight = Fp8Tokens.empty(tokens, inputs, empty(0, dtype=BF16)), in_fp8(rows, inputs)
    check_multiplies(BF16, weight)
    fp8_in_order(x, weight)


def plain(dtype: torch.dtype, *shape: int) -> Tensor:
    return empty(shape, dtype=dtype)


def widen(grouping: Grouping, dtype: torch.dtype) -> None:
    dequantize(grouping.linear(dtype, *QWEN3_8B["qkv"]), dtype)


def mlps(
    weigh: Callable[..., ExpertWeights],
    shape: tuple[int, int, int, int],
    tokens: int,
    dtype: torch.dtype,
    activation: AnyActivation,
) -> None:
    """Compute a layer's experts, which have biases if gates are clamped."""
    count, used, hidden_size, size = shape
    gate_up = weigh(dtype, count, rows_per_output(activation) * size, hidden_size)
    down = weigh(dtype, count, hidden_size, size)
    routes = Routes(numbers(tokens, used), empty(tokens, used))
    biases = {"gate_up_bias": empty(count, 2 * size), "down_bias": empty(count, hidden_size)}
    x = empty(tokens, hidden_size, dtype=dtype)
    expert_mlps(x, routes, gate_up, down, activation, **(biases if activation == CLAMPED else {}))


def paged(
    head_dim: int, heads: int, kv_heads: int, rows: int, cache: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Return queries, a cache's keys and values, and block tables."""
    choose_backend("auto", "cuda", BF16, 256, head_dim, in_fp8=cache == FP8)
    pages = empty(64, 256, kv_heads, head_dim + OTHER_VALUES.get(head_dim, 0), dtype=cache)
    keys, values = pages[..., :head_dim], pages[..., head_dim:] if head_dim in OTHER_VALUES else pages
    return empty(rows, heads, head_dim, dtype=BF16), (keys, values), numbers(rows, 16)


def decode(
    head_dim: int, rows: int, cache: torch.dtype, window: int | None, in_order: bool, alibi: bool = False
) -> None:
    q, pages, tables = paged(head_dim, 32, 8, rows, cache)
    scales, slopes = empty(2) if cache == FP8 else None, empty(32) if alibi else None
    plan = plan_decode(numbers(rows), pages[0], window=window, programs=decode_programs(head_dim) if in_order else None)
    if in_order:
        decode_in_order(q, *pages, tables, numbers(rows), 4096, 1.0, plan, kv_scales=scales, slopes=slopes)
    else:
        paged_decode_triton(q, *pages, tables, numbers(rows), 1.0, plan, kv_scales=scales, slopes=slopes)


def verify(head_dim: int, rows: int, cache: torch.dtype, window: int | None, most: int) -> None:
    """Attend from the rows' last tokens and their guesses."""
    q, pages, tables = paged(head_dim, 32, 8, (1 + most) * rows, cache)
    scales, lens = empty(2) if cache == FP8 else None, numbers(len(q))
    bundles = bundle(lens, numbers(rows), numbers(rows), most, queries_of_a_bundle(most, 32, pages[0]))
    plan = plan_decode(lens, pages[0], window=window, bundles=bundles)
    paged_decode_triton(q, *pages, tables, lens, 1.0, plan, kv_scales=scales)


def share(head_dim: int, rows: int, cache: torch.dtype, most: int, alibi: bool = False) -> None:
    """Attend from the rows' last tokens, and guesses if there are any, to prefixes that rows share, and to the rest."""
    q, pages, tables = paged(head_dim, 32, 8, (1 + most) * rows, cache)
    scales, lens, row = empty(2) if cache == FP8 else None, numbers(len(q)), numbers(rows)
    slopes = empty(32) if alibi else None
    prefixes, bundles = SharedPrefixes(rows, 32, pages[0]), None
    if most:
        bundles = bundle(lens, row, row, most, queries_of_a_bundle(most, 32, pages[0]), prefixes, numbers(len(q)))
    plan = plan_decode(lens, pages[0], prefixes=prefixes, bundles=bundles)
    queries = None if bundles is None else bundles.shared
    shared = attend_to_prefixes(q, *pages, tables, prefixes, 1.0, None, scales, queries, slopes, lens)
    paged_decode_triton(q, *pages, tables, lens, 1.0, plan, None, scales, shared, slopes=slopes)


def prefill(
    head_dim: int, length: int, cache: torch.dtype, window: int | None, in_order: bool, alibi: bool = False
) -> None:
    q, pages, tables = paged(head_dim, 32, 8, 8 * length, cache)
    options = {"kv_scales": empty(2) if cache == FP8 else None, "slopes": empty(32) if alibi else None}
    attend = prefill_in_order if in_order else paged_prefill_triton
    attend(q, *pages, tables, numbers(9), numbers(8), length, 1.0, window=window, **options)


def store(head_dim: int, tokens: int, cache: torch.dtype) -> None:
    _, pages, _ = paged(head_dim, 32, 8, 1, cache)
    norm, values = norm_of(head_dim, BF16), None
    if head_dim in OTHER_VALUES:
        sizes = 40 * head_dim, 8 * OTHER_VALUES[head_dim]
        qkv, values = empty(tokens, sum(sizes), dtype=BF16).split(sizes, dim=1)
        qkv, values = qkv.unflatten(1, (40, -1)), values.unflatten(1, (8, -1))
    else:
        qkv = empty(tokens, 48, head_dim, dtype=BF16)
    scales = empty(2) if cache == FP8 else None
    slots, rotations = (numbers(tokens), *pages, numbers(tokens)), empty(4096, head_dim)
    norm_rotate_store(qkv, norm, norm, None, rotations, False, None, *slots, scales, values=values)


def delta(
    matrices: torch.dtype,
    is_prefill: bool,
    shape: tuple[int, int, int, int] = (KEY_HEADS, VALUE_HEADS, HEAD, HEAD),
    largest: float = 1.0,
) -> None:
    """Go on with the memories of Qwen3-Next's layers, or fill them. shape: heads and sizes of keys, and of values"""
    key_heads, value_heads, key_dim, value_dim = shape
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    qkv, weight = empty(TOKENS, channels, dtype=BF16), empty(channels, 4, dtype=BF16)
    a, b, log_decay, bias = (empty(*rows, value_heads) for rows in ((TOKENS,), (TOKENS,), (), ()))
    memory = recurrence((key_heads, value_heads, key_dim, value_dim), matrices)
    if is_prefill:
        delta_chunks(qkv, a, b, log_decay, bias, memory, chunks(), largest)
    else:
        states = LayerStates(empty(64, inputs_length(4, GUESSES), channels, dtype=BF16), memory)
        for rows in states_rows():
            delta_rows(qkv, a, b, weight, log_decay, bias, states, rows, largest)


def mamba(shape: tuple[int, int, int, int], is_prefill: bool, dtype: torch.dtype = BF16) -> None:
    """Go on with states of Mamba2's, or fill them. shape: heads, numbers of each, groups, and numbers of a state"""
    heads, dim, groups, size = shape
    channels = heads * dim + 2 * groups * size
    xbc, dt, weight = empty(TOKENS, channels, dtype=dtype), empty(TOKENS, heads, dtype=dtype), empty(channels, 4)
    memory = recurrence((groups, heads, size, dim), FP32, dtype)
    parameters, limits = [empty(heads)] * 3, (0.0, float("inf"))
    if is_prefill:
        mamba_chunks(xbc, dt, *parameters, memory, chunks(), limits)
        norm_groups(xbc[:, : heads * dim].view(TOKENS, groups, -1), xbc, empty(heads * dim))
    else:
        states = LayerStates(empty(64, inputs_length(4, GUESSES), channels, dtype=dtype), memory)
        for rows in states_rows():
            mamba_rows(xbc, dt, weight, empty(channels), *parameters, states, rows, limits)


def delta_of_both(shape: tuple[int, int, int, int], matrices: torch.dtype) -> None:
    """Compute the delta rule in one order, in a prefill step and in a decode step; shape: as for delta"""
    key_heads, value_heads, key_dim, value_dim = shape
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    rings = TokenRings(
        empty(64, value_heads, key_dim, value_dim, dtype=matrices),
        empty(64, CHUNK, channels, dtype=BF16),
        empty(64, CHUNK, 2 * value_heads, dtype=BF16),
    )
    for tokens, spans in steps_in_order():
        qkv, a, b = (empty(tokens, size, dtype=BF16) for size in (channels, value_heads, value_heads))
        delta_in_order(qkv, a, b, empty(value_heads), empty(value_heads), rings, spans, 2.0)


def mamba_of_both(shape: tuple[int, int, int, int]) -> None:
    """Compute Mamba2 in one order, in a prefill step and in a decode step; shape: as for mamba"""
    heads, dim, groups, size = shape
    channels = heads * dim + 2 * groups * size
    rings = TokenRings(
        empty(64, heads, size, dim), *(empty(64, CHUNK, numbers, dtype=BF16) for numbers in (channels, heads))
    )
    for tokens, spans in steps_in_order():
        xbc, dt = empty(tokens, channels, dtype=BF16), empty(tokens, heads, dtype=BF16)
        mamba_in_order(xbc, dt, *[empty(heads)] * 3, rings, spans, (0.0, float("inf")))


def steps_in_order() -> Iterator[tuple[int, Spans]]:
    """Yield the tokens and the spans of a prefill step, and of a decode step."""
    for tokens, chunks, seqs, in_rings in ((TOKENS, TOKENS // CHUNK, 8, False), (64, 64, 64, True)):
        cuts = numbers(chunks + 1), *(numbers(chunks) for _ in range(3))
        yield tokens, Spans(numbers(seqs * COLUMNS).view(seqs, COLUMNS), *cuts, None, in_rings)


def recurrence(sizes: tuple[int, int, int, int], matrices: torch.dtype, dtype: torch.dtype = BF16) -> Recurrence:
    """Return the memories of 64 sequences. sizes: key heads, heads, key dim and value dim; matrices: their dtype"""
    key_heads, heads, key_dim, value_dim = sizes
    ring = 64, ring_length(GUESSES)
    beside = empty(*ring, key_heads, key_dim, dtype=dtype), empty(*ring, heads, value_dim, dtype=dtype)
    return Recurrence(empty(64, heads, key_dim, value_dim, dtype=matrices), *beside, empty(*ring, heads))


def states_rows() -> Iterator[StateRows]:
    """Yield the rows of decode steps, few and many, without guesses and with some."""
    for count in (1, 64):
        yield StateRows(numbers(count), numbers(count), numbers(count))
        yield StateRows(numbers(count), numbers(5 * count), *(numbers(count) for _ in range(3)), GUESSES)


def norm_groups(x: Tensor, gate: Tensor, weight: Tensor) -> None:
    """Compute what follows Mamba2: a norm behind the gate, the gate alone, and a norm of groups that ranks share."""
    gated_norm(x, gate, weight, 1e-6, gates_first=True)
    gated_norm(x, gate, None, 1e-6)
    gated_norm(x, gate, weight, 1e-6, True, part_of_mean_squares(x, gate, 4096))


def chunks() -> Chunks:
    """Return the chunks of eight sequences."""
    return Chunks(
        numbers(9),
        *(numbers(8) for _ in range(3)),
        *(numbers(TOKENS // CHUNK) for _ in range(3)),
        numbers(9),
        *(numbers(8) for _ in range(2)),
        may_fold=True,
    )


def convolve_and_norm() -> None:
    """Compute what comes before and behind the delta rule."""
    inputs = empty(64, 4, CHANNELS, dtype=BF16)
    convolve_chunks_triton(empty(TOKENS, CHANNELS, dtype=BF16), empty(CHANNELS, 4, dtype=BF16), inputs, chunks(), True)
    attended, gates = empty(TOKENS, VALUE_HEADS, HEAD, dtype=BF16), empty(TOKENS, VALUE_HEADS * HEAD)
    gated_norm(attended, gates, empty(HEAD), 1e-6)


def read_texts(head_dim: int, window: int | None, has_biases: bool, dtype: torch.dtype = BF16) -> None:
    """Attend as an encoder does; of twelve heads, and 300 tokens."""
    qkv, biases = empty(300, 36, head_dim, dtype=dtype), empty(12, 1023) if has_biases else None
    attend_to_texts_triton(*qkv.split(12, dim=1), [100, 200], numbers(3), 0.1, window, biases)


def normalise(size: int, dtype: torch.dtype, centred: bool = False) -> None:
    x, norm = empty(300, size, dtype=dtype), norm_of(size, dtype, centred)
    normalize(x, norm)
    add_norm(empty(4, 300, size), x, norm)
    norm_add_norm(x, x, norm, norm)


def steer(dtype: torch.dtype) -> None:
    stream, scale = empty(300, 4096, dtype=dtype), empty(1, dtype=dtype)
    for own in (None, scale):
        steer_triton(stream, stream[:4], numbers(4), numbers(300), empty(300, dtype=FP32), 1.0, own)


def sample(rows: int, dtype: torch.dtype) -> None:
    logits, settings = empty(rows, VOCABULARY, dtype=dtype), [empty(rows) for _ in range(3)]
    cutoff = find_cutoff(logits, settings[0], numbers(rows), *settings[1:])
    seeds = empty(rows, dtype=torch.int64)
    draw_triton(logits, settings[0], seeds, numbers(rows), cutoff=cutoff)
    masks = empty(rows, VOCABULARY // 32, dtype=torch.int32)
    draw_lines_triton(logits, settings[0], seeds, numbers(rows), DrawnLines(seeds, seeds, masks), numbers(rows))
    for parts in (
        entropy_parts_triton(logits, settings[0], seeds),
        entropy_parts_triton(logits.float(), settings[0], cutoff=cutoff),
    ):
        entropies_triton(parts, settings[0])
    changed, tokens = logits.float(), empty(rows, 500, dtype=torch.int32)
    penalize_triton(changed, tokens, numbers(rows), numbers(rows), *settings)
    apply_masks_triton(changed, masks)
    ban_sequences_triton(changed, tokens, numbers(rows), numbers(rows), empty(rows, 3, 4, dtype=torch.int64))


def choose_experts(dtype: torch.dtype, count: int, routing: Routing, corrected: bool = False) -> None:
    route(empty(64, count, dtype=dtype), routing, empty(count, dtype=FP32) if corrected else None)


def pairs_of(name: str, rank: int, dtype: torch.dtype) -> Pairs:
    """Eight slots' beside a matrix of Qwen3-8B."""
    rows, inputs = QWEN3_8B[name]
    a = empty(8, len(PARTS[name]) * rank, inputs, dtype=dtype)
    return Pairs(a, empty(8, rows, rank, dtype=dtype), PARTS[name])


def adapt(name: str, tokens: int, rank: int, dtype: torch.dtype) -> None:
    rows, inputs = QWEN3_8B[name]
    pairs, by_slot = pairs_of(name, rank, dtype), AdapterRows.of(numbers(tokens), 8)
    x = empty(tokens, inputs, dtype=dtype)
    expand_triton(shrink(x, pairs, by_slot), pairs, by_slot)
    h = shrink(x, pairs, by_slot, pieces_for(x, pairs, by_slot))
    expand(h, pairs, by_slot, empty(tokens, rows, dtype=dtype), "silu" if name == "gates and ups" else None)


def adapt_row(weigh: Callable[..., OneRowWeight], name: str, rank: int, dtype: torch.dtype) -> None:
    rows, inputs = QWEN3_8B[name]
    of_row, activation = (
        RowAdapter.of(pairs_of(name, rank, dtype), AdapterRows.of(numbers(1), 8)),
        "silu" if name == "gates and ups" else None,
    )
    x, norm = empty(1, inputs, dtype=dtype), norm_of(inputs, dtype)
    one_row_norm_linear(x, x, norm, weigh(dtype, rows, inputs), None, activation, of_row=of_row)


def adapt_experts(weigh: Callable[..., ExpertWeights], tokens: int, dtype: torch.dtype) -> None:
    """Eight adapters of Qwen3-30B-A3B's experts."""
    (count, used, hidden_size, size), rank, slots = QWEN3_30B, 16, 8

    def pairs(parts: tuple[int, ...], inputs: int) -> Pairs:
        a = empty(count * slots, len(parts) * rank, inputs, dtype=dtype)
        return Pairs(a, empty(count * slots, sum(parts), rank, dtype=dtype), parts)

    rows = AdapterRows.of(numbers(tokens), slots)
    adapters = ExpertAdapters(pairs((size, size), hidden_size), pairs((hidden_size,), size), rows)
    weights = weigh(dtype, count, 2 * size, hidden_size), weigh(dtype, count, hidden_size, size)
    routes = Routes(numbers(tokens, used), empty(tokens, used))
    expert_mlps(empty(tokens, hidden_size, dtype=dtype), routes, *weights, "silu", adapters=adapters)


def often_if(condition: bool) -> Often:
    return "often" if condition else "seldom"


def of_products() -> Iterator[Launch]:
    kinds = {"plain": plain, "fp8": fp8}
    of_names = *product(QWEN3_8B, (1, 64)), *product(("gates and ups",), (16, 300)), ("qkv", 16), ("down", 300)
    for (kind, weigh), (name, tokens), dtype in product(kinds.items(), of_names, (BF16, FP32)):
        if dtype == BF16 or (kind, name) == ("plain", "gates and ups"):
            often = often_if((kind, name, tokens, dtype) == ("plain", "gates and ups", 16, BF16))
            if (kind, name, tokens) == ("fp8", "qkv", 16):
                often = "always"
            call = partial(multiply, weigh, name, tokens, dtype)
            yield Launch(f"{kind}, {name} of {tokens} in {dtype}", call, often)
    yield Launch("plain, a LayerNorm and gates and ups of 1", partial(multiply_centred, plain), "often")
    yield Launch("plain, qkv of a row of two ranks", partial(multiply_lane, plain), "often")
    yield Launch("plain, gates and ups of 4096 in float16", partial(multiply, plain, "gates and ups", 4096, FP16))
    for tokens, inputs in ((144, 4096), (192, 12288), (256, 12288)):
        yield Launch(f"few outputs of {inputs}, {tokens} tokens", partial(multiply_few_outputs, tokens, inputs))
    for tokens in (16, 64, 300):
        yield Launch(f"fp8 of {tokens}, captured", partial(multiply_captured, tokens), often_if(tokens == 64))
    for tokens in (16, 300):
        yield Launch(f"fp8 of {tokens}, in order", partial(multiply_fp8_in_order, tokens))
    for tokens, dtype in ((16, BF16), (300, BF16), (300, FP32), (3000, BF16)):
        yield Launch(f"plain of {tokens} in {dtype}, in order", partial(multiply_in_order, plain, tokens, dtype))


def of_adapters() -> Iterator[Launch]:
    ways = [
        ("qkv", 16, 16, BF16),
        ("gates and ups", 16384, 128, BF16),
        ("down", 16, 128, FP32),
    ]
    for name, tokens, rank, dtype in ways:
        yield Launch(f"{name} of {tokens}, {rank=}, in {dtype}", partial(adapt, name, tokens, rank, dtype))
    kinds = {"plain": plain, "fp8": fp8, "int4": GROUPINGS["int4 g128"].linear}
    of_row = *product(kinds, (("qkv", 128),)), ("int4", ("gates and ups", 16))
    for kind, (name, rank) in of_row:
        weigh = kinds[kind]
        call, often = partial(adapt_row, weigh, name, rank, BF16), often_if((kind, rank) == ("int4", 16))
        yield Launch(f"{kind}, {name} of a row, {rank=}", call, often)
    of_experts = {"plain": plain, "fp8": fp8, "int4": GROUPINGS["int4 g128"].experts}
    for kind, tokens in (("plain", 1), ("fp8", 1000), ("int4", 4000)):
        call = partial(adapt_experts, of_experts[kind], tokens, BF16)
        yield Launch(f"{kind}, experts of {tokens} with adapters", call)


def of_groups() -> Iterator[Launch]:
    of_kinds = [
        *product(GROUPINGS, PRODUCTS),
        *product(WIDE, (("gates and ups", 1, BF16), ("qkv", 1, FP32))),
        ("int8 rows", ("qkv", 8, FP32)),
        ("nf4", ("qkv", 1, FP32)),
        ("mxfp4", ("down", 300, FP16)),
        ("mxfp4", ("down", 32, BF16)),  # in pieces
    ]
    for kind, (name, tokens, dtype) in of_kinds:
        if kind not in AS_OTHERS or tokens == 300:
            often = often_if((kind, name, tokens) in [("int8 rows", "qkv", 8), ("mxfp4", "down", 32)])
            if (kind, name, tokens, dtype) == ("nvfp4", "qkv", 8, BF16):
                often = "always"
            call = partial(multiply, GROUPINGS[kind].linear, name, tokens, dtype)
            yield Launch(f"{kind}, {name} of {tokens} in {dtype}", call, often)
    for kind, tokens in product(WIDE, (1, 300)):
        yield Launch(f"{kind} of {tokens}, in order", partial(multiply_in_order, GROUPINGS[kind].linear, tokens, BF16))
    yield Launch("nvfp4 as bfloat16", partial(widen, GROUPINGS["nvfp4"], BF16))
    yield Launch("nf4 as bfloat16", partial(widen, GROUPINGS["nf4"], BF16))


def skip(tokens: int, dtype: torch.dtype) -> None:
    """Compute the experts of LongCat-Flash, and what the choices add that are none; it has four times as many."""
    count, used, hidden_size, size = LONGCAT
    x, routes = empty(tokens, hidden_size, dtype=dtype), Routes(numbers(tokens, used), empty(tokens, used))
    weights = plain(dtype, count, 2 * size, hidden_size), plain(dtype, count, hidden_size, size)
    add_identities(expert_mlps(x, routes, *weights, "silu", count=count), x, routes, count)


def of_experts() -> Iterator[Launch]:
    kinds = {"plain": plain, "fp8": fp8}
    for kind, tokens, dtype in (*product(kinds, SIZES, (BF16,)), *product(("plain",), (1, 200), (FP32,))):
        often = often_if((kind, tokens) == ("plain", 4000))
        call = partial(mlps, kinds[kind], QWEN3_30B, tokens, dtype, "silu")
        yield Launch(f"{kind} of {tokens} in {dtype}", call, often)
    for kind, tokens in (*product(("plain",), SIZES), ("fp8", 1), ("fp8", 4000)):
        shape = NEMOTRON_3 if kind == "plain" else QWEN3_30B  # in FP8, no block of 128 fits the former
        call = partial(mlps, kinds[kind], shape, tokens, BF16, RELU2)
        yield Launch(f"{kind} of {tokens} without gates", call, often_if((kind, tokens) == ("plain", 1)))
    for dtype, count in product((BF16, FP32), (64, 512)):
        yield Launch(f"routes to {count} in {dtype}", partial(choose_experts, dtype, count, Routing(8)))
    by_logits = Routing(8, "sigmoid", corrects_logits=True)
    for tokens in (1, 200):
        yield Launch(f"{tokens} tokens skip what is no expert", partial(skip, tokens, BF16))
    corrected = Routing(12, scale=6.0, identities=256)
    yield Launch("routes to 768, of which some are no experts", partial(choose_experts, FP32, 768, corrected, True))
    yield Launch("routes by corrected logits", partial(choose_experts, FP32, 384, by_logits, True))
    yield Launch("routes to 64, and 2 that all take", partial(choose_experts, BF16, 64, Routing(6, always=2)))
    yield Launch("routes by sparsemixer", partial(choose_experts, BF16, 16, Routing(2, "sparsemixer", nearness=0.02)))


def of_group_experts() -> Iterator[Launch]:
    of_kinds = [
        *product((*WIDE, "int8 rows", "mxfp4", "q4_k", "q6_k", "nf4"), ((1, BF16), (4000, BF16))),
        *product(("int4 g64 zeros", "mxfp4", "nf4"), ((200, BF16),)),
        ("nvfp4", (4000, FP32)),
    ]
    for kind, (tokens, dtype) in of_kinds:
        call = partial(mlps, GROUPINGS[kind].experts, QWEN3_30B, tokens, dtype, "silu")
        yield Launch(f"{kind} of {tokens} in {dtype}", call)
    for kind, tokens in product(("int4 g64 zeros", "int8 rows"), (1, 4000)):
        call = partial(mlps, GROUPINGS[kind].experts, NEMOTRON_3, tokens, BF16, RELU2)
        yield Launch(f"{kind} of {tokens} without gates", call)
    yield Launch("gpt-oss of 300", partial(mlps, GROUPINGS["mxfp4"].experts, GPT_OSS, 300, BF16, CLAMPED), "often")
    yield Launch("int4 rows, tiny", partial(mlps, GROUPINGS["int4 rows"].experts, TINY, 300, FP32, "silu"))


def of_attention() -> Iterator[Launch]:
    of_rows = (
        *product((64, 128, 256), (BF16,), (1,)),
        (128, FP8, 1),
        (128, BF16, 200),
        *product((256, 512), (FP8,), (200,)),
    )
    for head_dim, cache, rows in of_rows:
        call = partial(decode, head_dim, rows, cache, None, False)
        yield Launch(f"{MAKES_WAY if rows == 1 else 'decode of 200'}, {head_dim=}, {cache=}", call)
    for head_dim, cache in product(HEADS, (BF16, FP8)):
        if head_dim in (128, 512) or (head_dim, cache) == (256, FP8):
            call = partial(prefill, head_dim, 1000, cache, None, False)
            yield Launch(f"prefill, {head_dim=}, {cache=}", call, often_if((head_dim, cache) == (512, BF16)))
    for head_dim, cache in (*product((64, 128, 256, 512), (FP8,)), (256, BF16)):
        call = partial(store, head_dim, 300, cache)
        yield Launch(f"keys, {head_dim=}, {cache=}", call, "always" if (head_dim, cache) == (128, FP8) else "seldom")
    yield Launch("decode with a window", partial(decode, 256, 200, BF16, 1024, False))
    yield Launch("prefill with a window", partial(prefill, 256, 1000, BF16, 1024, False))
    for head_dim in (128, 512):
        yield Launch(f"decode in order, {head_dim=}", partial(decode, head_dim, 200, BF16, None, True))
    for head_dim in (256, 512):
        yield Launch(f"prefill in order, {head_dim=}", partial(prefill, head_dim, 1000, BF16, None, True))
    for attend, size in (decode, 200), (prefill, 1000):
        often = often_if(attend is decode)
        yield Launch(f"{attend.__name__} with slopes", partial(attend, 128, size, BF16, None, False, True), often)
        yield Launch(f"{attend.__name__} in order with slopes", partial(attend, 128, size, BF16, None, True, True))
    yield Launch("decode with slopes, in FP8", partial(decode, 128, 200, FP8, None, False, True))
    for head_dim, cache in product(OTHER_VALUES, (BF16, FP8)):
        named, often = f"other values, {head_dim=}, {cache=}", often_if(cache == BF16)
        yield Launch(f"decode of 200, {named}", partial(decode, head_dim, 200, cache, None, False), often)
        yield Launch(f"decode with a window, {named}", partial(decode, head_dim, 200, cache, 129, False))
        yield Launch(f"prefill, {named}", partial(prefill, head_dim, 1000, cache, None, False), often)
        yield Launch(f"keys, {named}", partial(store, head_dim, 300, cache))
        for attend, size in (decode, 200), (prefill, 1000):
            yield Launch(f"{attend.__name__} in order, {named}", partial(attend, head_dim, size, cache, None, True))


def of_guesses_and_prefixes() -> Iterator[Launch]:
    for head_dim, cache in ((128, BF16), (128, FP8), (256, BF16), (512, FP8)):
        named, often = f"{head_dim=}, {cache=}", often_if((head_dim, cache) == (128, BF16))
        yield Launch(f"8 guesses, {named}", partial(verify, head_dim, 8, cache, None, 8), often)
    for head_dim, cache in ((128, BF16), (512, FP8)):
        yield Launch(f"prefixes, {head_dim=}, {cache=}", partial(share, head_dim, 16, cache, 0))
    yield Launch("4 guesses", partial(verify, 128, 8, BF16, None, 4))
    yield Launch("8 guesses with a window", partial(verify, 256, 8, FP8, 1024, 8))
    yield Launch("prefixes, 8 guesses", partial(share, 256, 16, BF16, 8))
    yield Launch("prefixes, 8 guesses with slopes", partial(share, 128, 16, BF16, 8, True))
    for head_dim, cache in product(OTHER_VALUES, (BF16, FP8)):
        named = f"other values, {head_dim=}, {cache=}"
        yield Launch(f"8 guesses, {named}", partial(verify, head_dim, 8, cache, None, 8))
        yield Launch(f"prefixes, {named}", partial(share, head_dim, 16, cache, 0))
    yield Launch("guesses without a model", partial(draft_and_accept, 32, 160))


def of_the_rest() -> Iterator[Launch]:
    for matrices, is_prefill in ((BF16, False), (FP32, False), (FP32, True)):
        call = partial(delta, matrices, is_prefill)
        yield Launch(f"delta rule, {matrices=}, {is_prefill=}", call, often_if(is_prefill))
    for is_prefill in (False, True):
        call = partial(delta, FP32, is_prefill, (30, 30, 96, 192), 2.0)
        yield Launch(f"delta rule of OLMo Hybrid, {is_prefill=}", call, often_if(is_prefill))
    yield Launch("around the delta rule", convolve_and_norm)
    for matrices, shape in ((BF16, (KEY_HEADS, VALUE_HEADS, HEAD, HEAD)), (FP32, (30, 30, 96, 192))):
        yield Launch(f"delta rule in one order, {shape=}", partial(delta_of_both, shape, matrices))
    for shape in ((64, 64, 8, 128), (24, 128, 1, 256)):
        yield Launch(f"Mamba2 in one order, {shape=}", partial(mamba_of_both, shape))
        for is_prefill in (True, False):
            call = partial(mamba, shape, is_prefill)
            yield Launch(f"Mamba2, {shape=}, {is_prefill=}", call, often_if(shape[0] == 64))
    yield Launch("Mamba2 in float32", partial(mamba, (64, 64, 8, 128), True, FP32))
    for size, dtype in ((1024, BF16), (5376, BF16), *product((4096, 12288), (BF16, FP32))):
        yield Launch(f"norms of {size} in {dtype}", partial(normalise, size, dtype))
    for head_dim, window, has_biases in ((32, None, False), (64, 65, False), (64, None, True), (256, 257, False)):
        call = partial(read_texts, head_dim, window, has_biases)
        yield Launch(f"texts, {head_dim=}, {window=}, {has_biases=}", call, often_if(head_dim == 64))
    for head_dim in (64, 256):
        yield Launch(f"texts in float32, {head_dim=}", partial(read_texts, head_dim, 65, True, FP32))
    yield Launch("LayerNorms of 4096", partial(normalise, 4096, BF16, centred=True))
    yield Launch("activations", lambda: [activate(empty(300, 8192, dtype=BF16), name) for name in get_args(Function)])
    yield Launch("xIELU", lambda: xielu(empty(300, 8192, dtype=BF16), empty(4, dtype=FP32)))
    for dtype in (BF16, FP32):
        yield Launch(f"draws from {dtype}", partial(sample, 64, dtype))
        yield Launch(f"steering in {dtype}", partial(steer, dtype))
    yield Launch("a row of Qwen3-0.6B", partial(launch_row, BF16))


def of_latents() -> Iterator[Launch]:
    for heads, sizes in ((16, V3), (20, V3), (64, V3), (128, V3), (40, MINICPM3)):
        for rows in (1, 200):
            call = partial(meet_latents, heads, rows, sizes, BF16)
            yield Launch(f"{rows} rows meet latents, {heads=}, {sizes=}", call, often_if((heads, rows) == (128, 200)))
    for heads in (16, 20):
        yield Launch(f"200 rows meet latents in FP8, {heads=}", partial(meet_latents, heads, 200, V3, BF16, FP8))
        for queries in (1, 4):
            call = partial(share_latents, heads, queries, V3, BF16)
            yield Launch(f"rows share latents, {heads=}, {queries=}", call, often_if((heads, queries) == (16, 4)))
    yield Launch("rows share latents in FP8", partial(share_latents, 16, 2, V3, BF16, FP8))
    yield Launch("latents in FP8", partial(store_latents, 16, V3, BF16, True, FP8))
    yield Launch("rows meet latents in float32", partial(meet_latents, 16, 200, V3, FP32))
    for sizes in (V3_HEAD, GLM_HEAD):
        call = partial(meet_keys, 16, 1000, sizes, BF16)
        yield Launch(f"prompts meet keys, {sizes=}", call, often_if(sizes == V3_HEAD))
    yield Launch("prompts meet keys in float32", partial(meet_keys, 16, 1000, V3_HEAD, FP32))
    yield Launch("latents", partial(store_latents, 16, V3, BF16, True), "often")
    yield Launch("latents with a factor", partial(store_latents, 64, V3, BF16, True, None, 12**0.5))
    yield Launch("latents in halves", partial(store_latents, 40, MINICPM3, FP32, False))


LAUNCHES = {
    "products": list(of_products()),
    "adapters": list(of_adapters()),
    "products in groups": list(of_groups()),
    "experts": list(of_experts()),
    "experts in groups": list(of_group_experts()),
    "attention": list(of_attention()),
    "guesses and prefixes": list(of_guesses_and_prefixes()),
    "latents": list(of_latents()),
    "the rest": list(of_the_rest()),
}
