"""Which tensors make up a matrix of bitsandbytes', and whether they are as it writes them."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoinfer.checks import as_number, short
from nanoinfer.kernels.groups import BITSANDBYTES, TABLES
from nanoinfer.kernels.launch import cdiv
from nanoinfer.weights.bitsandbytes.matrix import (
    NUMBERS,
    BnbMatrix,
    BnbPart,
    EightBits,
    FourBits,
    Nested,
    shape_of,
)
from nanoinfer.weights.shards import FLOATS

log = logging.getLogger("nanoinfer")

STATE, ROW_SCALES, ROW_FORMAT = ".quant_state.bitsandbytes__", "SCB", "weight_format"
OFFSET = "nested_offset"  # in a quant_state whose scales are codes
Stored = tuple[str, Any, Path]  # a tensor's name, what reads it, as safetensors' slice objects do, and its file


def is_of_matrix(name: str) -> bool:
    """Whether a tensor of this name says that a matrix is bitsandbytes'."""
    return STATE in name or name.endswith(f".{ROW_SCALES}")


def joined(tensors: Iterable[Stored]) -> Iterator[Stored]:
    """Yield tensors as they are, but a BnbMatrix for those of each matrix, under the name of its numbers.

    Raises ValueError, naming file and tensor, for a matrix that is not as bitsandbytes writes it.
    """
    stored = list(tensors)
    readers = {name: tensor for name, tensor, _ in stored}
    marks = {_owner(name): name for name in readers if is_of_matrix(name)}
    for name, tensor, file in stored:
        owner = _owner(name)
        if owner not in marks:
            yield name, tensor, file
        elif name == owner:
            try:
                yield name, _matrix_of(name, marks[name], readers), file
            except ValueError as error:
                raise ValueError(f"{file}: {name} is not as bitsandbytes writes it: {error}") from error


def split(tensors: Iterable[tuple[str, Tensor]], where: str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as they are, but for those of each matrix its parts, in bits if it has groups.

    where: stands for a file in the messages of errors, which are those of `joined`
    """
    file = Path(where)
    for name, tensor, _ in joined((name, tensor, file) for name, tensor in tensors):
        if isinstance(tensor, BnbMatrix):
            parts = tensor.parts(name, in_bits=tensor.kind != NUMBERS)
            yield from ((own, part[...]) for own, part in parts.items())
        else:
            yield name, tensor


def _owner(name: str) -> str:
    """Return the name of the matrix to which a tensor may belong."""
    module, found, _ = name.partition(".weight.")
    if not found:
        module, _, end = name.rpartition(".")
        found = f".{end}" if end in (ROW_SCALES, ROW_FORMAT) else ""
    return f"{module}.weight" if found else name


def _matrix_of(name: str, mark: str, readers: Mapping[str, Any]) -> BnbMatrix:
    """mark: the name of the tensor that says what the matrix is"""
    codes = readers[name]
    if mark.endswith(ROW_SCALES):
        order = readers.get(f"{name.removesuffix('weight')}{ROW_FORMAT}")
        if order is not None and (number := int(order[...])) != 0:
            raise ValueError(f"its {ROW_FORMAT} is {number}: must be 0, for rows")
        outputs, inputs = shape_of(codes)
        _check(codes, [outputs, inputs], {torch.int8})
        _check(readers[mark], [outputs], FLOATS)
        return EightBits((outputs, inputs), codes, readers[mark])
    state = _read_state(readers[mark])
    numbers, (outputs, inputs), block = state["quant_type"], state["shape"], state["blocksize"]
    table, scales = (_find(readers, f"{name}.{end}") for end in ("quant_map", "absmax"))
    if not torch.allclose(table[:].cpu(), torch.tensor(TABLES[numbers]), rtol=1e-6, atol=0):
        raise ValueError(f"its quant_map is not that of {numbers}")
    blocks = cdiv(outputs * inputs, block)
    _check(codes, [cdiv(outputs * inputs, 2), 1], {torch.uint8})
    _check(scales, [blocks], {torch.uint8} if OFFSET in state else FLOATS)
    nested = None
    if OFFSET in state:
        of_scales, factors = (_find(readers, f"{name}.nested_{end}") for end in ("quant_map", "absmax"))
        _check(of_scales, [256], FLOATS)
        _check(factors, [cdiv(blocks, state["nested_blocksize"])], FLOATS)
        nested = Nested(of_scales[:].float(), factors[:].float(), state["nested_blocksize"], state[OFFSET])
    return FourBits((outputs, inputs), codes, scales, numbers, block, nested)


def _read_state(reader: Any) -> dict[str, Any]:
    """Return what a quant_state says; raises ValueError if it lacks something, or has what is not known."""
    state = json.loads(bytes(reader[:].tolist()))
    if not isinstance(state, dict):
        state = {}
    shape, sizes = state.get("shape"), [state.get("blocksize")]
    if OFFSET in state:
        sizes += [state.get("nested_blocksize"), None if as_number(state[OFFSET]) is None else 1]
    sizes += shape if isinstance(shape, list) and len(shape) == 2 else [None]
    if state.get("quant_type") not in BITSANDBYTES or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"its quant_state is {short(state)}: must have a quant_type {' or '.join(BITSANDBYTES)}, a shape, a"
            f" blocksize, and beside a {OFFSET} a nested_blocksize"
        )
    return state


def _check(reader: Any, shape: list[int], dtypes: Collection[torch.dtype]) -> None:
    """Raise ValueError for a tensor of another shape or type. reader: it, or a slice object"""
    if (own := shape_of(reader)) != shape or reader[:1].dtype not in dtypes:
        types = " or ".join(sorted(map(str, dtypes)))
        raise ValueError(f"a tensor has shape {own} and {reader[:1].dtype}: must be {shape} and {types}")


def _find(readers: Mapping[str, Any], name: str) -> Any:
    if name not in readers:
        raise ValueError(f"there is no {name}")
    return readers[name]


def modules_of(tensors: Iterable[Stored]) -> dict[str, list[str]]:
    """Return the modules of each kind of matrices."""
    modules = defaultdict(list)
    for name, tensor, _ in tensors:
        if isinstance(tensor, BnbMatrix):
            modules[tensor.kind].append(name.removesuffix(".weight"))
    return dict(modules)


def log_numbers(what: str, tensors: Iterable[Any], dtype: torch.dtype) -> None:
    """Log how many matrices became numbers of the dtype, and their bytes before and then. what: begins the line"""
    read = [tensor.matrix for tensor in tensors if isinstance(tensor, BnbPart) and not tensor.end]
    if read:
        count, stored = sum(math.prod(matrix.shape) for matrix in read), sum(matrix.num_bytes for matrix in read)
        name = str(dtype).removeprefix("torch.")
        message = "%s: %d matrices of bitsandbytes became numbers of %s: they take %.3f GB, and %.3f GB in the files"
        log.info(message, what, len(read), name, count * dtype.itemsize / 1e9, stored / 1e9)
