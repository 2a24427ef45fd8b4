"""Steering: vectors added to hidden states, as forward hooks of transformers add them, for the rows that ask alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build
from cases.case import SHAPE
from cases.drafters import DRAFTERS
from conftest import of_each_kind, whole_only
from transformers import PreTrainedModel

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.kernels.steering import steer_reference, steer_triton

PROMPTS = [[5], list(range(40)), [7] * 33, list(range(3, 90))]
SMALL = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 200}
KINDS = ["longcat", "gemma4", "granite", "nemotronh", "gemma2", "gptneox", "falconh1", "qwen3.5", "olmo2", "cohere2"]
SIZE = SHAPE["hidden_size"]


def vectors_of(*layers: int, seed: int = 0, size: int = SIZE) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(size, generator=generator) for layer in layers}


@contextmanager
def hooked(model: PreTrainedModel, vectors: dict[int, torch.Tensor], strength: float) -> Iterator[None]:
    """Let hooks add vectors to the outputs of layers, or to the input of the first one, or behind the last norm.

    They come before those hooks by which transformers has kept hidden states since its first forward that gave any.
    """
    base = model.model if hasattr(model, "model") else model.base_model
    layers = next(module for module in base.modules() if isinstance(module, torch.nn.ModuleList) and len(module) > 1)
    norm = next(own for name in ("norm", "norm_f", "final_layernorm", "final_layer_norm", "embedding_norm")
                if (own := getattr(base, name, None)) is not None)  # fmt: skip

    def adding(vector: torch.Tensor) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (output[0] + strength * vector, *output[1:])
            return output + strength * vector

        return hook

    def before(vector: torch.Tensor) -> Callable[..., Any]:
        return lambda _, given: (given[0] + strength * vector, *given[1:])

    with ExitStack() as stack:
        for layer, vector in vectors.items():
            place = layer % (len(layers) + 1)
            if place == 0:
                handle = layers[0].register_forward_pre_hook(before(vector), prepend=True)
            else:
                module = norm if place == len(layers) else layers[place - 1]
                handle = module.register_forward_hook(adding(vector), prepend=True)
            stack.callback(handle.remove)
        yield


@torch.inference_mode()
def assert_equal_to_hooks(
    model: PreTrainedModel, output: RequestOutput, vectors: dict[int, torch.Tensor], strength: float
) -> None:
    """Check the log-probabilities of prompt and output, and that each greedy token is the likeliest."""
    for sample in output.samples:
        tokens = output.prompt_token_ids + sample.token_ids
        with hooked(model, vectors, strength):
            logprobs = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        first = len(output.prompt_token_ids)
        theirs = logprobs[range(first - 1, len(tokens) - 1), sample.token_ids]
        ours = torch.tensor([entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def steered(steering: tuple[str, float] | None, **settings: Any) -> SamplingParams:
    how = {"max_tokens": 10, "seed": 1, "logprobs": 0, "ignore_eos": True, **settings}
    return SamplingParams(steering=steering, **how)


@pytest.mark.parametrize("name", of_each_kind(KINDS, 0, 1, 2, 3))
def test_it_is_what_hooks_of_transformers_add(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """The second time, the prompts' blocks are in the cache."""
    model = build(CASES[name], tmp_path)
    llm = make_llm(str(tmp_path), **CASES[name].small, max_steerings=1)
    vectors = vectors_of(0, 1, -1, size=model.config.hidden_size)
    llm.load_steering("mine", vectors)
    for _ in range(2):
        for output in llm.generate(PROMPTS[:2], steered(("mine", 0.7), max_tokens=5), use_tqdm=False):
            assert_equal_to_hooks(model, output, vectors, 0.7)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen")
    return str(folder), build(CASES["qwen3"], folder)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 16, "max_num_batched_tokens": 50},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"tensor_parallel_size": 2},
        {"deterministic": True, "max_num_seqs": 5},
        *whole_only([{"data_parallel_size": 2}, {"tensor_parallel_size": 2, "deterministic": True}]),
    ],
    ids=str,
)
def test_rows_of_one_step_have_their_own(
    options: dict[str, Any], make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel], no_foresight: None
) -> None:
    """Of one prompt, each steering and strength has a cache of its own; whoever has none is not changed."""
    folder, model = qwen
    llm = make_llm(folder, **SMALL, **options, max_steerings=2)
    known = {"a": vectors_of(1, 3), "b": vectors_of(0, -1, seed=1)}
    for name, vectors in known.items():
        llm.load_steering(name, vectors)
    assert llm.steerings == {"a": (1, 3), "b": (0, 4)}
    asked = [("a", 1.0), None, ("b", -0.5), ("a", 2.0), None, ("b", 0.0)]
    for _ in range(2):
        prompts = [PROMPTS[3], PROMPTS[3], PROMPTS[3], PROMPTS[3], PROMPTS[0], PROMPTS[1]]
        outputs = llm.generate(prompts, [steered(own, n=2) for own in asked], use_tqdm=False)
        for output, own in zip(outputs, asked, strict=True):
            name, strength = own or ("a", 0.0)
            assert_equal_to_hooks(model, output, known[name], strength)
    if "num_kvcache_blocks" not in options and "max_num_seqs" not in options and "data_parallel_size" not in options:
        assert [output.num_cached_tokens for output in outputs] == [80, 80, 80, 80, 0, 32]


