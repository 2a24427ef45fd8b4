"""Entropies: of the distributions that tokens were drawn from, alone and in company, with guesses and on ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import DEVICE, HAS_CUDA

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams
from nanoinfer.batch.__main__ import main as run_batch
from nanoinfer.kernels.sampling.entropy import (
    BLOCK,
    entropies,
    entropies_reference,
    entropies_triton,
    entropy_parts,
    entropy_parts_reference,
    entropy_parts_triton,
)

PROMPT = "ROMEO:\n"
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1.7, "n": 2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "logit_bias": {70: 2.0, 71: -3.0}, "min_tokens": 3},
    {"allowed_token_ids": list(range(60, 90)), "kept_tokens": True},
    {"bad_words": ["the", " I"], "logprobs": 2},
    {"structured_outputs": {"regex": "[a-z ]{5,30}"}},
]


@pytest.fixture(scope="module")
def processed() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, logprobs_mode="processed_logprobs", dtype="float32", max_num_seqs=16) as own:
        yield own


def run(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


def all_params(**others: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=8, seed=i, entropy=True, **{**own, **others}) for i, own in enumerate(SETTINGS)]


def entropies_of(outputs: list[RequestOutput]) -> list[list[float]]:
    return [sample.entropies for output in outputs for sample in output.samples]


def assert_alike(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(own) for own in found] == [len(own) for own in expected]
    for own, theirs in zip(found, expected, strict=True):
        assert own == pytest.approx(theirs, abs=1e-3)


def test_they_are_those_of_processed_logprobs(processed: LLM) -> None:
    """The oracle adds up over the log-probabilities of all tokens that could be drawn."""
    for output in run(processed, all_params(logprobs=-1)):
        for sample in output.samples:
            expected = [-sum(math.exp(p) * p for p in place.values() if p > -math.inf) for place in sample.logprobs]
            assert sample.entropies == pytest.approx(expected, abs=1e-4)


def test_they_change_nothing_else(processed: LLM) -> None:
    plain, asked = all_params(), all_params()
    for params in plain:
        params.entropy = False
    told, silent = run(processed, asked), run(processed, plain)
    assert [output.token_ids for output in told] == [output.token_ids for output in silent]
    assert {tuple(own) for own in entropies_of(told) if not any(own)} == {(0.0,) * 8}  # temperature 0
    assert all(output.entropies is None for output in silent)


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "suffix"},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "deterministic": True},
        {"data_parallel_size": 2},
        {"max_num_seqs": 2, "num_kvcache_blocks": 6, "max_model_len": 64},
    ],
)
def test_guesses_ranks_replicas_and_preemption(
    processed: LLM, make_llm: Callable[..., LLM], options: dict[str, Any]
) -> None:
    own = make_llm(dtype="float32", **options)
    assert_alike(entropies_of(run(own, all_params())), entropies_of(run(processed, all_params())))


def test_streams_and_batch_files(processed: LLM, tmp_path: Any) -> None:
    (params, *_) = all_params()
    (expected,) = entropies_of(run(processed, [params]))
    assert [entropy for new in processed.stream(PROMPT, params) for entropy in new.entropies] == expected
    (tmp_path / "in").write_text(json.dumps({"id": 1, "prompt": PROMPT, "seed": 0, "max_tokens": 8, "entropy": True}))
    run_batch([str(tmp_path / "in"), str(tmp_path / "out"), "--model", "bundled", "--dtype", "float32"])
    assert json.loads((tmp_path / "out").read_text())["entropies"] == pytest.approx(expected, abs=1e-4)


def oracle(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The entropies of [rows, vocabulary] in float64."""
    scores = logits.double() / temperatures.where(temperatures > 0, 1).double()[:, None]
    found = -(scores.softmax(1) * scores.log_softmax(1).masked_fill(scores.isneginf(), 0)).sum(1)
    return found.where(temperatures > 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [7, BLOCK, 2 * BLOCK + 5])
def test_the_kernels(vocabulary: int, dtype: torch.dtype) -> None:
    logits = (6 * torch.randn(5, vocabulary, device=DEVICE)).to(dtype)
    logits[1, : vocabulary // 2] = float("-inf")
    logits[2, 3] = 90.0  # all but certain
    temperatures = torch.tensor([1.0, 0.7, 1.0, 0.0, 2.5], device=DEVICE)
    expected = oracle(logits, temperatures)
    for parts_of, put in (
        (entropy_parts_triton, entropies_triton),
        (entropy_parts_reference, entropies_reference),
        (entropy_parts_triton, entropies_reference),
    ):
        assert put(parts_of(logits, temperatures), temperatures).tolist() == pytest.approx(expected.tolist(), abs=1e-3)
        places = torch.tensor([4, 0, 1], device=DEVICE)
        some = put(parts_of(logits, temperatures[places], places), temperatures[places])
        assert some.tolist() == pytest.approx(expected[places].tolist(), abs=1e-3)
        halves = [parts_of(half, temperatures, width=vocabulary) for half in logits.split(vocabulary // 2 + 1, dim=1)]
        assert put(torch.cat(halves, 1), temperatures).tolist() == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_cutoff_and_logits_that_are_not_finite() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [1.0, float("nan"), 2.0, 0.0], [float("-inf")] * 4], device=DEVICE)
    cutoff = torch.tensor([2.0, -9.0, -9.0], device=DEVICE), torch.tensor([3, 0, 0], device=DEVICE)
    ones = torch.ones(3, device=DEVICE)
    kept = logits.clone()
    kept[0, [0, 2]] = float("-inf")
    for parts_of, put in ((entropy_parts_triton, entropies_triton), (entropy_parts_reference, entropies_reference)):
        found = put(parts_of(logits, ones, cutoff=cutoff), ones)
        assert found[0].item() == pytest.approx(oracle(kept, ones)[0].item(), abs=1e-6)
        assert put(parts_of(logits, ones), ones)[1:].isnan().all()


@pytest.mark.gpu
def test_a_captured_step_in_16_bits() -> None:
    """Entropies of bfloat16's logits are within 1e-3 of those that float64 has of the same logits."""
    logits = (4 * torch.randn(512, 151_936, device="cuda")).bfloat16()
    ones = torch.ones(512, device="cuda")
    found = entropies(entropy_parts(logits, ones), ones)
    assert (found - oracle(logits, ones)).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", [None, "suffix"])
def test_graphs_change_nothing(make_llm: Callable[..., LLM], speculation: str | None) -> None:
    assert HAS_CUDA
    graphs, eager = (make_llm(enforce_eager=own, speculation=speculation) for own in (False, True))
    params = [own for own in all_params() if own.structured_outputs is None]  # forms have graphs of their own
    assert_alike(entropies_of(run(graphs, params)), entropies_of(run(eager, params)))
