"""What an LLM answers by vLLM's names beside its own methods, for programs that were written for vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import Config
from nanoinfer.integrations.vllm.lora import LoRARequest, loras_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nanoinfer.llm import LLM

READING = "llm.embed, llm.classify and llm.rerank read texts"
OUR_STEPS = "llm.add_request, llm.step and llm.has_unfinished_requests run requests step by step"
OUR_WEIGHTS = "llm.update_weights(named_tensors) writes a trainer's tensors, llm.load_weights a checkpoint's"
ABSENT = {
    name: instead
    for names, instead in (
        ("encode reward", READING),
        ("enqueue enqueue_chat wait_for_completion", OUR_STEPS),
        ("collective_rpc apply_model", f"no code of yours runs in the ranks; {OUR_WEIGHTS}"),
        ("init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update", OUR_WEIGHTS),
        ("start_draft_weight_update finish_weight_update reload_weights", OUR_WEIGHTS),
        ("get_weight_version update_weight_version", "llm.weights_version counts the changes of the weights"),
        ("start_profile stop_profile", "run the script under torch.profiler.profile()"),
        ("get_metrics", "llm.stats() counts what has been done; each output has timings and num_cached_tokens"),
        ("get_world_size", "llm.config has tensor_parallel_size and data_parallel_size"),
        ("set_tokenizer", "LLM(tokenizer=...) takes a folder or a Hub id"),
        ("release_kv_cache_memory", "llm.sleep gives memory back, and llm.wake_up takes it again"),
        ("reset_mm_cache", "leave it out: equal images are known by their pixels"),
        ("preprocess_chat", "llm.get_tokenizer().apply_chat_template makes a chat's text"),
        ("supported_tasks", "llm.config.description.generates says whether the model generates"),
        ("shutdown exit", "llm.close() gives memory and processes back"),
        ("flush_cache", "llm.reset_prefix_cache() forgets what prompts share"),
        ("async_generate", "AsyncLLM serves the tasks of an event loop"),
        ("update_weights_from_tensor update_weights_from_disk update_weights_from_distributed", OUR_WEIGHTS),
        ("release_memory_occupation", "llm.sleep gives memory back, and llm.wake_up takes it again"),
        ("resume_memory_occupation", "llm.wake_up takes memory again"),
        ("get_server_info", "llm.config has the options, and llm.stats() what has been done"),
        ("from_engine_args", "LLM(model, ...) takes the options themselves"),
    )
    for name in names.split()
}
"""Maps a name of vLLM's LLM that ours lacks to a sentence that says what to do."""


def attribute_of(llm: LLM, name: str) -> Any:
    """Return what an LLM answers by one of vLLM's names. Raises AttributeError, with what to do instead."""
    if name == "get_tokenizer":
        return partial(tokenizer_of, llm)
    if name == "get_default_sampling_params":
        return llm.default_sampling_params
    if name == "model_config":
        return ModelConfig(llm.config)
    if name == "llm_engine":
        return EngineNames(llm)
    what = f"{type(llm).__name__!r} object has no attribute {name!r}"
    raise AttributeError(f"{what}: {ABSENT[name]}" if name in ABSENT else what)


def tokenizer_of(llm: LLM) -> PreTrainedTokenizerBase:
    """Return llm.tokenizer, the tokenizer of transformers.

    Raises ValueError if there is none.
    """
    if llm.tokenizer is None:
        raise ValueError(f"model={llm.config.model!r} has no tokenizer: LLM(tokenizer=...) takes another's")
    return llm.tokenizer


class EngineNames:
    """An LLM by the names of vLLM's LLMEngine.

    model_config: the model's settings, by vLLM's names
    cache_config: enable_prefix_caching, which is True, and block_size and num_gpu_blocks of the KV cache
    vllm_config: these two, and the options max_num_seqs and max_num_batched_tokens in its scheduler_config
    tokenizer: the LLM's; None if there is none
    model_executor: has model_executor.driver_worker.model_runner.model.load_weights(named_tensors), which is
        llm.update_weights(named_tensors, partial=True). To delete it closes the LLM
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loras = loras_of(llm)
        self.model_config = ModelConfig(llm.config)
        blocks = {"block_size": llm.config.kvcache_block_size, "num_gpu_blocks": llm.config.num_kvcache_blocks}
        self.cache_config = SimpleNamespace(enable_prefix_caching=True, **blocks)
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config, cache_config=self.cache_config, scheduler_config=llm.config
        )
        self.tokenizer = llm.tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises ValueError if there is none."""
        return tokenizer_of(self._llm)

    def get_model_config(self) -> ModelConfig:
        """Return model_config."""
        return self.model_config

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now, and not when a request first names it; returns True. Raises as load_adapter does."""
        self._loras.check_requests(self._llm, lora_request).load()
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter of a lora_int_id; returns whether there was one."""
        return self._loras.unload(self._llm, lora_id)

    def list_loras(self) -> set[int]:
        """Return the lora_int_id of each adapter that a LoRARequest has brought, and that is still loaded."""
        return self._loras.numbers(self._llm)

    def pin_lora(self, lora_id: int) -> bool:
        """Let no other adapter take the place of this one; returns whether it is loaded."""
        return self._loras.pin(self._llm, lora_id)

    @property
    def model_executor(self) -> SimpleNamespace:
        """The way to the weights."""

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
            self._llm.update_weights(weights, partial=True)

        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=load_weights)))
        return SimpleNamespace(driver_worker=worker, shutdown=self._llm.close)

    @model_executor.deleter
    def model_executor(self) -> None:
        self._llm.close()

    if not TYPE_CHECKING:  # as above

        def __getattr__(self, name: str) -> Any:
            known = "model_config, vllm_config, tokenizer, model_executor, get_model_config(), add_lora() and the like"
            raise AttributeError(f"llm.llm_engine has no {name!r}: it has {known}; llm's own methods do the rest")


class ModelConfig:
    """A model's settings by the names of vLLM's ModelConfig.

    model, tokenizer: the folders that were read
    dtype: the weights' torch.dtype
    max_model_len: a sequence has at most this many tokens; max_seq_len_to_capture: the same, for graphs serve them all
    is_multimodal_model: whether it sees images
    seed, revision, hf_config_path, tokenizer_revision, quantization, logprobs_mode, enforce_eager, trust_remote_code:
        LLM's options
    """

    tokenizer_mode, runner_type, is_encoder_decoder = "auto", "generate", False

    def __init__(self, config: Config) -> None:
        self.model = self.served_model_name = config.model
        self.tokenizer = config.tokenizer or config.model
        self.dtype: torch.dtype = config.torch_dtype
        self.max_model_len = self.max_seq_len_to_capture = config.max_model_len
        self.seed, self.quantization, self.logprobs_mode = config.seed, config.quantization, config.logprobs_mode
        self.revision, self.tokenizer_revision = config.revision, config.tokenizer_revision
        self.hf_config_path = config.hf_config_path
        self.is_multimodal_model = config.sees
        self.enforce_eager, self.trust_remote_code = config.enforce_eager, config.trust_remote_code
        self._vocab_size = config.description.vocab_size

    @property
    def hf_config(self) -> PretrainedConfig:
        """The checkpoint's config.json, as transformers reads it."""
        return Checkpoint.open(self.model, self.hf_config_path).hf_config

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """The text model's part of it."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        """Return how many tokens the model knows."""
        return self._vocab_size
