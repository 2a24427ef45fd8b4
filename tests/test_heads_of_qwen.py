"""The prediction head of Qwen3.5 and Qwen3-Next guesses as its definition says, and changes no result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import build
from cases.heads import QWEN, Drawn, build_with_head, record_rounds
from conftest import HAS_CUDA, assert_equal, greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from test_guesses_beside_states import PARAMS, PROMPTS, SPREAD, VOCAB, open_llm
from test_guesses_of_an_llm import run
from test_prediction_heads import FILE, NAMES_NONE, SMALL, assert_defined, copy_tokenizer
from test_quantization import SMALL_BLOCKS, write_checkpoint
from torch import Tensor

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.benchmark.determinism import bits_of
from nanoinfer.config import Config

ATTENDING = {
    name: replace(case, settings={**case.settings, "layer_types": ["full_attention"] * 4})
    for name, case in QWEN.items()
}
STATES = {**SMALL, "max_model_len": 192, "kvcache_block_size": 64}
MTP: dict[str, Any] = {"speculation": "mtp", "max_guesses": 3}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Drawn]]:
    """What the head has computed for the guesses of each verifying step."""
    return record_rounds(monkeypatch)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize("name", of_each_kind(QWEN, 0, 2))
def test_guesses_are_what_the_definition_says(
    name: str, agrees: bool, rounds: list[list[Drawn]], tmp_path: Path
) -> None:
    """Behind chunks, cached prefixes, and guesses that held or did not. The model's other layers keep states."""
    model, head = build_with_head(QWEN[name], tmp_path, agrees)
    prompt = [7 * i % 150 for i in range(75)]
    with LLM(str(tmp_path), **STATES, max_num_batched_tokens=64, **MTP) as llm:
        for _ in range(2):
            rounds.clear()
            (output,) = run(llm, [prompt], greedy(14, ignore_eos=True))
            assert (output.num_accepted_tokens > 0.5 * output.num_proposed_tokens > 1) == agrees
            assert_defined(rounds, prompt + output.token_ids, model, head)
            assert len(rounds) > 2
        assert output.num_cached_tokens == 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with the bundled one's tokenizer, and a head that is mostly right."""
    folder, case = tmp_path_factory.mktemp("agrees"), QWEN["qwen3.5"]
    build_with_head(replace(case, settings={**case.settings, "vocab_size": VOCAB}), folder, agrees=True)
    copy_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(folder: str) -> list[RequestOutput]:
    with open_llm(folder) as llm:
        return run(llm, PROMPTS, PARAMS)


@pytest.mark.usefixtures("no_foresight", "one_thread")
@pytest.mark.parametrize("spread", ["roomy", "tight", "host", *whole_only(["one row", "two ranks"])])
def test_results_are_those_without(spread: str, folder: str, expected: list[RequestOutput]) -> None:
    """Samples, prompts that begin alike, log-probabilities of prompts, and structured outputs; most guesses hold."""
    with open_llm(folder, **{**MTP, **SPREAD[spread]}) as llm:
        for _ in range(2):
            outputs = run(llm, PROMPTS, PARAMS)
            assert_equal(outputs, expected)
        assert llm.stats().num_accepted_tokens > 0.3 * llm.stats().num_proposed_tokens > 0
        assert spread != "tight" or llm.engine.scheduler.num_preemptions > 0


@pytest.mark.usefixtures("one_thread")
def test_bits_are_those_without_if_sums_have_one_order(folder: str) -> None:
    prompts, params, results = [PROMPTS[0], PROMPTS[5][:60]], greedy(12, ignore_eos=True, logprobs=0), []
    for options in ({}, MTP):
        with open_llm(folder, deterministic=True, **options) as llm:
            results.append([bits_of(output) for output in run(llm, prompts, params)])
            assert not options or llm.stats().num_accepted_tokens > 5
    assert results[0] == results[1]


@pytest.mark.skipif(HAS_CUDA, reason="no kernel is interpreted where there is a GPU; the last test has its graphs")
def test_empty_places_change_nothing(tmp_path: Path) -> None:
    """Where kernels are interpreted, steps have all places, as a GPU's graphs have. One row ends before the other."""
    case = QWEN["qwen3.5"]
    few = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    build_with_head(replace(case, settings={**case.settings, **few}), tmp_path, agrees=True)
    shape = {**STATES, "max_model_len": 80, "num_kvcache_blocks": 8, "max_num_seqs": 2}
    params = [SamplingParams(temperature=0.8 * i, max_tokens=3 + 3 * i, seed=1, ignore_eos=True) for i in range(2)]
    outputs, prompts = [], [[5, 6, 7], [8, 9]]
    for options in ({}, {"attention_backend": "triton", "speculation": "mtp", "max_guesses": 2}):
        with LLM(str(tmp_path), **{**shape, **options}) as llm:
            outputs.append(run(llm, prompts, params))
    assert_equal(outputs[1], outputs[0])
    assert all(output.num_accepted_tokens for output in outputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"enforce_eager": True}], ids=repr)
def test_a_gpu_gives_the_same_tokens(options: dict[str, Any], folder: str) -> None:
    """Rows come and go, so that graphs have empty rows."""
    params = [SamplingParams(temperature=0.4 * (i % 3), seed=i, max_tokens=8 + 5 * (i % 17)) for i in range(40)]
    prompts, texts = [PROMPTS[i % 8] for i in range(40)], []
    for own in ({}, MTP):
        with open_llm(folder, **{"device": "cuda", **options, **own}) as llm:
            texts.append([output.token_ids for output in run(llm, prompts, params)])
            held, proposed = llm.stats().num_accepted_tokens, llm.stats().num_proposed_tokens
    assert held > 0.5 * proposed > 150
    if options.get("dtype") != "bfloat16":
        assert texts[0] == texts[1]


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
