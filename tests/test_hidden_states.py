"""Hidden states: those of transformers' output_hidden_states, for each token once, whatever computed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.case import SHAPE
from cases.drafters import DRAFTERS
from cases.readers import save_sentence_model
from conftest import of_each_kind, whole_only
from transformers import AutoConfig, AutoModel, PreTrainedModel, Qwen3Config, Qwen3Model

from nanoinfer import LLM, RequestOutput, SampleOutput, SamplingParams

PROMPTS = [[5], list(range(40)), [7] * 33, list(range(3, 90))]
SMALL = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 200}
LAYERS = (0, 2, 3, -1)
KINDS = ["longcat", "gemma4", "granite", "nemotronh", "gemma2", "gptneox", "cohere2", "falconh1", "qwen3.5", "lfm2"]


def asking(layers: tuple[int, ...] = LAYERS, **settings: Any) -> SamplingParams:
    how = {"max_tokens": 12, "seed": 1, "ignore_eos": True, **settings}
    return SamplingParams(hidden_states=layers, **how)


@torch.inference_mode()
def states_of(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(
        states[0] for states in model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    )


def assert_equal_to_transformers(
    model: PreTrainedModel, prompt: list[int], sample: SampleOutput, layers: tuple[int, ...] = LAYERS, first: int = 0
) -> None:
    """Check those of all tokens from `first` on, but for the last generated one."""
    expected = states_of(model, (prompt + sample.token_ids)[: len(prompt) + max(0, len(sample.token_ids) - 1)])
    assert sample.hidden_states is not None
    assert list(sample.hidden_states) == list(layers)
    for layer, ours in sample.hidden_states.items():
        theirs = expected[layer][first:]
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def check_all(model: PreTrainedModel, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for sample in output.samples:
            assert_equal_to_transformers(model, output.prompt_token_ids, sample)


@pytest.mark.parametrize("name", of_each_kind(KINDS, 0, 1, 2, 3))
def test_they_are_those_of_transformers(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """The second time, the prompts' blocks are in the cache."""
    model = build(CASES[name], tmp_path)
    count = len(states_of(model, [5]))
    layers = tuple(range(count))
    llm = make_llm(str(tmp_path), **CASES[name].small, images=False, hidden_state_layers=layers)
    for _ in range(2):
        for output in llm.generate(PROMPTS[:2], asking(layers, max_tokens=5), use_tqdm=False):
            assert_equal_to_transformers(model, output.prompt_token_ids, output, layers)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen")
    return str(folder), build(CASES["qwen3"], folder)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 16, "max_num_batched_tokens": 50},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"deterministic": True, "max_num_seqs": 5},
        *whole_only([{"data_parallel_size": 2}]),
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_preempted_in_chunks_and_on_two_ranks(
    options: dict[str, Any],
    make_llm: Callable[..., LLM],
    qwen: tuple[str, PreTrainedModel],
    no_foresight: None,
) -> None:
    """Tokens that are computed again have theirs once."""
    folder, model = qwen
    llm = make_llm(folder, **SMALL, **options, hidden_state_layers=LAYERS)
    check_all(model, llm.generate(PROMPTS, asking(n=3, max_tokens=20), use_tqdm=False))
    if "num_kvcache_blocks" in options:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        ({}, "alternating"),
        ({"deterministic": True, "max_num_seqs": 5}, "suffix"),
        *whole_only([({"num_kvcache_blocks": 16, "max_num_batched_tokens": 8}, "random")]),
        pytest.param({"device": "cuda"}, "suffix", marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_guesses_that_fail_leave_none(
    options: dict[str, Any], drafter: str, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
) -> None:
    folder, model = qwen
    how = {**SMALL, **options, "hidden_state_layers": LAYERS}
    params = [asking(max_tokens=4 + 2 * i, n=1 + i % 2, seed=i) for i in range(4)]
    plain = make_llm(folder, **how).generate(PROMPTS, params, use_tqdm=False)
    known = [output.prompt_token_ids + sample.token_ids for output in plain for sample in output.samples]
    outputs = make_llm(folder, **how, speculation=DRAFTERS[drafter](known)).generate(PROMPTS, params, use_tqdm=False)
    check_all(model, outputs)
    assert drafter != "alternating" or sum(output.num_accepted_tokens for output in outputs) > 0


def test_requests_ask_for_layers_of_their_own(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    """Those that ask for none have none, and keep the cached prefix; only the named ones come, by the names given."""
    folder, model = qwen
    llm = make_llm(folder, **SMALL, hidden_state_layers=[4, 0, 2, 3])
    asked: list[tuple[int, ...] | None] = [(2,), None, (-1, 4), (0, 3)]
    for _ in range(2):
        params = [SamplingParams(max_tokens=9, hidden_states=layers) for layers in asked]
        outputs = llm.generate([PROMPTS[3]] * 4, params, use_tqdm=False)
    for output, layers in zip(outputs, asked, strict=True):
        if layers is None:
            assert output.hidden_states is None
            assert output.num_cached_tokens == 80
        else:
            assert output.num_cached_tokens == 0
            assert_equal_to_transformers(model, PROMPTS[3], output, layers)


def test_those_of_the_output_alone_let_the_prompt_come_from_the_cache(
    make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
) -> None:
    folder, model = qwen
    llm = make_llm(folder, **SMALL, hidden_state_layers=LAYERS, max_num_batched_tokens=30)
    for cached in (0, 80):
        params = asking(n=2, prompt_hidden_states=False)
        (output,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
        assert output.num_cached_tokens == cached
        for sample in output.samples:
            assert sample.hidden_states[0].shape == (12, SHAPE["hidden_size"])
            assert_equal_to_transformers(model, PROMPTS[3], sample, first=len(PROMPTS[3]) - 1)


def test_a_prompt_alone_has_those_of_all_of_its_tokens(
    make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
) -> None:
    folder, model = qwen
    llm = make_llm(folder, **SMALL, hidden_state_layers=LAYERS)
    for output in llm.generate(PROMPTS, asking(max_tokens=0), use_tqdm=False):
        assert output.token_ids == []
        assert_equal_to_transformers(model, output.prompt_token_ids, output)


def test_scores_have_those_of_prompt_and_continuation(
    make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
) -> None:
    folder, model = qwen
    llm = make_llm(folder, **SMALL, hidden_state_layers=LAYERS)
    continuations = [[3, 4], [9] * 20]
    for score, tokens in zip(llm.score(PROMPTS[1], continuations, hidden_states=[2, -1]), continuations, strict=True):
        expected = states_of(model, PROMPTS[1] + tokens)
        assert list(score.hidden_states) == [2, -1]
        for layer, ours in score.hidden_states.items():
            torch.testing.assert_close(ours, expected[layer], rtol=1e-4, atol=1e-4)
    assert llm.score(PROMPTS[1], continuations)[0].hidden_states is None


@pytest.mark.parametrize("is_encoder", [False, True])
def test_embeddings_have_those_of_their_texts(is_encoder: bool, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Those of texts that an encoder computes packed are divided."""
    pytest.importorskip("sentence_transformers")
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    if is_encoder:
        config = AutoConfig.for_model("bert", **sizes, num_attention_heads=4, max_position_embeddings=128)
        model = AutoModel.from_config(config).float().eval()
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        model = Qwen3Model(Qwen3Config(**sizes, **heads, pad_token_id=1, eos_token_id=1)).float().eval()
    folder = save_sentence_model(model, tmp_path, "mean" if is_encoder else "lasttoken")
    llm = make_llm(folder, device="cpu", max_model_len=96, hidden_state_layers=(1, -1), runner="pooling")
    texts = [[5, 6, 7], list(range(9, 60)), [4] * 30]
    for _ in range(2):
        for output, tokens in zip(llm.embed(texts, hidden_states=[-1, 1], use_tqdm=False), texts, strict=True):
            expected = states_of(model, tokens)
            assert list(output.hidden_states) == [-1, 1]
            for layer, ours in output.hidden_states.items():
                torch.testing.assert_close(ours, expected[layer], rtol=1e-4, atol=1e-4)
    assert llm.embed(texts, use_tqdm=False)[0].hidden_states is None


def test_the_last_output_of_a_stream_has_them(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    llm = make_llm(qwen[0], **SMALL, hidden_state_layers=LAYERS)
    (output,) = llm.generate([[5, 6, 7]], asking(max_tokens=4), use_tqdm=False)
    *others, last = llm.stream([[5, 6, 7]], asking(max_tokens=4))
    assert [new.hidden_states for new in others] == [None] * 3
    for layer in LAYERS:
        assert torch.equal(last.hidden_states[layer], output.hidden_states[layer])
        assert output.hidden_states[layer].shape == (6, SHAPE["hidden_size"])


def test_they_have_the_models_dtype(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    folder, model = qwen
    llm = make_llm(folder, **SMALL, dtype="bfloat16", hidden_state_layers=LAYERS)
    (output,) = llm.generate([PROMPTS[3]], asking(), use_tqdm=False)
    expected = states_of(model, PROMPTS[3] + output.token_ids[:-1])
    for layer, ours in output.hidden_states.items():
        assert ours.dtype == torch.bfloat16
        error = (ours.float() - expected[layer]).norm() / expected[layer].norm()
        assert error < 3e-2


def test_new_weights_give_new_ones(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    """A request that is computed again under new weights has no hidden states of the old ones."""
    folder, model = qwen
    llm = make_llm(folder, **SMALL, hidden_state_layers=LAYERS)
    doubled = {"model.embed_tokens.weight": model.model.embed_tokens.weight.detach() * 2}
    number = llm.add_request(PROMPTS[1], asking())
    for _ in range(4):
        llm.step()
    llm.update_weights({**model.state_dict(), **doubled}, in_flight="recompute")
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert outputs[0].request_id == number
    tokens = PROMPTS[1] + outputs[0].token_ids[:-1]
    embedded = doubled["model.embed_tokens.weight"][torch.tensor(tokens)]
    torch.testing.assert_close(outputs[0].hidden_states[0], embedded)


class TestErrors:
    def test_numbers_that_the_model_lacks(
        self, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
    ) -> None:
        with pytest.raises(ValueError, match=r"hidden_state_layers has 5: the model's hidden states are 0 .* to 4"):
            make_llm(qwen[0], **SMALL, hidden_state_layers=[0, 5])
        llm = make_llm(qwen[0], **SMALL, hidden_state_layers=[1])
        for layer in (5, -6):
            with pytest.raises(ValueError, match=rf"sampling_params.hidden_states has {layer}: the model's"):
                llm.generate([[5]], asking((layer,)), use_tqdm=False)

    def test_numbers_that_were_not_named_at_the_start(
        self, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
    ) -> None:
        llm = make_llm(qwen[0], **SMALL, hidden_state_layers=[1])
        named = r"hidden_states has -1: must be among LLM's hidden_state_layers=\(1,\)"
        for call in (
            lambda: llm.generate([[5]], asking((1, -1)), use_tqdm=False),
            lambda: llm.score([5], [[6]], hidden_states=[-1]),
            lambda: llm.embed([[5]], hidden_states=[-1]),
        ):
            with pytest.raises(ValueError, match=named):
                call()

    @pytest.mark.parametrize("value", [3, "1", [1.5], [None], [True], {1: 2}])
    def test_what_is_no_list_of_integers(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"hidden_states=.*: must be a list of integers"):
            SamplingParams(hidden_states=value)
        with pytest.raises(ValueError, match=r"hidden_state_layers=.*: must be a list of integers"):
            LLM("bundled", hidden_state_layers=value)

    def test_a_restriction_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="prompt_hidden_states=False: must be True without hidden_states"):
            SamplingParams(prompt_hidden_states=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "granite", "mixtral", "qwen3.5"])
def test_graphs_keep_what_eager_steps_keep(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """In float32 both are those of transformers, for a single row, too, and for rows that pad a graph."""
    model = build(CASES[name], tmp_path)
    how = {"device": "cuda", "kvcache_block_size": 64, "max_model_len": 320, "hidden_state_layers": LAYERS}
    llms = [
        make_llm(str(tmp_path), **how, images=False),
        make_llm(str(tmp_path), **how, images=False, enforce_eager=True),
    ]
    for count in (1, 11):
        prompts = (PROMPTS * 3)[-count:]
        outputs = [llm.generate(prompts, asking(), use_tqdm=False) for llm in llms]
        check_all(model, outputs[0])
        for graph, eager in zip(*outputs, strict=True):
            assert graph.token_ids == eager.token_ids
            for layer in LAYERS:
                torch.testing.assert_close(graph.hidden_states[layer], eager.hidden_states[layer], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_those_of_long_prompts_come_beside_the_next_steps(make_llm: Callable[..., LLM]) -> None:
    """Steps overwrite the slots while the host still reads: each prompt has its own, as it has alone."""
    llm = make_llm(dtype="bfloat16", device="cuda", max_num_batched_tokens=1024, hidden_state_layers=(0, -1))
    prompts = [[(7 * i + j) % 500 for j in range(400 + 3 * i)] for i in range(40)]
    params = asking((0, -1), max_tokens=3)
    together = llm.generate(prompts, params, use_tqdm=False)
    table = llm.engine.ranks.runner.holdings.model.embedding.weight.cpu()
    for output, prompt in zip(together, prompts, strict=True):
        tokens = torch.tensor(prompt + output.token_ids[:-1])
        assert torch.equal(output.hidden_states[0], table[tokens])
