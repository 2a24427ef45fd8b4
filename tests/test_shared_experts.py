"""Shared experts whose parts are experts of the others' stack: which are, what fills them, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from cases import CASES, build
from cases.layouts import PUBLISHED
from conftest import greedy, of_each_kind, whole_only
from test_groups import LAYOUTS
from test_kernels import randn
from test_loader import rank
from test_models import run
from test_routers import ROUTINGS
from torch import Tensor

from nanoinfer import LLM
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import Config
from nanoinfer.kernels.experts.route import Routing, route_reference, route_triton
from nanoinfer.models import describe
from nanoinfer.models.description import Description
from nanoinfer.models.mlps import make_mlp
from nanoinfer.models.shared_experts import parts_in_stack
from nanoinfer.parallel.shares import share_of
from nanoinfer.weights.formats.experts import Experts, ExpertSizes, ExpertTensors, OutputShare
from nanoinfer.weights.formats.format import Format
from nanoinfer.weights.formats.formats import all_in
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.formats.fp8.matrix import Fp8Matrix
from nanoinfer.weights.formats.groups.format import GroupFormat
from nanoinfer.weights.formats.groups.matrix import GroupMatrix
from nanoinfer.weights.formats.matrix import Matrix
from nanoinfer.weights.formats.plain.experts import PlainExperts
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.plain.matrix import PlainMatrix
from nanoinfer.weights.formats.table import INT4, INT8, MXFP4
from nanoinfer.weights.shards import Section, Shard, table_of

COUNT, HIDDEN, SIZE = 2, 96, 64
MODULES = "experts.{}", "gate", "up", "down", ()
APART = "shared.gate", "shared.up", "shared.down"
TOGETHER = "shared.gates_and_ups", "shared.down"
UNGATED = "shared.up", "shared.down"
IN_LAYOUTS = {name: GroupFormat(name, layout) for name, layout in LAYOUTS.items()}
FORMATS = {
    "plain": PLAIN,
    "fp8": Fp8Format((32, 16)),
    "int4 on the fly": INT4,
    "mxfp4 on the fly": MXFP4,
    **{name: IN_LAYOUTS[name] for name in ("int4 groups", "int4 with zeros", "int8 groups", "gptq", "awq")},
    **{name: IN_LAYOUTS[name] for name in ("gptq with zeros", "nvfp4", "modelopt", "mxfp4")},
}


def drawn(name: str, module: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    """Return what a checkpoint in the format has for a matrix of random numbers."""
    weight = torch.randn(outputs, inputs)
    tensors = PUBLISHED[name].write(weight)[0] if name in PUBLISHED else {"weight": weight}
    return {f"{module}.{end}": tensor for end, tensor in tensors.items()}


def write_whole(shard: Shard, stored: Tensor) -> None:
    """As a file's tensors are written."""
    shard.target.copy_(stored if shard.takes_all or not stored.dim() else stored[shard.index])


def write_rows(shard: Shard, stored: Tensor) -> None:
    """As rows of a trainer's tensors are written that come in several parts."""
    if not stored.dim():
        write_whole(shard, stored)
        return
    for first in range(0, len(stored), 128):
        if (meeting := shard.meet(stored[first : first + 128], first)) is not None:
            meeting[0].copy_(meeting[1])


def fill(module: Matrix | Experts, tensors: dict[str, Tensor], write: Callable[[Shard, Tensor], None]) -> None:
    table = table_of(module)
    for name in tensors.keys() & table.keys():
        for shard in table[name]:
            assert shard.stored_shape == tensors[name].shape or shard.shape == (1,)
            write(shard, tensors[name])
    module.finish()


def dense(module: Matrix | Experts) -> list[Tensor]:
    """Return all that a matrix holds, or the two of each expert."""
    if isinstance(module, PlainMatrix):
        assert isinstance(module.weight, Tensor)
        return [module.weight]
    if isinstance(module, (Fp8Matrix, GroupMatrix)):
        return [module.store.dense(torch.float32)]
    if isinstance(module, PlainExperts):
        return [module.gate_up, module.down]
    return [store.dense(torch.float32).unflatten(0, (module.sizes.held, -1)) for store in (module.gate_up, module.down)]


