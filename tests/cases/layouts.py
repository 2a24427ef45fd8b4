"""Matrices in four and eight bits as checkpoints store them, written from the definitions of their formats.

A writer takes a matrix, [out, in] float32, and returns the tensors of its module, by the ends of their names, and the
matrix that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that has the i-th four bits


def integers_of(numbers: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack neighbours along a dimension into int32; order: which of them has the lowest bits, the next ones, ..."""
    count = 32 // bits
    rows = numbers.long().movedim(dim, -1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % count)).unflatten(-1, (-1, count))
    words = sum(rows[..., number] << bits * place for place, number in enumerate(order or range(count)))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().movedim(-1, dim).contiguous()


def bytes_of(codes: Tensor) -> Tensor:
    """Pack pairs of four bits, the first of them in the lower ones, into uint8."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def round_groups(
    weight: Tensor,
    group: int,
    bits: int,
    symmetric: bool,
    groups: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return numbers, scales, zeros and what they stand for. groups: of each input; None: neighbours"""
    groups = torch.arange(weight.shape[1]) // group if groups is None else groups
    count, top = int(groups.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.empty(len(weight), count, dtype=dtype), torch.empty(len(weight), count, dtype=torch.int64)
    numbers, dense = torch.empty(weight.shape, dtype=torch.int64), torch.empty_like(weight)
    for number in range(count):
        inputs = (groups == number).nonzero().flatten()
        values = weight[:, inputs]
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        scale = (values.abs().amax(1) / (top // 2) if symmetric else (high - low) / top).to(dtype)
        zero = torch.full((len(weight),), 1 << bits - 1) if symmetric else (-low / scale.float()).round().long()
        scales[:, number], zeros[:, number] = scale, zero.clamp(0, top)
        found = (values / scale.float()[:, None]).round() + zeros[:, number : number + 1]
        numbers[:, inputs] = found.clamp(0, top).long()
        dense[:, inputs] = (numbers[:, inputs] - zeros[:, number : number + 1]) * scale.float()[:, None]
    return numbers, scales, zeros, dense


def act_order(weight: Tensor, group: int) -> Tensor:
    """Return groups of inputs that are no neighbours; all matrices of as many inputs have the same."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(7))
    groups = torch.empty(weight.shape[1], dtype=torch.int64)
    groups[order] = torch.arange(weight.shape[1]) // group
    return groups


def pack_quantized(bits: int, group: int | None, symmetric: bool, ordered: bool = False) -> Writer:
    """compressed-tensors' "pack-quantized"; group: None: channels"""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        size = group or weight.shape[1]
        groups = act_order(weight, size) if ordered else None
        numbers, scales, zeros, dense = round_groups(weight, size, bits, symmetric, groups, torch.bfloat16)
        tensors = {
            "weight_packed": integers_of(numbers, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = integers_of(zeros, bits, 0)
        if groups is not None:
            tensors["weight_g_idx"] = groups.int()
        return tensors, dense

    return write


def int_quantized(weight: Tensor) -> tuple[Tensors, Tensor]:
    """compressed-tensors' "int-quantized", of channels."""
    numbers, scales, _, dense = round_groups(weight, weight.shape[1], 8, True, dtype=torch.bfloat16)
    return {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}, dense


def gptq(bits: int, group: int, symmetric: bool, ordered: bool, less_one: bool = True, g_idx: bool = True) -> Writer:
    """GPTQ's tensors; less_one: those of its first version"""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        size = weight.shape[1] if group == -1 else group
        groups = act_order(weight, size) if ordered else torch.arange(weight.shape[1]) // size
        numbers, scales, zeros, dense = round_groups(weight, size, bits, symmetric, groups)
        words = integers_of(zeros.mT, bits, 1)
        if less_one:  # GPTQModel takes one from each number of the whole word at once, which may borrow
            words = (words.long() - sum(1 << bits * place for place in range(32 // bits))) % (1 << 32)
            words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
        tensors = {"qweight": integers_of(numbers.mT, bits, 0), "qzeros": words, "scales": scales.mT.contiguous()}
        return {**tensors, **({"g_idx": groups.int()} if g_idx else {})}, dense

    return write


def awq(group: int) -> Writer:
    """AWQ's tensors of the version "gemm"."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        numbers, scales, zeros, dense = round_groups(weight, group, 4, symmetric=False)
        qweight, qzeros = (integers_of(some.mT, 4, 1, AWQ_ORDER) for some in (numbers, zeros))
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.mT.contiguous()}, dense

    return write


def nearest_codes(values: Tensor) -> Tensor:
    """Return the codes of the numbers in e2m1 that are nearest."""
    return (values.unsqueeze(-1) - E2M1).abs().argmin(-1)


def nvfp4(modelopt: bool) -> Writer:
    """NVFP4 as ModelOpt stores it, or as compressed-tensors does, whose global scale divides."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        grouped = weight.unflatten(1, (-1, 16))
        whole = weight.abs().max() / (6 * 448)
        scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        codes = nearest_codes(grouped / (scales.float() * whole).unsqueeze(-1))
        packed = bytes_of(codes.flatten(1))
        tensors = {"weight_scale": scales}
        if modelopt:
            tensors |= {"weight": packed, "weight_scale_2": whole, "input_scale": torch.tensor(0.1)}
        else:
            divisor = (1 / whole).reshape(1)
            whole = 1 / divisor
            tensors |= {"weight_packed": packed, "weight_global_scale": divisor, "input_global_scale": torch.ones(1)}
        return tensors, (E2M1[codes] * (scales.float() * whole).unsqueeze(-1)).flatten(1)

    return write


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """compressed-tensors' "mxfp4-pack-quantized"."""
    grouped = weight.unflatten(1, (-1, 32))
    exponents = grouped.abs().amax(-1).log2().floor().int() - 2
    scales = torch.ldexp(torch.ones(exponents.shape), exponents)
    codes = nearest_codes(grouped / scales.unsqueeze(-1))
    tensors = {"weight_packed": bytes_of(codes.flatten(1)), "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, (E2M1[codes] * scales.unsqueeze(-1)).flatten(1)


NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Return numbers of a flat tensor by block, [blocks, block], with zeros behind the last."""
    return torch.nn.functional.pad(values.flatten(), (0, -values.numel() % block)).view(-1, block)


def bitsandbytes(kind: str, twice: bool = False) -> Writer:
    """bitsandbytes' tensors of "nf4" or "fp4"; twice: the scales have codes, too"""
    table = {"nf4": NF4, "fp4": FP4}[kind]

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        blocks = in_blocks(weight, 64)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        tensors = {"weight.absmax": scales, "weight.quant_map": table.clone()}
        if twice:
            offset, map_of_scales = scales.mean(), torch.linspace(-1, 1, 256)
            wide = in_blocks(scales - offset, 256)
            largest = wide.abs().amax(1)
            codes = (wide / largest[:, None]).unsqueeze(-1).sub(map_of_scales).abs().argmin(-1)
            scales = (map_of_scales[codes] * largest[:, None] + offset).flatten()[: len(scales)]
            tensors["weight.absmax"] = codes.flatten()[: len(scales)].to(torch.uint8)
            tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": map_of_scales}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        codes = (blocks / scales[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1)
        dense = (table[codes] * scales[:, None]).flatten()[: weight.numel()].view(weight.shape)
        pairs = codes.flatten()[: weight.numel()].unflatten(0, (-1, 2))  # the first is in the higher bits
        tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8).unsqueeze(1)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
        return tensors, dense

    return write


def llm_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    """bitsandbytes' tensors of eight bits."""
    largest = weight.abs().amax(1)
    numbers = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {"weight": numbers, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, numbers * (largest / 127)[:, None]


@dataclass(frozen=True)
class Published:
    """A format as checkpoints have it: the quantization_config of their config.json, and what writes a matrix."""

    config: dict[str, Any]
    write: Writer
    others: dict[str, Writer | None] = field(default_factory=dict)  # of modules whose names contain this; None: plain

    @property
    def has_head(self) -> bool:
        """Whether the output projection is in it."""
        return bool(self.config.get("lm_head") or self.others.get("lm_head"))


def compressed(format: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors with one group of matrices."""
    group = {"targets": ["Linear"], "format": format, "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def _integers(bits: int, group: int | None, symmetric: bool = True, actorder: str | None = None) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, actorder=actorder, **strategy)


def _gptq(bits: int, group: int, sym: bool, desc_act: bool, format: str = "gptq") -> dict[str, Any]:
    own = {"bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act, "checkpoint_format": format}
    return {"quant_method": "gptq", **own}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}

BITSANDBYTES = {  # as transformers writes it
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
    "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0,
}  # fmt: skip

MIXED_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"],
            "format": "pack-quantized",
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        },
        "group_1": {
            "targets": ["Linear"],
            "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        },
    },
    "ignore": ["re:.*layers.0.*", "lm_head"],
}
MIXED_ROUND = {
    **AUTO_ROUND,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
    "extra_config": {
        "model.layers.0.mlp.down_proj": {"bits": 16},
        r".*self_attn\.(q|k|v)_proj": {"bits": 8, "group_size": -1},
        "lm_head": {"bits": 4, "group_size": 16},
    },
}
MIXED_GPTQ = {
    **_gptq(4, 32, True, True),
    "dynamic": {r"-:.*layers\.0\..*": {}, r"+:.*self_attn\..*": {"bits": 8, "desc_act": False}},
    "lm_head": True,
}
MIXED_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "exclude_modules": ["lm_head", "model.layers.0.*", "*.self_attn.o_proj"],
    "kv_cache_quant_algo": "FP8",
}

PUBLISHED = {
    "int4 groups": Published(_integers(4, 32), pack_quantized(4, 32, True)),
    "int4 with zeros": Published(_integers(4, 32, False), pack_quantized(4, 32, False)),
    "int4 channels": Published(_integers(4, None), pack_quantized(4, None, True)),
    "int4 act order": Published(_integers(4, 32, True, "group"), pack_quantized(4, 32, True, True)),
    "int4 static order": Published(_integers(4, 32, True, "static"), pack_quantized(4, 32, True)),
    "int8 groups": Published(_integers(8, 32), pack_quantized(8, 32, True)),
    "int8 with zeros, channels": Published(_integers(8, None, False), pack_quantized(8, None, False)),
    "int8 one by one": Published(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int_quantized
    ),
    "gptq": Published(_gptq(4, 32, True, False), gptq(4, 32, True, False)),
    "gptq with zeros": Published(_gptq(4, 32, False, False), gptq(4, 32, False, False)),
    "gptq act order": Published(_gptq(4, 32, True, True), gptq(4, 32, True, True)),
    "gptq act order with zeros": Published(_gptq(4, 32, False, True), gptq(4, 32, False, True)),
    "gptq v2": Published(_gptq(4, 32, False, False, "gptq_v2"), gptq(4, 32, False, False, less_one=False)),
    "gptq of 8 bits, channels": Published(_gptq(8, -1, False, False), gptq(8, -1, False, False)),
    "awq": Published(AWQ, awq(32)),
    "auto-round as gptq": Published(
        {**AUTO_ROUND, "sym": True, "packing_format": "auto_round:auto_gptq"}, gptq(4, 32, True, False, g_idx=False)
    ),
    "auto-round as awq": Published({**AUTO_ROUND, "sym": False, "packing_format": "auto_round:auto_awq"}, awq(32)),
    "auto-round": Published(
        {**AUTO_ROUND, "sym": False, "packing_format": "auto_round"},
        gptq(4, 32, False, False, less_one=False, g_idx=False),
    ),
    "nvfp4": Published(compressed("nvfp4-pack-quantized", **NVFP4), nvfp4(modelopt=False)),
    "modelopt": Published(MODELOPT, nvfp4(modelopt=True)),
    "mxfp4": Published(compressed("mxfp4-pack-quantized", **MXFP4), mxfp4),
    "nf4": Published(BITSANDBYTES, bitsandbytes("nf4")),
    "nf4 twice": Published(BITSANDBYTES, bitsandbytes("nf4", twice=True)),
    "fp4": Published({**BITSANDBYTES, "bnb_4bit_quant_type": "fp4"}, bitsandbytes("fp4")),
    "llm.int8": Published({**BITSANDBYTES, "load_in_4bit": False, "load_in_8bit": True}, llm_int8),
}
MIXED = {
    "groups": Published(
        MIXED_GROUPS,
        pack_quantized(4, 32, False),
        {"layers.0.": None, "self_attn": pack_quantized(8, None, True)},
    ),
    "auto-round": Published(
        MIXED_ROUND,
        gptq(4, 32, True, False, g_idx=False),
        {
            "layers.0.mlp.down_proj": None,
            "o_proj": gptq(4, 32, True, False, g_idx=False),
            "self_attn": gptq(8, -1, True, False, g_idx=False),
            "lm_head": gptq(4, 16, True, False, g_idx=False),
        },
    ),
    "gptq": Published(MIXED_GPTQ, gptq(4, 32, True, True), {"layers.0.": None, "self_attn": gptq(8, 32, True, False)}),
    "modelopt": Published(MIXED_MODELOPT, nvfp4(modelopt=True), {"layers.0.": None, "o_proj": None, "lm_head": None}),
}
