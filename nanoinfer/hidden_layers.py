"""Hidden states by number, as transformers' output_hidden_states has them: 0: the embeddings; i: behind layer i - 1.

The last ones stand behind the last norm. Numbers below 0 count from there: -1 is the last.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.checks import as_int, as_list, short


def check_layers(name: str, value: Any) -> tuple[int, ...]:
    """Return the integers of a list, each once. Raises ValueError, naming the argument, for all else."""
    entries = as_list(value, ordered=False)
    layers = None if entries is None else [as_int(entry) for entry in entries]
    if layers is None or None in layers:
        raise ValueError(f"{name}={short(value)}: must be a list of integers, such as [0, 12, -1]")
    return tuple(dict.fromkeys(layer for layer in layers if layer is not None))


def resolve_layer(name: str, layer: int, num_layers: int) -> int:
    """Return a number from 0 on for any number of hidden states; num_layers: the model's.

    Raises ValueError, naming the argument, for hidden states that the model does not have.
    """
    if not -num_layers - 1 <= layer <= num_layers:
        raise ValueError(
            f"{name} has {short(layer)}: the model's hidden states are 0 (embeddings) to {num_layers}, which is also -1"
            " (behind the last norm)"
        )
    return layer % (num_layers + 1)
