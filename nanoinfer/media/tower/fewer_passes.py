"""Lets modules of transformers' towers compute with fewer passes over memory, on a GPU: the same, and as exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.kernels.rotation import rotate_heads

# What MLPs call their first product, the activation and the second product: Qwen's, and those of SigLIP.
MLPS = (("linear_fc1", "act_fn", "linear_fc2"), ("fc1", "activation_fn", "fc2"))


def take_fewer_passes(model: nn.Module) -> None:
    """Replace what some modules of a tower compute: those of Qwen's towers and of SigLIP. Others stay as they are.

    Then cu_seqlens, which tell a tower where an image ends, must be in host memory.
    """
    for module in model.modules():
        if hasattr(module, "num_heads") and _has_equal_parts(getattr(module, "qkv", None)):
            _replace(module, _attend)
        elif (products := _find_products(module)) is not None:
            _replace(module, _mlp_of(*products))
        elif isinstance(module, nn.Conv3d) and module.kernel_size == module.stride:
            _replace(module, _one_patch)
        elif isinstance(module, nn.Conv2d) and _has_patches(module):
            _replace(module, _patches)


def _has_equal_parts(qkv: nn.Module | None) -> bool:
    """Return whether a projection gives as many numbers of keys, and of values, as of queries."""
    return isinstance(qkv, nn.Linear) and qkv.out_features == 3 * qkv.in_features


def _has_patches(convolution: nn.Conv2d) -> bool:
    """Return whether what a convolution multiplies are patches side by side, all channels of each."""
    is_whole = convolution.padding in ("valid", (0, 0)) and convolution.groups == 1 and convolution.dilation == (1, 1)
    return is_whole and convolution.kernel_size == convolution.stride


def _find_products(module: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """Return the products of an MLP whose activation the first one can apply; None: it is none."""
    from transformers.activations import GELUTanh  # here, for a model that cannot see does without

    for first, activation, second in MLPS:
        if isinstance(getattr(module, activation, None), GELUTanh) and hasattr(module, first):
            return getattr(module, first), getattr(module, second)
    return None


def _replace(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Let one module compute another way; others of its class do not."""
    vars(module)["forward"] = MethodType(forward, module)


def _attend(
    self: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> Tensor:
    """Attend within each image: images of one size together, and no copy of queries, keys and values."""
    qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
    rotate_heads(qkv[:, :2].flatten(1, 2), *position_embeddings)
    parts = []
    for start, count, length in _runs(cu_seqlens.tolist()):
        run = qkv[start : start + count * length].unflatten(0, (count, length))
        q, k, v = run.permute(2, 0, 3, 1, 4)
        parts.append(
            F.scaled_dot_product_attention(q, k, v, scale=self.scaling).transpose(1, 2).flatten(2).flatten(0, 1)
        )
    projected: Tensor = self.proj(parts[0] if len(parts) == 1 else torch.cat(parts))
    return projected


def _runs(ends: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first token of each run of equally long images, how many they are, and their tokens."""
    spans = list(pairwise(ends))
    for length, run in groupby(spans, lambda span: span[1] - span[0]):
        images = list(run)
        yield images[0][0], len(images), length


def _mlp_of(first: nn.Linear, second: nn.Linear) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return an MLP whose first product applies the activation."""

    def mlp(_: nn.Module, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, -2)
        inner = torch._addmm_activation(first.bias, rows, first.weight.T, use_gelu=True)
        projected: Tensor = second(inner)
        return projected.view(*hidden_states.shape[:-1], -1)

    return mlp


def _one_patch(self: Any, patches: Tensor) -> Tensor:
    """A convolution of patches, each as large as its kernel, is a product: [patches, out_channels]."""
    return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


def _patches(self: Any, images: Tensor) -> Tensor:
    """A convolution of patches is a product: [images, out_channels, rows, columns], each patch's numbers side by side.

    Towers add to these numbers layer by layer, and sums keep their order: channel by channel, each pass would be slow.
    """
    height, width = self.kernel_size
    patches = images.unfold(2, height, height).unfold(3, width, width).permute(0, 2, 3, 1, 4, 5).flatten(3)
    return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
