"""Prefixes on disk: another run begins with them, as if it had computed them, or refuses them by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from conftest import greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file

from nanoinfer import LLM
from nanoinfer.runner.memory import prefix_files
from nanoinfer.runner.memory.prefix_files import MANIFEST

SMALL = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 320}
STEM = [(7 * i * i + 3) % 150 for i in range(150)]
BEHIND = [[5, 6, 7], list(range(30)), [9]]
KINDS = ["qwen3", "gemma2", "qwen3.5", "deepseek-v3", "falconh1", "lfm2", "gemma4", "mistral window", "gptoss"]


def texts(llm: LLM) -> list[tuple[list[int], int]]:
    outputs = llm.generate([STEM + behind for behind in BEHIND], greedy(12, ignore_eos=True), use_tqdm=False)
    return [(output.token_ids, output.num_cached_tokens) for output in outputs]


@pytest.mark.parametrize("name", of_each_kind(KINDS, 0, 1, 2, 3))
def test_another_run_goes_on_from_it(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Its tokens are those of a run that has computed all, and the saved ones count as cached."""
    build(CASES[name], tmp_path / "model")
    how = {**SMALL, **CASES[name].small, "device": "cpu"}
    first = make_llm(str(tmp_path / "model"), **how)
    saved = first.save_prefix(STEM, tmp_path / "prefix")
    assert saved >= 128
    expected = [tokens for tokens, _ in texts(make_llm(str(tmp_path / "model"), **how))]
    second = make_llm(str(tmp_path / "model"), **how)
    assert second.load_prefix(tmp_path / "prefix") == saved
    (began,) = second.generate([STEM + BEHIND[1]], greedy(12, ignore_eos=True), use_tqdm=False)
    assert began.num_cached_tokens == saved
    assert [tokens for tokens, _ in texts(second)] == expected
    assert second.load_prefix(tmp_path / "prefix") == saved
    manager = second.engine.scheduler.block_manager
    assert manager.num_free == len(manager.blocks)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen")
    build(CASES["qwen3"], folder)
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"kv_offload_gib": 0.01},
        *whole_only([{"deterministic": True}, {"dtype": "bfloat16"}]),
    ],
    ids=str,
)
def test_on_two_ranks_and_beside_a_host_tier(
    options: dict[str, Any], make_llm: Callable[..., LLM], qwen: str, tmp_path: Path
) -> None:
    first = make_llm(qwen, **SMALL, **options)
    assert first.save_prefix(STEM, tmp_path / "prefix") == 144
    expected = [tokens for tokens, _ in texts(first)]
    assert len(list((tmp_path / "prefix").glob("*.safetensors"))) == options.get("tensor_parallel_size", 1)
    second = make_llm(qwen, **SMALL, **options)
    second.load_prefix(tmp_path / "prefix")
    assert texts(second) == [(tokens, 144) for tokens in expected]


@pytest.mark.whole
def test_replicas_load_it(make_llm: Callable[..., LLM], qwen: str, tmp_path: Path) -> None:
    make_llm(qwen, **SMALL).save_prefix(STEM, tmp_path / "prefix")
    llm = make_llm(qwen, **SMALL, data_parallel_size=2)
    assert llm.load_prefix(tmp_path / "prefix") == 144
    assert [count for _, count in texts(llm)] == [144] * 3
    with pytest.raises(ValueError, match="data_parallel_size=2: save_prefix needs an LLM without replicas"):
        llm.save_prefix(STEM, tmp_path / "other")


def test_what_is_cached_already_stays_and_the_rest_comes(
    make_llm: Callable[..., LLM], qwen: str, tmp_path: Path
) -> None:
    first = make_llm(qwen, **SMALL)
    first.save_prefix(STEM, tmp_path / "prefix")
    second = make_llm(qwen, **SMALL)
    second.generate([STEM[:70]], greedy(2), use_tqdm=False)
    second.load_prefix(tmp_path / "prefix")
    assert texts(second) == [(tokens, 144) for tokens, _ in texts(first)]


