"""Prompts with embeddings in place of tokens: what transformers computes of inputs_embeds."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, VOCAB, build
from cases.heads import HEADS, build_with_head
from conftest import greedy, of_each_kind, whole_only
from transformers import PreTrainedModel

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.media.given import PIECE

KINDS = ["gpt2", "granite", "muse-glimmer", "bloom", "opt", "afmoe", "gemma2", "falconh1", "longcat", "qwen3.5"]
SMALL = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 300}
BEFORE, BEHIND = [5, 6, 7], [8, 9]


def embeddings(model: PreTrainedModel, count: int = 30, seed: int = 0) -> torch.Tensor:
    own = model.get_input_embeddings().weight
    return torch.randn(count, own.shape[1], generator=torch.Generator().manual_seed(seed)) * own.std().detach()


def embedded(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return what the model makes of tokens, as inputs_embeds takes it."""
    scale = model.config.embedding_multiplier if model.config.model_type == "falcon_h1" else 1
    return model.get_input_embeddings()(torch.tensor(token_ids, dtype=torch.int64)) * scale


@torch.inference_mode()
def assert_equal_to_transformers(
    model: PreTrainedModel, parts: list[list[int] | torch.Tensor], output: RequestOutput
) -> None:
    """Check the log-probabilities of greedy tokens, and that these are the likeliest."""
    rows = [part if isinstance(part, torch.Tensor) else embedded(model, part) for part in parts]
    prompt = torch.cat(rows)
    assert len(output.prompt_token_ids) == len(prompt)
    for sample in output.samples:
        inputs = torch.cat([prompt, embedded(model, sample.token_ids)])[None]
        logprobs = model(inputs_embeds=inputs).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        assert sample.token_ids == logprobs.argmax(-1).tolist()
        ours = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert ours == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)


def asking(**settings: Any) -> SamplingParams:
    return greedy(6, logprobs=0, ignore_eos=True, **settings)


@pytest.mark.parametrize("name", of_each_kind(KINDS, 0, 1, 2, 3))
def test_a_family_equals_transformers(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(CASES[name], tmp_path)
    llm = make_llm(str(tmp_path), **CASES[name].small)
    own = embeddings(model)
    for parts in ([own], [BEFORE, own, BEHIND, own[:3]]):
        (output,) = llm.generate([{"prompt_embeds": parts}], asking(), use_tqdm=False)
        assert_equal_to_transformers(model, parts, output)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen")
    return str(folder), build(CASES["qwen3"], folder)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 19, "max_num_batched_tokens": 50},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"deterministic": True, "max_num_seqs": 3},
        {"speculation": "suffix"},
        *whole_only([{"data_parallel_size": 2}]),
        {"tensor_parallel_size": 2},
        pytest.param({"device": "cuda"}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_in_chunks_preempted_and_on_two_ranks(
    options: dict[str, Any], make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel], no_foresight: None
) -> None:
    folder, model = qwen
    llm = make_llm(folder, **{**SMALL, **options})
    own = embeddings(model, 150)
    asked = [[own], [BEFORE, own[:70]], [own[:40], BEHIND], [own[100:], own[:9]], [list(range(20))]]
    prompts = [{"prompt_embeds": parts} for parts in asked[:-1]] + asked[-1]
    how = greedy(20, logprobs=0, ignore_eos=True, n=3)
    for _ in range(2):
        for parts, output in zip(asked, llm.generate(prompts, how, use_tqdm=False), strict=True):
            assert_equal_to_transformers(model, parts, output)
    if "num_kvcache_blocks" in options:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("deterministic", [True, *whole_only([False])])
@pytest.mark.parametrize("head", [False, *whole_only([True])])
def test_drafts_do_not_see_them(
    head: bool,
    deterministic: bool,
    make_llm: Callable[..., LLM],
    make_qwen3: Callable[..., str],
    qwen: tuple[str, PreTrainedModel],
    tmp_path: Path,
) -> None:
    """A draft of another hidden size, and a prediction head, guess as if the tokens of number 0 stood there."""
    folder, model = qwen
    if head:
        folder, model = str(tmp_path), build_with_head(next(iter(HEADS.values())), tmp_path)[0]
        options = {"speculation": "mtp", "max_guesses": 2}
    else:
        options = {"speculation": "draft", "draft_model": make_qwen3(vocab_size=VOCAB, num_hidden_layers=1)}
    llm = make_llm(folder, **{**SMALL, **options}, deterministic=deterministic)
    own = embeddings(model, 70)
    for parts in ([own], [BEFORE, own, BEHIND]):
        (output,) = llm.generate([{"prompt_embeds": parts}], asking(), use_tqdm=False)
        assert_equal_to_transformers(model, parts, output)
    assert llm.stats().num_proposed_tokens > 0


