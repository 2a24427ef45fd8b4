"""vLLM's arguments that have no counterpart here: at which values they change nothing, and what to write for others.

A value changes nothing if callers get the same results and can do the same things. It may be about speed, logs or
servers, or name what nanoinfer does anyway. None always means that an argument is not given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from nanoinfer.checks import short
from nanoinfer.integrations.vllm.values import (
    ANY,
    BEAM_WIDTH,
    BEST_OF,
    DEFAULT,
    EMPTY,
    EQUAL_PRIORITIES,
    FALSE,
    FLAG,
    NONE,
    NUMBER,
    POSITIVE,
    STARTS,
    TRUE,
    WHOLE_OUTPUT,
    Arguments,
    Values,
    only,
)

log = logging.getLogger("nanoinfer")


class Argument(NamedTuple):
    """An argument of vLLM's; reason: why other values cannot be had, and what to use instead."""

    same: Values
    reason: str

    def check(self, name: str, value: Any, beside: Arguments) -> None:
        """Raise ValueError for a value that would change results; beside: all arguments of the call.

        What would change speed alone, or what computes the same, is taken with one warning.
        """
        if value is None or self.same.has(value, beside):
            return
        if name in OF_SPEED and OF_SPEED[name].has(value, beside):
            _warn_once(f"{name}={short(value)} is left out: {self.reason}")
            return
        raise ValueError(f"{name}={short(value)}: must be {self.same.text}: {self.reason}")


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


BACKENDS = {"backend", "disable_fallback"}
OF_SPEED = {
    "enable_prefix_caching": FALSE,
    "guided_decoding_backend": Values("", lambda value, _: isinstance(value, str)),
    "structured_outputs_config": Values("", lambda value, _: isinstance(value, Mapping) and value.keys() <= BACKENDS),
}
"""Arguments of LLM at values that change how fast it is, or by which library it gets the same texts."""

NO_CODE = "no code of yours runs between two tokens; see SamplingParams(logit_bias=..., structured_outputs=...)"
OF_FILES = "an adapter's own files say what it has"
REFUSED_IN_ADAPTERS = "merge such an adapter into its base with PEFT's merge_and_unload()"
IMAGES_ALONE = "of other media than texts there are images and frames of videos; see LLM(images=...)"
IMAGE_SIZES = "LLM(image_options=...) says how large images become"
OWN_TOWERS = "towers are those of transformers"
NOT_FETCHED = "nothing is fetched; see LLM(image_folder=...)"
SNAPSHOTS = "snapshots of states are kept where prompts part, and now and then"
NO_CACHE_SWITCH = "prompts always share what is computed; llm.reset_prefix_cache() forgets it"
NO_OFFLOADING = "weights stay on the device; LLM(tensor_parallel_size=...) divides them"
IN_ORDER = "requests begin in the order in which they come"
OWN_KERNELS = "the kernels are nanoinfer's own; see LLM(attention_backend=...)"
OWN_TOKENIZATION = "pass prompts of token ids to tokenize them yourself"
STRUCTURED = "write SamplingParams(structured_outputs=...)"
ONE_MACHINE = "an LLM runs on one machine; nanoinfer.integrations.ray_data uses several"
DIVIDED = "LLM(tensor_parallel_size=..., data_parallel_size=...) alone divide the work"
BLOCKS = "write LLM(num_kvcache_blocks=...)"
CUT_BEFORE = "a prompt that is too long is refused: cut it before"
BEAMS = "SamplingParams has no beams: call llm.beam_search"
READS = "a checkpoint's files say how it is read; LLM(runner=...) says whether it only reads"
NOT_LOGGED = "the log tells of no requests"
SPECULATION = "write LLM(speculation=..., max_guesses=..., draft_model=...)"
NOT_HERE = "nothing here depends on it"

Line = tuple[str, Values, str]

