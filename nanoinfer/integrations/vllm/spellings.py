"""vLLM's names for options of LLM, and for their values, where ours are others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nanoinfer.checks import as_int, check_flag, check_int, check_number, short

Options = Mapping[str, Any]
Spelling = Callable[[Any, Options], Options]
"""What makes our arguments of one that is not None. It gets all arguments of the call, too."""

POOLING, POOLING_TASKS = "pooling", ("embed", "embedding", "classify", "score", "reward")
DRAFT_MODEL = "draft_model"  # a method of its speculative_config
# Some versions of vLLM name the model, too.
HEADS = "mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "mimo_v2_mtp", "qwen3_next_mtp", "qwen3_5_mtp"
THINK = ("<think>", "</think>")
PARSERS: dict[str, tuple[str, str] | None] = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45", "glm45", "glm47", "holo2"), THINK),
    **dict.fromkeys(("hunyuan_a13b", "kimi_k2", "mimo", "minimax_m2", "minimax_m2_append_think"), THINK),
    **dict.fromkeys(("nemotron_v3", "olmo3", "poolside_v1", "qwen3", "step3", "step3p5"), THINK),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gemma4": None,
    "openai_gptoss": None,
}
"""Its parsers of reasoning -> the markers of their families; None: those that the model's tokenizer knows."""
SAMPLING = "do_sample_frames"  # of a processor's arguments, for videos, whose frames are all taken


def _without(arguments: Any, *names: str) -> Any:
    """Return a mapping without some names; what is none stays as it is."""
    if not isinstance(arguments, Mapping):
        return arguments
    return {name: value for name, value in arguments.items() if name not in names}


def _limit_media(limits: Any, beside: Options) -> Options:
    """Return our options for vLLM's limits: a number for each medium, or a mapping that has it as "count".

    Limits of media other than images and videos are not looked at: a prompt with one is refused.
    """
    name = "limit_mm_per_prompt"
    if not isinstance(limits, Mapping):
        raise ValueError(f"{name}={short(limits)}: must be a mapping, such as {{'image': 4, 'video': 1}}")
    images, videos = (_count(limits.get(medium)) for medium in ("image", "video"))
    if as_int(images) == 0 and not videos:
        return {"images": False}
    return {"limit_images_per_prompt": images, "limit_videos_per_prompt": videos}


def _count(limit: Any) -> Any:
    return limit.get("count") if isinstance(limit, Mapping) else limit


def _without_media(value: Any, beside: Options) -> Options:
    flag = check_flag("language_model_only", value)
    return {"images": False} if flag else {}


def _runner_of(value: Any, beside: Options) -> Options:
    """Return our option for a task, as vLLM called it before it had runners."""
    return {"runner": POOLING if isinstance(value, str) and value in POOLING_TASKS else value}


def _count_adapters(value: Any, beside: Options) -> Options:
    """Return how many adapters vLLM's options let in: its max_loras, which is 1 if nobody says it."""
    if not check_flag("enable_lora", value):
        return {}
    count = beside.get("max_loras")
    return {"max_adapters": 1 if count is None else check_int("max_loras", count, 1)}


def _offload(value: Any, beside: Options) -> Options:
    """Return our option for vLLM's GiB of each GPU's weights."""
    ranks = as_int(beside.get("tensor_parallel_size")) or 1
    return {"weight_offload_gib": ranks * check_number("cpu_offload_gb", value, 0, math.inf, "of GiB, at least 0")}


def _speculate(config: Any, beside: Options) -> Options:
    """Return our options for vLLM's speculative_config. Other settings of its drafters change no result."""
    name = "speculative_config"
    if not isinstance(config, Mapping):
        raise ValueError(f"{name}={short(config)}: must be a mapping, such as {{'method': 'suffix'}}")
    if not config:
        return {}
    model, count = config.get("model"), config.get("num_speculative_tokens")
    method = config.get("method", None if model is None else "ngram" if model == "[ngram]" else DRAFT_MODEL)
    if method not in ("ngram", "suffix", DRAFT_MODEL, *HEADS):
        raise ValueError(
            f"{name}={short(config)}: its method must be 'ngram', 'suffix', 'mtp' or {DRAFT_MODEL!r}: nanoinfer guesses"
            " from earlier text, by the model's own head, or by a small model; see LLM(speculation=...)"
        )
    ours = {"speculation": "draft", "draft_model": model} if method == DRAFT_MODEL else {"speculation": "suffix"}
    if method in HEADS:
        ours = {"speculation": "mtp"}
    return ours | ({} if count is None else {"max_guesses": count})


def _markers_of(parser: Any, beside: Options) -> Options:
    """Return our option for one of vLLM's parsers. That of a family whose markers are no pair needs none."""
    if isinstance(parser, str) and (not parser or parser in PARSERS):
        markers = PARSERS.get(parser)
        return {} if markers is None else {"reasoning_markers": markers}
    raise ValueError(
        f"reasoning_parser={short(parser)}: must be one of {', '.join(PARSERS)}; LLM(reasoning_markers=(opening,"
        " closing)) takes any markers"
    )


def _reason(config: Any, beside: Options) -> Options:
    """Return our option for vLLM's reasoning_config, a mapping or an object: two texts, or a parser."""
    names = "reasoning_start_str", "reasoning_end_str", "reasoning_parser"
    known = config if isinstance(config, Mapping) else {name: getattr(config, name, None) for name in names}
    opening, closing, parser = (known.get(name) or "" for name in names)
    if opening and closing:
        return {"reasoning_markers": (opening, closing)}
    if opening or closing or known.keys() - names:
        raise ValueError(f"reasoning_config={short(config)}: must have {names[0]} and {names[1]}, or {names[2]}")
    return _markers_of(parser, beside)


OTHER_NAMES: dict[str, dict[str, Spelling]] = {
    "LLM": {
        "limit_mm_per_prompt": _limit_media,
        "mm_processor_kwargs": lambda value, _: {"image_options": _without(value, SAMPLING)},
        "allowed_local_media_path": lambda value, _: (
            {} if isinstance(value, str) and not value else {"image_folder": value}
        ),
        "cpu_offload_gb": _offload,
        "language_model_only": _without_media,
        "task": _runner_of,
        "enable_lora": _count_adapters,
        "speculative_config": _speculate,
        "reasoning_parser": _markers_of,
        "reasoning_config": _reason,
        "max_lora_rank": lambda value, _: {"max_adapter_rank": value},
    },
    "LoRARequest": {"lora_local_path": lambda value, _: {"lora_path": value}},
}
"""Who takes an argument of vLLM's that we name otherwise -> its name -> what makes our arguments of it."""

SAME_VALUES: dict[str, Mapping[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "lm_head_dtype": {"float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "attention_backend": {"TRITON_ATTN": "triton", "FLASH_ATTN": "flash_attn"},
    "max_model_len": {"auto": None, -1: None},
    "quantization": {"bitsandbytes": "nf4"},  # which vLLM rounds to as it loads
    "load_format": dict.fromkeys(
        ("auto", "hf", "fastsafetensors", "instanttensor", "runai_streamer", "bitsandbytes"), "safetensors"
    ),  # ways to read the same files
}
"""Options of LLM that vLLM has too -> its names for values -> ours."""


def our_value(option: str, value: Any) -> Any:
    """Return the value of an option of LLM, by our name where vLLM has another."""
    known = SAME_VALUES.get(option, {})
    return known.get(value if isinstance(value, str) else as_int(value), value)