def test_they_are_cached_by_what_they_are(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    """Prompts share what is equal in front, in pieces of 64 rows, and nothing with tokens or other embeddings."""
    folder, model = qwen
    llm = make_llm(folder, **SMALL)
    own, others = embeddings(model, 200), embeddings(model, 200, seed=1)

    def cached(parts: Any) -> int:
        (output,) = llm.generate([{"prompt_embeds": parts}], asking(), use_tqdm=False)
        assert_equal_to_transformers(model, parts if isinstance(parts, list) else [parts], output)
        return output.num_cached_tokens

    assert cached(own) == 0
    assert cached(own.clone()) == 192  # whole blocks before the last token
    assert cached(others) == 0
    assert cached(torch.cat([own[:130], others[:100]])) == 128
    assert cached([[0] * 40, own]) == 0  # the id that stands for them is no token
    assert cached([[0] * 40, others]) == 32


def test_tensors_and_arrays_of_any_type(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    """A caller may change a tensor as soon as the call has checked it."""
    folder, model = qwen
    llm = make_llm(folder, **SMALL)
    own = embeddings(model).bfloat16().float()
    swapped, fixed = own.numpy().astype(">f4"), own.numpy().copy()
    fixed.flags.writeable = False  # as Ray's are
    arrays = own.numpy(), own.double().numpy(), swapped, fixed
    for given in (own.bfloat16(), *arrays, own.clone().requires_grad_(), own.T.clone().T):
        (output,) = llm.generate({"prompt_embeds": given}, asking(), use_tqdm=False)
        assert_equal_to_transformers(model, [own], output)
    given = own.clone()
    llm.add_request({"prompt_embeds": [given, np.array([3, 4])]}, asking())
    given.zero_()
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert_equal_to_transformers(model, [own, [3, 4]], outputs[0])


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "aborted"])
def test_their_memory_ends_with_their_requests(
    ends: bool, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
) -> None:
    """Also of requests that an abort ends between two chunks; what towers have made of images is not pushed out."""
    llm = make_llm(qwen[0], **SMALL, max_num_batched_tokens=40)

    def num_pieces() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) and thing.shape == (PIECE, 48) for thing in gc.get_objects())

    before = num_pieces()
    for seed in range(5):
        number = llm.add_request({"prompt_embeds": embeddings(qwen[1], 2 * PIECE, seed)}, asking())
        llm.step()
        assert num_pieces() > before
        if not ends:
            llm.abort(number)
        while llm.has_unfinished_requests():
            llm.step()
    llm.generate([BEFORE], asking(), use_tqdm=False)  # rows have sequences that have ended until the next step
    assert num_pieces() == before
    media = llm.engine.ranks.runner.holdings.media
    assert media is not None
    assert media._kept.num_bytes == 0


