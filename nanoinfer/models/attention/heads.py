"""KVHeads and QueryScaling: what a layer of attention may have."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.kernels.attention.projected.qkv import Parts


@dataclass(frozen=True)
class QueryScaling:
    """The factor of a rotated query at position p: 1 + beta * log(1 + floor(p / length)), as in Ministral 3."""

    beta: float
    length: int


@dataclass(frozen=True)
class KVHeads:
    """The heads of keys and values in a layer of attention.

    count: of the keys, and of the values
    dim: the numbers in a head of the keys; queries have as many
    values_are_keys: values are the keys before norm and rotation, as in Gemma 4; else they have their own projection
    source: the layer whose keys and values this layer reads; None: it has its own
    value_dim: the numbers in a head of the values, if not as many, as in MiMo-V2
    """

    count: int
    dim: int
    values_are_keys: bool = False
    source: int | None = None
    value_dim: int | None = None

    @property
    def value_size(self) -> int:
        """The numbers in a head of the values."""
        return self.value_dim or self.dim

    @property
    def parts(self) -> Parts:
        """What the layer projects, see kernels.attention.projected.qkv."""
        if self.source is not None:
            return "q"
        return "qk" if self.values_are_keys else "qkv"
