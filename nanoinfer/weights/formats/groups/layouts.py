"""The layouts that tools write."""

from __future__ import annotations

import torch

from nanoinfer.kernels.groups import Numbers
from nanoinfer.weights.formats.groups.fields import Field, Packing
from nanoinfer.weights.formats.groups.layout import Layout

INT32, BYTE = 32, 8  # bits
AWQ_PLACES = Packing(4, (0, 2, 4, 6, 1, 3, 5, 7))
PAIRS = Packing.in_turn(4, BYTE)
NVFP4_GROUP, MXFP4_GROUP = 16, 32


def integers(bits: int) -> Numbers:
    """Return the integers of so many bits."""
    return "int4" if bits == 4 else "int8"


def pack_quantized(bits: int, group: int, symmetric: bool, ordered: bool) -> Layout:
    """Return that of compressed-tensors' integers. ordered: groups are no neighbours; group: as in Layout"""
    packing = Packing.in_turn(bits, INT32)
    fields = [
        Field("weight_packed", "numbers", along_inputs=packing),
        Field("weight_scale", "scales"),
        Field("weight_shape", "shape", constant=True),
        Field("weight_g_idx", "g_idx", constant=not ordered),
    ]
    if not symmetric:
        fields.append(Field("weight_zero_point", "zeros", along_outputs=packing))
    return Layout(integers(bits), tuple(fields), group)


def gptq(bits: int, group: int, symmetric: bool, ordered: bool, less_one: bool) -> Layout:
    """Return that of GPTQ; arguments: as for pack_quantized. less_one: each zero is stored less one"""
    packing = Packing.in_turn(bits, INT32)
    ones = sum(1 << bits * place for place in range(packing.count)) if less_one else 0
    fields = (
        Field("qweight", "numbers", turned=True, along_inputs=packing),
        Field("scales", "scales", turned=True),
        Field("qzeros", "zeros", turned=True, along_outputs=packing, added=ones, constant=symmetric),
        Field("g_idx", "g_idx", constant=not ordered),
    )
    return Layout(integers(bits), fields, group, torch.float16)


def awq(group: int, symmetric: bool) -> Layout:
    """Return that of AWQ's version "gemm"; arguments: as for pack_quantized"""
    fields = (
        Field("qweight", "numbers", turned=True, along_outputs=AWQ_PLACES),
        Field("scales", "scales", turned=True),
        Field("qzeros", "zeros", turned=True, along_outputs=AWQ_PLACES, constant=symmetric),
    )
    return Layout("int4", fields, group, torch.float16)


def int_quantized(group: int) -> Layout:
    """Return that of compressed-tensors' integers of eight bits, one by one; group: as in Layout"""
    return Layout("int8", (Field("weight", "numbers", added=128), Field("weight_scale", "scales")), group)


NVFP4 = Layout(
    "e2m1",
    (
        Field("weight_packed", "numbers", along_inputs=PAIRS),
        Field("weight_scale", "scales"),
        Field("weight_global_scale", "factors", divides=True),
    ),
    NVFP4_GROUP,
    torch.float8_e4m3fn,
)  # compressed-tensors'
MODELOPT = Layout(
    "e2m1",
    (
        Field("weight", "numbers", along_inputs=PAIRS),
        Field("weight_scale", "scales"),
        Field("weight_scale_2", "factors"),
    ),
    NVFP4_GROUP,
    torch.float8_e4m3fn,
)
MXFP4 = Layout(
    "e2m1",
    (Field("weight_packed", "numbers", along_inputs=PAIRS), Field("weight_scale", "scales")),
    MXFP4_GROUP,
    torch.uint8,
)  # compressed-tensors'
GPT_OSS = Layout(
    "e2m1",
    (
        Field("_blocks", "numbers", along_inputs=PAIRS, block=MXFP4_GROUP // PAIRS.count),
        Field("_scales", "scales"),
    ),
    MXFP4_GROUP,
    torch.uint8,
    stacked=True,
)
