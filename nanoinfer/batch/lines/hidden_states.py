"""Hidden states in files and tables: the bytes of a safetensors file, whose tensors have the layers' numbers as names.

They keep dtype and shape so, and take no more than their own bytes. Arrays of text would take three times as many.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

from safetensors.torch import save
from torch import Tensor


def as_safetensors(states: Mapping[int, Tensor]) -> bytes:
    """Return hidden states as the bytes of a safetensors file; safetensors.torch.load reads them."""
    return save({str(layer): of_layer.clone() for layer, of_layer in states.items()})  # numbers may share a tensor


def as_text(states: Mapping[int, Tensor]) -> str:
    """Return the same bytes in base64, as JSON can hold them."""
    return b64encode(as_safetensors(states)).decode()
