"""Reads the configs of GPTQ's tools (GPTQModel, AutoGPTQ), of AutoAWQ and of AutoRound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.weights.formats.configs.settings import check_known, flag_in, mappings_in, names_in, wrong
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.layouts import awq, gptq
from nanoinfer.weights.formats.groups.reading import containing, pattern_of, read_bits, read_choice, read_group
from nanoinfer.weights.formats.plain.format import PLAIN

HEAD = "lm_head"
LAYERS = r"re:.*\blayers\."  # these tools leave what is outside of them as it is, but for the head if they are told
PLAIN_BITS = 16  # of matrices that AutoRound leaves as they are, or more
QUANTIZED_BY = (  # how GPTQ's tools have found the numbers, and which kernels they would use
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware", "mse", "dataset",
    "tokenizer", "batch_size", "pad_token_id", "max_input_length", "model_seqlen", "cache_block_outputs",
    "block_name_to_quantize", "module_name_preceding_first_block", "use_cuda_fp16", "use_exllama", "disable_exllama",
    "exllama_config", "model_name_or_path", "model_file_base_name", "meta",
)  # fmt: skip
OF_GPTQ = (
    "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "lm_head", "dynamic",
    "modules_in_block_to_quantize", "backend", *QUANTIZED_BY,
)  # fmt: skip
OF_AWQ = (
    "bits", "group_size", "zero_point", "version", "format", "checkpoint_format", "modules_to_not_convert",
    "sym",  # transformers writes one, but zero_point decides
    "do_fuse", "fuse_max_seq_len", "modules_to_fuse", *QUANTIZED_BY,
)  # fmt: skip
BACKENDS = (  # kernels alone
    "auto", "autoawq", "auto_trainable", "machete", "marlin", "exllama_v1", "exllama_v2", "gemm", "gemm_triton",
    "torch_awq", "torch_fused_awq", "ipex",
)  # fmt: skip
OF_AUTO_ROUND = (
    "bits", "group_size", "sym", "data_type", "packing_format", "extra_config", "block_name_to_quantize",
    "to_quant_block_names", "backend",
    "act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type",  # nanoinfer does not round activations
    "static_kv_dtype", "static_attention_dtype",  # nor keys and values, if it is not told
    "iters", "nsamples", "n_samples", "seqlen", "batch_size", "train_bs", "lr", "minmax_lr", "lr_scheduler", "sampler",
    "seed", "dataset", "gradient_accumulate_steps", "amp", "low_gpu_mem_usage", "low_cpu_mem_usage", "nblocks",
    "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_torch_compile", "enable_adam",
    "enable_alg_ext", "not_use_best_mse", "dynamic_max_gap", "scale_dtype", "truncation", "model_free", "quant_lm_head",
    "quant_nontext_module", "supported_types", "autoround_version",
)  # fmt: skip
PACKINGS = {  # AutoRound's: None: AWQ's; else: whether a zero is stored less one
    "auto_round:auto_awq": None,
    "auto_round:awq": None,
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto_round:gptqmodel": False,
    "auto_round": False,
}


def read_gptq(config: Mapping[str, Any]) -> Formats:
    """Read the config of GPTQ; raises ValueError, naming the setting, for what is not supported.

    "dynamic" has settings of modules by regular expressions. Those behind "-:" are not quantized. Of others, those that
    "modules_in_block_to_quantize" lists are, or all.
    """
    rules: list[tuple[tuple[str, ...], Format]] = []
    for entry, own in mappings_in(config, "dynamic").items():
        pattern = (f"re:{entry.removeprefix('+:').removeprefix('-:')}",)
        rules.append((pattern, PLAIN if entry.startswith("-:") else _gptq({**config, **own})))
    others = _gptq(config)
    rules.append(((HEAD,), others if flag_in(config, "lm_head", False) else PLAIN))
    return Formats((*rules, (_listed(config, "modules_in_block_to_quantize") or (LAYERS,), others)))


def _gptq(config: Mapping[str, Any]) -> Format:
    check_known(config, OF_GPTQ, {"pack_dtype": ("int32",)})
    form = "checkpoint_format" if config.get("checkpoint_format") else "format"  # older tools know only the first
    version = read_choice(config, form, "gptq", ("gptq", "gptq_v2"))
    bits, group, symmetric = read_bits(config), read_group(config), flag_in(config, "sym", True)
    ordered = flag_in(config, "desc_act", False) and group != 0
    return GroupFormat("GPTQ", gptq(bits, group, symmetric, ordered, less_one=version == "gptq"))


def _listed(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the names in lists of a list, which are quantized together."""
    value = config.get(name) or []
    names = value if isinstance(value, list) else [value]
    parts = [part for some in names for part in (some if isinstance(some, list) else [some])]
    if not all(isinstance(part, str) for part in parts):
        raise wrong(name, value, "a list of lists of names")
    return tuple(parts)


def read_awq(config: Mapping[str, Any]) -> Formats:
    """Read the config of AutoAWQ; raises ValueError, naming the setting, for what is not supported."""
    check_known(config, OF_AWQ, {"pack_dtype": ("int32",), "backend": BACKENDS})
    read_bits(config, (4,))
    for name in ("version", "format", "checkpoint_format"):  # by the tool and its version
        if config.get(name) is not None:
            read_choice(config, name, "gemm", ("gemm", "GEMM"))
    ignored = HEAD, *map(containing, names_in(config, "modules_to_not_convert"))
    layout = awq(read_group(config), symmetric=not flag_in(config, "zero_point", True))
    return Formats(((ignored, PLAIN), ((LAYERS,), GroupFormat("AWQ", layout))))


def read_auto_round(config: Mapping[str, Any]) -> Formats:
    """Read the config of AutoRound; raises ValueError, naming the setting, for what is not supported.

    "extra_config" has settings of modules by their names, or by regular expressions; of others, those in blocks that
    are named are quantized.
    """
    extra = mappings_in(config, "extra_config").items()
    rules = [((pattern_of(entry),), _auto_round({**config, **own})) for entry, own in extra]
    return Formats((*rules, ((HEAD,), PLAIN), (_blocks(config), _auto_round(config))))


def _blocks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns of the blocks that AutoRound has quantized: all layers, if none are named."""
    for name in ("block_name_to_quantize", "to_quant_block_names"):
        value = config.get(name)
        blocks = tuple(value.split(",")) if isinstance(value, str) else names_in(config, name)
        if blocks:
            return blocks
    return (LAYERS,)


def _auto_round(config: Mapping[str, Any]) -> Format:
    check_known(config, OF_AUTO_ROUND)
    if type(config.get("bits")) is int and config["bits"] >= PLAIN_BITS:
        return PLAIN
    read_choice(config, "data_type", "int", ("int",))
    packing = PACKINGS[read_choice(config, "packing_format", "auto_round:auto_gptq", PACKINGS)]
    bits, group = read_bits(config, (4,) if packing is None else (4, 8)), read_group(config)
    symmetric = flag_in(config, "sym", True)
    layout = awq(group, symmetric) if packing is None else gptq(bits, group, symmetric, False, less_one=packing)
    return GroupFormat("AutoRound", layout)