def test_guesses_are_verified_with_it(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    folder, model = qwen
    vectors = vectors_of(0, 2, 4)
    params = [steered(("mine", 1.0)), steered(None), steered(("mine", -2.0)), steered(("mine", 1.0), n=2)]
    plain = make_llm(folder, **SMALL, max_steerings=1)
    plain.load_steering("mine", vectors)
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    known = [output.prompt_token_ids + sample.token_ids for output in expected for sample in output.samples]
    llm = make_llm(folder, **SMALL, max_steerings=1, speculation=DRAFTERS["alternating"](known))
    llm.load_steering("mine", vectors)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert sum(output.num_accepted_tokens for output in outputs) > 0
    for output, wanted, own in zip(outputs, expected, params, strict=True):
        assert [sample.token_ids for sample in output.samples] == [sample.token_ids for sample in wanted.samples]
        assert_equal_to_hooks(model, output, vectors, 0.0 if own.steering is None else own.steering[1])


def test_hidden_states_show_it(make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]) -> None:
    folder, _ = qwen
    llm = make_llm(folder, **SMALL, max_steerings=1, hidden_state_layers=(0, 2, -1))
    vectors = vectors_of(2)
    llm.load_steering("mine", vectors)
    params = [steered(own, max_tokens=0, hidden_states=[0, 2, -1]) for own in (None, ("mine", 3.0))]
    plain, changed = llm.generate([PROMPTS[1]] * 2, params, use_tqdm=False)
    assert torch.equal(changed.hidden_states[0], plain.hidden_states[0])
    torch.testing.assert_close(changed.hidden_states[2], plain.hidden_states[2] + 3 * vectors[2])
    assert not torch.allclose(changed.hidden_states[-1], plain.hidden_states[-1])


