"""LLM.embed: embeddings as sentence-transformers computes them, however texts are cut, cached and divided."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.case import SHAPE
from cases.readers import END, PROMPTS, TEXTS, change_json, save_sentence_model, spread_norms
from conftest import of_each_kind, whole_only
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3Model

from nanoinfer import BUNDLED_MODEL, LLM
from nanoinfer.models.reading.classes import BARE
from nanoinfer.pooling.sentence_model import read_sentence_model

sentence_transformers = pytest.importorskip("sentence_transformers")

LENGTH = 96
SMALL = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": LENGTH}
SPREAD: list[dict[str, int]] = [
    {},
    {"max_num_batched_tokens": 50},
    {"tensor_parallel_size": 2},
    {"max_num_seqs": 1},
    {"max_num_batched_tokens": 7},
]
WAYS = {
    "last": {},
    "mean": {"pooling": "mean"},
    "mean, as it is": {"pooling": "mean", "normalises": False},
    "last, a matrix": {"dense": {"out_features": 20}},
    "first": {"pooling": "cls"},
    "max": {"pooling": "max"},
    "weighted": {"pooling": "weightedmean"},
    "mean, a matrix without bias or activation": {
        "pooling": "mean",
        "dense": {"out_features": 32, "bias": False, "activation_function": torch.nn.Identity()},
    },
}

POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "first": lambda states: states[0],
    "max": lambda states: states.amax(0),
    "weighted": lambda states: (
        (states * torch.arange(1, len(states) + 1)[:, None]).sum(0) / (len(states) * (len(states) + 1) / 2)
    ),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=END,
        eos_token_id=END,
        bos_token_id=None,
    )
    model = Qwen3Model(config).float().eval()
    spread_norms(model)
    return model


@pytest.fixture(scope="module")
def save(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Save the model as an embedding model; returns its folder."""
    return lambda **how: save_sentence_model(model, tmp_path_factory.mktemp("embedder"), **how)


@pytest.fixture(scope="module")
def folder(save: Callable[..., str]) -> str:
    return save(prompts=PROMPTS)


def encode(folder: str, texts: list[str], **how: Any) -> np.ndarray:
    return sentence_transformers.SentenceTransformer(folder, device="cpu").encode(texts, **how)


def embed(llm: LLM, prompts: Any, **how: Any) -> np.ndarray:
    outputs = llm.embed(prompts, use_tqdm=False, **how)
    assert all(output.error is None for output in outputs)
    return np.stack([output.embedding for output in outputs])


