"""Weights and configs as they come: sharded, tied or not, by any transformers version; each rank reads its slice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Oracle, greedy, safetensors_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from nanoinfer import LLM
from nanoinfer.config import Config
from nanoinfer.layers.embedding import VocabParallelEmbedding
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.loader import load_weights


def rank(index: int, size: int) -> TensorParallel:
    """A rank without a process group: enough to be loaded."""
    tp = TensorParallel()
    tp.rank, tp.size = index, size
    return tp


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_slices_make_up_the_whole(size: int, tmp_path: Path) -> None:
    """Of two KV heads, each of four ranks has the one that its query heads see."""
    weights = {
        "block.q_proj.weight": torch.randn(16, 8),
        "block.k_proj.weight": torch.randn(8, 8),
        "block.o_proj.weight": torch.randn(8, 16),
        "embed.weight": torch.randn(21, 8),
    }
    save_file(weights, tmp_path / "model.safetensors")

    def load(index: int) -> nn.ModuleDict:
        tp = rank(index, size)
        block = nn.ModuleDict(
            {
                "qk_proj": ColumnParallelLinear(8, {"q_proj": 4, "k_proj": 2}, tp, head_dim=4),
                "o_proj": RowParallelLinear(16, 8, tp),
            }
        )
        model = nn.ModuleDict({"block": block, "embed": VocabParallelEmbedding(21, 8, tp)})
        load_weights(model, str(tmp_path))
        return model

    models = [load(index) for index in range(size)]
    q_and_k = [model["block"]["qk_proj"].weight.split([16 // size, max(8 // size, 4)]) for model in models]
    held = q_and_k[:: size // 2] if size > 2 else q_and_k
    assert torch.equal(torch.cat([q for q, _ in q_and_k]), weights["block.q_proj.weight"])
    assert torch.equal(torch.cat([k for _, k in held]), weights["block.k_proj.weight"])
    assert all(torch.equal(q_and_k[i][1], held[i * len(held) // size][1]) for i in range(size))
    assert torch.equal(torch.cat([m["block"]["o_proj"].weight for m in models], dim=1), weights["block.o_proj.weight"])
    assert torch.equal(torch.cat([m["embed"].weight for m in models]), weights["embed.weight"])


def test_a_sharded_checkpoint(make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3(shards=4)
    assert len(safetensors_of(folder)) > 2
    (output,) = make_llm(folder).generate([[5, 6, 7]], greedy(8), use_tqdm=False)
    assert output["token_ids"] == Oracle(folder).greedy([5, 6, 7], 8)


def test_a_tied_checkpoint_that_stores_its_matrix_twice(
    make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    folder = make_qwen3(tie_word_embeddings=True)
    (file,) = safetensors_of(folder)
    with safe_open(file, framework="pt") as reader:
        assert "lm_head.weight" not in reader.keys()  # noqa: SIM118
    expected = Oracle(folder).greedy([5, 6, 7], 8)
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    (output,) = make_llm(folder).generate([[5, 6, 7]], greedy(8), use_tqdm=False)
    assert output["token_ids"] == expected


@pytest.mark.parametrize("place", ["top level", "rope_parameters"])
def test_rope_theta_is_found_wherever_a_transformers_version_wrote_it(
    place: str, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    folder = make_qwen3(rope_theta=500.0)
    expected = Oracle(folder).greedy([5, 6, 7] * 10, 16)
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    for name in ("rope_theta", "rope_parameters", "rope_scaling"):
        config.pop(name, None)
    theta = {"rope_theta": 500.0}
    config |= theta if place == "top level" else {"rope_parameters": {**theta, "rope_type": "default"}}
    file.write_text(json.dumps(config))
    (output,) = make_llm(folder).generate([[5, 6, 7] * 10], greedy(16), use_tqdm=False)
    assert output["token_ids"] == expected


def test_the_models_own_length_caps_max_model_len(make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3(max_position_embeddings=100)
    assert Config.create(folder).max_model_len == 100
    assert Config.create(folder, max_model_len=50).max_model_len == 50


def test_a_hub_id_is_resolved_by_snapshot_download(
    make_llm: Callable[..., LLM], make_qwen3: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = make_qwen3(), []

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.append(repo_id)
        return folder

    monkeypatch.setattr("nanoinfer.config.snapshot_download", snapshot_download)
    llm = make_llm("someone/some-model")
    assert asked == ["someone/some-model"]
    assert llm.config.model == folder


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_weights_are_converted_to_the_dtype_that_is_asked_for(
    dtype: str, stored: str, make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]
) -> None:
    folder = make_qwen3(dtype=stored)
    (file,) = safetensors_of(folder)
    save_file({name: w.to(getattr(torch, stored)) for name, w in load_file(file).items()}, file, {"format": "pt"})
    llm = make_llm(folder, dtype=dtype)
    assert {p.dtype for p in llm.engine.runner.model.parameters()} == {getattr(torch, dtype)}
    assert len(llm.generate([[5]], greedy(4), use_tqdm=False)[0]["token_ids"]) == 4


def test_dummy_weights_need_no_checkpoint(make_llm: Callable[..., LLM], make_qwen3: Callable[..., str]) -> None:
    folder = make_qwen3()
    for file in safetensors_of(folder):
        file.unlink()
    llm = make_llm(folder, load_format="dummy")
    outputs = llm.generate([[5], [6]], greedy(8, ignore_eos=True), use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [8, 8]
