"""What a checkpoint's generation_config.json says of how tokens are chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoinfer.checks import check_settings

FILE = "generation_config.json"
GENERATION_SETTINGS = (  # what SamplingParams has, too
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_new_tokens", "min_new_tokens", "stop_strings", "num_return_sequences",
)  # fmt: skip
OURS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "num_return_sequences": "n",
}
READ_ELSEWHERE = ("do_sample", "eos_token_id")
NO_CHANGE = (  # these choose no token
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config",
    "_commit_hash", "trust_remote_code",
    "max_length",  # counts the prompt as well: max_model_len bounds that
    "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty",  # of beams, which are refused
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "renormalize_logits", "remove_invalid_values",
    "use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "max_matching_ngram_size", "speculation_type",  # guesses, which change no token
)  # fmt: skip
UNSUPPORTED = {  # settings that choose tokens, and the values with which they do not
    **dict.fromkeys(("num_beams", "typical_p", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(
        ("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "top_h",
         "penalty_alpha", "assistant_ensemble_weight"), (0,),
    ),
    **dict.fromkeys(
        ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
         "exponential_decay_length_penalty", "sequence_bias", "token_healing", "watermarking_config", "max_time",
         "dola_layers", "constraints", "force_words_ids"), (),
    ),
}  # fmt: skip


def read_generation_config(folder: str) -> dict[str, Any]:
    """Read the file itself: transformers would add its own defaults, which are not the checkpoint's.

    Without a file there are no settings. Raises ValueError if it cannot be read.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except Exception as error:
        raise ValueError(f"model={folder!r}: cannot read its {FILE}: {error}") from error


def find_sampling_params(folder: str, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the file as SamplingParams names them; their values are the caller's to check.

    Raises ValueError, naming the setting, for one that is unknown or that SamplingParams does not have.
    """
    where = f"model={folder!r}: its {FILE}"
    try:
        check_settings(where, generation, (*GENERATION_SETTINGS, *READ_ELSEWHERE, *NO_CHANGE), UNSUPPORTED)
    except ValueError as error:
        raise ValueError(f"{error}; give requests SamplingParams of their own") from None
    found = {OURS.get(name, name): generation[name] for name in GENERATION_SETTINGS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
