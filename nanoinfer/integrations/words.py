"""What transformers, vLLM, SGLang and their like call things, and what to write here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nanoinfer.integrations.vllm import arguments, spellings
from nanoinfer.integrations.vllm.methods import attribute_of

ELSEWHERE = {
    name: ours
    for names, ours in (
        ("torch_dtype", "dtype"),
        ("model_path model_name_or_path", "model"),
        ("tokenizer_path", "tokenizer"),
        ("mem_fraction_static memory_ratio", "gpu_memory_utilization"),
        ("chunked_prefill_size max_prefill_tokens max_extend_tokens", "max_num_batched_tokens"),
        ("random_seed sampling_seed", "seed"),
        ("max_running_req", "max_num_seqs"),
        ("max_seq_len_override", "max_model_len"),
        ("num_page_override", "num_kvcache_blocks"),
        ("speculative_algorithm", "speculation"),
        ("speculative_draft_model_path", "draft_model"),
        ("speculative_num_draft_tokens speculative_num_steps", "max_guesses"),
        ("disable_radix_cache", "leave it out: prompts always share what is computed"),
        ("cuda_graph_max_bs cuda_graph_bs", "leave it out: graphs serve up to max_num_seqs rows"),
        ("return_logprob top_logprobs_num", "logprobs"),
        ("logprob_start_len", "prompt_logprobs_start"),
        ("json_schema", 'write SamplingParams(structured_outputs={"json": schema})'),
        ("regex", 'write SamplingParams(structured_outputs={"regex": pattern})'),
        ("ebnf", 'write SamplingParams(structured_outputs={"grammar": text})'),
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
        ("normalize_embeddings", "normalize"),
        ("conversation", "messages"),
        ("params generation_config", "sampling_params"),
        ("disable_tqdm progress_bar show_progress_bar", "use_tqdm"),
        ("max_new_tokens max_completion_tokens", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("thinking_budget max_thinking_tokens reasoning_budget", "thinking_token_budget"),
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
        ("logits_processor", "logits_processors"),
        ("stopping_criteria", "a function of SamplingParams(logits_processors=...) may leave an end of sequence alone"),
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


class Words:
    """The Vocabulary of the hints, see hints.Vocabulary. What changes nothing, or has another name, is vLLM's."""

    def take(self, taker: str, name: str, value: Any, beside: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return our arguments in place of one that we lack; None: it is unknown."""
        if name in self.changes_nothing(taker):
            arguments.check(taker, name, value, beside)
            return {}
        if (spelling := spellings.OTHER_NAMES.get(taker, {}).get(name)) is not None:
            return {} if value is None else spelling(value, beside)
        return None

    def our_values(self, taker: str, named: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of ours, with our names for values that vLLM names otherwise."""
        return {name: spellings.our_value(name, value) for name, value in named.items()} if taker == "LLM" else named

    def meant(self, taker: str, name: str) -> str | None:
        """Return our argument for another's, or a sentence that says what to do; None if there is neither."""
        return OF_ONE_CALL.get(taker, {}).get(name, ELSEWHERE.get(name))

    def reason_for(self, name: str) -> str | None:
        """Return what to know of an argument that some call of vLLM's takes; None if none does."""
        return arguments.reason_for(name)

    def changes_nothing(self, taker: str) -> Collection[str]:
        """Return the arguments that `take` accepts only at values that change no result."""
        return arguments.ARGUMENTS.get(taker, {}).keys()

    def attribute(self, owner: Any, name: str) -> Any:
        """Return what an LLM answers by vLLM's names. Raises AttributeError, with what to do instead."""
        return attribute_of(owner, name)
