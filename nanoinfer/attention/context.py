"""Context: what the layers of one step need to know about its tokens; Scoring: how a layer scores a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.attention.prefill.prefill_plan import DividedPrefill
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.delta.chunks import Chunks
from nanoinfer.kernels.states.in_order import Spans
from nanoinfer.kernels.states.memory import LayerStates, StateRows
from nanoinfer.kernels.steering import SteeredTokens


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How an attention layer scores a key."""

    scale: float  # factor of a query's product with the key
    window: int | None = None  # query i sees key j if i - window < j <= i; None: if j <= i
    softcap: float | None = None  # a scaled score becomes softcap * tanh(score / softcap), as in Gemma 2
    kv_scales: Tensor | None = None  # [2] float32, of the layer's keys and of its values in a cache of FP8
    sinks: Tensor | None = None  # [heads] float32, a score that each query of a head has beside the keys', for no value
    slopes: Tensor | None = None  # [heads] float32: a score of key j by query i gets slope * (j - i), as in ALiBi
    whole_images: bool = False  # each token of an image sees the whole image (PackedQueries.ends)

    def __post_init__(self) -> None:
        assert self.softcap is None or self.slopes is None  # no model has both


@dataclass(slots=True)
class PackedQueries:
    """How a prefill step's tokens divide into sequences; each has at least one new token."""

    query_lens: list[int]
    context_lens: list[int]  # the new tokens included
    cu_query_lens: Tensor  # [seqs + 1] int32
    cu_context_lens: Tensor  # [seqs + 1] int32
    is_long: list[bool]  # for each sequence, whether it is rotated by Rope.long_frequencies
    divided: DividedPrefill | None = None  # the same tokens, if some can attend by cuDNN
    ends: Tensor | None = None  # [tokens] int32, where what a token sees ends, by Scoring.whole_images; None: behind it


@dataclass(slots=True)
class GroupContext:
    """Where the keys and values of a step's tokens live, for one group of layers (see CacheLayout). A block is a page.

    slot_mapping: [tokens] int32, page * block_size + offset; -1: the layers write nothing
    block_tables: [seqs, max blocks] int32, in pages
    divided_tables: [pieces, max blocks] int32, of PackedQueries.divided, if it is given
    plan: the attention backend's, of a decode step
    """

    slot_mapping: Tensor
    block_tables: Tensor
    divided_tables: Tensor | None = None
    plan: Any = None


@dataclass(slots=True)
class StateContext:
    """Where the states of a step's sequences live, for all layers that have states. A slot holds one sequence's.

    layers: what each such layer has
    rows: of a decode step; chunks: of a prefill step
    spans: of both, if sums have one order
    """

    layers: Mapping[int, LayerStates]
    rows: StateRows | None = None
    chunks: Chunks | None = None
    spans: Spans | None = None


@dataclass(slots=True)
class MediaContext:
    """What the decoder gets of the images and videos of a prefill step.

    deep: behind each of the first layers, to be added
    places: [n] int64, of the placeholders among the step's tokens
    embeddings: [n, hidden_size], in place of theirs; deep: [n, hidden_size] each
    """

    places: Tensor
    embeddings: Tensor
    deep: list[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """Which tokens of a decode step are guesses: those behind the last tokens of all rows, one row's after another's.

    A guess is a token as the others are: it has its own position, slot, context and block table. So a backend need not
    know of guesses; it may read a row's keys once for all of the row's tokens.

    row_of: [tokens] int32, whose each token is
    first: [rows] int32, the place of a row's first guess among all guesses
    counts: [rows] int32, how many a row has; most: at most
    heads: query heads of this rank
    """

    row_of: Tensor
    first: Tensor
    counts: Tensor
    most: int
    heads: int


@dataclass(slots=True)
class Context:
    """One step's tokens and where their keys and values live. Decode has one token a sequence, and its guesses."""

    layers: Mapping[int, tuple[Tensor, Tensor]]  # of the KV cache: for each layer, its keys and its values
    groups: list[GroupContext]  # of layers
    positions: Tensor  # [tokens] int32; -1: a padding token
    context_lens: Tensor  # [seqs] int32
    max_context_len: int  # at least the longest context
    prefill: PackedQueries | None = None  # None: a decode step
    states: StateContext | None = None  # None: no layer has one
    prefixes: SharedPrefixes | None = None  # which layers of the first group read once for all rows that share them
    layer_inputs: Tensor | None = None  # [tokens, layers, size], which the model sets if its layers have such inputs
    distance_biases: Tensor | None = None  # attend_to_texts' biases, which the model sets if it has some
    media: MediaContext | None = None  # None: the step's tokens are no image's or video's
    guesses: Guesses | None = None  # among the tokens of a decode step
    types: Tensor | None = None  # [tokens] int32, 1 in the second text of a pair, for an encoder; None: 0 everywhere
    adapters: AdapterRows | None = None  # those that the tokens name; None: no token names one
    steering: SteeredTokens | None = None  # which vectors are added to the tokens' hidden states; None: none are
    rotary: Tensor | None = None  # what rotary_rows are, if not `positions`
    rotary_rows: Tensor = field(init=False)  # [tokens] int32, rows of the rotary tables; [3, tokens]: see Rope.sections

    def __post_init__(self) -> None:
        self.rotary_rows = self.positions if self.rotary is None else self.rotary
