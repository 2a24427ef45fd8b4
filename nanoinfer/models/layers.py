"""The layers of a decoder, and the joints that add up the results of their branches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context
from nanoinfer.layers.experts import MixtureOfExperts
from nanoinfer.layers.experts_beside_mlp import BesideMLP
from nanoinfer.layers.layer_inputs import LayerInputBranch
from nanoinfer.layers.norm import Joint, NormLayer, add_branches
from nanoinfer.layers.rotary import Rope, RotaryEmbedding, query_scales
from nanoinfer.models.causal_lm import Place, anywhere
from nanoinfer.models.description import Description, NoMixer
from nanoinfer.models.mixers import Mixer, make_mixer
from nanoinfer.models.mlps import AnyMLP, make_experts, make_mlp
from nanoinfer.parallel.tensor_parallel import TensorParallel

Rotaries = dict[Rope, RotaryEmbedding]


class DecoderLayer(nn.Module):
    """One layer: its branches, each after a joint. The next layer's first joint adds the last branch's result."""

    def __init__(
        self,
        mixer_joint: Joint,
        mixer: Mixer,
        mlp_joint: Joint,
        mlp: AnyMLP,
        input_branch: tuple[Joint, LayerInputBranch] | None,
    ) -> None:
        """input_branch: the branch behind the MLP, if the model's layers have one, and the joint before it"""
        super().__init__()
        self.mixer_joint, self.mixer = mixer_joint, mixer
        self.mlp_joint, self.mlp = mlp_joint, mlp
        self.input_branch = None if input_branch is None else nn.ModuleList(input_branch)

    @property
    def first_joint(self) -> Joint:
        """What adds the results of the layers before to the stream that this one reads."""
        return self.mixer_joint

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """Run the branches; returns the last one's result, not yet added, and the residual stream.

        x: the previous branch's result, not yet added to residual: the joint adds both and normalises the sum
        residual: None in the first layer, where x is the embeddings
        All are [tokens, hidden_size], but for pieces: see Joint.forward.
        """
        x, residual = self.mixer(x, residual, self.mixer_joint, context)
        self.mixer_joint.keep(residual)
        x, residual = self.mlp(x, residual, self.mlp_joint, context.adapters)
        if self.input_branch is None:
            return x, residual
        joint, branch = self.input_branch
        return branch(x, residual, joint, context)


class ParallelLayer(nn.Module):
    """A layer whose branches read the same stream, through one norm or each its own (Wang and Komatsuzaki, 2021).

        residual --+--> the joint's norm --> mixer --+--> the layer's result
                   '--> MLP's norm --------> MLP ----'

    The ranks' parts of both results are added up at once, by the next joint.
    """

    def __init__(self, joint: Joint, mixer: Mixer, mlp_norm: NormLayer | None, mlp: AnyMLP, tp: TensorParallel) -> None:
        """mlp_norm: None: the joint's norm is the MLP's, too; the joint's stream is whole on every rank"""
        super().__init__()
        self.mixer_joint, self.mixer = joint, mixer
        self.mlp_joint, self.mlp = Joint(None, mlp_norm or joint.pre, tp, sums=False), mlp

    @property
    def first_joint(self) -> Joint:
        """What adds the results of the layers before to the stream that this one reads."""
        return self.mixer_joint

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """Run both branches; returns the sum of their results, not yet added, and the residual stream.

        x, residual: as for DecoderLayer.forward
        """
        x, residual = self.mixer(x, residual, self.mixer_joint, context)
        self.mixer_joint.keep(residual)
        y, _ = self.mlp(residual, None, self.mlp_joint, context.adapters)
        return add_branches(x, y), residual


class OneBranchLayer(nn.Module):
    """A layer with one branch, as in Nemotron-H (NVIDIA, 2025): its mixer, or its MLP or experts."""

    def __init__(self, joint: Joint, mixer: Mixer | None, mlp: AnyMLP | None) -> None:
        super().__init__()
        self.joint, self.mixer, self.mlp = joint, mixer, mlp

    @property
    def first_joint(self) -> Joint:
        """What adds the results of the layers before to the stream that this one reads."""
        return self.joint

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """Run the branch; returns its result, not yet added, and the residual stream.

        x, residual: as for DecoderLayer.forward
        """
        if self.mixer is not None:
            x, residual = self.mixer(x, residual, self.joint, context)
        else:
            assert self.mlp is not None
            x, residual = self.mlp(x, residual, self.joint, context.adapters)
        self.joint.keep(residual)
        return x, residual


