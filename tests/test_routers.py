"""Routers that correct their scores: the kernel against its reference and transformers, and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import CASES, SHAPE, build
from cases.corrected import CORRECTED
from conftest import DEVICE, greedy, of_each_kind, whole_only
from safetensors.torch import load_file, save_file
from test_kernels import SHORT, assert_close, randn
from test_loader import rank
from test_models import run
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from nanoinfer import LLM
from nanoinfer.kernels.experts.route import Routes, Routing, route_reference, route_triton
from nanoinfer.kernels.linear.dispatch import norm_and_linear
from nanoinfer.kernels.linear.one_row import one_row_norm_linear
from nanoinfer.kernels.norm.norm import Norm
from nanoinfer.layers.experts import Router, RouterTensors, SharedExpert
from nanoinfer.layers.norm import Joint
from nanoinfer.models import describe
from nanoinfer.weights.formats.formats import all_in
from nanoinfer.weights.formats.fp8.format import Fp8Format
from nanoinfer.weights.shards import table_of

ROUTINGS = [
    (12, Routing(3, "sigmoid")),
    (128, Routing(8, "sigmoid", normalised=True, epsilon=1e-20, scale=2.5)),
    (60, Routing(4, "softmax", normalised=True, least_sum=0.2)),
    (128, Routing(8, "softmax", normalised=True, logit_scale=0.3)),
    (64, Routing(6, "sigmoid", normalised=True, groups=8, used_groups=3)),
    (60, Routing(7, "sigmoid", groups=3, used_groups=1, scale=0.5)),
    (60, Routing(6, "sigmoid", corrects_logits=True)),
    *whole_only([(256, Routing(8, "sigmoid", groups=8, used_groups=4)), (20, Routing(2, groups=10, used_groups=2))]),
]


def assert_alike(ours: Routes, expected: Routes) -> None:
    assert torch.equal(ours.experts, expected.experts)
    assert_close(ours.weights, expected.weights)


@pytest.mark.parametrize(("count", "routing"), ROUTINGS)
class TestRoute:
    def test_corrections_of_both_signs(self, count: int, routing: Routing) -> None:
        logits, correction = randn(9, count), randn(count)
        for some in (correction, correction - 5, None):
            assert_alike(route_triton(logits, routing, some), route_reference(logits, routing, some))

    def test_among_equals_the_first_experts_and_groups_win(self, count: int, routing: Routing) -> None:
        logits = randn(9, count).sign()
        correction = randn(count).sign() * 0.75
        assert_alike(route_triton(logits, routing, correction), route_reference(logits, routing, correction))
        zeros = torch.zeros_like(logits)
        assert route_triton(zeros, routing).experts.tolist() == [list(range(routing.used))] * 9

    def test_factors_of_the_experts_weights(self, count: int, routing: Routing) -> None:
        logits, factors = randn(9, count), randn(count)
        plain = route_reference(logits * routing.logit_scale, replace(routing, logit_scale=1.0))
        for function in (route_triton, route_reference):
            routes = function(logits, routing, None, factors)
            assert_alike(routes, plain._replace(weights=plain.weights * factors[plain.experts]))

    def test_nan(self, count: int, routing: Routing) -> None:
        """One number is enough. The experts are any, but no two alike."""
        logits, correction = randn(3, count), randn(count) - 1
        logits[1, count // 2] = float("nan")
        ours, expected = (f(logits, routing, correction) for f in (route_triton, route_reference))
        assert_alike(Routes(*(part[::2] for part in ours)), Routes(*(part[::2] for part in expected)))
        experts = set(ours.experts[1].tolist())
        assert len(experts) == routing.used
        assert experts <= set(range(count))
        assert ours.weights[1].isnan().all()

    def test_weights_are_those_of_the_scores(self, count: int, routing: Routing) -> None:
        """A correction that is the same for all changes nothing."""
        logits = randn(9, count)
        plain, corrected = (route_triton(logits, routing, some) for some in (None, torch.full_like(logits[0], -3)))
        assert_close(corrected.weights, plain.weights)


@pytest.mark.parametrize("count", [2, 16, *whole_only([60])])
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_sparsemixer(count: int, sign: int) -> None:
    """Of all positive, all negative, and mixed logits, many are near each other. Among equal ones the first win."""
    logits = randn(50, count) / 20 + sign
    logits[:20] = logits[:20].round(decimals=2) + 0.0
    expected = sparsemixer(logits, 0.01, training=False)
    routing = Routing(2, "sparsemixer", nearness=0.02)
    for function in (route_triton, route_reference):
        assert_alike(function(logits, routing), Routes(expected[1].int(), expected[0]))
    scaled = replace(routing, normalised=True, scale=1.5)
    assert_alike(route_triton(logits, scaled), route_reference(logits, scaled))
    logits[1, count // 2] = float("nan")
    for function in (route_triton, route_reference):
        routes = function(logits, routing)
        assert len(set(routes.experts[1].tolist())) == 2
        assert routes.weights[1].isnan().all()
        assert not routes.weights[2:].isnan().any()


class TheirRouter:
    """The experts' layer of a case's model in transformers, whose router gets logits as they are."""

    def __init__(self, name: str, count: int, used: int) -> None:
        case = CASES[name]
        counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        of = {key: count for key in counts if key in case.settings}
        sizes = {"hidden_size": count, "moe_k" if "moe_k" in case.settings else "num_experts_per_tok": used}
        settings = {**SHAPE, **case.settings, **of, **sizes}
        config = AutoConfig.for_model(case.model_type, architectures=[case.architecture], **settings)
        experts = describe(config).experts
        assert experts is not None
        self.experts = experts
        layers = AutoModelForCausalLM.from_config(config).float().eval().model.layers
        layer = layers[experts.layers.index(True)]
        self.block = layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp
        (router,) = (module for module in self.block.modules() if type(module).__name__.endswith("Router"))
        matrix = router.gate if isinstance(getattr(router, "gate", None), nn.Linear) else router
        nn.init.eye_(matrix.weight)
        router.register_forward_hook(self._keep)

    def _keep(self, _: nn.Module, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self.weights, self.chosen = outputs[1:]

    @torch.inference_mode()
    def route(self, logits: Tensor, correction: Tensor) -> Routes:
        """Route as they do; the experts of a token come in the order of their numbers."""
        corrections = [*self.block.named_buffers(), *self.block.named_parameters()]
        for name, target in corrections:
            if name.endswith("_bias"):
                target.copy_(correction)
        self.block(logits.unsqueeze(0))
        return by_number(Routes(self.chosen.int(), self.weights.float()))


def by_number(routes: Routes) -> Routes:
    order = routes.experts.argsort(dim=1)
    return Routes(routes.experts.gather(1, order), routes.weights.gather(1, order))


def routed(logits: Tensor, routing: Routing, correction: Tensor) -> Routes:
    """Return the kernel's routes, where the logits are."""
    routes = route_triton(logits.to(DEVICE), routing, correction.to(DEVICE))
    return Routes(routes.experts.to(logits.device), routes.weights.to(logits.device))


