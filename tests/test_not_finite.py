"""Logits that are NaN or infinite end their own row with an error, and no other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEVICE, greedy, of_each_kind
from test_kernels import empty_inbox
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanoinfer import BUNDLED_MODEL, LLM, RequestOutput, SamplingParams, batch
from nanoinfer.engine.results.faults import not_finite
from nanoinfer.kernels.ranks.best_of_ranks import best_of_ranks
from nanoinfer.kernels.rows import advance_rows_reference, advance_rows_triton
from nanoinfer.kernels.sampling.draw import NO_TOKEN, draw_reference, draw_triton
from nanoinfer.requests.outputs import warn_of_errors
from nanoinfer.runner.threads import num_threads

BAD = 7  # a token whose vector is so large that float16 overflows
GOOD = [[20, 21, 22], [30] * 40, [41, 42]]
FORCED = {"logit_bias": {BAD: 1e9}, "temperature": 0}  # draws BAD, behind which logits are NaN
OPTIONS: dict[str, Any] = {
    "dtype": "float16",
    "tokenizer": BUNDLED_MODEL,
    "num_kvcache_blocks": 12,
    "kvcache_block_size": 16,
    "max_model_len": 96,
    "max_num_seqs": 8,
}
SPREAD = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2, "device": "cpu"},
    "one by one": {"deterministic": True},
    "short chunks": {"max_num_batched_tokens": 16},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of finite numbers, in which the vector of BAD and a layer's result add up to more than 65504."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[BAD] = 65000.0
        for layer in model.model.layers:
            layer.mlp.down_proj.weight *= 300
    path = tmp_path_factory.mktemp("overflows")
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=of_each_kind(SPREAD, 0))
def llm(request: pytest.FixtureRequest, folder: str) -> Iterator[LLM]:
    with num_threads(1), LLM(folder, **OPTIONS, **SPREAD[request.param]) as made:
        yield made


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def assert_is_error(output: Any) -> None:
    assert output.finish_reason == "error"
    assert "logits are not finite" in output.stop_reason
    assert "dtype='float16' is the likely cause" in output.stop_reason
    assert "bfloat16" in output.stop_reason


DRAWN = [{"temperature": 0}, {"temperature": 1.0}, {"top_k": 5, "logprobs": 2}]


@pytest.mark.parametrize(
    ("llm", "settings"), of_each_kind(product(SPREAD, DRAWN), 0, 1, 2, 3, 6, 9), ids=str, indirect=["llm"]
)
def test_a_prompt_ends_alone(llm: LLM, settings: dict[str, Any]) -> None:
    """The first token is missing. The others have the tokens that they have without it, in blocks that it had."""
    params = SamplingParams(max_tokens=8, seed=5, ignore_eos=True, **settings)
    expected = [output.token_ids for output in run(llm, GOOD, params)]
    for _ in range(2):
        first, bad, *others = run(llm, [GOOD[0], [BAD] * 40, *GOOD[1:]], params)
        assert_is_error(bad)
        assert (bad.token_ids, bad.text) == ([], "")
        assert bad.timings.first_token is None
        assert [output.token_ids for output in (first, *others)] == expected
        assert {output.finish_reason for output in (first, *others)} == {"length"}
        llm.reset_prefix_cache()


ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": 1, "kept_tokens": True},
    {"repetition_penalty": 1.1},
    {"temperature": 1.0, "top_p": 0.5},
    {"n": 3, "temperature": 0.5},
    {"min_tokens": 5},
    {"prompt_logprobs": 0},
]


@pytest.mark.parametrize(
    ("llm", "settings"), of_each_kind(product(SPREAD, ASKED), *range(8), 14, 21), ids=str, indirect=["llm"]
)
def test_tokens_before_the_fault_stay(llm: LLM, settings: dict[str, Any]) -> None:
    params = SamplingParams(**{**FORCED, "max_tokens": 20, **settings})
    good, bad, other = run(llm, [GOOD[0], GOOD[1], GOOD[2]], [greedy(20), params, greedy(20)])
    assert len(good.token_ids) == len(other.token_ids) == 20
    for sample in bad.samples:
        assert_is_error(sample)
        assert sample.token_ids == [BAD]
        if "logprobs" in settings:
            assert len(sample.logprobs) == len(sample.kept_tokens) == 1
            assert math.isfinite(sample.cumulative_logprob)


def test_the_last_token_may_fail(llm: LLM) -> None:
    (output,) = run(llm, GOOD[:1], SamplingParams(**FORCED, max_tokens=2))
    assert_is_error(output)
    (output,) = run(llm, GOOD[:1], SamplingParams(**FORCED, max_tokens=1))
    assert (output.finish_reason, output.token_ids) == ("length", [BAD])


def test_what_others_begin_with_is_computed_anew(llm: LLM) -> None:
    """Attention gives a masked NaN the weight 0, which is NaN again: blocks before it in the prompt have it, too."""
    begin = list(range(30, 50))
    (expected,) = run(llm, [begin], greedy(4))
    llm.reset_prefix_cache()
    assert_is_error(run(llm, [[*begin, BAD, 5]], greedy(4))[0])
    assert run(llm, [begin], greedy(4))[0].token_ids == expected.token_ids
    llm.reset_prefix_cache()
    assert math.isnan(llm.score(begin, [[BAD, 5, 6]])[0].logprob)
    assert run(llm, [begin], greedy(4))[0].token_ids == expected.token_ids


def test_a_stream_says_so(llm: LLM) -> None:
    params = SamplingParams(**FORCED, max_tokens=9, stop=["never to be seen"])
    *parts, last = llm.stream([GOOD[0]], params)
    assert_is_error(last)
    assert [token for part in (*parts, last) for token in part.token_ids] == [BAD]


def test_a_guided_row_says_so(llm: LLM) -> None:
    """A mask leaves no logit but those of its form: it is not the mask that is at fault."""
    pytest.importorskip("llguidance")
    params = [greedy(8, structured_outputs={"choice": ["yes", "no"]})] * 2
    bad, good = run(llm, [[BAD], GOOD[0]], params)
    assert_is_error(bad)
    assert good.text in ("yes", "no")
    assert good.finish_reason == "stop"


def test_what_cannot_be_scored_is_not_greedy(llm: LLM) -> None:
    bad, good = llm.score([BAD, 3], [[4, 5]])[0], llm.score([2, 3], [[4, 5]])[0]
    assert math.isnan(bad.logprob)
    assert bad.is_greedy is False
    assert math.isfinite(good.logprob)


def test_queued_requests(llm: LLM) -> None:
    number = llm.add_request(GOOD[0], SamplingParams(**FORCED, max_tokens=30))
    other = llm.add_request(GOOD[1], greedy(4))
    outputs: dict[int, RequestOutput] = {}
    while llm.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in llm.step())
    assert_is_error(outputs[number])
    assert outputs[other].finish_reason == "length"


def test_callers_that_look_at_tokens_alone_can_warn(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """lm-eval's and TRL's: an evaluation would count an answer as wrong, and a training go on."""
    good, bad = run(llm, [GOOD[0], [BAD, 3]], [greedy(1), greedy(1, n=2)])
    warn_of_errors([good])
    assert not caplog.messages
    warn_of_errors([good, bad])
    (message,) = caplog.messages
    assert message.startswith("2 of 3 samples have ended early, with an error: the model's logits are not finite")


def test_only_float16_is_told_to_change() -> None:
    assert "float16" not in not_finite("float32")
    assert "dtype='bfloat16'" in not_finite("bfloat16")
    assert "would work" not in not_finite("bfloat16")


def strict(line: str) -> Any:
    """Read a line of JSON as the standard has it, without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_results_of_a_batch_are_strict_json(folder: str, tmp_path: Path) -> None:
    chat = {"method": "POST", "url": "/v1/completions", "custom_id": "e"}
    rows = [
        {"id": "a", "token_ids": [BAD, 3]},
        {"id": "b", "token_ids": [BAD, 3, 4], "max_tokens": 0, "prompt_logprobs": 2},
        {"id": "c", "token_ids": GOOD[0], "max_tokens": 2, "logprobs": 1, "kept_tokens": True, "top_k": 1},
        {**chat, "body": {"prompt": [3, 4], "max_tokens": 2, "logprobs": 1, "model": math.inf}},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = batch.run(source, target, folder, **OPTIONS)
    assert (summary.done, summary.errors) == (3, 1)
    results = {row.get("custom_id", row["id"]): row for row in map(strict, target.read_text().splitlines())}
    assert "logits are not finite" in results["a"]["error"]["message"]
    values = [entry["logprob"] for place in results["b"]["prompt_logprobs"][1:] for entry in place.values()]
    assert set(values) == {None}
    assert len(results["c"]["token_ids"]) == 2
    assert results["e"]["response"]["body"]["model"] == folder
    assert strict((tmp_path / "out.jsonl.manifest.json").read_text())["model"]


@pytest.mark.parametrize("function", [draw_triton, draw_reference])
def test_a_draw_marks_rows(function: Callable[..., Any]) -> None:
    """One NaN among finite logits is enough, in any slice of the vocabulary. One token may be impossible."""
    logits = torch.randn(7, 9000, device=DEVICE)
    logits[1, 5000] = logits[2] = math.nan
    logits[3, 8999], logits[4, 10], logits[5] = math.inf, -math.inf, -math.inf
    logits[6, 0] = math.nan
    seeds = torch.arange(7, device=DEVICE)
    for temperature in (0.0, 0.7):
        columns = torch.full((7,), temperature, device=DEVICE), seeds, seeds.int()
        best, ids = function(logits, *columns, first_id=100)
        assert best.isfinite().tolist() == [True, False, False, False, True, False, False]
        assert ((ids >= 100) & (ids < 9100)).all()
        marked = function(logits, *columns, first_id=100, marks=True)[1]
        assert torch.equal(marked, ids.where(best.isfinite(), NO_TOKEN))


def test_ranks_mark_rows() -> None:
    scores = torch.tensor([[1.0, math.inf, 2.0, -math.inf], [3.0, 0.0, math.inf, -math.inf]], device=DEVICE)
    ids = torch.arange(8, device=DEVICE).int().view(2, 4)
    inbox = empty_inbox(2, 2, 4, dtype=torch.float32)
    inbox[1] = torch.stack([scores[1], ids[1].float()])
    other = empty_inbox(2, 2, 4, dtype=torch.float32)
    addresses = torch.tensor([inbox.data_ptr(), other.data_ptr()], device=DEVICE)
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert best_of_ranks(scores[0], ids[0], addresses, 0, stop).tolist() == [4, NO_TOKEN, NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("advance", [advance_rows_triton, advance_rows_reference])
def test_a_marked_row_goes_on_with_a_token(advance: Callable[..., None]) -> None:
    """The row's next step runs before the host knows of the mark, and looks its token up."""
    tokens, positions = (torch.zeros(3, dtype=torch.int32, device=DEVICE) for _ in range(2))
    sampled, drawn = torch.tensor([5, NO_TOKEN, 9], dtype=torch.int32, device=DEVICE), torch.empty_like(tokens)
    advance(tokens, positions, sampled, drawn)
    assert tokens.tolist() == [5, 0, 9]
    assert torch.equal(drawn, sampled)