def test_a_name_that_is_loaded_again_shares_nothing_with_what_it_was(
    make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
) -> None:
    folder, model = qwen
    llm = make_llm(folder, **SMALL, max_steerings=1)
    for seed in range(2):
        vectors = vectors_of(1 + seed, seed=seed)
        llm.load_steering("mine", vectors)
        (output,) = llm.generate([PROMPTS[3]], steered(("mine", 1.0)), use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert_equal_to_hooks(model, output, vectors, 1.0)
    llm.unload_steering("mine")
    assert llm.steerings == {}
    llm.load_steering("other", vectors)
    assert llm.generate([PROMPTS[3]], steered(("other", 1.0)), use_tqdm=False)[0].num_cached_tokens == 0


@pytest.fixture(scope="module")
def llm(qwen: tuple[str, PreTrainedModel]) -> Iterator[LLM]:
    with LLM(qwen[0], **SMALL, dtype="float32", num_kvcache_blocks=40, max_steerings=1) as made:
        yield made


class TestErrors:
    @pytest.mark.parametrize(
        ("vectors", "told"),
        [
            ({5: torch.zeros(SIZE)}, "vectors has 5: the model's hidden states are 0"),
            ({1: torch.zeros(SIZE + 1)}, rf"vectors\[1\] has the shape \[{SIZE + 1}\]: must be \[{SIZE}\]"),
            ({1: [[0.0] * SIZE]}, r"vectors\[1\] has the shape \[1, "),
            ({1: [float("nan")] * SIZE}, r"vectors\[1\] has numbers that are not finite"),
            ({1: "x"}, r"vectors\[1\]='x': must be a vector"),
            ({4: [0.0] * SIZE, -1: [0.0] * SIZE}, "vectors has -1: these are hidden states 4, and stand there twice"),
            ({"1": [0.0] * SIZE}, "vectors has '1': must be a mapping from integers"),
            ({}, "vectors={}: must be a mapping"),
            ([1.0], "vectors=.*: must be a mapping"),
        ],
    )
    def test_vectors_that_do_not_fit(self, vectors: Any, told: str, llm: LLM) -> None:
        with pytest.raises(ValueError, match=told):
            llm.load_steering("mine", vectors)
        assert llm.steerings == {}

    @pytest.mark.parametrize("value", ["mine", ("mine",), ("", 1.0), ("mine", "1"), ("mine", float("inf")), 3])
    def test_what_is_no_steering(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"steering=.*: must be None, or the name of loaded vectors and a number"):
            SamplingParams(steering=value)

    def test_names(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="steering='mine': is not loaded; none is"):
            llm.generate([[5]], steered(("mine", 1.0)), use_tqdm=False)
        llm.load_steering("mine", vectors_of(1))
        with pytest.raises(ValueError, match="steering='nine': is not loaded; loaded are 'mine'"):
            llm.generate([[5]], steered(("nine", 1.0)), use_tqdm=False)
        with pytest.raises(ValueError, match="steering='other': max_steerings=1, and so many are loaded: 'mine'"):
            llm.load_steering("other", vectors_of(1))
        llm.add_request([5], steered(("mine", 1.0)))
        for change in (lambda: llm.load_steering("mine", vectors_of(2)), lambda: llm.unload_steering("mine")):
            with pytest.raises(RuntimeError, match="steering='mine': 1 of its requests have not ended"):
                change()
        while llm.has_unfinished_requests():
            llm.step()
        llm.unload_steering("mine")
        with pytest.raises(ValueError, match="name='': must be a string"):
            llm.unload_steering("")

    def test_an_llm_without_room_pays_nothing(
        self, make_llm: Callable[..., LLM], qwen: tuple[str, PreTrainedModel]
    ) -> None:
        llm = make_llm(qwen[0], **SMALL)
        assert llm.engine.ranks.runner.holdings.steering is None
        with pytest.raises(RuntimeError, match="max_steerings=0: this LLM has no room"):
            llm.load_steering("mine", vectors_of(1))
        with pytest.raises(ValueError, match="steering='mine': max_steerings=0"):
            llm.generate([[5]], steered(("mine", 1.0)), use_tqdm=False)


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_what_its_reference_adds(dtype: torch.dtype, scale: float | None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stream, vectors = torch.randn(7, 80, device=device).to(dtype), torch.randn(3, 80, device=device).to(dtype)
    are_set = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([-1, 0, 1, 2, 2, -1, 0], dtype=torch.int32, device=device)
    strengths = torch.randn(7, device=device)
    scales = None if scale is None else torch.tensor([scale], device=device).to(dtype)
    ours, expected = stream.clone(), stream.clone()
    steer_triton(ours, vectors, are_set, slots, strengths, 0.5, scales)
    steer_reference(expected, vectors, are_set, slots, strengths, 0.5, scales)
    torch.testing.assert_close(ours, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    assert torch.equal(ours[[0, 2, 5]], stream[[0, 2, 5]])
    assert not torch.equal(ours[1], stream[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "granite", "gemma4", "qwen3.5"])
def test_graphs_steer_as_eager_steps_do(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    model = build(CASES[name], tmp_path)
    how = {"device": "cuda", "kvcache_block_size": 64, "max_model_len": 320, "max_steerings": 2}
    vectors = vectors_of(0, 2, -1, size=model.config.hidden_size)
    asked = [("mine", 0.5), None, ("mine", -1.0)]
    outputs = []
    for is_eager in (False, True):
        llm = make_llm(str(tmp_path), **how, enforce_eager=is_eager)
        llm.load_steering("mine", vectors)
        outputs.append(llm.generate(PROMPTS[1:], [steered(own) for own in asked], use_tqdm=False))
        outputs[-1] += llm.generate(PROMPTS[:1], steered(("mine", 1.0)), use_tqdm=False)  # a single row
    for graph, eager, own in zip(*outputs, [*asked, ("mine", 1.0)], strict=True):
        assert graph.token_ids == eager.token_ids
        assert_equal_to_hooks(copy.deepcopy(model), graph, vectors, 0.0 if own is None else own[1])