class LayerOfHalves(nn.Module):
    """A layer of two halves, with experts beside both, as in LongCat-Flash (Meituan, 2025).

        residual --> mixer --> joint --+--> MLP --> mixer --> MLP --+--> the layer's result
                                       '--> experts ----------------'

    The ranks' parts of the experts' result and of the last MLP's are added up at once, by the next joint.
    """

    def __init__(
        self, first: DecoderLayer, second: DecoderLayer, experts: MixtureOfExperts, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.first, self.second, self.experts, self.tp = first, second, experts, tp
        self.joined = Joint(None, None, tp, sums=False)

    @property
    def first_joint(self) -> Joint:
        """What adds the results of the layers before to the stream that this one reads."""
        return self.first.mixer_joint

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """Run both halves; returns the sum of the last MLP's result and the experts', and the residual stream.

        x, residual: as for DecoderLayer.forward
        """
        first, adapters = self.first, context.adapters
        x, residual = first.mixer(x, residual, first.mixer_joint, context)
        first.mixer_joint.keep(residual)
        routes, joined, residual = self.experts.router(x, residual, first.mlp_joint)
        beside = self.experts.mix(joined, routes, self.tp, adapters)
        x, _ = first.mlp(joined, None, self.joined, adapters)
        x, residual = self.second(x, residual, context)
        return add_branches(x, beside), residual


Layer: TypeAlias = DecoderLayer | LayerOfHalves | OneBranchLayer | ParallelLayer


def make_layers(
    model: Description,
    max_model_len: int,
    rotaries: Rotaries,
    backend: AttentionBackend,
    tp: TensorParallel,
    place: Place = anywhere,
) -> tuple[list[Layer], Joint]:
    """Make the layers, and the joint behind the last one. rotaries: by the layers' ropes; place: as for CausalLM"""
    joints, halves = _joints(model, tp), list[Layer]()
    scaling = model.query_scaling
    scales = None if scaling is None else query_scales(scaling.beta, scaling.length, max_model_len)
    for layer, rope in enumerate(model.ropes):
        rotary = None if rope is None else rotaries[rope]
        with place(layer // 2 if model.in_halves else layer):
            mixer = None
            if not isinstance(model.mixers[layer], NoMixer):
                mixer = make_mixer(model, layer, rotary, scales, backend, tp)
            halves.append(_make_layer(model, layer, mixer, joints, tp))
    layers = _of_halves(model, halves, tp, place) if model.in_halves else halves
    return layers, next(joints)


def _make_layer(
    model: Description, layer: int, mixer: Mixer | None, joints: Iterator[Joint], tp: TensorParallel
) -> Layer:
    """Make a layer around its mixer; None: it has an MLP alone."""
    if mixer is None:
        return OneBranchLayer(next(joints), None, make_mlp(model, layer, tp))
    if model.has_one_branch:
        return OneBranchLayer(next(joints), mixer, None)
    mlp, branch = make_mlp(model, layer, tp), _make_input_branch(model, layer, tp)
    if model.is_parallel:
        mlp_norm = _norm(model, layer, model.names_of(layer).mlp_norm)
        return ParallelLayer(next(joints), mixer, mlp_norm, mlp, tp)
    of_branches = next(joints), mixer, next(joints), mlp
    return DecoderLayer(*of_branches, None if branch is None else (next(joints), branch))


def _of_halves(model: Description, halves: list[Layer], tp: TensorParallel, place: Place) -> list[Layer]:
    """Put each two layers, and the experts of the first of them, together."""
    layers = list[Layer]()
    for number in range(0, model.num_layers, 2):
        first, second = halves[number : number + 2]
        assert isinstance(first, DecoderLayer)
        assert isinstance(second, DecoderLayer)
        assert model.experts is not None
        with place(number // 2):
            experts = make_experts(model, model.experts, number, tp)
        layers.append(LayerOfHalves(first, second, experts, tp))
    return layers


def _make_input_branch(model: Description, layer: int, tp: TensorParallel) -> LayerInputBranch | None:
    if model.layer_inputs is None:
        return None
    how = model.layer_inputs, model.hidden_size, model.activation, tp, model.formats
    return LayerInputBranch(model.names.prefix(layer), layer, *how)


def _norm(
    model: Description, layer: int, name: str | None, scale_name: str | None = None, eps: float | None = None
) -> NormLayer | None:
    if name is None:
        return None
    path = model.names.prefix(layer) + name
    eps = (eps or model.norm_eps) / model.residual_scale**2
    return NormLayer(path, model.hidden_size, eps, model.norm, scale_name=scale_name)


def _joints(model: Description, tp: TensorParallel) -> Iterator[Joint]:
    """Yield the joints in order: one before each branch, and one after the last layer."""
    if model.post_norm:
        yield from _joints_behind(model, tp)
        return
    names, by_layer = model.names, [model.names_of(layer) for layer in range(model.num_layers)]
    has_post = any(one.attention_post_norm or one.mlp_post_norm for one in by_layer)
    whole = model.is_parallel or has_post
    assert model.residual_scale == 1 or (not has_post and names.last_norm is not None)
    norm, post_eps = partial(_norm, model), model.post_norm_eps
    sparse = (False,) * model.num_layers if model.experts is None else model.experts.layers
    is_beside = model.experts is not None and isinstance(model.experts.beside, BesideMLP)
    post, stream, sums = None, None, model.layer_inputs is None and model.embedding_norm is None
    for layer, names in enumerate(by_layer):
        yield Joint(post, norm(layer, names.attention_norm, stream), tp, whole, sums)
        if model.is_parallel or model.has_one_branch:
            sums = True
            continue
        yield Joint(norm(layer, names.attention_post_norm, eps=post_eps), norm(layer, names.mlp_norm), tp, whole)
        post = norm(layer, names.mlp_post_norm, eps=post_eps)
        sums = not (is_beside and sparse[layer])
        if model.layer_inputs is not None:
            yield Joint(post, None, tp, whole, sums)
            post, sums = norm(layer, model.layer_inputs.post_norm), True
        stream = None if names.layer_scale is None else model.names.prefix(layer) + names.layer_scale
    last = None
    if names.last_norm is not None:
        kind = model.last_norm or model.norm
        eps = model.norm_eps / model.residual_scale**2
        last = NormLayer(names.last_norm, model.hidden_size, eps, kind, scale_name=stream)
    yield Joint(post, last, tp, whole, sums)


def _joints_behind(model: Description, tp: TensorParallel) -> Iterator[Joint]:
    """Yield the joints of a model whose norms stand behind the sums."""
    assert model.residual_scale == 1
    yield Joint(None, None, tp, sums=model.embedding_norm is None)
    for layer in range(model.num_layers):
        for name in (model.names.attention_norm, model.names.mlp_norm):
            yield Joint(None, _norm(model, layer, name), tp, replaces=True)
