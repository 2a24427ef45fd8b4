"""Attention backends: how queries meet the paged KV cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.attention.context import Context, Scoring
from nanoinfer.checks import check_choice


class AttentionBackend(Protocol):
    """The interface of a backend. layers/attention.py calls it once the new keys and values are in the cache.

    The tensors have the shapes that kernels/attention/paged_prefill.py and paged_decode.py describe.
    """

    def prepare_decode(self, context: Context) -> None:
        """Compute what all layers of a decode step need. The runner calls this before the first layer."""
        ...

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from packed queries, each to the keys that it sees (Scoring.window) in its sequence's context."""
        ...

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, scoring: Scoring) -> Tensor:
        """Attend from one query per sequence, to the keys that it sees (Scoring.window) in its context."""
        ...


HAS_FP8 = (8, 9)  # the first GPUs that convert FP8
BACKENDS = ("flash_attn", "triton", "torch")


def choose_backend(
    name: str, device: str, dtype: torch.dtype, block_size: int, head_dim: int, in_fp8: bool = False
) -> str:
    """Return the backend that `name` stands for. "auto" is torch on the CPU, and on CUDA triton, the fastest.

    in_fp8: whether the KV cache is in FP8
    Raises ValueError, with the reason, if the named backend cannot run.
    """
    name = check_choice("attention_backend", name, ["auto", *BACKENDS])
    if name == "auto":
        return "torch" if device == "cpu" else "triton"
    problem = None
    if name == "flash_attn":
        problem = _flash_attn_problem(device, dtype, block_size, head_dim, in_fp8)
    elif name == "triton":
        problem = _triton_problem(device, in_fp8)
    if problem:
        raise ValueError(f"attention_backend={name!r}: {problem}")
    return name


def make_backend(name: str, windows: Iterable[int | None], in_order: bool = False) -> AttentionBackend:
    """Create the backend of one of the names in BACKENDS; imports only what that backend needs.

    windows: each layer's window, as in Scoring
    in_order: of "triton", the one that gives a token the same bits in any company
    """
    if in_order:
        from nanoinfer.attention.in_order_backend import InOrderBackend

        assert name == "triton"
        return InOrderBackend(windows)
    if name == "flash_attn":
        from nanoinfer.attention.flash_attn_backend import FlashAttnBackend

        return FlashAttnBackend()
    if name == "triton":
        from nanoinfer.attention.triton_backend import TritonBackend

        return TritonBackend(windows)
    from nanoinfer.attention.torch_backend import TorchBackend

    return TorchBackend(windows)


def _flash_attn_problem(device: str, dtype: torch.dtype, block_size: int, head_dim: int, in_fp8: bool) -> str | None:
    if device != "cuda":
        return f"needs device='cuda', not {device!r}"
    if importlib.util.find_spec("flash_attn") is None:
        return "needs the flash-attn package: pip install 'nanoinfer[flash]'"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs dtype bfloat16 or float16, not {dtype}"
    if block_size % 256:
        return f"needs a kvcache_block_size that is a multiple of 256, not {block_size}"
    if in_fp8:
        return "cannot read a KV cache of kv_cache_dtype='fp8'; 'triton' and 'torch' can"
    if head_dim > 256 or head_dim % 8:
        return f"needs a head_dim of at most 256 and a multiple of 8, not {head_dim}"
    return None


def _triton_problem(device: str, in_fp8: bool) -> str | None:
    import triton

    if device == "cpu" and not triton.knobs.runtime.interpret:
        return "needs device='cuda', or TRITON_INTERPRET=1 in the environment to interpret the kernels on the CPU"
    if device == "cuda" and in_fp8 and (capability := torch.cuda.get_device_capability()) < HAS_FP8:
        needed, has = (".".join(map(str, numbers)) for numbers in (HAS_FP8, capability))
        return f"needs a GPU of compute capability {needed} or more for kv_cache_dtype='fp8', not {has}; use 'torch'"
    return None