@torch.inference_mode()
@pytest.mark.parametrize("shared", of_each_kind(zip([APART, TOGETHER, UNGATED]), 0, 1), ids=len)
@pytest.mark.parametrize("parts", [*whole_only([1, 3]), 2])
@pytest.mark.parametrize("name", FORMATS)
def test_each_rank_holds_its_share_of_each_part(name: str, parts: int, shared: tuple[str, ...]) -> None:
    """Also a rank that splits the outputs of downs."""
    form, is_gated = FORMATS[name], shared is not UNGATED
    assert form.stores_parts(SIZE, parts)
    tensors, wholes, size = {}, [], parts * SIZE
    together = 2 if shared is TOGETHER else 1
    for module in shared:
        outputs, inputs = (HIDDEN, size) if module == shared[-1] else (together * size, HIDDEN)
        tensors |= drawn(name, module, outputs, inputs)
        matrix = form.make_matrix([Section(module, outputs, (outputs, inputs), 0)], inputs, False)
        if isinstance(matrix, PlainMatrix):
            matrix.may_pack = False
        fill(matrix, tensors, write_whole)
        wholes += dense(matrix)
    *above, downs = wholes
    gates_and_ups = torch.cat(above).view(1 + is_gated, parts, SIZE, HIDDEN)
    names = ExpertTensors(MODULES[0], "gate" if is_gated else None, "up", "down", (), shared=shared)
    for ranks, index, splits_outputs in ((1, 0, False), (2, 1, False), (2, 0, True)):
        share, outputs = share_of(SIZE, index, ranks), share_of(HIDDEN, index, ranks)
        sizes = ExpertSizes(COUNT, HIDDEN, SIZE, share.start, len(share), always=parts)
        output_share = OutputShare(outputs, lambda x: x) if splits_outputs else None
        for write in (write_whole, write_rows):
            experts = form.make_experts(names, sizes, output_share, False)
            fill(experts, tensors, write)
            gate_up, down = (weights[COUNT:] for weights in dense(experts))
            own = slice(share.start, share.stop)
            assert torch.equal(gate_up, gates_and_ups[:, :, own].transpose(0, 1).flatten(1, 2))
            columns = downs.unflatten(1, (parts, SIZE)).transpose(0, 1)
            assert torch.equal(down, columns[:, outputs.start : outputs.stop] if splits_outputs else columns[..., own])


@pytest.mark.parametrize(
    ("form", "size", "parts", "is_stored"),
    [
        (Fp8Format(), 1408, 2, True),
        (Fp8Format(), 1408 + 64, 2, False),
        (Fp8Format((1, None)), 1408, 2, False),
        (INT8, 128, 2, True),
        (INT8, 64, 1, True),
        (INT8, 64, 2, False),  # the whole is in larger groups
        (INT8, 96, 1, False),
        (IN_LAYOUTS["awq"], 48, 2, False),
        *((IN_LAYOUTS[name], 64, 2, False) for name in LAYOUTS if "act order" in name or "channels" in name),
    ],
)
def test_matrices_that_are_no_sum_of_their_parts(form: Format, size: int, parts: int, is_stored: bool) -> None:
    assert form.stores_parts(size, parts) == is_stored


@pytest.mark.parametrize("always", [1, 2])
@pytest.mark.parametrize(("count", "routing"), ROUTINGS)
def test_routes_to_experts_that_all_tokens_take(count: int, routing: Routing, always: int) -> None:
    """Neither norm nor scale nor factor changes their weight."""
    how, used = (randn(count), randn(count)), routing.used
    for logits, choose in product((randn(9, count), randn(3, 9, count)), (route_reference, route_triton)):
        chosen, routes = (choose(logits, one, *how) for one in (routing, replace(routing, always=always)))
        assert torch.equal(routes.experts[:, :used], chosen.experts)
        assert torch.equal(routes.weights[:, :used], chosen.weights)
        assert routes.experts[:, used:].tolist() == [[*range(count, count + always)]] * 9
        assert (routes.weights[:, used:] == 1).all()


JOINED = {  # and how many parts the shared expert has
    "granitemoehybrid experts, two that all tokens take": 2,
    "deepseek-v2": 2,
    "deepseek-v3": 1,
    "deepseek-v3 groups, biases": 2,
    "glm4moe": 1,
    "glm4moelite": 1,
    "nemotronh experts, two that all tokens take": 2,
    "hy3": 1,
}


