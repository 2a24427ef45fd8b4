"""Attention backends: how queries meet the paged KV cache."""

from __future__ import annotations

import importlib.util
import math
from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.attention.cache_layout import CacheLayout
from nanoinfer.attention.context import Context, GroupContext, Scoring
from nanoinfer.checks import check_choice
from nanoinfer.kernels.fp8 import HAS_FP8


class AttentionBackend(Protocol):
    """The interface of a backend. layers/attention.py calls it once the new keys and values are in the cache.

    The tensors have the shapes that paged_prefill.py and paged_decode.py of kernels/attention say. group: the layer's
    prefills_latents: `prefill` takes latents, as `decode` does
    """

    prefills_latents: bool

    def prepare_decode(self, context: Context) -> None:
        """Compute what all layers of a decode step need. The runner calls this before the first layer."""
        ...

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from packed queries, each to the keys that it sees (Scoring.window) in its sequence's context."""
        ...

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: Context, group: GroupContext, scoring: Scoring
    ) -> Tensor:
        """Attend from one query per sequence, to the keys that it sees (Scoring.window) in its context."""
        ...


BACKENDS = ("flash_attn", "triton", "torch")


def choose_backend(
    name: str,
    device: str,
    dtype: torch.dtype,
    block_size: int,
    head_dim: int,
    in_fp8: bool = False,
    has_sinks: bool = False,
    has_slopes: bool = False,
    in_order: bool = False,
    has_latents: bool = False,
    has_other_values: bool = False,
) -> str:
    """Return the backend that `name` stands for. "auto" is torch on the CPU, and on CUDA triton, the fastest.

    in_fp8: whether the KV cache is in FP8
    has_sinks, has_slopes: whether some layer's heads have sinks, or the slopes of ALiBi (Scoring)
    in_order: whether it must add up in one order on CUDA, for deterministic=True
    has_latents: whether some layer's keys and values are made of latents
    has_other_values: whether some layer's values have another size than its keys
    Raises ValueError, with the reason, if the named backend cannot run, or the GPU cannot keep such a cache.
    """
    name = check_choice("attention_backend", name, ["auto", *BACKENDS])
    if in_fp8:
        _check_converts_fp8(device)
    if name == "auto":
        return "torch" if device == "cpu" else "triton"
    if in_order and name != "triton":
        raise ValueError(
            f"deterministic=True: attention_backend={name!r} adds up in other orders in other steps; on CUDA it must be"
            " 'triton', or 'auto'"
        )
    problem = None
    if name == "flash_attn":
        has = has_sinks, has_slopes, has_latents, has_other_values
        problem = _flash_attn_problem(device, dtype, block_size, head_dim, in_fp8, *has)
    elif name == "triton":
        problem = _triton_problem(device)
    if problem:
        raise ValueError(f"attention_backend={name!r}: {problem}")
    return name


def block_unit(name: str, block_size: int, head_dim: int) -> int:
    """Return of how many tokens a block should have a multiple, so that the backend's kernels read whole tiles of keys.

    block_size: tokens in a block of a model whose layers are alike
    """
    if name == "flash_attn":
        return block_size
    return math.gcd(block_size, 64 if head_dim > 128 else 128)


def make_backend(
    name: str, layout: CacheLayout, in_order: bool = False, latent_heads: int | None = None
) -> AttentionBackend:
    """Create the backend of one of the names in BACKENDS; imports only what that backend needs.

    layout: of the KV cache
    latent_heads: how many query heads of this rank see one latent; None: the cache has keys and values
    in_order: of "triton", the one that gives a token the same bits in any company
    """
    if in_order:
        from nanoinfer.attention.in_order_backend import InOrderBackend

        assert name == "triton"
        return InOrderBackend(layout)
    if name == "flash_attn":
        from nanoinfer.attention.flash_attn_backend import FlashAttnBackend

        return FlashAttnBackend()
    if name == "triton" and latent_heads is not None:
        from nanoinfer.attention.latent_backend import LatentBackend

        return LatentBackend(layout, latent_heads)
    if name == "triton":
        from nanoinfer.attention.triton_backend import TritonBackend

        return TritonBackend(layout)
    from nanoinfer.attention.torch_backend import TorchBackend

    return TorchBackend(layout)


def _flash_attn_problem(
    device: str,
    dtype: torch.dtype,
    block_size: int,
    head_dim: int,
    in_fp8: bool,
    has_sinks: bool,
    has_slopes: bool,
    has_latents: bool,
    has_other_values: bool,
) -> str | None:
    if has_sinks:
        return "cannot attend with the sinks of this model's heads; 'triton' and 'torch' can"
    if has_slopes:
        return "cannot attend with the slopes of this model's heads (ALiBi); 'triton' and 'torch' can"
    if has_latents:
        return "cannot attend to latents, which this model has for keys and values; 'triton' and 'torch' can"
    if has_other_values:
        return "cannot attend to values of another size than keys, as this model has them; 'triton' and 'torch' can"
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
        return f"needs heads of at most 256 numbers, a multiple of 8, not {head_dim}; 'triton' and 'torch' do not"
    return None


def _triton_problem(device: str) -> str | None:
    import triton

    if device == "cpu" and not triton.knobs.runtime.interpret:
        return "needs device='cuda', or TRITON_INTERPRET=1 in the environment to interpret the kernels on the CPU"
    return None


def _check_converts_fp8(device: str) -> None:
    """Raise ValueError for a GPU on which our kernel cannot write keys in FP8, whichever backend would read them."""
    if device == "cuda" and torch.cuda.device_count() and (capability := torch.cuda.get_device_capability()) < HAS_FP8:
        needed, has = (".".join(map(str, numbers)) for numbers in (HAS_FP8, capability))
        raise ValueError(
            f"kv_cache_dtype='fp8': needs a GPU of compute capability {needed} or more, not {has}; 'auto' keeps `dtype`"
        )
