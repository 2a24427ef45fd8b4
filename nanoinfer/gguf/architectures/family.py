"""Family: what sets apart the files of an architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nanoinfer.gguf.architectures.rotations import rope_of
from nanoinfer.gguf.header import Header
from nanoinfer.gguf.tensors.composed import Composition
from nanoinfer.gguf.tensors.tensor import Change, Order

QUERIES, KEYS = re.compile(r"\.attn_q\.(weight|bias)$"), re.compile(r"\.attn_k\.(weight|bias)$")
DECAYS = "ssm_a"


@dataclass(frozen=True)
class Family:
    """An architecture.

    model_type, name: transformers' names of the config and of the class
    keys: settings of the config by those of the metadata, beside those that all have
    settings: what the config needs and no metadata say
    reads: make further settings of a file's header
    rope: makes rope_parameters of it
    in_pairs: rows of queries and keys lie as rotations take them, pair by pair
    norms_more: weights of norms are stored so much more than the checkpoint's
    epsilon: the config's name of that of norms
    has_tiles: value heads of the gated delta rule lie as TILED says
    experts: what a checkpoint calls the experts of a layer, where gguf's tables lack its name
    composed: how the file has tensors, by their names in a layer of the checkpoint; the first that is there counts
    """

    model_type: str
    name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    reads: tuple[Callable[[Header], dict[str, Any]], ...] = ()
    rope: Callable[[Header], dict[str, Any]] = rope_of
    in_pairs: bool = False
    norms_more: float = 0.0
    epsilon: str = "rms_norm_eps"
    has_tiles: bool = False
    experts: str = "mlp.experts"
    composed: Mapping[str, tuple[Composition, ...]] = field(default_factory=dict)

    def change_of(self, header: Header, name: str) -> Change:
        """Return what sets a tensor of the file apart from the checkpoint's."""
        part = name.split(".", 2)[-1]
        if self.has_tiles and (tiled := TILED.get(part)) is not None:
            return tiled(header)
        more = self.norms_more if name.endswith("norm.weight") and "ssm_norm" not in name else 0.0
        return Change(self._in_pairs(header, name), more=more, is_exponential=part == DECAYS)

    def _in_pairs(self, header: Header, name: str) -> Order | None:
        """Return the order of rows that lie pair by pair."""
        queries = int(header.needed("attention.head_count")) if self.in_pairs else 0
        if queries and QUERIES.search(name):
            return Order(queries, -1, 2)
        is_key = queries and KEYS.search(name)
        return Order(header.largest("attention.head_count_kv", queries), -1, 2) if is_key else None


def _tiles(header: Header, of_values: bool = True, behind_keys: bool = False) -> Order:
    """Return the order of value heads, of which those of one key lie apart in the file.

    of_values: each has as many rows as values, and not one
    behind_keys: behind the rows of queries and keys
    """
    keys, heads = header.needed("ssm.group_count"), header.needed("ssm.time_step_rank")
    size = header.needed("ssm.inner_size") // heads if of_values else 1
    return Order(1, heads // keys, keys, size, 2 * keys * header.needed("ssm.state_size") if behind_keys else 0)


def _of_keys_and_values(header: Header) -> Change:
    return Change(_tiles(header, behind_keys=True))


def _of_heads(header: Header) -> Change:
    return Change(_tiles(header, of_values=False))


TILED: dict[str, Callable[[Header], Change]] = {
    "attn_qkv.weight": _of_keys_and_values,
    "ssm_conv1d.weight": _of_keys_and_values,
    "attn_gate.weight": lambda header: Change(_tiles(header)),
    "ssm_out.weight": lambda header: Change(columns=_tiles(header)),
    "ssm_alpha.weight": _of_heads,
    "ssm_beta.weight": _of_heads,
    "ssm_dt.bias": _of_heads,
    DECAYS: lambda header: replace(_of_heads(header), is_exponential=True),
}  # of the gated delta rule, by the names in a layer
