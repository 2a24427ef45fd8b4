"""Operands: what the kernels know of a weight, and the JIT functions with which they multiply it.

A format has one for tiles of several tokens, and may have one for a single token. See docs/tour.md for how to add one.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operand(NamedTuple):
    """What the tile kernel knows of a weight, [out_features, in_features]; experts have a dimension more before.

    numbers: its numbers or words, or a tensor descriptor of them
    parts: what else add_products reads: a tensor, a NamedTuple of tensors and integers, or None
    form: what add_products is compiled for: a frozen dataclass, or None
    add_products: the JIT function that adds up a tile's products: see linear.plain.add_products
    rows, in_features: of a matrix
    apart: a tile's gates and ups add up apart from each other, and 64 tokens and more are the left matrix; else each
        gate's row comes before its up's, and the weight is the left matrix
    """

    numbers: Any
    parts: Any
    form: Any
    add_products: Any
    rows: int
    in_features: int
    apart: bool


class RowOperand(NamedTuple):
    """What the kernel for a single token knows of a weight, [out_features, in_features], or of experts' weights.

    parts: a NamedTuple of tensors and integers, whose `numbers` come first
    form: what the functions are compiled for: a frozen dataclass, or None
    load: loads the numbers of a tile of rows: see linear.plain.load_row_tile
    load_scales: loads what its rows multiply by, as those of linear.plain; None: nothing
    prepare: makes of the token's vector what `multiply` takes
    multiply: returns a tile's products with it, [block_n] float32
    rows, in_features: of a matrix
    programs: the rows of a tile, the programs for each multiprocessor, and the warps of a program
    per_load: the numbers that a thread loads at once; None: adapters.one_row cannot add up terms beside them
    """

    parts: Any
    form: Any
    load: Any
    load_scales: Any
    prepare: Any
    multiply: Any
    rows: int
    in_features: int
    programs: tuple[int, int, int]
    per_load: int | None
