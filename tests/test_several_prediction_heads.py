"""MiMo-V2-Flash's prediction heads guess as their definition says, each at its distance, and change no result."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import build
from cases.heads import MIMO, Drawn, Head, build_with_heads, record_rounds
from conftest import HAS_CUDA, assert_equal, greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from test_guesses_of_an_llm import PROMPTS, SPREAD, run
from test_prediction_heads import FILE, NAMES_NONE, SMALL, assert_most_hold, assert_same, copy_tokenizer, make
from test_quantization import SMALL_BLOCKS, write_checkpoint
from torch import Tensor
from transformers import PreTrainedModel

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.config import Config
from nanoinfer.runner.drafting.draft_layers import DraftLayers

MTP = {"speculation": "mtp", "max_model_len": 160, "max_num_batched_tokens": 15}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Drawn]]:
    """What the heads have computed for the guesses of each verifying step."""
    return record_rounds(monkeypatch)


@torch.inference_mode()
def assert_defined(rounds: list[list[Drawn]], text: list[int], model: PreTrainedModel, heads: list[Head]) -> None:
    """Check that guesses of a text are what the definition says: head k has the model's hidden states, and guess k."""
    hidden = model.model(torch.tensor([text])).last_hidden_state[0]
    for drawn in rounds:
        begin = drawn[0][0]
        tokens = text[1 : begin + 2]
        for number, (position, token, after) in enumerate(drawn):
            assert (position, token) == (begin, tokens[-1])
            expected = heads[number](torch.tensor(tokens[number:]), hidden[: begin + 1])[-1]
            torch.testing.assert_close(after, expected, atol=2e-4, rtol=2e-4)
            tokens = [*tokens, int(model.lm_head(expected).argmax())]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", of_each_kind(MIMO, 0))
