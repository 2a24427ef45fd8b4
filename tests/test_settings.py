"""A setting that is declared as a penalty or as a filter is wherever tokens, masses and log-probabilities are told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import Oracle, greedy, whole_only
from torch import Tensor

from nanoinfer import BUNDLED_MODEL, LLM, SamplingParams
from nanoinfer.requests import settings as request_settings
from nanoinfer.runner.logits import processor_group, settings
from nanoinfer.runner.logits.settings import FILTERS, PENALTIES, Change, Filter, Penalty, is_plain, needs_tokens
from nanoinfer.runner.message import LogitsMessage

PROMPT = list(range(40, 60))
VOCABULARY = 2048  # the bundled model's
MINUS_INFINITY = float("-inf")


@dataclass
class Settings(SamplingParams):
    """SamplingParams with two settings more.

    top_n_sigma: the sampler leaves out tokens whose logits are more standard deviations below the largest
    even_bonus: the sampler adds this number to the logits of even tokens
    """

    top_n_sigma: float = 0.0
    even_bonus: float = 0.0


def keep_top_n_sigma(logits: Tensor, temperatures: Tensor, sigmas: Tensor) -> Tensor:
    deviations = torch.stack([row[row.isfinite()].std(correction=0) for row in logits])
    return logits >= (logits.amax(dim=1) - sigmas * deviations)[:, None]


def make_even_bonus(messages: list[LogitsMessage], device: torch.device) -> Change:
    bonuses = torch.tensor([[message.params.even_bonus] for message in messages], device=device)
    return lambda logits, positions, tokens, rows: logits + bonuses[rows] * (torch.arange(logits.shape[1]) % 2 == 0)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare both settings, as docs/tour.md says."""
    for name in ("top_n_sigma", "even_bonus"):
        monkeypatch.setattr(SamplingParams, name, 0.0, raising=False)
    monkeypatch.setattr(request_settings, "_copy", lambda params: params)  # it would leave out the fields of a subclass
    sigma = Filter("top_n_sigma", lambda sigma: sigma > 0, keep_top_n_sigma)
    bonus = Penalty(lambda params: params.even_bonus != 0, make_even_bonus)
    for name, declared in (("FILTERS", [*FILTERS, sigma]), ("PENALTIES", [*PENALTIES, bonus])):
        for module in (settings, processor_group):
            monkeypatch.setattr(module, name, declared)


WANTED: list[dict[str, Any]] = [
    {"top_n_sigma": 2.5},
    {"top_n_sigma": 3.5, "temperature": 2.0},
    {"even_bonus": 3.0},
    {"even_bonus": -1.5, "top_n_sigma": 3.0},
    {"top_n_sigma": 3.0, "top_k": 2},
]


@pytest.fixture(scope="module", params=["raw_logprobs", "processed_logprobs"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"dtype": "float32", "num_kvcache_blocks": 20, "max_model_len": 256}
    with LLM(BUNDLED_MODEL, device="cpu", logprobs_mode=request.param, **options) as made:
        yield made


def definition(logits: Tensor, params: SamplingParams) -> tuple[Tensor, float]:
    """Return each token's log-probability, -inf if it cannot be drawn, and the mass of those that can, in float64."""
    logits = logits.double() + params.even_bonus * (torch.arange(VOCABULARY) % 2 == 0)
    kept = torch.ones(VOCABULARY, dtype=torch.bool)
    if params.top_n_sigma:
        kept &= logits >= logits.max() - params.top_n_sigma * logits.std(correction=0)
    if params.top_k:
        kept &= logits >= logits[kept].topk(min(params.top_k, int(kept.sum()))).values[-1]
    scores = logits / params.temperature
    mass = scores.softmax(0)[kept].sum().log().item()
    return scores.masked_fill(~kept, MINUS_INFINITY).log_softmax(0), mass


@pytest.mark.parametrize(
    ("llm", "wanted"),
    [
        *(("processed_logprobs", wanted) for wanted in WANTED),
        ("raw_logprobs", WANTED[0]),
        *whole_only(("raw_logprobs", wanted) for wanted in WANTED[1:]),
    ],
    indirect=["llm"],
    ids=str,
)
def test_what_is_declared_is_told(wanted: dict[str, Any], declared: None, llm: LLM, oracle: Oracle) -> None:
    """Rows that do not ask run beside, some with filters of their own."""
    params = Settings(max_tokens=5, seed=4, ignore_eos=True, logprobs=VOCABULARY, kept_tokens=True, **wanted)
    others = [
        Settings(max_tokens=8, seed=4, kept_tokens=True, top_k=3),
        greedy(8),
        SamplingParams(max_tokens=8, seed=1),
    ]
    alone = [llm.generate([PROMPT], other, use_tqdm=False)[0].token_ids for other in others]
    samples = replace(params, n=2)
    output, *beside = llm.generate([PROMPT] * 4, [samples, *others], use_tqdm=False)
    assert [entry.token_ids for entry in beside] == alone
    for sample in output.samples:
        logits = oracle.logits(PROMPT + sample.token_ids)[len(PROMPT) - 1 : -1]
        places = zip(logits, sample.token_ids, sample.kept_tokens, sample.logprobs, strict=True)
        for row, token, (count, log_mass), entry in places:
            expected, mass = definition(row, params)
            possible = expected.isfinite()
            assert possible[token]
            assert count == possible.sum()
            assert log_mass == pytest.approx(mass, abs=1e-4)
            if llm.config.logprobs_mode == "processed_logprobs":
                assert sorted(entry) == possible.nonzero().flatten().tolist()
                assert sum(map(math.exp, entry.values())) == pytest.approx(1, abs=1e-5)
                assert entry[token] == pytest.approx(expected[token].item(), abs=1e-4)


def test_a_greedy_row_needs_no_filter(declared: None, llm: LLM) -> None:
    plain, asks = (
        llm.generate([PROMPT], Settings(temperature=0, max_tokens=8, top_n_sigma=sigma), use_tqdm=False)[0]
        for sigma in (0.0, 1.0)
    )
    assert plain.token_ids == asks.token_ids
    assert is_plain(Settings(temperature=0, top_n_sigma=1.0, top_k=5))


def test_which_rows_are_plain(declared: None) -> None:
    """A plain row is drawn by the captured step alone."""
    assert all(map(is_plain, (SamplingParams(), SamplingParams(top_k=-1, temperature=0.5), Settings(min_tokens=3))))
    for wanted in (
        {"top_k": 1},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"logprobs": 0},
        {"kept_tokens": True},
        {"top_n_sigma": 1.0},
        {"even_bonus": 1.0},
    ):
        params = Settings(**wanted)
        assert not is_plain(params), wanted
        assert needs_tokens(params) == any("_penalty" in name for name in wanted)
