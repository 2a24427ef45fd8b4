"""Latents that running sequences share are read once, for their rows and for guesses."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import CASES, build
from conftest import DEVICE, greedy, whole_only
from test_kernels import DTYPES, assert_close
from test_latents import LARGE, PROMPTS, SHAPES, Shape, plan_ahead
from test_shared_prefixes import find_shared, nested_tables, on_device
from torch import Tensor

from nanoinfer import LLM
from nanoinfer.engine.prefixes import shared_prefixes
from nanoinfer.kernels.attention.decode.bundles import bundle
from nanoinfer.kernels.attention.decode.paged_decode import paged_decode_reference
from nanoinfer.kernels.attention.prefixes.prefix_plan import SharedPrefixes
from nanoinfer.kernels.fp8 import FP8
from nanoinfer.kernels.latent.decode import meet_latents, queries_at_once
from nanoinfer.kernels.latent.shared_prefix import attend_to_shared_latents

OF_MODELS = [pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE[:2]]
MOST = 3  # guesses of a row


class Step:
    """Rows of which most share latents, some more of them than others. has_guesses: some rows have some, one no token

    tokens: of the step that see something; row_of: whose each token is
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, in_fp8: bool, has_guesses: bool) -> None:
        self.heads, self.latent, turning, block_size = shape
        rows = 11
        tables, lens = nested_tables(rows, block_size)
        counts = [row * 3 % (MOST + 1) if has_guesses and row != 4 else 0 for row in range(rows)]
        contexts = [0 if has_guesses and row == 4 else length - MOST for row, length in enumerate(lens)]
        guesses = [(row, i) for row, count in enumerate(counts) for i in range(1, count + 1)]
        self.row_of = on_device(array("i", [*range(rows), *(row for row, _ in guesses)]))
        self.lens = on_device(array("i", [*contexts, *(contexts[row] + i for row, i in guesses)]))
        self.first = on_device(array("i", [sum(counts[:row]) for row in range(rows)]))
        self.counts = on_device(array("i", counts))
        width = max(map(len, tables))
        padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
        self.tables = padded.to(DEVICE)[self.row_of.long()]
        numbers = 1 + max(map(max, tables)), block_size, 1, self.latent + turning
        self.cache = torch.randn(*numbers, device=DEVICE).to(dtype).to(FP8 if in_fp8 else dtype)
        self.q = torch.randn(len(self.lens), self.heads, numbers[-1], device=DEVICE).to(dtype)
        found = find_shared(tables, block_size)
        assert found is not None
        self.prefixes = SharedPrefixes(rows + 3, self.heads, self.cache, has_latents=True)
        self.prefixes.fill(on_device(self.prefixes.pack(found.order, found.runs)))

    def expected(self, scales: Tensor) -> Tensor:
        """Attend from each token alone."""
        keys = self.cache if self.cache.dtype == FP8 else self.cache.float()
        values = keys[..., : self.latent]
        how = self.tables, self.lens, int(self.lens.max()), 0.1
        return paged_decode_reference(self.q.float(), keys, values, *how, kv_scales=scales)


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sharing pay for short prompts too."""
    for name, least in (("MIN_ROWS", 2), ("MIN_TOKENS", 2), ("MIN_SAVED", 2)):
        monkeypatch.setattr(shared_prefixes, name, least)


@pytest.mark.filterwarnings("ignore:divide by zero")  # of what nobody reads, as rows without a token have it
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_fp8", [False, *whole_only([True])])
@pytest.mark.parametrize("has_guesses", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[0], *whole_only(zip(SHAPES[1:])), *OF_MODELS])
def test_shared_latents_are_read_once(shape: Shape, has_guesses: bool, in_fp8: bool, dtype: torch.dtype) -> None:
    step, scales = Step(shape, dtype, in_fp8, has_guesses), torch.tensor([0.5, 0.5], device=DEVICE)
    bundles = None
    if has_guesses:
        queries = queries_at_once(MOST, step.heads, step.cache)
        if queries == 1:
            return  # tokens that attend one by one share nothing
        counted = step.first, step.counts, MOST, queries
        bundles = bundle(step.lens, *counted, step.prefixes, step.row_of)
    latents = step.q, step.cache, step.latent, step.tables
    shared = attend_to_shared_latents(*latents, step.prefixes, 0.1, scales, bundles and bundles.shared)
    expected, has = step.expected(scales), step.lens > 0
    for workers in (None, 13):  # so few divide rows
        plan = plan_ahead(step.lens, step.cache, step.heads, step.latent, workers, None, bundles, step.prefixes)
        out = meet_latents(*latents, step.lens, 0.1, plan, scales, shared)
        assert_close(out[has], expected[has])


@pytest.mark.usefixtures("cheap", "no_foresight")
@pytest.mark.parametrize("speculation", [None, "suffix"])
def test_tokens_are_those_of_rows_alone(
    speculation: str | None, make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(CASES["youtu"], tmp_path)
    how = {"dtype": "float32", "max_model_len": 128, "kvcache_block_size": 16}
    prompts, params = [PROMPTS[0][:40] + [token] * 3 for token in (5, 6)], greedy(3, ignore_eos=True)
    expected = make_llm(str(tmp_path), device="cpu", **how).generate(prompts, params, use_tqdm=False)
    own = {
        "attention_backend": "triton",
        "enforce_eager": True,
        "speculation": speculation,
        "max_guesses": 2,
        "max_num_seqs": 4,
    }
    llm, shares = make_llm(str(tmp_path), **how, **own), list[bool]()
    steps = llm.engine.ranks.runner.steps
    run = steps.forward
    monkeypatch.setattr(steps, "forward", lambda *how: (shares.append(how[1].shares), run(*how))[1])
    for output, other in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
        assert output.token_ids == other.token_ids
    assert any(shares)
