"""Models whose layers keep states return with guesses what they return without: a state goes back behind wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.drafters import Babbler, Prophet
from conftest import assert_equal, greedy, of_each_kind, whole_only
from test_guesses_of_an_llm import assert_counts, run
from test_prediction_heads import copy_tokenizer

from nanoinfer import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoinfer.benchmark.determinism import bits_of

KINDS = ["qwen3.5", "granitemoehybrid", "lfm2", "qwen3next", "olmohybrid", "nemotronh", "falconh1", "bamba"]
VOCAB = 2048  # of the bundled model
SIZES = {"max_model_len": 256, "kvcache_block_size": 64}
JSON = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
WISHES: list[dict[str, Any]] = [
    {},
    {"prompt_logprobs": 1},
    {"n": 3},
    {"structured_outputs": {"json": JSON}},
    {"logprobs": 2, "frequency_penalty": 0.4},
    {"n": 2, "prompt_logprobs": 0, "logprobs": 0},
    {"structured_outputs": {"regex": "[a-z ]{4,20}"}, "n": 2},
    {"top_p": 0.8, "min_tokens": 4},
]
PARAMS = [
    SamplingParams(temperature=[0, 0.8][i % 2], seed=i, max_tokens=[24, 9, 30][i % 3], ignore_eos=i % 4 > 0, **wish)
    for i, wish in enumerate(WISHES)
]
SPREAD: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"num_kvcache_blocks": 4, "max_num_batched_tokens": 64, "max_num_seqs": 5, "max_guesses": 15},
    "host": {"num_kvcache_blocks": 4, "max_num_batched_tokens": 70, "max_num_seqs": 4, "kv_offload_gib": 0.01},
    "one row": {"max_num_seqs": 1, "max_guesses": 2},
    "two ranks": {"tensor_parallel_size": 2, "max_guesses": 4},
}


def draw_prompts() -> list[list[int]]:
    """Some begin alike, and go on before, at or behind a multiple of 64. So do their outputs."""
    generator = torch.Generator().manual_seed(0)
    shared, *own = (torch.randint(3, VOCAB, (140,), generator=generator).tolist() for _ in range(9))
    cuts = [(0, 50), (64, 1), (64, 30), (60, 2), (128, 5), (0, 63), (70, 41), (64, 64)]
    return [shared[:cut] + rest[:count] for (cut, count), rest in zip(cuts, own, strict=True)]


PROMPTS = draw_prompts()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that makes a model of a kind, once, and returns its folder."""

    @cache
    def make(name: str) -> str:
        folder, case = tmp_path_factory.mktemp("states"), CASES[name]
        build(replace(case, settings={**case.settings, "vocab_size": VOCAB}), folder)
        copy_tokenizer(folder)
        return str(folder)

    return make


@pytest.fixture(scope="module")
def made(folder_of: Callable[[str], str]) -> Callable[[str], tuple[str, list[RequestOutput]]]:
    """Return a function that returns the folder of a kind's model, and what comes of the prompts without guesses."""

    @cache
    def make(name: str) -> tuple[str, list[RequestOutput]]:
        folder = folder_of(name)
        with open_llm(folder) as llm:
            return folder, run(llm, PROMPTS, PARAMS)

    return make


def open_llm(folder: str, **options: Any) -> LLM:
    shape = {"device": "cpu", "dtype": "float32", "use_tqdm": False, "num_kvcache_blocks": 60, **SIZES}
    return LLM(folder, **{**shape, **options})


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + sample.token_ids for output in outputs for sample in output.samples]


ALWAYS = [*((name, "roomy") for name in KINDS[:3]), *(("qwen3.5", spread) for spread in ("tight", "host", "one row"))]
TOGETHER = [*ALWAYS, *whole_only([pair for pair in product(KINDS, SPREAD) if pair not in ALWAYS])]


@pytest.mark.usefixtures("no_foresight", "one_thread")
@pytest.mark.parametrize(("name", "spread"), TOGETHER)
def test_results_are_those_without(
    name: str, spread: str, made: Callable[[str], tuple[str, list[RequestOutput]]]
) -> None:
    """Every other step's guesses hold. Prompts are fresh, then cached."""
    folder, expected = made(name)
    with open_llm(folder, **SPREAD[spread], speculation=Prophet(texts_of(expected), (True, False))) as llm:
        outputs = run(llm, PROMPTS, PARAMS)
        assert_equal(outputs, expected)
        assert_counts(llm, outputs)
        assert 0 < llm.stats().num_accepted_tokens < llm.stats().num_proposed_tokens
        assert spread != "tight" or llm.engine.scheduler.num_preemptions > 0
        assert_equal(run(llm, PROMPTS[::3], PARAMS[::3]), expected[::3])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("speculation", ["suffix", "auto", "draft", "random"])