@pytest.mark.parametrize("name", [*of_each_kind(CORRECTED, 1, 2, 12, 16)])
def test_transformers_routes_alike(name: str) -> None:
    """Corrected scores are negative, equal, far apart, or NaN."""
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for count, used in ((24, 4), (60, 7)):
        theirs = TheirRouter(name, count, used)
        routing, corrected = theirs.experts.routing, theirs.experts.corrected
        for scale in (1.0, 30.0) if corrected else (1.0,):  # sigmoids of large logits are equal
            logits, correction = scale * numbers(14, count), (numbers(count) - 0.5) * corrected
            logits[7, 3] = float("nan")
            ours, expected = by_number(routed(logits, routing, correction)), theirs.route(logits, correction)
            are_numbers = ~logits.isnan().any(dim=1)
            assert torch.equal(ours.experts[are_numbers], expected.experts[are_numbers])
            assert_close(ours.weights[are_numbers], expected.weights[are_numbers])
            assert ours.weights[7].isnan().all()
            assert expected.weights[7].isnan().any()
        if routing.groups == 1:  # among equal scores, they take any
            logits, correction = numbers(14, count).sign(), numbers(count).sign() / 4 * corrected
            scores = logits.softmax(dim=1) if routing.scoring == "softmax" else logits.sigmoid()
            ours, expected = routed(logits, routing, correction), theirs.route(logits, correction)
            chosen = [
                ((logits if routing.corrects_logits else scores) + correction)
                .gather(1, routes.experts.long())
                .sort()
                .values
                for routes in (ours, expected)
            ]
            assert torch.equal(*chosen)


@pytest.mark.parametrize("name", of_each_kind(CORRECTED, 1))
@torch.inference_mode()
def test_the_experts_that_an_output_tells_are_those_of_transformers(
    name: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    model, chosen = build(CASES[name], tmp_path), []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _, inputs, outputs: chosen.append(outputs[2]))
    llm = make_llm(str(tmp_path), **CASES[name].small, routed_experts=True)
    for output in llm.generate([[5], list(range(90))], greedy(9, ignore_eos=True), use_tqdm=False):
        chosen.clear()
        model(input_ids=torch.tensor([(output.prompt_token_ids + output.token_ids)[:-1]]))
        expected = torch.stack(chosen, dim=1).sort().values
        assert torch.tensor(output.routed_experts).sort().values.tolist() == expected.tolist()