FOR_LLM: tuple[Line, ...] = (
    # The model and its files
    ("convert", only("auto", "none", "embed"), READS),
    ("pooler_config override_pooler_config", DEFAULT, READS),
    ("model_impl", only("auto", "vllm"), "the models are nanoinfer's own; the README lists them"),
    ("config_format", only("auto", "hf"), "a model is a folder with config.json and *.safetensors"),
    ("model_weights hf_config_path", EMPTY, "config.json and weights lie in one folder; pass it as model"),
    ("hf_overrides model_class_overrides rope_scaling rope_theta", EMPTY, "change the folder's config.json"),
    ("model_loader_extra_config", EMPTY, "files are read in one way"),
    ("safetensors_load_strategy", only("lazy", "eager", "prefetch"), "weights are read from *.safetensors"),
    ("safetensors_prefetch_num_threads safetensors_prefetch_block_size", NUMBER, "files are read in one way"),
    ("ignore_patterns pt_load_map_location max_parallel_loading_workers", ANY, "weights are read from *.safetensors"),
    ("use_tqdm_on_load", FLAG, "write LLM(use_tqdm=...), which says whether a start shows bars"),
    ("code_revision", ANY, "no remote code runs here"),
    ("download_dir", NONE, "set the environment's HF_HUB_CACHE, or pass a folder as model"),
    ("hf_token", TRUE, "the Hub's client takes the token of the environment's HF_TOKEN, or of `hf auth login`"),
    ("tokenizer_mode", only("auto", "hf"), "tokenizers are those of transformers, fast where there is a fast one"),
    ("skip_tokenizer_init", FALSE, "a tokenizer is used if there is one; write SamplingParams(detokenize=False)"),
    ("tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config", ANY, "one process tokenizes"),
    ("chat_template", NONE, "pass it to llm.chat as chat_template"),
    ("enable_prompt_embeds", FALSE, "prompts are texts or token ids"),
    ("generation_config", only("auto", "vllm"), "see llm.default_sampling_params(), or pass SamplingParams"),
    ("override_generation_config", EMPTY, "pass SamplingParams, or change generation_config.json"),
    ("quantization_config", EMPTY, "config.json tells how a checkpoint is quantized; see LLM(quantization=...)"),
    ("quantization_param_path", NONE, "the checkpoint's own scales count; see LLM(kv_cache_dtype=...)"),
    ("allow_deprecated_quantization", FLAG, NOT_HERE),
    # The KV cache and memory
    ("block_size", POSITIVE, "a block's size changes no result; LLM(kvcache_block_size=...) sets ours"),
    ("enable_prefix_caching", TRUE, NO_CACHE_SWITCH),
    ("prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit", ANY, "hashes only find blocks"),
    ("kv_cache_memory_bytes num_gpu_blocks_override", NONE, BLOCKS),
    ("kv_cache_dtype_skip_layers", EMPTY, "all layers' caches have LLM(kv_cache_dtype=...)"),
    ("calculate_kv_scales", FALSE, "the checkpoint's own scales count; see LLM(kv_cache_dtype=...)"),
    ("disable_sliding_window", FLAG, "a model's windows are kept, and sequences may be longer than they are"),
    ("disable_hybrid_kv_cache_manager kv_sharing_fast_prefill swa_bounded_replay", FLAG, NOT_HERE),
    ("swap_space", NUMBER, "LLM(kv_offload_gib=...) says how much host memory keeps what blocks held"),
    ("preemption_mode watermark", ANY, "a sequence that loses its blocks is computed again"),
    ("kv_offloading_size", only(0), "write LLM(kv_offload_gib=...)"),
    ("cpu_offload_gb offload_group_size", only(0), NO_OFFLOADING),
    ("cpu_offload_params offload_params", EMPTY, NO_OFFLOADING),
    ("offload_backend offload_num_in_group offload_prefetch_step kv_offloading_backend", ANY, NO_OFFLOADING),
    ("kv_transfer_config kv_events_config ec_transfer_config", EMPTY, "no other engine takes part in a prompt"),
    ("ec_manager_config engram_config", DEFAULT, "no other engine takes part in a prompt"),
    ("enable_sleep_mode enable_cumem_allocator sleep_mode_offload_cudagraph", FLAG, "every LLM can sleep"),
    ("sleep_mode_backend enable_nccl_comm_suspend", ANY, "every LLM can sleep"),
    ("sleep_preserve_parameter_names", EMPTY, "llm.sleep keeps all weights or none; see llm.update_weights"),
    # Steps
    ("enable_chunked_prefill long_prefill_token_threshold_adaptive", FLAG, "chunks of prompts change no result"),
    ("long_prefill_token_threshold", NUMBER, "chunks of prompts change no result"),
    ("max_num_partial_prefills max_long_partial_prefills", NUMBER, "chunks of prompts change no result"),
    ("scheduler_reserve_full_isl prefill_schedule_interval scheduler_delay_factor", ANY, NOT_HERE),
    ("max_num_scheduled_tokens", NONE, "write LLM(max_num_batched_tokens=...)"),
    ("max_num_active_seqs", NONE, "write LLM(max_num_seqs=...)"),
    ("max_num_queued_reqs max_num_queued_tokens", NONE, "a call's prompts all wait in one queue, which has no limit"),
    ("num_scheduler_steps", POSITIVE, "the host is always a step ahead"),
    ("num_lookahead_slots", only(0), SPECULATION),
    ("async_scheduling disable_async_output_proc multi_step_stream_outputs", FLAG, "the host is always a step ahead"),
    ("use_v2_block_manager", FLAG, NOT_HERE),
    ("scheduling_policy", only("fcfs"), IN_ORDER),
    ("scheduler_cls", NONE, IN_ORDER),
    ("stream_interval", only(1), "llm.stream yields tokens as they come"),
    ("tokens_only", FALSE, "write SamplingParams(detokenize=False)"),
    # Kernels and graphs
    ("max_seq_len_to_capture max_context_len_to_capture", NUMBER, "a graph replays sequences of any length"),
    ("cudagraph_capture_sizes cuda_graph_sizes max_cudagraph_capture_size", ANY, "graphs change no result"),
    ("compilation_config optimization_level performance_mode", ANY, "compiling changes no result"),
    ("attention_config kernel_config ir_op_priority", DEFAULT, OWN_KERNELS),
    ("moe_backend linear_backend sparse_indexer_topk_backend", only("auto"), OWN_KERNELS),
    ("enable_flashinfer_autotune disable_cascade_attn", FLAG, OWN_KERNELS),
    ("monokernel use_fp64_gumbel", FALSE, OWN_KERNELS),
    ("gdn_prefill_backend kda_prefill_backend kda_decode_backend", ANY, OWN_KERNELS),
    ("mamba_cache_dtype mamba_ssm_cache_dtype", only("auto", "float32"), "LLM(state_dtype=...) is that of states"),
    ("mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint", ANY, SNAPSHOTS),
    ("mamba_config mamba_backend mamba_ssu_algorithm", ANY, "no Mamba is here"),
    ("mamba_cache_philox_rounds replayssm_buffer_len", ANY, "no Mamba is here"),
    ("use_replayssm", FLAG, "no Mamba is here"),
    ("enable_mamba_cache_stochastic_rounding", FLAG, "no Mamba is here"),
    # Ranks and machines
    ("distributed_executor_backend", STARTS, "an LLM starts its ranks itself, or has those of tensor_parallel_group"),
    ("worker_use_ray engine_use_ray disable_custom_all_reduce enable_shm_tensor_arena", FLAG, "ranks are processes"),
    ("ray_workers_use_nsight", FALSE, "ranks are processes that the LLM starts"),
    ("pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size", only(1), DIVIDED),
    ("dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size", ANY, DIVIDED),
    ("nnodes", only(1), ONE_MACHINE),
    ("node_rank", only(0), ONE_MACHINE),
    ("master_addr master_port", ANY, ONE_MACHINE),
    ("distributed_timeout_seconds cpu_distributed_timeout_seconds", NONE, "write LLM(worker_timeout=...)"),
    ("watchdog_config fault_tolerance_config", DEFAULT, "write LLM(worker_timeout=..., restart_replicas=True)"),
    ("enable_fault_tolerance", FALSE, "write LLM(restart_replicas=True)"),
    ("device_ids", EMPTY, "the environment's CUDA_VISIBLE_DEVICES chooses GPUs"),
    ("numa_bind", FALSE, "the operating system places processes"),
    ("numa_bind_nodes numa_bind_cpus", EMPTY, "the operating system places processes"),
    ("data_parallel_rank data_parallel_start_rank", only(0), "an LLM starts all of its replicas itself"),
    ("data_parallel_size_local", NONE, "an LLM starts all of its replicas itself; write LLM(data_parallel_size=...)"),
    ("data_parallel_address data_parallel_rpc_port", NONE, "an LLM starts all of its replicas itself"),
    ("data_parallel_hybrid_lb data_parallel_external_lb", FALSE, "an LLM starts all of its replicas itself"),
    ("data_parallel_multi_port_external_lb", FALSE, "an LLM starts all of its replicas itself"),
    ("enable_expert_parallel enable_ep_weight_filter enable_eplb", FLAG, "ranks share the work of all experts"),
    ("num_redundant_experts eplb_window_size eplb_step_interval eplb_log_balancedness", ANY, "ranks share all experts"),
    ("eplb_config expert_placement_strategy all2all_backend", ANY, "ranks share the work of all experts"),
    ("enable_elastic_ep", FALSE, "the number of ranks is fixed"),
    ("elastic_ep_max_dp_size", ANY, "the number of ranks is fixed"),
    ("enable_dbo enable_hc_sp enable_batch_sharded_sampling disable_nccl_for_dp_synchronization", FLAG, NOT_HERE),
    ("ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold dp_sync_interval", NUMBER, NOT_HERE),
    ("worker_cls", only("auto"), "no code of yours runs in ranks"),
    ("worker_extension_cls", EMPTY, "no code of yours runs in ranks; llm.update_weights writes weights"),
    ("weight_transfer_config", DEFAULT, "llm.update_weights takes a trainer's tensors"),
    # Adapters
    ("max_loras", POSITIVE, "write LLM(max_adapters=...), or enable_lora=True beside it"),
    ("max_cpu_loras", NUMBER, "adapters that are not loaded stay in their files"),
    ("lora_dtype", only("auto"), "adapters have the model's dtype: see LLM(dtype=...)"),
    ("lora_extra_vocab_size max_lora_cls_labels", ANY, "adapters add no tokens"),
    ("lora_target_modules", EMPTY, OF_FILES),
    ("enable_mixed_moe_lora_format", FLAG, OF_FILES),
    ("fully_sharded_loras", FLAG, "ranks divide adapters as they divide the model"),
    ("specialize_active_lora", FLAG, "graphs change no result"),
    ("enable_lora_bias enable_tower_connector_lora enable_moe_shared_loras", FALSE, REFUSED_IN_ADAPTERS),
    ("long_lora_scaling_factors qlora_adapter_name_or_path", EMPTY, REFUSED_IN_ADAPTERS),
    ("default_mm_loras", EMPTY, "each request names its adapter: see SamplingParams(adapter=...)"),
    # What there is not
    ("enable_prompt_adapter", FALSE, "there are no prompt adapters here"),
    ("max_prompt_adapters max_prompt_adapter_token", ANY, "there are no prompt adapters here"),
    ("speculative_model spec_method spec_model", EMPTY, SPECULATION),
    ("spec_tokens num_speculative_tokens", only(0), SPECULATION),
    ("watermark_config", EMPTY, "there is no watermark here"),
    ("diffusion_config", EMPTY, "models generate one token after another"),
    ("logits_processors", EMPTY, NO_CODE),
    ("structured_outputs_config", DEFAULT, "llguidance alone reads grammars; leave it out"),
    ("guided_decoding_backend", only("auto", "guidance"), "llguidance alone reads grammars; leave it out"),
    ("guided_decoding_disable_fallback", FLAG, "llguidance alone reads grammars"),
    ("guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties", FALSE, STRUCTURED),
    ("reasoning_parser reasoning_parser_plugin", EMPTY, "texts are what the model writes"),
    ("reasoning_config", DEFAULT, "texts are what the model writes"),
    ("enable_reasoning", FALSE, "texts are what the model writes"),
    ("io_processor_plugin additional_config", EMPTY, "there are no plugins here"),
    ("enable_return_routed_experts", FALSE, "write LLM(routed_experts=True)"),
    ("aux_output_config", DEFAULT, "see LLM(routed_experts=...)"),
    ("return_sampling_mask", FALSE, "SamplingParams(kept_tokens=True) tells how many tokens could be drawn"),
    ("enable_trace_replay", FALSE, "llm.score tells how likely given tokens are"),
    # Media
    ("allowed_media_domains", ANY, NOT_FETCHED),
    ("media_io_kwargs video_pruning_rate video_pruning_method", EMPTY, IMAGES_ALONE),
    ("interleave_mm_strings", FLAG, "a template gets each image where its message has it"),
    ("skip_mm_profiling disable_chunked_mm_input disable_mm_preprocessor_cache", FLAG, NOT_HERE),
    (
        "mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm",
        ANY,
        "equal images are known by their pixels",
    ),
    ("mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_ipc_gpu_memory_gb renderer_num_workers", ANY, NOT_HERE),
    ("mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path", ANY, OWN_TOWERS),
    ("mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin", ANY, OWN_TOWERS),
    ("mm_processor_device mm_device_do_normalize", ANY, "the CPU processes images"),
    ("enable_mm_embeds", FALSE, "images are given as they are, not as embeddings"),
    ("mm_encoder_only", FALSE, IMAGES_ALONE),
    # Logs and servers
    ("max_logprobs", ANY, "SamplingParams(logprobs=...) has no limit but the vocabulary"),
    ("disable_log_stats disable_log_requests enable_log_requests aggregate_engine_logging", FLAG, NOT_LOGGED),
    ("_api_process_count", only(1), "an LLM is used by one process"),
    ("_api_process_rank", only(0), "an LLM is used by one process"),
    ("served_model_name max_log_len show_hidden_metrics_for_version shutdown_timeout", ANY, "there is no server here"),
    ("jit_monitor_mode jit_monitor_verbose fail_on_environ_validation", ANY, NOT_HERE),
    ("log_level log_config_file", EMPTY, 'set up the logger: logging.getLogger("nanoinfer")'),
    ("logging_config", DEFAULT, 'set up the logger: logging.getLogger("nanoinfer")'),
    ("otlp_traces_endpoint collect_detailed_traces", EMPTY, "use torch.profiler around a call"),
    ("profiler_config", DEFAULT, "use torch.profiler around a call"),
    ("enable_layerwise_nvtx_tracing", FALSE, "use torch.profiler around a call"),
    ("per_request_spec_decode_metrics", only("none"), "each sample tells num_proposed_tokens and num_accepted_tokens"),
    ("kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details", FALSE, "see llm.memory"),
    ("enable_mm_processor_stats", FALSE, "see llm.stats()"),
    ("kv_cache_metrics_sample custom_histogram_buckets", ANY, "there is no server here"),
)

