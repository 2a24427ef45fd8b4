"""Config: every option of LLM, its default, its check."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from nanoinfer.attention import choose_backend
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.models import describe
from nanoinfer.models.description import EMBEDDING, HEAD, Description
from nanoinfer.weights.sources import FileSource

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Config:
    """The options of LLM, checked, beside what the checkpoint's own files say.

    model: a folder with config.json and *.safetensors, or a Hugging Face Hub id
    max_num_batched_tokens: one step computes at most this many prompt tokens; longer prompts go in chunks
    max_num_seqs: at most this many sequences run at once
    max_model_len: a sequence has at most this many tokens, prompt and output; the model's own limit may lower it
    gpu_memory_utilization: once the engine is up, at most this share of the GPU's memory is in use; other processes'
        memory counts too
    tensor_parallel_size: so many ranks share the model, 1 to 8: one GPU each, or on the CPU one process each
    enforce_eager: the host launches a decode step's kernels one by one instead of replaying a CUDA graph
    kvcache_block_size: a KV-cache block holds this many tokens, a multiple of 16 (with flash_attn, of 256)
    num_kvcache_blocks: the KV cache has this many blocks; None: as many as the memory holds
    attention_backend: "triton", "flash_attn" or "torch"; "auto" is triton on CUDA and torch on the CPU
    dtype: "float32", "float16" or "bfloat16", or torch's own; "auto" is the checkpoint's on CUDA, float32 on the CPU
    device: "cuda" or "cpu"; "auto" is CUDA if there is a device; CUDA_VISIBLE_DEVICES says which
    seed: a request without a seed of its own gets one that is made from this number
    load_format: "safetensors", or "dummy" for random weights of the config's shapes, which depend on seed and ranks
    worker_timeout: a rank whose process does not run for this many seconds, stopped or starved, ends the engine; on
        CUDA so does a step that is not done by then; float("inf") waits for ever

    Raises ValueError, naming the option, its value and what would work.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int | None = None
    attention_backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    load_format: str = "safetensors"
    worker_timeout: float = 30.0

    description: Description = field(init=False, repr=False)  # of the model
    eos_token_ids: frozenset[int] = field(init=False, repr=False)
    generation_defaults: dict[str, Any] = field(init=False, repr=False)  # as SamplingParams names them

    def __post_init__(self) -> None:
        self._check_sizes()
        self.device = _resolve_device(self.device, self.tensor_parallel_size)
        checkpoint = Checkpoint.open(self.model)
        self.model = checkpoint.folder
        self.eos_token_ids = checkpoint.eos_token_ids
        self.generation_defaults = checkpoint.generation_defaults
        self.description = self._describe(checkpoint.hf_config)
        self.max_model_len = min(self.max_model_len, self.description.max_position)
        self.description = self.description.within(self.max_model_len)
        self.dtype = _resolve_dtype(self.dtype, self.device, checkpoint.hf_config)
        self.attention_backend = choose_backend(
            self.attention_backend,
            self.device,
            self.torch_dtype,
            self.kvcache_block_size,
            self.description.head_dim,
        )
        self._check_num_blocks()

    @classmethod
    def create(cls, model: str, **options: Any) -> Config:
        """Config(model, **options), with an error for an unknown option that suggests the nearest name."""
        known = [f.name for f in fields(cls) if f.init and f.name != "model"]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"unknown argument {name!r}: {hint}")
        return cls(model, **options)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return DTYPES[self.dtype]

    def _describe(self, hf_config: PretrainedConfig) -> Description:
        model = describe(hf_config)
        model.check_ranks(self.tensor_parallel_size)
        if model.tied and self.load_format == "safetensors":
            # Some say that they are tied, and are not; transformers believes the tensors.
            own_head = FileSource(self.model, model.is_multimodal).has_own_head(f"{HEAD}.weight", f"{EMBEDDING}.weight")
            return replace(model, tied=not own_head)
        return model

    def _check_sizes(self) -> None:
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, low=1)
        _check_int("max_num_seqs", self.max_num_seqs, low=1)
        _check_int("max_model_len", self.max_model_len, low=2)  # a prompt token and a generated one
        _check_int("tensor_parallel_size", self.tensor_parallel_size, low=1, high=8)
        _check_int("seed", self.seed, low=0, high=2**63 - 1)
        _check_int("kvcache_block_size", self.kvcache_block_size, low=16)
        if self.kvcache_block_size % 16:
            raise ValueError(f"kvcache_block_size={self.kvcache_block_size}: must be a multiple of 16")
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization={share!r}: must be a number above 0, at most 1")
        if not isinstance(self.enforce_eager, bool):
            raise ValueError(f"enforce_eager={self.enforce_eager!r}: must be True or False")
        seconds = self.worker_timeout
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds >= 1:
            raise ValueError(f"worker_timeout={seconds!r}: must be a number of seconds, at least 1")
        _check_choice("load_format", self.load_format, ["safetensors", "dummy"])

    def _check_num_blocks(self) -> None:
        if self.num_kvcache_blocks is None:
            return
        _check_int("num_kvcache_blocks", self.num_kvcache_blocks, low=1)
        needed = -(-self.max_model_len // self.kvcache_block_size)
        if self.num_kvcache_blocks < needed:
            raise ValueError(
                f"num_kvcache_blocks={self.num_kvcache_blocks}: one sequence of max_model_len={self.max_model_len}"
                f" needs {needed} blocks of {self.kvcache_block_size} tokens; raise it, or lower max_model_len"
            )


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def _check_choice(name: str, value: str, allowed: list[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def _resolve_device(device: str, ranks: int) -> str:
    _check_choice("device", device, ["auto", "cuda", "cpu"])
    count = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cpu" or (device == "auto" and count == 0):
        return "cpu"
    if count == 0:
        raise ValueError("device='cuda': torch sees no CUDA device; use device='cpu', or 'auto'")
    if ranks > count:
        raise ValueError(f"tensor_parallel_size={ranks}: this machine has {count} GPU{'s' if count > 1 else ''}")
    return "cuda"


def _resolve_dtype(dtype: str | torch.dtype, device: str, hf_config: PretrainedConfig) -> str:
    dtype = str(dtype).removeprefix("torch.")
    _check_choice("dtype", dtype, ["auto", *DTYPES])
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    stored = hf_config.dtype or hf_config.get_text_config().dtype or torch.float32
    name = str(stored).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype='auto': the checkpoint's is {name}; choose one of {', '.join(DTYPES)}")
    return name