def hidden_of(model: PreTrainedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def prompts_of_all_lengths() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(2, 512, (LENGTH,), generator=generator).tolist()
    lengths = [1, 2, 15, 16, 17, 32, 33, LENGTH - 1, LENGTH]
    alone = [torch.randint(2, 512, (length,), generator=generator).tolist() for length in lengths]
    return [*alone, *(shared[:length] for length in lengths)]


@pytest.mark.parametrize("way", [next(iter(WAYS)), *list(WAYS)[1:]])
def test_embeddings_are_those_of_sentence_transformers(
    way: str, save: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    folder = save(**WAYS[way])
    llm = make_llm(folder, device="cpu")
    ours = embed(llm, TEXTS)
    np.testing.assert_allclose(ours, encode(folder, TEXTS), atol=1e-4)
    assert ours.dtype == np.float32


@pytest.mark.parametrize(("way", "options"), of_each_kind(product(POOLINGS, SPREAD), 0, 1, 2, 5, 14, 19, 24), ids=str)
def test_prompts_of_all_lengths_fresh_and_cached(
    options: dict, way: str, save: Callable[..., str], make_llm: Callable[..., LLM], model: PreTrainedModel
) -> None:
    llm = make_llm(save(**WAYS[way], **({"normalises": False})), **SMALL, **options)
    prompts = prompts_of_all_lengths()
    states = hidden_of(model, prompts)
    expected = np.stack([POOLINGS[way](state).numpy() for state in states])
    for _ in range(2):
        np.testing.assert_allclose(embed(llm, prompts), expected, atol=1e-4)
    assert llm.engine.scheduler.block_manager.share_used == 0
    cached = [output.num_cached_tokens for output in llm.embed(prompts, use_tqdm=False)]
    assert cached == [(len(prompt) - 1) // 16 * 16 if way == "last" else 0 for prompt in prompts]


def test_the_tokenizer_adds_its_end(folder: str, make_llm: Callable[..., LLM]) -> None:
    (output,) = make_llm(folder, device="cpu").embed("To be", use_tqdm=False)
    assert output.prompt_token_ids[-1] == END
    assert output.prompt == "To be"
    assert output.outputs.embedding is output["embedding"]


def test_a_prompt_by_its_name(folder: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(folder, device="cpu")
    named = embed(llm, TEXTS, prompt_name="query")
    np.testing.assert_allclose(named, encode(folder, TEXTS, prompt_name="query"), atol=1e-4)
    np.testing.assert_array_equal(embed(llm, TEXTS, prompt_name="document"), embed(llm, TEXTS))
    (output,) = llm.embed([{"prompt": "To be"}], prompt_name="query", use_tqdm=False)
    assert output.prompt == PROMPTS["query"] + "To be"
    for wrong, what in (("none", "must be one of document, query"), (7, "must be one of document, query")):
        with pytest.raises(ValueError, match=f"prompt_name={wrong!r}: {what}"):
            llm.embed(TEXTS, prompt_name=wrong)
    with pytest.raises(ValueError, match=re.escape("prompt_name='query': prompts[1] must be text")):
        llm.embed(["a", [2, 3]], prompt_name="query")


def test_a_default_prompt(save: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    folder = save(prompts=PROMPTS, default_prompt_name="query")
    llm = make_llm(folder, device="cpu")
    np.testing.assert_allclose(embed(llm, TEXTS), encode(folder, TEXTS), atol=1e-4)
    assert llm.embed([[2, 3]], use_tqdm=False)[0].prompt_token_ids == [2, 3]


def test_fewer_dimensions(folder: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(folder, device="cpu")
    whole = embed(llm, TEXTS)
    cut = embed(llm, TEXTS, dimensions=8)
    np.testing.assert_allclose(cut, encode(folder, TEXTS, truncate_dim=8, normalize_embeddings=True), atol=1e-4)
    np.testing.assert_array_equal(embed(llm, TEXTS, dimensions=64), whole)
    for wrong in (0, 65, 2.5, "8"):
        with pytest.raises(ValueError, match=f"dimensions={wrong!r}: must be an integer from 1 to 64"):
            llm.embed(TEXTS, dimensions=wrong)


def test_with_length_1_or_not(folder: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(folder, device="cpu")
    raw, whole = embed(llm, TEXTS, normalize=False), embed(llm, TEXTS, normalize=True)
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert (abs(lengths - 1) > 0.1).all()
    np.testing.assert_allclose(whole, raw / lengths, atol=1e-6)
    for wrong in (1, "no"):
        with pytest.raises(ValueError, match=f"normalize={wrong!r}: must be True or False"):
            llm.embed(TEXTS, normalize=wrong)


def test_dimensions_that_the_config_lists(save: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    folder = save()
    change_json(folder, "config.json", matryoshka_dimensions=[16, 32])
    llm = make_llm(folder, device="cpu")
    assert embed(llm, TEXTS, dimensions=16).shape == (len(TEXTS), 16)
    with pytest.raises(ValueError, match=re.escape("dimensions=8: must be one of [16, 32]")):
        llm.embed(TEXTS, dimensions=8)


def test_a_checkpoint_that_calls_itself_causal_and_has_no_head(
    save: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    folder = save()
    expected = encode(folder, TEXTS)
    change_json(folder, "config.json", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    np.testing.assert_allclose(embed(make_llm(folder, device="cpu"), TEXTS), expected, atol=1e-4)


def test_an_llm_that_generates_embeds_too(make_llm: Callable[..., LLM]) -> None:
    both, only = make_llm(device="cpu"), make_llm(device="cpu", runner="pooling")
    np.testing.assert_allclose(embed(both, TEXTS), embed(only, TEXTS), atol=1e-6)
    assert both.generate("To be", use_tqdm=False)[0].token_ids
    with pytest.raises(RuntimeError, match="reads texts, and has no logits"):
        only.generate("To be")
    with pytest.raises(RuntimeError, match="reads texts, and has no logits"):
        only.score("To be", " or")
    with pytest.raises(RuntimeError, match="runner='generate'"):
        only.add_request("To be")
    assert only.engine.ranks.runner.logits.numel() == 0


def test_an_iterator_is_read_as_outputs_are_taken(folder: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(folder, device="cpu", max_num_batched_tokens=64, max_num_seqs=4)
    given = 0

    def texts() -> Iterator[str]:
        nonlocal given
        for number in range(200):
            given += 1
            yield f"{TEXTS[number % len(TEXTS)]} {number}"

    outputs = llm.embed(texts(), use_tqdm=False)
    first = next(outputs)
    assert given < 40
    with pytest.raises(RuntimeError, match="a stream is open"):
        llm.embed(TEXTS)
    rest = list(outputs)
    assert [output.prompt for output in (first, *rest)] == [f"{TEXTS[i % len(TEXTS)]} {i}" for i in range(200)]
    assert embed(llm, TEXTS).shape == (len(TEXTS), 64)


def test_a_lists_prompt_that_cannot_work_is_found_half_way(folder: str, make_llm: Callable[..., LLM]) -> None:
    """The others are dropped, and the LLM goes on."""
    llm = make_llm(folder, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = [[5, index + 6] for index in range(100)]
    right = embed(llm, prompts)
    for last, what in (
        ([5, 10**9], "token id 1000000000"),
        ([], "empty"),
        (["a"], "a list of token ids"),
        (7, "must be"),
    ):
        before = llm.stats().num_requests
        with pytest.raises(ValueError, match=rf"prompts\[100\].*{what}"):
            llm.embed([*prompts, last], use_tqdm=False)
        assert 20 < llm.stats().num_requests - before < 60
    assert np.allclose(embed(llm, prompts), right, atol=1e-5)


def test_an_iterators_prompt_that_cannot_work(folder: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(folder, device="cpu")
    with pytest.raises(ValueError, match=re.escape("prompts[1]")):
        list(llm.embed(iter(["a", []]), use_tqdm=False))
    assert list(llm.embed(iter([]), use_tqdm=False)) == []
    assert llm.embed([], use_tqdm=False) == []
    with pytest.raises(ValueError, match=re.escape("prompts[0] is empty")):
        llm.embed([[]])


@pytest.mark.parametrize("way", ["last", *whole_only(["mean"])])
def test_bits_do_not_depend_on_company_or_chunks(
    way: str, save: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    folder = save(**WAYS[way])
    whole = make_llm(folder, **SMALL, deterministic=True)
    cut = make_llm(folder, **SMALL, deterministic=True, max_num_batched_tokens=7)
    prompts = prompts_of_all_lengths()[:7]
    alone = np.concatenate([embed(whole, [prompt]) for prompt in prompts])
    np.testing.assert_array_equal(embed(whole, prompts), alone)
    np.testing.assert_array_equal(embed(cut, prompts), alone)


@pytest.mark.parametrize("way", ["last", "mean"])
def test_numbers_that_are_not_finite_end_their_text_alone(
    way: str, save: Callable[..., str], make_llm: Callable[..., LLM], model: PreTrainedModel
) -> None:
    llm = make_llm(save(**WAYS[way]), device="cpu", dtype="float16")
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    weights["embed_tokens.weight"][7] = 65000.0  # and a layer's result add up to more than float16 has
    weights["layers.1.mlp.down_proj.weight"] *= 300
    llm.update_weights(weights)
    good, bad = llm.embed([[5, 6], [6, 7]], use_tqdm=False)
    assert np.isfinite(good.embedding).all()
    assert bad.embedding is None
    assert "not finite" in bad.error


@pytest.mark.parametrize("way", ["last", "mean"])
def test_new_weights_in_the_middle_of_a_text(
    way: str, save: Callable[..., str], make_llm: Callable[..., LLM], model: PreTrainedModel
) -> None:
    llm = make_llm(save(**WAYS[way]), **SMALL, max_num_batched_tokens=16)
    prompt = list(range(2, 60))
    (before,) = embed(llm, [prompt])
    llm.reset_prefix_cache()
    llm.add_request(llm.prepare_to_embed(prompt))
    assert not [output for _ in range(3) for output in llm.step()]
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    weights["norm.weight"][:32] *= -1
    llm.update_weights(weights)
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    np.testing.assert_allclose(outputs[0].embedding, before * np.repeat([-1, 1], 32), atol=1e-5)


@pytest.mark.parametrize("stem", of_each_kind([(stem,) for stem in BARE], list(BARE).index("Gemma3TextModel")))
def test_each_class_without_a_head(stem: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    kind = {"Gemma2Model": "gemma2", "Gemma3TextModel": "gemma3_text"}.get(stem, stem.removesuffix("Model").lower())
    shape = {**SHAPE, "initializer_range": 0.2, "sliding_window": 24}
    if stem == "Qwen2Model":
        shape.pop("head_dim")
    theirs = AutoModel.from_config(AutoConfig.for_model(kind, **shape), attn_implementation="eager").float().eval()
    assert type(theirs).__name__ == stem
    spread_norms(theirs)
    theirs.save_pretrained(tmp_path)
    prompts = [[3], list(range(2, 40)), list(range(2, 60))]
    expected = torch.stack([state[-1] for state in hidden_of(theirs, prompts)])
    ours = embed(make_llm(str(tmp_path), **SMALL), prompts)
    np.testing.assert_allclose(ours, torch.nn.functional.normalize(expected).numpy(), atol=1e-4)


def test_tokens_that_see_later_ones(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """As EmbeddingGemma's do, within windows of both directions in most layers."""
    own = {"initializer_range": 0.2, "sliding_window": 24, "num_hidden_layers": 7, "use_bidirectional_attention": True}
    config = AutoConfig.for_model("gemma3_text", **{**SHAPE, **own})
    theirs = AutoModel.from_config(config, attn_implementation="eager").float().eval()
    spread_norms(theirs)
    theirs.save_pretrained(tmp_path)
    prompts = [[3], list(range(2, 40)), list(range(2, 60))]
    expected = torch.stack([states.mean(dim=0) for states in hidden_of(theirs, prompts)])
    ours = embed(make_llm(str(tmp_path), **SMALL), prompts)
    np.testing.assert_allclose(ours, torch.nn.functional.normalize(expected).numpy(), atol=1e-4)


def test_tokens_that_see_later_ones_are_not_guessed(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3_text", **SHAPE, use_bidirectional_attention=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_bidirectional_attention=True in its config: must be False to generate"):
        LLM(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "mean_sqrt_len"}, "pooling_mode=mean_sqrt_len"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt=false"),
        (
            "2_Dense/config.json",
            {"activation_function": "torch.nn.modules.activation.GELU"},
            "activation_function=GELU",
        ),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
    ],
    ids=str,
)
def test_what_a_checkpoint_asks_for_and_is_not_there(
    file: str, change: dict, named: str, save: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    folder = save(dense={"out_features": 20})
    change_json(folder, file, **change)
    with pytest.raises(ValueError, match=named):
        make_llm(folder, device="cpu").embed(TEXTS)


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("lasttoken", "last"),
        ("mean_tokens", "mean"),
        ("cls_token", "first"),
        ("max_tokens", "max"),
        ("weightedmean_tokens", "weighted"),
    ],
)
def test_poolings_as_older_files_name_them(mode: str, what: str, folder: str, tmp_path: Path) -> None:
    """As those of Qwen3-Embedding do."""
    whole = shutil.copytree(folder, tmp_path / "old")
    names = "cls_token", "mean_tokens", "max_tokens", "lasttoken", "weightedmean_tokens"
    modes = {f"pooling_mode_{name}": name == mode for name in names}
    change_json(str(whole), "1_Pooling/config.json", pooling_mode=None, **modes)
    modules = (whole / "modules.json").read_text("utf-8")
    modules = re.sub(r"sentence_transformers\.[\w.]*\.(\w+)\"", r'sentence_transformers.models.\1"', modules)
    (whole / "modules.json").write_text(modules, "utf-8")
    assert read_sentence_model(str(whole)).what == what


def test_a_layer_norm_behind_the_pooling(save: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    folder = save(norm=True)
    np.testing.assert_allclose(embed(make_llm(folder, device="cpu"), TEXTS), encode(folder, TEXTS), atol=1e-4)
    change_json(folder, "2_LayerNorm/config.json", dimension=3)
    with pytest.raises(ValueError, match="dimension=3: must be 64, as in"):
        make_llm(folder, device="cpu").embed(TEXTS)


def test_modules_that_are_not_there(save: Callable[..., str], make_llm: Callable[..., LLM]) -> None:
    folder = Path(save())
    modules = (folder / "modules.json").read_text("utf-8")
    (folder / "modules.json").write_text(modules.replace("Normalize", "WordWeights"), "utf-8")
    with pytest.raises(ValueError, match="has Transformer, Pooling, WordWeights: must be"):
        make_llm(str(folder), device="cpu").embed(TEXTS)


def test_a_class_without_a_head_cannot_generate(folder: str) -> None:
    with pytest.raises(ValueError, match="runner='generate': must be left out: Qwen3Model"):
        LLM(folder, device="cpu", runner="generate")
    with pytest.raises(ValueError, match="runner='draft': must be"):
        LLM(BUNDLED_MODEL, runner="draft")


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["last", "mean"])
def test_on_a_gpu(way: str, save: Callable[..., str], make_llm: Callable[..., LLM], model: PreTrainedModel) -> None:
    llm = make_llm(save(**WAYS[way], normalises=False), **{**SMALL, "device": "cuda"})
    prompts = prompts_of_all_lengths()
    expected = np.stack(
        [(state[-1] if way == "last" else state.mean(0)).numpy() for state in hidden_of(model, prompts)]
    )
    np.testing.assert_allclose(embed(llm, prompts), expected, atol=1e-2)
    assert llm.engine.ranks.runner.graphs is None