class TestErrors:
    @pytest.fixture
    def saved(self, make_llm: Callable[..., LLM], qwen: str, tmp_path: Path) -> Path:
        make_llm(qwen, **SMALL).save_prefix(STEM, tmp_path / "prefix")
        return tmp_path / "prefix"

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"dtype": "bfloat16"}, "was saved with dtype='float32', and this LLM has 'bfloat16'"),
            ({"kvcache_block_size": 32}, "was saved with kvcache_block_size=16, and this LLM has 32"),
        ],
    )
    def test_other_options(
        self, options: dict[str, Any], told: str, saved: Path, make_llm: Callable[..., LLM], qwen: str
    ) -> None:
        llm = make_llm(qwen, **{**SMALL, **options})
        with pytest.raises(ValueError, match=told):
            llm.load_prefix(saved)
        assert texts(llm)[0][1] == 0

    def test_another_model_and_other_weights(
        self, saved: Path, make_llm: Callable[..., LLM], qwen: str, tmp_path: Path
    ) -> None:
        build(CASES["llama"], tmp_path / "llama")
        with pytest.raises(ValueError, match="was saved with model="):
            make_llm(str(tmp_path / "llama"), **SMALL).load_prefix(saved)
        llm = make_llm(qwen, **SMALL)
        weights = load_file(Path(qwen) / "model.safetensors")
        llm.update_weights({**weights, "model.norm.weight": weights["model.norm.weight"] + 1})
        with pytest.raises(ValueError, match="its prefix was computed with other weights"):
            llm.load_prefix(saved)

    def test_another_version(self, saved: Path, make_llm: Callable[..., LLM], qwen: str) -> None:
        manifest = json.loads((saved / MANIFEST).read_text())
        (saved / MANIFEST).write_text(json.dumps({**manifest, "nanoinfer": "0.0.1"}))
        with pytest.raises(ValueError, match=r"was saved with nanoinfer='0\.0\.1', and this LLM has "):
            make_llm(qwen, **SMALL).load_prefix(saved)

    def test_torn_files(self, saved: Path, make_llm: Callable[..., LLM], qwen: str, tmp_path: Path) -> None:
        llm = make_llm(qwen, **SMALL)
        with pytest.raises(ValueError, match="holds no saved prefix"):
            llm.load_prefix(tmp_path / "nowhere")
        file = saved / "rank-0.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match="prefix: "):
            llm.load_prefix(saved)
        file.unlink()
        with pytest.raises(ValueError, match="prefix: "):
            llm.load_prefix(saved)
        (saved / MANIFEST).write_text("{")
        with pytest.raises(ValueError, match="holds no saved prefix"):
            llm.load_prefix(saved)
        assert texts(llm)[0][1] == 0

    def test_a_full_disk_leaves_nothing(
        self, make_llm: Callable[..., LLM], qwen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(tensors: dict[str, torch.Tensor], file: Path, *others: Any) -> None:
            save_file({name: tensor[:1] for name, tensor in tensors.items()}, file)
            raise OSError(28, "No space left on device")

        llm = make_llm(qwen, **SMALL)
        monkeypatch.setattr(prefix_files, "save_file", full)
        with pytest.raises(RuntimeError, match="No space left on device"):
            llm.save_prefix(STEM, tmp_path / "prefix")
        assert list(tmp_path.iterdir()) == []
        monkeypatch.undo()
        assert llm.save_prefix(STEM, tmp_path / "prefix") == 144

    def test_a_cache_with_too_few_blocks(self, saved: Path, make_llm: Callable[..., LLM], qwen: str) -> None:
        llm = make_llm(qwen, **{**SMALL, "max_model_len": 100}, num_kvcache_blocks=8)
        with pytest.raises(RuntimeError, match="too few free blocks"):
            llm.load_prefix(saved)
        assert llm.generate([STEM[:50]], greedy(3), use_tqdm=False)[0].num_cached_tokens == 0

    def test_what_cannot_be_saved(self, saved: Path, make_llm: Callable[..., LLM], qwen: str, tmp_path: Path) -> None:
        llm = make_llm(qwen, **SMALL)
        with pytest.raises(ValueError, match="prompt has 10 tokens, of which the cache holds none"):
            llm.save_prefix(STEM[:10], tmp_path / "short")
        with pytest.raises(ValueError, match="is there already"):
            llm.save_prefix(STEM, saved)
        with pytest.raises(ValueError, match="folder='': must be the path of a folder"):
            llm.save_prefix(STEM, "")
        llm.add_request([5], greedy(4))
        with pytest.raises(RuntimeError, match="have not ended"):
            llm.load_prefix(saved)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3.5"])
def test_from_a_gpu_and_back(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    build(CASES[name], tmp_path / "model")
    how = {**CASES[name].small, "kvcache_block_size": 64, "device": "cuda"}
    first = make_llm(str(tmp_path / "model"), **how)
    saved = first.save_prefix(STEM, tmp_path / "prefix")
    second = make_llm(str(tmp_path / "model"), **how)
    assert second.load_prefix(tmp_path / "prefix") == saved
    assert [tokens for tokens, _ in texts(second)] == [tokens for tokens, _ in texts(first)]
