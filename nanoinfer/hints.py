"""Hints: the error for an unknown argument says what to write here instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

from nanoinfer.checks import short
from nanoinfer.vllm_arguments import ARGUMENTS, reason_for
from nanoinfer.vllm_spellings import OTHER_NAMES, Spelling

ELSEWHERE = {
    name: ours
    for names, ours in (
        ("torch_dtype", "dtype"),
        ("device_map", "device"),
        ("attn_implementation", "attention_backend"),
        ("tp_size num_gpus", "tensor_parallel_size"),
        ("dp_size num_replicas", "data_parallel_size"),
        ("max_seq_len max_seq_length context_length", "max_model_len"),
        ("max_batch_size max_running_requests", "max_num_seqs"),
        ("page_size", "kvcache_block_size"),
        ("disable_cuda_graph", "enforce_eager"),
        ("inputs input_ids text_inputs prompt_token_ids sentences", "prompts"),
        ("truncate_dim pooling_params", "dimensions"),
        ("normalize_embeddings", "leave it out: the checkpoint's modules.json says whether embeddings have length 1"),
        ("conversation", "messages"),
        ("params generation_config", "sampling_params"),
        ("disable_tqdm progress_bar show_progress_bar", "use_tqdm"),
        ("max_new_tokens max_completion_tokens", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("num_return_sequences num_samples", "n"),
        ("repeat_penalty", "repetition_penalty"),
        ("stop_strings stop_sequences stop_words", "stop"),
        ("eos_token_id", "stop_token_ids"),
        ("top_logprobs", "logprobs"),
        ("return_routed_experts", "routed_experts"),
        ("do_sample", "a temperature above 0 samples; SamplingParams(temperature=0) takes the most likely token"),
        ("max_length min_length", "SamplingParams(max_tokens=..., min_tokens=...) counts generated tokens alone"),
        ("num_beams", "beam_width"),
        ("bad_words_ids suppress_tokens", "write SamplingParams(logit_bias={token id: -100})"),
        ("response_format", "structured_outputs"),
        ("logits_processor stopping_criteria", "no code of yours runs between two tokens"),
        ("streamer stream", "llm.stream(...) yields the text as it comes"),
        ("attention_mask padding pad_token_id", "leave it out: prompts are not padded"),
        ("return_tensors return_dict tokenize", "leave it out: outputs are a list of dictionaries"),
        ("truncation", "a prompt that is too long is refused: cut it before"),
        ("load_in_8bit load_in_4bit", "quantization"),
        ("use_cache", "leave it out: it is always so"),
        ("limit_mm_per_prompt", "limit_images_per_prompt"),
        ("allowed_local_media_path", "image_folder"),
        ("language_model_only", "images"),
        ("image multi_modal_data", 'write {"prompt": text, "multi_modal_data": {"image": image}} as the prompt'),
        ("video videos", 'write {"prompt": text, "multi_modal_data": {"video": frames}} as the prompt'),
        ("enable_lora max_loras_per_batch", "max_adapters"),
        ("max_lora_rank", "max_adapter_rank"),
        ("adapter_name lora_name", "adapter"),
        ("lora_path lora_paths lora_modules", "llm.load_adapter(name, folder); SamplingParams(adapter=name) names it"),
        ("cache_dir token", "download the checkpoint, and pass its folder as model"),
    )
    for name in names.split()
}
"""Maps an argument of transformers, vLLM and their like to our argument, or to a sentence that says what to do."""

OF_ONE_CALL = {
    "load_adapter": {
        "adapter_name": "name",
        "lora_name": "name",
        **dict.fromkeys(("model_id", "peft_model_id", "lora_path", "adapter_path", "path", "tensors"), "source"),
        "peft_config": "config",
    },
    "unload_adapter": {"adapter_name": "name", "lora_name": "name"},
}
"""Maps a call to arguments that stand for others of ours there than elsewhere."""

SURE, LIKELY = 0.8, 0.6  # how much alike two names are, from 0 to 1, as difflib measures it

_takers: dict[str, list[str]] = {}  # our argument -> the calls that take it

T = TypeVar("T", bound=Callable[..., Any])


def hints_for(taker: str, its_own: Collection[str] | None = None) -> Callable[[T], T]:
    """Decorate a function or a class, so that it refuses unknown arguments by a ValueError with a hint.

    taker: the name by which users call the function or the class
    its_own: the arguments for which other calls point to it; None: all

    An argument of vLLM's that is at a value that changes nothing is left out, and one that we name otherwise gets our
    name. A function that passes other arguments on refuses only those that are clearly meant for us.
    """
    others, renamed = ARGUMENTS.get(taker, {}), OTHER_NAMES.get(taker, {})

    def decorate(call: T) -> T:
        function = cast(Any, call).__init__ if isinstance(call, type) else call
        parameters = inspect.signature(function).parameters.values()
        own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]  # no user passes these
        known = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
        taken = {*own, *known}
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in known if its_own is None else its_own:
            _takers.setdefault(name, []).append(taker)

        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            foreign = [name for name in named if name not in taken]
            beside = {**dict(zip(["self", *known], args, strict=False)), **named} if foreign else {}
            for name in foreign:
                if name in others:
                    others[name].check(name, named.pop(name), beside)
                elif name in renamed:
                    _rename(name, renamed[name], named, beside)
                elif hint := _hint(taker, name, known, is_open):
                    raise ValueError(f"unknown argument {name!r}: {hint}")
            return function(*args, **named)

        if not isinstance(call, type):
            return cast(T, checked)
        cast(Any, call).__init__ = checked
        return call

    return decorate


def _rename(name: str, ours: Spelling, named: dict[str, Any], beside: Mapping[str, Any]) -> None:
    """Put our arguments in place of one; raises ValueError if the caller has given them, too.

    beside: all arguments of the call
    """
    value = named.pop(name)
    for own, meant in ({} if value is None else ours(value, beside)).items():
        if named.get(own) is not None:
            raise ValueError(f"{name}={short(value)}: must be left out beside {own}={short(named[own])}")
        named[own] = meant


def _hint(taker: str, name: str, known: list[str], is_open: bool) -> str | None:
    """Say what to write instead of an unknown argument; None if it may be one to pass on."""
    elsewhere = ELSEWHERE | OF_ONE_CALL.get(taker, {})
    if not is_open and name not in elsewhere and (reason := reason_for(name)):
        return reason
    ours = elsewhere.get(name, name)
    if near := difflib.get_close_matches(ours, known, n=1, cutoff=SURE):
        return f"did you mean {near[0]!r}?"
    if ours in _takers:
        return f"write {' or '.join(f'{taker}({ours}=...)' for taker in _takers[ours])}"
    if name in elsewhere:
        return ours
    if is_open:
        return None
    return nearest(name, known)


def nearest(name: str, known: Sequence[str]) -> str:
    """Say which known name may be meant by an unknown one, or which are known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=LIKELY)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
