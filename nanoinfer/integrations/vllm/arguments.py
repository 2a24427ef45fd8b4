"""vLLM's arguments that have no counterpart here: at which values they change nothing, and what to write for others.

A value changes nothing if callers get the same results and can do the same things. It may be about speed, logs or
servers, or name what nanoinfer does anyway. None always means that an argument is not given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from nanoinfer.checks import short
from nanoinfer.integrations.vllm import values
from nanoinfer.integrations.vllm.values import Arguments, Values, only

log = logging.getLogger("nanoinfer")

T = TypeVar("T")


def _by_name(groups: Mapping[T, str]) -> dict[str, T]:
    return {name: known for known, names in groups.items() for name in names.split()}


OF_CALLS = "media_io_kwargs mm_processor_kwargs tokenization_kwargs"
SAME: dict[str, dict[Values, str]] = {
    "LLM": {
        only("auto", "none", "embed"): "convert",
        values.DEFAULT: """
            attention_config aux_output_config ec_manager_config engram_config fault_tolerance_config ir_op_priority
            kernel_config logging_config override_pooler_config pooler_config profiler_config structured_outputs_config
            watchdog_config weight_transfer_config
        """,
        only("auto", "vllm"): "generation_config model_impl",
        only("auto", "hf"): "config_format tokenizer_mode",
        values.EMPTY: """
            additional_config collect_detailed_traces cpu_offload_params default_mm_loras device_ids diffusion_config
            ec_transfer_config hf_overrides io_processor_plugin kv_cache_dtype_skip_layers
            kv_events_config kv_transfer_config log_config_file log_level long_lora_scaling_factors
            lora_target_modules media_io_kwargs model_class_overrides model_loader_extra_config model_weights
            numa_bind_cpus numa_bind_nodes offload_params otlp_traces_endpoint override_generation_config
            override_neuron_config qlora_adapter_name_or_path quantization_config
            reasoning_parser_plugin rope_scaling rope_theta sleep_preserve_parameter_names spec_method spec_model
            speculative_model video_pruning_method video_pruning_rate watermark_config worker_extension_cls
        """,
        only("lazy", "eager", "prefetch"): "safetensors_load_strategy",
        values.NUMBER: """
            dbo_decode_token_threshold dbo_prefill_token_threshold dp_sync_interval long_prefill_token_threshold
            max_context_len_to_capture max_cpu_loras max_long_partial_prefills max_num_partial_prefills
            max_seq_len_to_capture safetensors_prefetch_block_size safetensors_prefetch_num_threads swap_space
            ubatch_size
        """,
        values.ANY: """
            all2all_backend allowed_media_domains code_revision compilation_config cp_kv_cache_interleave_size
            cuda_graph_sizes cudagraph_capture_sizes custom_histogram_buckets dcp_comm_backend
            dcp_kv_cache_interleave_size dcp_q_replicate elastic_ep_max_dp_size enable_mamba_shared_prefix_checkpoint
            enable_nccl_comm_suspend eplb_config eplb_log_balancedness eplb_step_interval eplb_window_size
            expert_placement_strategy fail_on_environ_validation gdn_prefill_backend ignore_patterns jit_monitor_mode
            jit_monitor_verbose kda_decode_backend kda_prefill_backend kv_cache_metrics_sample kv_offloading_backend
            logits_processor_pattern lora_extra_vocab_size mamba_backend mamba_block_size mamba_cache_mode
            mamba_cache_philox_rounds mamba_config mamba_ssu_algorithm master_addr master_port
            max_cudagraph_capture_size max_log_len max_logprobs max_lora_cls_labels max_parallel_loading_workers
            max_prompt_adapter_token max_prompt_adapters mm_device_do_normalize mm_encoder_attn_backend
            mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
            mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb
            mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_shm_cache_max_object_size_mb
            mm_tensor_ipc num_redundant_experts offload_backend offload_num_in_group offload_prefetch_step
            optimization_level performance_mode preemption_mode prefill_schedule_interval
            prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit pt_load_map_location
            renderer_num_workers replayssm_buffer_len scheduler_delay_factor scheduler_reserve_full_isl
            served_model_name show_hidden_metrics_for_version shutdown_timeout sleep_mode_backend
            tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type watermark
        """,
        values.FLAG: """
            aggregate_engine_logging allow_deprecated_quantization async_scheduling disable_async_output_proc
            disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
            disable_log_requests disable_log_stats disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization
            disable_sliding_window enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator
            enable_dbo enable_ep_weight_filter enable_eplb enable_expert_parallel enable_flashinfer_autotune
            enable_hc_sp enable_log_requests enable_mamba_cache_stochastic_rounding enable_mixed_moe_lora_format
            enable_multimodal_encoder_data_parallel enable_prompt_embeds enable_shm_tensor_arena enable_sleep_mode
            engine_use_ray fully_sharded_loras guided_decoding_disable_fallback interleave_mm_strings
            kv_sharing_fast_prefill
            long_prefill_token_threshold_adaptive multi_step_stream_outputs skip_mm_profiling
            sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay use_replayssm use_tqdm_on_load
            use_v2_block_manager worker_use_ray
        """,
        values.NONE: """
            chat_template cpu_distributed_timeout_seconds data_parallel_address data_parallel_rpc_port
            data_parallel_size_local distributed_timeout_seconds download_dir kv_cache_memory_bytes max_num_active_seqs
            max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens num_gpu_blocks_override
            override_attention_dtype quantization_param_path scheduler_cls
        """,
        values.TRUE: "enable_prefix_caching hf_token",
        values.FALSE: """
            calculate_kv_scales cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb
            data_parallel_multi_port_external_lb enable_elastic_ep enable_fault_tolerance enable_layerwise_nvtx_tracing
            enable_logging_iteration_details enable_lora_bias enable_mfu_metrics enable_mm_embeds
            enable_mm_processor_stats enable_moe_shared_loras enable_prompt_adapter
            enable_reasoning enable_return_routed_experts enable_tower_connector_lora enable_trace_replay
            guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace kv_cache_metrics
            mm_encoder_only monokernel numa_bind ray_workers_use_nsight return_sampling_mask skip_tokenizer_init
            tokens_only use_fp64_gumbel
        """,
        values.POSITIVE: "block_size max_loras num_scheduler_steps",
        only(0): """
            _api_process_rank data_parallel_rank data_parallel_start_rank kv_offloading_size node_rank
            num_lookahead_slots num_speculative_tokens offload_group_size spec_tokens
        """,
        only("fcfs"): "scheduling_policy",
        only(1): """
            _api_process_count decode_context_parallel_size nnodes pipeline_parallel_size prefill_context_parallel_size
            stream_interval
        """,
        only("auto"): "linear_backend lora_dtype moe_backend sparse_indexer_topk_backend worker_cls",
        only("auto", "float32"): "mamba_cache_dtype mamba_ssm_cache_dtype",
        values.STARTS: "distributed_executor_backend",
        only("auto", "guidance"): "guided_decoding_backend",
        only("none"): "per_request_spec_decode_metrics",
    },
    "SamplingParams": {
        values.BEST_OF: "best_of",
        values.FALSE: "early_stopping flat_logprobs skip_reading_prefix_cache use_beam_search watermarking",
        only(1): "length_penalty stream_interval",
        values.EMPTY: """
            guided_decoding logprob_token_ids prompt_logprob_token_ids repetition_detection trace_decode_token_ids
        """,
        values.FLAG: "skip_clone spaces_between_special_tokens",
        values.WHOLE_OUTPUT: "output_kind",
        values.NONE: "truncate_prompt_tokens",
        only(0): "prompt_logprob_start routed_experts_prompt_start",
        values.NUMBER: "output_text_buffer_length",
    },
    "BeamSearchParams": {values.BEAM_WIDTH: "num_return_sequences"},
    "LoRARequest": {
        values.ANY: "base_model_name",
        values.EMPTY: "tensorizer_config_dict",
        values.FLAG: "is_3d_lora_weight",
        values.NONE: "long_lora_max_len",
    },
    "beam_search": {values.EQUAL_PRIORITIES: "priority"},
    "generate": {
        values.EQUAL_PRIORITIES: "priority",
        values.EMPTY: f"{OF_CALLS} guided_options_request",
        values.NONE: "prompt_adapter_request",
    },
    "chat": {
        values.EQUAL_PRIORITIES: "priority",
        values.EMPTY: OF_CALLS,
        only("auto", "string", "openai"): "chat_template_content_format",
    },
    "sleep": {only("abort", "wait", "keep"): "mode"},
    "reset_prefix_cache": {
        values.FALSE: "reset_running_requests",
        values.FLAG: "reset_connector",
        values.ANY: "device",
    },
}
"""Who takes the arguments -> the values that change nothing -> the names of the arguments."""

ARGUMENTS = {taker: _by_name(names) for taker, names in SAME.items()}
"""Who takes the argument -> its name -> the values that change nothing."""

BACKENDS = {"backend", "disable_fallback"}
OF_SPEED = {
    "enable_prefix_caching": values.FALSE,
    "guided_decoding_backend": Values("", lambda value, _: isinstance(value, str)),
    "structured_outputs_config": Values("", lambda value, _: isinstance(value, Mapping) and value.keys() <= BACKENDS),
}
"""Arguments of LLM at values that change how fast it is, or by which library it gets the same texts."""

OURS = {
    "BeamSearchParams(beam_width=...)": "num_return_sequences",
    "LLM(attention_backend=...)": "attention_config",
    "LLM(data_parallel_size=...)": "data_parallel_rank data_parallel_size_local data_parallel_start_rank",
    "LLM(image_options=...)": "mm_processor_kwargs",
    "LLM(kv_cache_dtype=...)": "calculate_kv_scales kv_cache_dtype_skip_layers quantization_param_path",
    "LLM(kv_offload_gib=...)": "kv_offloading_size swap_space",
    "LLM(kvcache_block_size=...)": "block_size",
    "LLM(max_adapters=...)": "max_loras",
    "LLM(max_num_batched_tokens=...)": "max_num_scheduled_tokens",
    "LLM(max_num_seqs=...)": "max_num_active_seqs",
    "LLM(num_kvcache_blocks=...)": "kv_cache_memory_bytes num_gpu_blocks_override",
    "LLM(quantization=...)": "quantization_config",
    "LLM(reasoning_markers=...)": "reasoning_parser_plugin",
    "LLM(restart_replicas=True)": "enable_fault_tolerance fault_tolerance_config",
    "LLM(routed_experts=True)": "aux_output_config enable_return_routed_experts",
    "LLM(runner=...)": "convert override_pooler_config pooler_config",
    "LLM(speculation=...)": "num_speculative_tokens spec_method spec_model spec_tokens speculative_model",
    "LLM(state_dtype=...)": "mamba_cache_dtype mamba_ssm_cache_dtype",
    "LLM(tensor_parallel_size=...)": "pipeline_parallel_size",
    "LLM(use_tqdm=...)": "use_tqdm_on_load",
    "LLM(worker_timeout=...)": "cpu_distributed_timeout_seconds distributed_timeout_seconds watchdog_config",
    "SamplingParams(adapter=...)": "default_mm_loras",
    "SamplingParams(detokenize=False)": "skip_tokenizer_init tokens_only",
    "SamplingParams(kept_tokens=True)": "return_sampling_mask",
    "SamplingParams(logprobs=...)": "logprob_token_ids prompt_logprob_token_ids",
    "SamplingParams(n=...)": "best_of",
    "SamplingParams(prompt_logprobs_start=...)": "prompt_logprob_start",
    "SamplingParams(repetition_penalty=...)": "repetition_detection",
    "SamplingParams(structured_outputs=...)": "guided_decoding guided_options_request",
    "llm.beam_search(...)": "early_stopping length_penalty use_beam_search",
    "llm.chat(..., chat_template=...)": "chat_template",
    "llm.score(...)": "enable_trace_replay trace_decode_token_ids",
    "llm.stream(...)": "output_kind stream_interval",
    "llm.update_weights(...)": "weight_transfer_config worker_extension_cls",
}
"""What to write -> names of arguments that it stands for."""

ADVICE = {
    "an LLM starts its ranks itself, or has those of tensor_parallel_group": "distributed_executor_backend",
    "an LLM runs on one machine; nanoinfer.integrations.ray_data uses several": "nnodes node_rank",
    "a prompt that is too long is refused: cut it before": "truncate_prompt_tokens",
    "change the folder's config.json": "hf_overrides model_class_overrides rope_scaling rope_theta",
    "llguidance alone reads grammars; leave it out": "guided_decoding_backend structured_outputs_config",
    "merge such an adapter into its base with PEFT's merge_and_unload()": "enable_lora_bias long_lora_max_len",
    "pass SamplingParams; see llm.default_sampling_params()": "generation_config override_generation_config",
    "pass prompts of token ids to tokenize them yourself": "tokenization_kwargs",
    "prompts always share what is computed; llm.reset_prefix_cache() forgets it": "enable_prefix_caching",
    "requests begin in the order in which they come": "priority scheduler_cls scheduling_policy",
    "run the script under torch.profiler.profile()": "enable_layerwise_nvtx_tracing profiler_config",
    "set the environment's CUDA_VISIBLE_DEVICES": "device_ids",
    "set the environment's HF_HUB_CACHE, or pass a folder as model": "download_dir",
    "set the environment's HF_TOKEN, or call `hf auth login`": "hf_token",
    "layers lie in host memory whole; see LLM(weight_offload_gib=...)": "cpu_offload_params",
    'write prompts with "cache_salt", which share nothing with others': "skip_reading_prefix_cache",
    'set up logging.getLogger("nanoinfer")': "log_config_file log_level logging_config",
}
"""What to know -> names of arguments."""

PAGE = "docs/coming-from-elsewhere.md says what nanoinfer has in its place"
REASONS = _by_name({f"write {ours}": names for ours, names in OURS.items()}) | _by_name(ADVICE)


def check(taker: str, name: str, value: Any, beside: Arguments) -> None:
    """Raise ValueError for a value that would change results; beside: all arguments of the call.

    What would change speed alone, or what computes the same, is taken with one warning.
    """
    same = ARGUMENTS[taker][name]
    if value is None or same.has(value, beside):
        return
    if name in OF_SPEED and OF_SPEED[name].has(value, beside):
        _warn_once(f"{name}={short(value)} is left out: {REASONS[name]}")
        return
    raise ValueError(f"{name}={short(value)}: must be {same.text}: {reason_for(name)}")


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def reason_for(name: str) -> str | None:
    """Return what to know of an argument that some call of vLLM's takes; None if none does."""
    is_known = any(name in arguments for arguments in ARGUMENTS.values())
    return REASONS.get(name, PAGE) if is_known else None
