"""LoadsSteerings: vectors that an LLM adds to the hidden states of requests which name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanoinfer.checks import as_int, short
from nanoinfer.config import Config
from nanoinfer.hidden_layers import resolve_layer
from nanoinfer.hints import hints_for
from nanoinfer.requests.door import Door


class LoadsSteerings(Door):
    """The methods of LLM that load and forget vectors for steering."""

    config: Config

    @hints_for("load_steering")
    def load_steering(self, name: str, vectors: Mapping[int, Any]) -> None:
        """Load vectors that requests add to hidden states, in place of those that have the name.

        name: what requests call them, as in SamplingParams(steering=(name, 1.5))
        vectors: by the numbers of hidden states, as SamplingParams.hidden_states has them: hidden_size numbers each, a
            tensor, an array or a list. The LLM keeps a copy in the model's dtype

        Vector i, times the request's strength, is added to what hidden_states[i] shows, at each token of the request's
        prompt and output. So it changes what the layers behind it read, as a forward hook of transformers does that
        adds to layer i - 1's output.

        Raises ValueError for vectors that do not fit the model, and for more names than max_steerings. Raises
        RuntimeError if max_steerings is 0, the weights are offloaded, or requests of the name have not ended.
        """
        with self._door("writable"):
            self.engine.steerings.check_room(name := _check_name(name))
            checked = self._check_vectors(vectors)
        with self._turn():
            self.engine.check_writable()
            self._check_unused(name)
            self.engine.steerings.load(name, checked)

    @hints_for("unload_steering")
    def unload_steering(self, name: str) -> None:
        """Forget vectors, which makes room for others.

        name: the one with which they were loaded

        Raises ValueError for a name that is not loaded, and RuntimeError while requests of it have not ended.
        """
        with self._door("open"):
            name = _check_name(name)
        with self._turn():
            with self._door("open"):
                self.engine.steerings.check_is_loaded(name)
            self._check_unused(name)
            self.engine.steerings.unload(name)

    @property
    def steerings(self) -> dict[str, tuple[int, ...]]:
        """Those that are loaded, by name: the numbers of the hidden states that each adds to, from 0 on."""
        return dict(self.engine.steerings.loaded)

    def _check_unused(self, name: str) -> None:
        if running := self._requests.of_steering(name):
            raise RuntimeError(
                f"steering={name!r}: {len(running)} of its requests have not ended: call step until they have, or abort"
                " them"
            )

    def _check_vectors(self, vectors: Any) -> dict[int, npt.NDArray[np.float32]]:
        """Return vectors by numbers from 0 on. Raises ValueError for those that do not fit the model."""
        if not isinstance(vectors, Mapping) or not vectors:
            raise ValueError(f"vectors={short(vectors)}: must be a mapping from numbers of hidden states to vectors")
        checked: dict[int, npt.NDArray[np.float32]] = {}
        model = self.config.description
        for key, vector in vectors.items():
            if (number := as_int(key)) is None:
                raise ValueError(f"vectors has {short(key)}: must be a mapping from integers, such as 12 or -1")
            layer = resolve_layer("vectors", number, model.last_hidden_layer)
            if layer in checked:
                raise ValueError(f"vectors has {number}: these are hidden states {layer}, and stand there twice")
            checked[layer] = _as_vector(number, vector, model.hidden_size)
        return checked


def _as_vector(number: int, vector: Any, size: int) -> npt.NDArray[np.float32]:
    """Return a vector's numbers. Raises ValueError if it has another size, or numbers that are not finite."""
    try:
        made = torch.as_tensor(vector).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"vectors[{number}]={short(vector)}: must be a vector of {size} numbers") from error
    if made.shape != (size,):
        raise ValueError(f"vectors[{number}] has the shape {list(made.shape)}: must be [{size}], the hidden_size")
    if not bool(made.isfinite().all()):
        raise ValueError(f"vectors[{number}] has numbers that are not finite: all must be")
    return made.contiguous().numpy().copy()


def _check_name(name: object) -> str:
    if not isinstance(name, str) or name == "":
        raise ValueError(f"name={short(name)}: must be a string, by which requests name the vectors")
    return str.__str__(name)