def described(name: str, folder: Path) -> Description:
    build(CASES[name], folder)
    return describe(Checkpoint.open(str(folder)).hf_config)


def parts_of(model: Description) -> set[int]:
    assert model.experts is not None
    return {
        parts_in_stack(model, model.experts, layer) for layer in range(model.num_layers) if model.experts.layers[layer]
    }


@pytest.mark.parametrize("name", of_each_kind(JOINED, 0, 1))
def test_shared_experts_in_the_stack(name: str, tmp_path: Path) -> None:
    model = described(name, tmp_path)
    assert parts_of(model) == {JOINED[name]}
    assert parts_of(replace(model, joins_shared=False)) == {0}
    assert parts_of(replace(model, mlp_bias=True)) == {0}
    module = rf"re:.*{model.names.shared_experts[0]}\b"
    assert parts_of(replace(model, formats=all_in(Fp8Format((8, 8)), (module,)))) == {0}
    assert parts_of(replace(model, formats=all_in(Fp8Format((8, 8))))) == {JOINED[name]}


@pytest.mark.parametrize(
    "name", ["qwen2moe", "granitemoeshared", "nemotronh latents", "longcat", *whole_only(["gptoss", "kolibri"])]
)
def test_shared_experts_that_stand_apart(name: str, tmp_path: Path) -> None:
    """They have gates, other sizes, or no latents; or there are none."""
    name = next(case for case in CASES if case.startswith(name))
    assert parts_of(described(name, tmp_path)) == {0}


def test_adapters_have_a_shared_expert_that_stands_apart(tmp_path: Path) -> None:
    build(CASES["glm4moe"], tmp_path)
    configs = [Config(str(tmp_path), device="cpu", max_adapters=most) for most in (0, 1)]
    assert [parts_of(config.description) for config in configs] == [{1}, {0}]


@torch.inference_mode()
@pytest.mark.parametrize("name", of_each_kind(JOINED, 0))
def test_a_layer_computes_the_same_with_a_shared_expert_apart(name: str, tmp_path: Path) -> None:
    model = described(name, tmp_path)
    assert model.experts is not None
    layer = model.experts.layers.index(True)
    joined, apart = (make_mlp(replace(model, joins_shared=joins), layer, rank(0, 1)) for joins in (True, False))
    tables = table_of(joined), table_of(apart)
    assert tables[0].keys() == tables[1].keys()
    for name, shards in tables[1].items():
        stored = torch.randn(shards[0].stored_shape) / 8
        for shard in () if shards[0].replaces else (*tables[0][name], *shards):
            shard.target.copy_(stored[shard.index])
    x, outs = torch.randn(7, model.hidden_size), []
    for mixture in (joined, apart):
        mixture.keep_taken(len(x))
        outs.append(mixture.mix(x, mixture.router.choose(mixture.router.score(x)), rank(0, 1)))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    assert torch.equal(joined.taken, apart.taken)


@pytest.mark.parametrize("ranks", [*whole_only([1, 4]), 2])
@pytest.mark.parametrize("name", of_each_kind(JOINED, 1, 5))
def test_a_family_equals_transformers_also_after_an_update(
    name: str, ranks: int, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    model = build(CASES[name], tmp_path)
    llm = make_llm(str(tmp_path), **{**CASES[name].small, "device": "cpu", "tensor_parallel_size": ranks})
    run(llm, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape))
    llm.update_weights(model.state_dict())
    run(llm, model)


PROMPTS = [[7], list(range(20, 50)), [5, 6] * 15]


@pytest.mark.parametrize("quantization", [None, *whole_only(["fp8", "int8"])])
def test_ranks_have_the_bits_of_one(quantization: str | None, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Then downs are split by outputs, each of two parts."""
    name = "glm4moe groups, biases, norms, two dense layers"
    assert parts_of(described(name, tmp_path)) == {2}
    params, results = greedy(6, ignore_eos=True, logprobs=2, prompt_logprobs=1), []
    how = {**CASES[name].small, "device": "cpu", "quantization": quantization, "deterministic": True}
    for ranks in (1, 2):
        llm = make_llm(str(tmp_path), **how, tensor_parallel_size=ranks)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        results.append([(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs])
    assert results[0] == results[1]
