"""Context: what the layers of one step need to know about its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class PackedQueries:
    """How a prefill step's tokens divide into sequences; each has at least one new token."""

    query_lens: list[int]
    context_lens: list[int]  # the new tokens included
    cu_query_lens: Tensor  # [seqs + 1] int32
    cu_context_lens: Tensor  # [seqs + 1] int32


@dataclass(slots=True)
class Context:
    """One step's tokens and where their keys and values live. Decode has one token a sequence."""

    kv_cache: Tensor  # [2, layers, blocks, block_size, kv_heads, head_dim], keys before values
    positions: Tensor  # [tokens] int32; -1: a padding token
    slot_mapping: Tensor  # [tokens] int32, block * block_size + offset; -1: written nowhere
    block_tables: Tensor  # [seqs, max blocks] int32
    context_lens: Tensor  # [seqs] int32
    max_context_len: int  # no context is longer
    prefill: PackedQueries | None = None  # None: a decode step
    decode_plan: Any = None  # what the attention backend worked out for all layers of a decode step
