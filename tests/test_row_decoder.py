"""Which models' steps of one row take a single launch, and that what it gets of a model is the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import greedy
from torch import Tensor
from transformers import Qwen3Config

from nanoinfer import LLM
from nanoinfer.attention import make_backend
from nanoinfer.attention.cache_layout import Pages, lay_out
from nanoinfer.attention.context import Context, GroupContext
from nanoinfer.benchmark.shapes import write_config
from nanoinfer.kernels.decoder.row_model import RowShape, decoder_row_reference
from nanoinfer.layers.norm import NormKind
from nanoinfer.layers.rotary import Rope
from nanoinfer.models import build, describe
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.models.description import Description
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.process.torch_state import default_dtype
from nanoinfer.runner.steps.row_decoder import RowDecoder, is_plain, row_model_of

LENGTH, BLOCK_SIZE, BLOCKS = 40, 16, 3
LAYOUT = lay_out([Pages(2, 16)] * 2, BLOCK_SIZE, BLOCK_SIZE)
BACKEND = make_backend("torch", LAYOUT)
QWEN3 = Qwen3Config(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    architectures=["Qwen3ForCausalLM"],
)


@pytest.fixture
def description() -> Description:
    return describe(QWEN3)


def make(description: Description) -> CausalLM:
    torch.manual_seed(0)
    with default_dtype(torch.float32):
        model = build(description, 64, BACKEND, TensorParallel(), torch.float32)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def make_pages() -> dict[int, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    keys, values = (torch.randn(2, BLOCKS, BLOCK_SIZE, 2, 16) for _ in "kv")
    return {layer: (keys[layer], values[layer]) for layer in range(2)}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_what_the_launch_gets_is_the_model(description: Description) -> None:
    """Its reference computes the hidden state that the model computes, and writes the same keys."""
    model, pages, copies = make(description), make_pages(), make_pages()
    token, position = torch.tensor([3], dtype=torch.int32), torch.tensor([LENGTH - 1], dtype=torch.int32)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    slot = table[:, (LENGTH - 1) // BLOCK_SIZE] * BLOCK_SIZE + (LENGTH - 1) % BLOCK_SIZE
    context = Context(pages, [GroupContext(slot, table)], position, position + 1, LENGTH)
    BACKEND.prepare_decode(context)
    expected = model(token, context)
    row = row_model_of(model, description, copies)
    assert row is not None
    result = decoder_row_reference(row, token, position, slot, table)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    for layer, ours in pages.items():
        for theirs, mine in zip(copies[layer], ours, strict=True):
            torch.testing.assert_close(theirs, mine, atol=1e-4, rtol=1e-4)
    assert RowDecoder.takes(token, context)


@pytest.mark.parametrize(
    "part",
    [
        {"qk_norm": None},
        {"qk_norm": "full"},
        {"windows": (None, 8)},
        {"qkv_bias": True},
        {"norm": NormKind(plus_one=True)},
        {"score_cap": 30.0},
        {"residual_scale": 0.5},
        {"activation": "gelu_tanh"},
        {"sinks": True},
        {"alibi": (0.5, 0.25)},
        {"double_from": 1},
        {"kv_heads": (KVHeads(2, 16), KVHeads(2, 16, source=0))},
        {"ropes": (Rope((1.0,) * 8, interleaved=True),) * 2},
        {"ropes": (Rope((1.0,) * 4),) * 2},
        {"ropes": (None, Rope((1.0,) * 8))},
    ],
    ids=str,
)
def test_models_with_other_parts_keep_their_launches(description: Description, part: dict[str, Any]) -> None:
    """Whatever a description says beside sizes, the launch does not compute."""
    model = make(description)
    assert row_model_of(model, description, make_pages()) is not None
    assert row_model_of(model, replace(description, **part), make_pages()) is None


def test_a_cache_of_another_dtype_keeps_its_launches(description: Description) -> None:
    pages = {layer: (k.half(), v.half()) for layer, (k, v) in make_pages().items()}
    assert row_model_of(make(description), description, pages) is None


def test_steps_on_the_cpu_keep_their_launches(description: Description) -> None:
    assert RowDecoder.of(make(description), description, make_pages(), BACKEND) is None


def test_qwen3_of_600_million_fits(tmp_path: Path) -> None:
    write_config("0.6b", str(tmp_path))
    published = describe(Qwen3Config.from_pretrained(tmp_path))
    heads = published.kv_heads[0]
    sizes = published.hidden_size, published.num_heads, heads.count, heads.dim, published.intermediate_size
    assert is_plain(published)
    assert RowShape(*sizes, programs=128).fits(2)


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_one_request_on_a_gpu(tmp_path: Path, make_llm: Callable[..., LLM], enforce_eager: bool) -> None:
    """A request alone has the log-probabilities that it has beside another: two rows take a launch for each product."""
    write_config("0.6b", str(tmp_path))
    llm = make_llm(str(tmp_path), load_format="dummy", dtype="bfloat16", enforce_eager=enforce_eager)
    assert llm.engine.ranks.runner.steps._row_decoder is not None
    prompt = torch.randint(0, 150_000, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    check_alone_and_beside(llm, prompt)


def check_alone_and_beside(llm: LLM, prompt: list[int]) -> None:
    params = greedy(32, ignore_eos=True, logprobs=0, detokenize=False)
    (alone,) = llm.generate([prompt], params, use_tqdm=False)
    beside, _ = llm.generate([prompt, prompt[:50]], params, use_tqdm=False)
    pairs = list(zip(alone.token_ids, beside.token_ids, strict=True))
    first = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    assert first > 0  # a prompt's step has drawn it; two rows' last bits may differ, and so may a later token
    scores = [[out.logprobs[place][out.token_ids[place]] for place in range(first)] for out in (alone, beside)]
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), atol=0.1, rtol=0.05)