def test_salts_streams_beams_and_scores(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    folder, model = qwen
    llm = make_llm(folder, **SMALL)
    own = embeddings(model, 40)
    prompt = {"prompt_embeds": own, "cache_salt": "mine"}
    (output,) = llm.generate(prompt, asking(), use_tqdm=False)
    assert llm.generate({"prompt_embeds": own}, asking(), use_tqdm=False)[0].num_cached_tokens == 0
    streamed = [token for new in llm.stream([prompt], asking()) for token in new.token_ids]
    assert streamed == output.token_ids
    with torch.inference_mode():
        inputs = torch.cat([own, embedded(model, output.token_ids)])[None]
        theirs = model(inputs_embeds=inputs).logits[0].log_softmax(-1)[39:-1][range(6), output.token_ids]
    (scored,) = llm.score(prompt, [output.token_ids])
    assert sum(scored.logprobs) == pytest.approx(float(theirs.sum()), abs=1e-3)


def test_beside_what_a_request_may_want(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    """Hidden states begin with the embeddings; log-probabilities of the tokens behind them are given."""
    folder, model = qwen
    llm = make_llm(folder, **SMALL, hidden_state_layers=(0,))
    own = embeddings(model, 20)
    how = asking(hidden_states=[0], prompt_hidden_states=True, prompt_logprobs=0, prompt_logprobs_start=20)
    (output,) = llm.generate({"prompt_embeds": [own, BEHIND]}, how, use_tqdm=False)
    torch.testing.assert_close(output.hidden_states[0][:20], own)
    assert [entry is not None for entry in output.prompt_logprobs] == [False] * 20 + [True] * 2
    assert output.prompt_token_ids == [0] * 20 + BEHIND


@pytest.mark.parametrize("name", of_each_kind(HEADS, 0))
def test_beside_a_prediction_head(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """It knows nothing of what stands for tokens, and changes none."""
    model, _ = build_with_head(HEADS[name], tmp_path, agrees=True)
    llm = make_llm(str(tmp_path), **SMALL, speculation="mtp", max_num_batched_tokens=64)
    own = embeddings(model, 100)
    for parts in ([own], [BEFORE, own[:20], BEHIND]):
        (output,) = llm.generate([{"prompt_embeds": parts}], asking(), use_tqdm=False)
        assert_equal_to_transformers(model, parts, output)
        assert output.num_proposed_tokens > 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ({"prompt_embeds": torch.zeros(3, 5)}, r"has the shape \(3, 5\): must be \[n, 48\]"),
            ({"prompt_embeds": torch.zeros(0, 48)}, r"has the shape \(0, 48\): must be \[n, 48\]"),
            ({"prompt_embeds": torch.zeros(1, 3, 48)}, r"has the shape \(1, 3, 48\): must be \[n, 48\]"),
            ({"prompt_embeds": torch.zeros(3, 48).int()}, r"has dtype torch.int32: must be floating-point"),
            (
                {"prompt_embeds": np.zeros((3, 48), object)},
                r"has dtype object: must be floating-point numbers, float16",
            ),
            ({"prompt_embeds": np.zeros((3, 48), np.longdouble)}, r"has dtype \w+: must be floating-point"),
            ({"prompt_embeds": np.zeros((3, 48), int)}, r"has dtype int64: must be floating-point"),
            ({"prompt_embeds": torch.zeros(3, 48).to_sparse()}, r"is tensor\(.*\n.*: must be a dense tensor"),
            ({"prompt_embeds": torch.zeros(3, 48, device="meta")}, r"must be a dense tensor, with numbers in memory"),
            ({"prompt_embeds": [[3], torch.full((2, 48), torch.nan)]}, r"\[1\] has NaN or infinite numbers in float32"),
            ({"prompt_embeds": [[3]]}, r"is \[\[3\]\]: must have a tensor"),
            ({"prompt_embeds": []}, r"is \[\]: must have a tensor"),
            ({"prompt_embeds": "text"}, r"is 'text': must be a tensor \[n, hidden_size\], or a list of token ids"),
            ({"prompt_embeds": [torch.zeros(3, 48), [10**6]]}, r"has token id 1000000"),
            ({"prompt_embeds": torch.zeros(3, 48), "prompt": "x"}, r"has 'prompt': must have 'prompt_embeds' alone"),
            ({"prompt_embeds": torch.zeros(301, 48)}, r"has 301 tokens: must be fewer than max_model_len=300"),
        ],
    )
    def test_of_prompts(
        self, prompt: Any, message: str, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
    ) -> None:
        llm = make_llm(qwen[0], **SMALL)
        with pytest.raises(ValueError, match=r"prompts\[1\].*" + message):
            llm.generate([[1], prompt], asking(), use_tqdm=False)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"repetition_penalty": 1.1}, r"repetition_penalty=1.1: must be 1 for prompts\[0\]"),
            ({"prompt_logprobs": 0}, r"prompt_logprobs=0: must be left out for prompts\[0\].* at least 20"),
            ({"prompt_logprobs": 0, "prompt_logprobs_start": 19}, r"prompt_logprobs_start be at least 20"),
        ],
    )
    def test_settings_that_need_tokens(
        self, settings: Any, message: str, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
    ) -> None:
        llm = make_llm(qwen[0], **SMALL)
        prompt = {"prompt_embeds": [embeddings(qwen[1], 20), BEHIND]}
        with pytest.raises(ValueError, match=message):
            llm.generate(prompt, greedy(4, **settings), use_tqdm=False)

    def test_log_probabilities_of_nothing(
        self, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
    ) -> None:
        """Where no token is behind the embeddings, no start would help."""
        llm = make_llm(qwen[0], **SMALL)
        with pytest.raises(
            ValueError, match=r"prompt_logprobs=0: must be left out for prompts\[0\]: embeddings are no"
        ):
            llm.generate({"prompt_embeds": embeddings(qwen[1])}, greedy(4, prompt_logprobs=0), use_tqdm=False)

    def test_a_prefix_on_disk(
        self, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel], tmp_path: Path
    ) -> None:
        llm = make_llm(qwen[0], **SMALL)
        with pytest.raises(ValueError, match="the cache holds none: it must have at least 16 tokens of text"):
            llm.save_prefix({"prompt_embeds": embeddings(qwen[1])}, tmp_path / "prefix")

    def test_layers_with_inputs_of_their_own(self, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
        build(CASES["gemma4"], tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["hidden_size_per_layer_input"]
        llm = make_llm(str(tmp_path), **CASES["gemma4"].small)
        with pytest.raises(ValueError, match="this model's layers read embeddings of their own, by token ids"):
            llm.generate({"prompt_embeds": torch.zeros(2, llm.config.description.hidden_size)}, use_tqdm=False)

    def test_texts_that_are_read(self, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
        llm = make_llm(qwen[0], **SMALL)
        with pytest.raises(ValueError, match=r"prompts\[0\] has 'prompt_embeds': must be text or token ids"):
            llm.embed([{"prompt_embeds": embeddings(qwen[1])}], use_tqdm=False)