FOR_SAMPLING_PARAMS: tuple[Line, ...] = (
    ("best_of", BEST_OF, "SamplingParams(n=...) gives all samples: choose among them"),
    ("use_beam_search early_stopping", FALSE, BEAMS),
    ("length_penalty", only(1), BEAMS),
    ("logits_processors", EMPTY, NO_CODE),
    ("guided_decoding", EMPTY, STRUCTURED),
    ("spaces_between_special_tokens", FLAG, "the tokenizer alone says where spaces stand"),
    ("output_kind", WHOLE_OUTPUT, "llm.stream yields what is new"),
    ("stream_interval", only(1), "llm.stream yields tokens as they come"),
    ("truncate_prompt_tokens", NONE, CUT_BEFORE),
    ("extra_args", EMPTY, "there are no plugins here"),
    ("flat_logprobs", FALSE, "log-probabilities are a list with a mapping for each token"),
    ("logprob_token_ids prompt_logprob_token_ids", EMPTY, "SamplingParams(logprobs=...) gives the most likely tokens"),
    ("prompt_logprob_start", only(0), "write SamplingParams(prompt_logprobs_start=...)"),
    ("skip_clone", FLAG, "each call copies settings"),
    ("output_text_buffer_length", NUMBER, "llm.stream holds back what may begin a stop string"),
    ("thinking_token_budget", NONE, "write SamplingParams(max_tokens=...)"),
    ("repetition_detection", EMPTY, "write SamplingParams(repetition_penalty=...)"),
    ("watermarking", FALSE, "there is no watermark here"),
    ("skip_reading_prefix_cache", FALSE, NO_CACHE_SWITCH),
    ("trace_decode_token_ids", EMPTY, "llm.score tells how likely given tokens are"),
    ("routed_experts_prompt_start", only(0), "outputs have the experts of all tokens; see LLM(routed_experts=...)"),
)

