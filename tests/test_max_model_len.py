"""How long a sequence may be: the option max_model_len, its default, and the model's own limit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Oracle, greedy
from transformers import AutoConfig

from nanoinfer import LLM
from nanoinfer.config import DEFAULT_MAX_MODEL_LEN, Config
from nanoinfer.models import describe

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 32.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def by_kind(full: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": PLAIN}


def test_the_default_of_max_model_len_keeps_the_models_own_limit(make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3(max_position_embeddings=100)
    assert Config(folder).max_model_len == 100
    assert Config(folder, max_model_len=50).max_model_len == 50
    assert Config(make_qwen3(max_position_embeddings=5000)).max_model_len == DEFAULT_MAX_MODEL_LEN


@pytest.mark.parametrize("length", [101, DEFAULT_MAX_MODEL_LEN, 10**6])
def test_more_than_the_models_own_limit_is_refused(length: int, make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3(max_position_embeddings=100)
    assert Config(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ValueError, match=f"max_model_len={length}: must be at most 100"):
        Config(folder, max_model_len=length)


@pytest.mark.parametrize(
    ("kind", "positions", "settings", "limit"),
    [
        ("qwen3", 40960, {"rope_parameters": YARN}, 131072),
        ("qwen2", 32768, {"rope_scaling": {"type": "yarn", **YARN}}, 131072),
        ("qwen3", 131072, {"rope_parameters": YARN}, 131072),
        ("llama", 32768, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.5}}, 81920),
        ("llama", 131072, {"rope_parameters": {**YARN, "factor": 2.0}}, 131072),
        ("olmo3", 8192, {"rope_parameters": {**YARN, "original_max_position_embeddings": 8192}, **KINDS}, 32768),
        (
            "gemma3_text",
            8192,
            {"rope_parameters": by_kind(YARN), **KINDS},
            131072,
        ),
        (
            "gemma3_text",
            131072,
            {"rope_parameters": by_kind(LINEAR), **KINDS},
            131072,
        ),
        ("llama", 16384, {"rope_parameters": LINEAR}, 16384),
        ("llama", 131072, {"rope_parameters": LLAMA3}, 131072),
        ("phi3", 131072, {"rope_parameters": LONGROPE}, 131072),
        ("qwen3", 40960, {}, 40960),
    ],
)
def test_the_models_own_limit(kind: str, positions: int, settings: dict[str, Any], limit: int) -> None:
    """YaRN's stretched length counts where it is more than max_position_embeddings, which is whole elsewhere."""
    shape = {"num_hidden_layers": 2, "max_position_embeddings": positions, "architectures": [CLASSES[kind]]}
    config = AutoConfig.for_model(kind, **shape, **copy.deepcopy(settings))
    assert describe(config).max_position == limit


def test_behind_max_position_embeddings_yarn_is_that_of_transformers(
    make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    yarn = {**YARN, "original_max_position_embeddings": 32}
    folder = make_qwen3(max_position_embeddings=40, rope_parameters=yarn)
    prompt = [5, 6, 7] * 30
    (output,) = make_llm(folder, max_model_len=128).generate([prompt], greedy(16, ignore_eos=True), use_tqdm=False)
    assert output["token_ids"] == Oracle(folder).greedy(prompt, 16, ignore_eos=True)
