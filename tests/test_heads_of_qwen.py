"""The prediction head of Qwen3.5 and Qwen3-Next guesses as its definition says, and changes no result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import build
from cases.heads import QWEN, Drawn, build_with_head, record_rounds
from conftest import greedy, of_each_kind
from safetensors.torch import load_file, save_file
from test_guesses_of_an_llm import run
from test_prediction_heads import FILE, NAMES_NONE, SMALL, assert_defined
from test_quantization import SMALL_BLOCKS, write_checkpoint
from torch import Tensor

from nanoinfer import LLM
from nanoinfer.config import Config

ATTENDING = {
    name: replace(case, settings={**case.settings, "layer_types": ["full_attention"] * 4})
    for name, case in QWEN.items()
}
MTP: dict[str, Any] = {"speculation": "mtp", "max_guesses": 3}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Drawn]]:
    """What the head has computed for the guesses of each verifying step."""
    return record_rounds(monkeypatch)


@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize("name", of_each_kind(ATTENDING, 0, 2))
def test_guesses_are_what_the_definition_says(
    name: str, agrees: bool, rounds: list[list[Drawn]], tmp_path: Path
) -> None:
    """Behind chunks, cached prefixes, and guesses that held or did not."""
    model, head = build_with_head(ATTENDING[name], tmp_path, agrees)
    prompt = list(range(3, 44))
    with LLM(str(tmp_path), **SMALL, max_num_batched_tokens=17, **MTP) as llm:
        for _ in range(2):
            rounds.clear()
            (output,) = run(llm, [prompt], greedy(14, ignore_eos=True))
            assert (output.num_accepted_tokens > 0.5 * output.num_proposed_tokens > 1) == agrees
            assert_defined(rounds, prompt + output.token_ids, model, head)
            assert len(rounds) > 2
        assert output.num_cached_tokens == 32


def test_a_config_may_name_no_head_and_files_may_lack_it(tmp_path: Path) -> None:
    """Configs of Qwen3-Next do not tell that its files have one."""
    case, next_case = ATTENDING["qwen3.5"], ATTENDING["qwen3next"]
    build(replace(case, settings={**case.settings, "mtp_num_hidden_layers": 0}), tmp_path / "none")
    with pytest.raises(ValueError, match=NAMES_NONE):
        Config(str(tmp_path / "none"), **MTP)
    settings = {**next_case.settings}
    del settings["num_nextn_predict_layers"]
    build(replace(next_case, settings=settings), tmp_path / "lost")
    with pytest.raises(ValueError, match=r"^speculation='mtp': .* prediction head, mtp\.layers\.0\.\*: transformers"):
        Config(str(tmp_path / "lost"), **MTP)
    build_with_head(case, tmp_path / "some")
    tensors = load_file(tmp_path / "some" / FILE)
    del tensors["mtp.fc.weight"]
    save_file(tensors, tmp_path / "some" / FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit the model: missing: mtp\.fc\.weight"):
        LLM(str(tmp_path / "some"), **SMALL, **MTP)


def test_a_checkpoint_in_fp8_may_hold_it_in_16_bits(rounds: list[list[Drawn]], tmp_path: Path) -> None:
    """As published ones do, whose configs need not say so."""
    build_with_head(ATTENDING["qwen3.5"], tmp_path, agrees=True)
    head = {name: tensor for name, tensor in load_file(tmp_path / FILE).items() if name.startswith("mtp.")}
    in_fp8, states = tmp_path / "fp8", list[Tensor]()
    in_fp8.mkdir()
    for own in (write_checkpoint(tmp_path, in_fp8, SMALL_BLOCKS), in_fp8):
        others = {name: tensor for name, tensor in load_file(own / FILE).items() if not name.startswith("mtp.")}
        save_file(others | head, own / FILE, {"format": "pt"})
        with LLM(str(own), **SMALL, speculation="mtp", max_guesses=1) as llm:
            rounds.clear()
            run(llm, [[5, 6, 7]], greedy(9, ignore_eos=True))
            states.append(torch.stack([after for ((_, _, after),) in rounds]))
    assert len(states[0]) > 2
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)


def test_embeddings_of_its_own_are_refused(tmp_path: Path) -> None:
    case = ATTENDING["qwen3.5"]
    build(replace(case, settings={**case.settings, "mtp_use_dedicated_embeddings": True}), tmp_path)
    with pytest.raises(ValueError, match=r"mtp_use_dedicated_embeddings=True in its config is not supported"):
        Config(str(tmp_path))
