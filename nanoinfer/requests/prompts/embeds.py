"""Prompts that hold embeddings in place of some or all of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.checks import short
from nanoinfer.config import Config
from nanoinfer.media.given import pieces_of
from nanoinfer.media.pixels import Pixels
from nanoinfer.media.spans import MediaPrompt, MediaSpan
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.requests.chat.beside import SALT
from nanoinfer.requests.prompts.token_ids import MOST_SHOWN, pack_ids, token_ids_of
from nanoinfer.sampling_params import SamplingParams

EMBEDS = "prompt_embeds"  # the key of a prompt that is a mapping, as vLLM names it
PLACEHOLDER = 0  # the token id that stands where embeddings do
FLOATS = ("float16", "float32", "float64")  # of arrays; tensors may have others


def read_embeds(name: str, prompt: Mapping[str, Any], config: Config) -> MediaPrompt:
    """Return a prompt with embeddings: a tensor, [n, hidden_size], or a list of such tensors and of lists of token ids.

    name: begins the messages of errors. Raises ValueError for what cannot be embeddings of the model.
    """
    if others := [key for key, value in prompt.items() if key not in (EMBEDS, SALT) and value is not None]:
        raise ValueError(f"{name} has {short(others[0])}: must have {EMBEDS!r} alone, or {SALT!r} beside it")
    name, value = f"{name}[{EMBEDS!r}]", prompt[EMBEDS]
    _check_model(name, config)
    parts = value if isinstance(value, (list, tuple)) else [value]
    token_ids, spans, pixels = list[int](), list[MediaSpan](), list[Pixels]()
    for index, part in enumerate(parts):
        own = name if part is value else f"{name}[{index}]"
        if _is_list_of_ids(part):
            token_ids += token_ids_of(own, part, "a tensor [n, hidden_size], or a list of token ids")
            continue
        with fresh_torch_state():
            embeddings = _as_embeddings(own, part, config)
            for span, rows in pieces_of(embeddings, len(token_ids)):
                spans.append(span)
                pixels.append(rows)
        token_ids += [PLACEHOLDER] * len(embeddings)
    if not spans:
        shown = short(value, MOST_SHOWN)
        raise ValueError(f"{name} is {shown}: must have a tensor; a prompt of ids alone is {{'prompt_token_ids': ids}}")
    pack_ids(name, token_ids, config.description.vocab_size)
    return MediaPrompt(token_ids, tuple(spans), None, 0, tuple(pixels), {})


def check_settings(name: str, prompt: MediaPrompt, params: SamplingParams) -> None:
    """Raise ValueError for settings that need the tokens in whose place embeddings stand."""
    if not (end := prompt.given_end):
        return
    if params.repetition_penalty != 1:
        raise ValueError(
            f"repetition_penalty={params.repetition_penalty}: must be 1 for {name}: it counts a prompt's tokens, and"
            " embeddings are none; presence_penalty and frequency_penalty count generated ones alone"
        )
    if params.prompt_logprobs is not None and params.prompt_logprobs_start < end:
        works = f", or prompt_logprobs_start be at least {end}" if end < len(prompt) else ""
        raise ValueError(
            f"prompt_logprobs={params.prompt_logprobs}: must be left out for {name}{works}: embeddings are no tokens,"
            " and have no probability"
        )


def _check_model(name: str, config: Config) -> None:
    if config.description.layer_inputs is not None:
        raise ValueError(f"{name}: must be left out: this model's layers read embeddings of their own, by token ids")


def _is_list_of_ids(part: Any) -> bool:
    """Whether a part can only be token ids, for good or ill: embeddings are tensors or arrays of two axes."""
    return not isinstance(part, (Tensor, np.ndarray)) or (part.ndim == 1 and "int" in str(part.dtype))


def _as_embeddings(name: str, part: Tensor | np.ndarray[Any, Any], config: Config) -> Tensor:
    """Return a tensor of the model's dtype in host memory."""
    model = config.description
    width = model.embedding_size or model.hidden_size
    if isinstance(part, Tensor) and (part.is_nested or part.is_meta or part.layout != torch.strided):
        raise ValueError(f"{name} is {short(part, MOST_SHOWN)}: must be a dense tensor, with numbers in memory")
    if part.ndim != 2 or part.shape[1] != width or not len(part):
        raise ValueError(f"{name} has the shape {tuple(part.shape)}: must be [n, {width}], a row for each token")
    given = part.detach() if isinstance(part, Tensor) else _tensor_of(name, part)
    if not given.is_floating_point():
        raise ValueError(f"{name} has dtype {given.dtype}: must be floating-point numbers")
    embeddings = given.to("cpu", config.torch_dtype).contiguous()
    if not embeddings.isfinite().all():
        raise ValueError(f"{name} has NaN or infinite numbers in {config.dtype}: must be finite")
    return embeddings


def _tensor_of(name: str, part: np.ndarray[Any, Any]) -> Tensor:
    own = part.dtype.newbyteorder("=")
    if own not in FLOATS:
        raise ValueError(f"{name} has dtype {part.dtype}: must be floating-point numbers, {', '.join(FLOATS)}")
    return torch.from_numpy(part.astype(own, subok=False))  # a copy: torch takes none that is read-only without a word