def wide_logits(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def test_a_float32_router_rounds_no_logits() -> None:
    """Its input has the model's dtype."""
    torch.manual_seed(0)
    router = Router(RouterTensors(("gate",), ("bias",), in_float32=True), 256, 32, Routing(4, "sigmoid"))
    for parameter in router.parameters():
        parameter.normal_()
    x = torch.randn(20, 256).bfloat16()
    routes, joined, _ = router(x, None, Joint(None, None, rank(0, 1)))
    assert joined.dtype == torch.bfloat16
    expected = route_reference(wide_logits(x, router.weight), router.routing, router.correction)
    assert torch.equal(routes.experts, expected.experts)
    assert torch.allclose(routes.weights, expected.weights, rtol=1e-5)


def test_a_float32_product_of_one_row_is_not_rounded() -> None:
    x, weight, norm = randn(1, 192, dtype=SHORT), randn(40, 192), Norm(randn(192, dtype=SHORT), 1e-6)
    normed = torch.empty_like(x)
    out, _ = one_row_norm_linear(x, None, norm, weight, normed=normed)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), wide_logits(normed, weight), rtol=1e-5, atol=1e-4)
    several, normed, _ = norm_and_linear(x.expand(2, -1).contiguous(), None, norm, weight)
    assert torch.allclose(several.double(), wide_logits(normed, weight), rtol=1e-5, atol=1e-4)


WITH_OTHER_NAMES = ["minimax-m2", "hy3 biases, some layers", "exaonemoe", "ernie4.5moe", "kolibri"]
OPTIONS = {"kvcache_block_size": 16, "max_model_len": 320}


@pytest.mark.parametrize("name", of_each_kind(WITH_OTHER_NAMES, 1))
def test_names_of_files_and_of_transformers_modules(name: str, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Published files name tensors as those that transformers saves; a trainer names them as its modules."""
    model = build(CASES[name], tmp_path)
    own, saved = model.state_dict(), load_file(tmp_path / "model.safetensors")
    corrections = [key for key in own if key.endswith(("expert_bias", "correction_bias"))]
    assert corrections
    assert not saved.keys() & set(corrections)
    llm = make_llm(str(tmp_path), load_format="dummy", device="cpu", tensor_parallel_size=2, **OPTIONS)
    for weights in (own, saved):
        llm.update_weights(weights)
        run(llm, model)
    del own[corrections[0]]
    with pytest.raises(ValueError, match=r"missing: model.layers.\d.*bias"):
        llm.update_weights(own)


def test_scales_of_a_shared_expert_have_the_names_of_their_matrices() -> None:
    table = table_of(SharedExpert(("a", "b"), 256, 128, "silu", rank(0, 1), formats=all_in(Fp8Format())))
    for name in ("gate_proj", "up_proj", "down_proj"):
        (shard,) = table[f"b.{name}.weight"]
        assert shard.replaces == (f"a.{name}.weight",)
        assert shard.needs == (f"b.{name}.weight_scale_inv",)
        assert table.keys() >= {*shard.needs}


FURTHER = {
    "glm4moe": "model.layers.4.mlp.experts.0.up_proj.weight",
    "hy3": "model.layers.4.eh_proj.weight",
    "exaonemoe": "mtp.layers.0.mlp.gate.weight",
    "ernie4.5moe": "model.mtp_block.0.mlp.gate_proj.weight",
}


@pytest.mark.parametrize(("name", "tensor"), of_each_kind(FURTHER.items(), 0))
def test_layers_that_guess_further_tokens_are_not_read(
    name: str, tensor: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """A layer more than those is unknown."""
    model = build(CASES[name], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, tensor: torch.zeros(3, 3)}, tmp_path / "model.safetensors", {"format": "pt"})
    llm = make_llm(str(tmp_path), **OPTIONS)
    run(llm, model)
    llm.load_weights(str(tmp_path))
    run(llm, model)
    with pytest.raises(ValueError, match=r"unknown: model.layers.5.mlp.gate.weight"):
        llm.update_weights({**weights, tensor: torch.zeros(3, 3), "model.layers.5.mlp.gate.weight": torch.zeros(3, 3)})


def test_a_model_that_guesses_no_further_tokens_has_no_further_layer(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    build(replace(CASES["glm4moe"], settings={**CASES["glm4moe"].settings, "num_mtp_layers": 0}), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, FURTHER["glm4moe"]: torch.zeros(3, 3)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"unknown: {FURTHER['glm4moe']}"):
        make_llm(str(tmp_path), **OPTIONS)