def test_all_that_guesses(
    speculation: str, made: Callable[[str], tuple[str, list[RequestOutput]]], tmp_path: Path
) -> None:
    """A draft model has no states. "auto" guesses only while it finds that guesses pay: a busy machine changes that."""
    folder, expected = made("qwen3.5")
    options: dict[str, Any] = {"speculation": Babbler(VOCAB) if speculation == "random" else speculation}
    if speculation == "draft":
        small = {"vocab_size": VOCAB, "num_hidden_layers": 1}
        build(replace(CASES["qwen3"], settings={**CASES["qwen3"].settings, **small}), tmp_path)
        copy_tokenizer(tmp_path)
        options["draft_model"] = str(tmp_path)
    with open_llm(folder, **options, max_guesses=3) as llm:
        for _ in range(2):
            assert_equal(run(llm, PROMPTS[::2], PARAMS[::2]), expected[::2])
        assert llm.stats().num_proposed_tokens > 0 or speculation == "auto"


@pytest.mark.parametrize("name", of_each_kind(KINDS[:3], 0))
def test_bits_are_those_without_if_sums_have_one_order(
    name: str, made: Callable[[str], tuple[str, list[RequestOutput]]]
) -> None:
    """Outputs pass a multiple of 64, behind which guesses fail."""
    folder, _ = made(name)
    prompts, params = [PROMPTS[0], PROMPTS[5][:60]], greedy(14, ignore_eos=True, logprobs=0)
    with open_llm(folder, deterministic=True) as alone:
        wanted = run(alone, prompts, params)
    with open_llm(folder, deterministic=True, speculation=Prophet(texts_of(wanted), (True, False))) as llm:
        outputs = run(llm, prompts, params)
        assert 5 < llm.stats().num_accepted_tokens < llm.stats().num_proposed_tokens
    assert list(map(bits_of, outputs)) == list(map(bits_of, wanted))


WAYS = ["roomy", "tight", "host"]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize("dtype", ["bfloat16", *whole_only(["float32"])])
@pytest.mark.parametrize("name", KINDS)
def test_a_gpu_gives_the_bits_of_a_request_alone(
    name: str, dtype: str, ranks: int, folder_of: Callable[[str], str]
) -> None:
    """In chunks, from snapshots, preempted, from host memory, in company, guessed, and on several ranks."""
    folder, how = folder_of(name), {"device": "cuda", "dtype": dtype, "deterministic": True}
    lengths = [24, 9, 70, 130]
    params = [
        SamplingParams(
            temperature=[0, 0.8][i % 2],
            seed=i,
            n=1 + i % 3 // 2,
            max_tokens=lengths[i % 4],
            ignore_eos=True,
            logprobs=1,
        )
        for i in range(len(PROMPTS))
    ]
    params[0].prompt_logprobs = 1
    wanted = []
    with open_llm(folder, **how) as alone:
        for prompt, own in zip(PROMPTS, params, strict=True):
            alone.reset_prefix_cache()
            wanted += run(alone, [prompt], [own])
    for way, guesses in product(WAYS, (None, Prophet(texts_of(wanted), (True, False)), "suffix")):
        options = {**SPREAD[way], **({} if way == "roomy" else {"num_kvcache_blocks": 7}), "speculation": guesses}
        if guesses is None:
            options.pop("max_guesses", None)
        with open_llm(folder, **how, **options, tensor_parallel_size=ranks) as llm:
            for _ in range(2):
                assert list(map(bits_of, run(llm, PROMPTS, params))) == list(map(bits_of, wanted)), (way, guesses)
            assert way == "roomy" or llm.engine.scheduler.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_beams_have_the_same_bits_on_a_gpu(name: str, folder_of: Callable[[str], str]) -> None:
    """Beams begin amid chunks, and pass a multiple of 64, beside others or alone."""
    params, prompts = BeamSearchParams(3, 9, ignore_eos=True), [PROMPTS[1], PROMPTS[5], PROMPTS[7]]
    with open_llm(folder_of(name), device="cuda", dtype="bfloat16", deterministic=True) as llm:
        together = llm.beam_search(prompts, params)
        for prompt, output in zip(prompts, together, strict=True):
            llm.reset_prefix_cache()
            (own,) = llm.beam_search([prompt], params)
            assert own.sequences == output.sequences


def test_a_draft_model_with_states_is_refused(folder_of: Callable[[str], str]) -> None:
    folder = folder_of("lfm2")
    with pytest.raises(ValueError, match=r"^draft_model=.*: some of its layers keep a state, which a draft model"):
        open_llm(folder, speculation="draft", draft_model=folder)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_a_gpu_gives_the_same_tokens(name: str, folder_of: Callable[[str], str]) -> None:
    """Rows come and go, so that graphs have empty rows."""
    folder = folder_of(name)
    params = [SamplingParams(temperature=0.4 * (i % 3), seed=i, max_tokens=8 + 5 * (i % 17)) for i in range(40)]
    prompts, texts = [PROMPTS[i % 8] for i in range(40)], []
    with open_llm(folder, device="cuda") as llm:
        wanted = run(llm, prompts, params)
    for speculation in ("suffix", Prophet(texts_of(wanted), (True, False))):
        with open_llm(folder, device="cuda", speculation=speculation) as llm:
            texts.append([output.token_ids for output in run(llm, prompts, params)])
            held = llm.stats().num_accepted_tokens
    assert held > 150
    assert texts == [[output.token_ids for output in wanted]] * 2