FOR_BEAM_SEARCH_PARAMS: tuple[Line, ...] = (
    ("num_return_sequences", BEAM_WIDTH, "the output has beam_width sequences"),
)

FOR_LORA_REQUEST: tuple[Line, ...] = (
    ("base_model_name", ANY, "an adapter is for the LLM's model"),
    ("tensorizer_config_dict", EMPTY, "weights are read from *.safetensors"),
    ("is_3d_lora_weight", FLAG, OF_FILES),
    ("long_lora_max_len", NONE, REFUSED_IN_ADAPTERS),
)
FOR_BEAM_SEARCH: tuple[Line, ...] = (("priority", EQUAL_PRIORITIES, IN_ORDER),)
FOR_CALLS: tuple[Line, ...] = (
    *FOR_BEAM_SEARCH,
    ("tokenization_kwargs", EMPTY, OWN_TOKENIZATION),
    ("mm_processor_kwargs", EMPTY, IMAGE_SIZES),
    ("media_io_kwargs", EMPTY, IMAGES_ALONE),
)
FOR_GENERATE: tuple[Line, ...] = (
    *FOR_CALLS,
    ("guided_options_request", EMPTY, STRUCTURED),
    ("prompt_adapter_request", NONE, "there are no prompt adapters here"),
)
FOR_CHAT: tuple[Line, ...] = (
    *FOR_CALLS,
    ("chat_template_content_format", only("auto", "string", "openai"), "a template gets content in the form it takes"),
)
FOR_SLEEP: tuple[Line, ...] = (("mode", only("abort", "wait", "keep"), "llm.sleep is refused while requests run"),)
FOR_RESET: tuple[Line, ...] = (
    ("reset_running_requests", FALSE, "requests that run keep what they have computed"),
    ("reset_connector", FLAG, "no other engine keeps prompts"),
)


def _by_name(lines: tuple[Line, ...]) -> dict[str, Argument]:
    return {name: Argument(same, reason) for names, same, reason in lines for name in names.split()}


ARGUMENTS = {
    "LLM": _by_name(FOR_LLM),
    "SamplingParams": _by_name(FOR_SAMPLING_PARAMS),
    "BeamSearchParams": _by_name(FOR_BEAM_SEARCH_PARAMS),
    "LoRARequest": _by_name(FOR_LORA_REQUEST),
    "beam_search": _by_name(FOR_BEAM_SEARCH),
    "generate": _by_name(FOR_GENERATE),
    "chat": _by_name(FOR_CHAT),
    "sleep": _by_name(FOR_SLEEP),
    "reset_prefix_cache": _by_name(FOR_RESET),
}
"""Who takes the argument -> its name -> what is known of it."""


def reason_for(name: str) -> str | None:
    """Return what to know of an argument that some call of vLLM's takes; None if none does."""
    return next((known[name].reason for known in ARGUMENTS.values() if name in known), None)