def test_guesses_are_what_the_definition_says(
    name: str, rounds: list[list[Drawn]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind chunks, cached prefixes, and guesses of which some hold; texts are longer than windows."""
    monkeypatch.setattr(DraftLayers, "depth", lambda *_: 3)  # even where a row's limit is lower
    model, heads = build_with_heads(MIMO[name], tmp_path, small=0.015)
    prompt = [7 * i % 150 for i in range(87)]
    with LLM(str(tmp_path), **SMALL | MTP) as llm:
        assert llm.config.max_guesses == 3
        for _ in range(2):
            rounds.clear()
            (output,) = run(llm, [prompt], greedy(24, ignore_eos=True))
            assert 4 < output.num_accepted_tokens < output.num_proposed_tokens
            assert_defined(rounds, prompt + output.token_ids, model, heads)
        assert output.num_cached_tokens == 80


def test_a_last_chunk_may_be_shorter_than_the_heads_reach(rounds: list[list[Drawn]], tmp_path: Path) -> None:
    """Then further heads lack the keys of a few positions, until these are behind their windows."""
    model, heads = build_with_heads(MIMO["mimo-v2"], tmp_path)
    prompt = [7 * i % 150 for i in range(31)]
    with LLM(str(tmp_path), **SMALL | MTP) as llm:
        rounds.clear()
        (output,) = run(llm, [prompt], greedy(32, ignore_eos=True))
        assert output.num_accepted_tokens > 12
    behind = [drawn for drawn in rounds if drawn[0][0] > len(prompt) + model.config.sliding_window]
    assert len(behind) > 1
    assert_defined([drawn[:1] for drawn in rounds] + behind, prompt + output.token_ids, model, heads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with the bundled one's tokenizer, and heads that are mostly right."""
    folder, case = tmp_path_factory.mktemp("heads"), MIMO["mimo-v2"]
    build_with_heads(replace(case, settings={**case.settings, "vocab_size": 2048}), folder)
    copy_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(folder: str) -> list[RequestOutput]:
    with make(folder) as llm:
        return run(llm)


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize("spread", ["roomy", "tight", "one row", "two ranks", *whole_only(["two replicas"])])
def test_results_are_those_without(spread: str, folder: str, expected: list[RequestOutput]) -> None:
    """All settings, samples of one prompt, and structured outputs; most guesses hold."""
    with make(folder, **{"speculation": "mtp", **SPREAD[spread]}) as llm:
        assert llm.config.max_guesses == min(3, SPREAD[spread].get("max_guesses", 3))
        assert_same(llm, spread, expected)


@pytest.mark.skipif(HAS_CUDA, reason="no kernel is interpreted where there is a GPU")
def test_empty_places_change_nothing(tmp_path: Path) -> None:
    """Where kernels are interpreted, steps have all places, as a GPU's graphs have. One row ends before the other."""
    case = MIMO["mimo-v2"]
    few = {"num_hidden_layers": 2, "layer_types": case.settings["layer_types"][:2]}
    build_with_heads(replace(case, settings={**case.settings, **few}), tmp_path)
    shape = {**SMALL, "max_model_len": 32, "num_kvcache_blocks": 20, "max_num_seqs": 2}
    params = [SamplingParams(temperature=0.8 * i, max_tokens=3 + 3 * i, seed=1, ignore_eos=True) for i in range(2)]
    outputs, prompts = [], [[5, 6, 7], [8, 9]]
    for options in ({}, {"attention_backend": "triton", "speculation": "mtp"}):
        with LLM(str(tmp_path), **{**shape, **options}) as llm:
            outputs.append(run(llm, prompts, params))
    assert_equal(outputs[1], outputs[0])
    assert all(output.num_accepted_tokens for output in outputs[1])


def test_the_output_projections_of_heads_are_as_the_layers_are(rounds: list[list[Drawn]], tmp_path: Path) -> None:
    """The published config keeps those of layers out of FP8, by their numbers. The files keep those of heads, too."""
    build_with_heads(MIMO["mimo-v2"], tmp_path)
    ends = "self_attn.o_proj.weight", "eh_proj.weight"
    kept = {name: tensor for name, tensor in load_file(tmp_path / FILE).items() if name.endswith(ends)}
    ignored = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(4)] + ["model.decoder.self_attn.o_proj"]
    in_fp8, states = tmp_path / "fp8", list[dict[tuple[int, ...], Tensor]]()
    in_fp8.mkdir()
    for own in (write_checkpoint(tmp_path, in_fp8, {**SMALL_BLOCKS, "ignored_layers": ignored}), in_fp8):
        others = {name: tensor for name, tensor in load_file(own / FILE).items() if "o_proj" not in name}
        others = {name: tensor for name, tensor in others.items() if "eh_proj" not in name}
        save_file(others | kept, own / FILE, {"format": "pt"})
        with LLM(str(own), **SMALL | MTP) as llm:
            rounds.clear()
            run(llm, [[5, 6, 7]], greedy(9, ignore_eos=True))
            states.append({(head, *at): after for drawn in rounds for head, (*at, after) in enumerate(drawn)})
    both = sorted(states[0].keys() & states[1].keys())  # steps near the end may be planned before that is known
    assert len(both) > 2
    torch.testing.assert_close(*(torch.stack([drawn[at] for at in both]) for drawn in states), atol=1e-4, rtol=1e-4)


def test_fewer_heads_are_run_if_fewer_guesses_are_asked_for(folder: str) -> None:
    """Each head that runs has a layer of keys."""
    counts = []
    for most in (1, 2, 15):
        with make(folder, speculation="mtp", max_guesses=most) as llm:
            assert llm.config.draft is not None
            counts.append((llm.config.max_guesses, len(llm.config.draft.layers)))
    assert counts == [(1, 1), (2, 2), (3, 3)]


def test_a_single_head_guesses_on_from_its_own_states(tmp_path: Path) -> None:
    case = MIMO["mimo-v2"]
    build_with_heads(replace(case, settings={**case.settings, "num_nextn_predict_layers": 1}), tmp_path)
    with LLM(str(tmp_path), **SMALL, speculation="mtp", max_guesses=4) as llm:
        (output,) = run(llm, [[5, 6, 7]], greedy(30, ignore_eos=True))
        assert llm.config.max_guesses == 4
        assert output.num_accepted_tokens > 0.5 * output.num_proposed_tokens > 6


def test_what_lacks_is_named(tmp_path: Path) -> None:
    """A config may name no head, the files lack all, or one of them, or a tensor."""
    case = MIMO["mimo-v2"]
    for settings in ({"num_nextn_predict_layers": 0}, {"layer_types": ["full_attention"] * 4}):
        build(replace(case, settings={**case.settings, **settings}), tmp_path / "none")
        with pytest.raises(ValueError, match=NAMES_NONE):
            Config(str(tmp_path / "none"), speculation="mtp")
    build(case, tmp_path / "lost")
    with pytest.raises(ValueError, match=r"^speculation='mtp': .* prediction head, model\.mtp\.layers\.0\.\*: transf"):
        Config(str(tmp_path / "lost"), speculation="mtp")
    build_with_heads(case, tmp_path / "some")
    whole = load_file(tmp_path / "some" / FILE)
    for lacking in ("model.mtp.layers.2.", "model.mtp.layers.1.eh_proj"):
        rest = {name: tensor for name, tensor in whole.items() if not name.startswith(lacking)}
        save_file(rest, tmp_path / "some" / FILE, {"format": "pt"})
        with pytest.raises(ValueError, match=rf"does not fit the model: missing: {re.escape(lacking)}"):
            LLM(str(tmp_path / "some"), **SMALL | MTP)
        LLM(str(tmp_path / "some"), **SMALL, speculation="mtp", max_guesses=1).close()


def test_it_sleeps_and_keeps_its_weights(folder: str) -> None:
    with make(folder, speculation="mtp") as llm:
        assert_most_hold(llm)
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights(folder)
        assert_most_hold(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"enforce_eager": True}], ids=repr)
def test_a_gpu_gives_the_same_tokens(options: dict[str, Any], folder: str) -> None:
    """Rows come and go, so that graphs have empty rows."""
    params = [SamplingParams(temperature=0.4 * (i % 3), seed=i, max_tokens=8 + 5 * (i % 17)) for i in range(40)]
    prompts, texts = [PROMPTS[i % 6] for i in range(40)], []
    for own in ({}, {"speculation": "mtp"}):
        with make(folder, **{"device": "cuda", **options, **own}) as llm:
            texts.append([output.token_ids for output in run(llm, prompts, params)])
            held, proposed = llm.stats().num_accepted_tokens, llm.stats().num_proposed_tokens
    assert held > 0.4 * proposed > 100
    if options.get("dtype") != "bfloat16":
        assert texts[0] == texts[1]
