"""The decoder: embeddings, layers of a mixer and a gated MLP on a residual stream, and logits.

    tokens --> embedding --> [ joint --> mixer --> joint --> MLP ] x layers --> joint --> logits

A mixer (models/mixers.py), such as attention, lets a token see those before it. A joint (layers/norm.py) adds a
branch's result to the residual stream and normalises the next branch's input. A Description says which mixers, norms,
biases, windows and scales the model has. Only constructors read it, no forward pass does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, ImageContext
from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.norm.norm import normalize
from nanoinfer.layers.embedding import Head, QuantizedHead, VocabParallelEmbedding
from nanoinfer.layers.experts import GatedSharedExpert, MixtureOfExperts
from nanoinfer.layers.head_transform import TransformBeforeHead
from nanoinfer.layers.label_head import LabelHead
from nanoinfer.layers.layer_inputs import LayerInputBranch, LayerInputs, LayerInputSizes
from nanoinfer.layers.norm import Joint, NormLayer
from nanoinfer.layers.positions import PositionEmbedding
from nanoinfer.layers.rotary import RotaryEmbedding, query_scales
from nanoinfer.layers.text_head import TextHead
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.models.description import EMBEDDING, HEAD, Description
from nanoinfer.models.mixers import Mixer, make_biases, make_mixer
from nanoinfer.models.mlps import AnyMLP, make_mlp
from nanoinfer.models.parallel_layer import ParallelLayer
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.experts import Experts
from nanoinfer.weights.formats.matrix import LinearMap, Matrix
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.shards import Section


def _make_input_branch(model: Description, layer: int, tp: TensorParallel) -> LayerInputBranch | None:
    if model.layer_inputs is None:
        return None
    how = model.layer_inputs, model.hidden_size, model.activation, tp, model.formats
    return LayerInputBranch(f"model.layers.{layer}.", layer, *how)


def _make_layer_inputs(model: Description, sizes: LayerInputSizes, tp: TensorParallel) -> LayerInputs:
    shape = model.num_layers, model.vocab_size, model.hidden_size
    return LayerInputs(sizes, *shape, model.norm_eps, tp, model.formats)


def _make_embedding_projection(model: Description) -> LinearMap | None:
    size = model.embedding_size
    if size is None:
        return None
    section = Section(model.embedding_projection, model.hidden_size, (model.hidden_size, size), 0)
    return model.formats.make_matrix([section], size, False)


def _make_head_transform(model: Description) -> TransformBeforeHead | None:
    if model.head_transform is None:
        return None
    how = model.hidden_size, model.norm_eps, model.norm, model.formats
    return TransformBeforeHead(model.head_transform, *how)


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

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """Run the branches; returns the last one's result, not yet added, and the residual stream.

        x: the previous branch's result, not yet added to residual: the joint adds both and normalises the sum
        residual: None in the first layer, where x is the embeddings
        All are [tokens, hidden_size], but for pieces: see Joint.forward.
        """
        x, residual = self.mixer(x, residual, self.mixer_joint, context)
        x, residual = self.mlp(x, residual, self.mlp_joint, context.adapters)
        if self.input_branch is None:
            return x, residual
        joint, branch = self.input_branch
        return branch(x, residual, joint, context)


class Decoder(CausalLM):
    """A whole model of such layers."""

    def __init__(
        self,
        model: Description,
        max_model_len: int,
        backend: AttentionBackend,
        tp: TensorParallel,
        head_dtype: torch.dtype,
    ) -> None:
        """Build the layers; arguments: as CausalLM says."""
        super().__init__(model, max_model_len, backend, tp, head_dtype)
        self.tp, self.num_layers = tp, model.num_layers
        self.different_layers = model.different_layers
        shape = model.embedded_ids or model.vocab_size, model.embedding_size or model.hidden_size
        other_name, bias = HEAD if model.tied else None, model.tied and model.head_bias
        self.embedding = VocabParallelEmbedding(EMBEDDING, *shape, tp, other_name, bias=bias)
        self.embedding_projection = _make_embedding_projection(model)
        # transformers rounds the scale to the embeddings' dtype
        self.embedding_scale = torch.tensor(model.embedding_scale, dtype=self.embedding.weight.dtype).item()
        self.layer_inputs = None if model.layer_inputs is None else _make_layer_inputs(model, model.layer_inputs, tp)
        rotaries = {rope: RotaryEmbedding(rope, max_model_len) for rope in set(model.ropes) if rope is not None}
        self.long_rotary = next((rotary for rotary in rotaries.values() if rotary.long_from is not None), None)
        self.layers = nn.ModuleList()
        self.positions = None if model.positions is None else PositionEmbedding(model.positions, model.hidden_size, tp)
        types = model.token_types
        self.token_types = None if types is None else PositionEmbedding(types, model.hidden_size, tp)
        self.embedding_norm = None
        if model.embedding_norm is not None:
            kind = model.inner_norm or model.norm
            self.embedding_norm = NormLayer(model.embedding_norm, model.hidden_size, model.norm_eps, kind)
        joints = _joints(model, tp)
        scaling = model.query_scaling
        scales = None if scaling is None else query_scales(scaling.beta, scaling.length, max_model_len)
        biases = make_biases(model, max_model_len, tp)
        for layer, rope in enumerate(model.ropes):
            rotary = None if rope is None else rotaries[rope]
            mixer = make_mixer(model, layer, rotary, scales, backend, tp, biases)
            mlp = make_mlp(model, layer, tp)
            branch = _make_input_branch(model, layer, tp)
            if model.is_parallel:
                mlp_norm = _norm(model, layer, model.names.mlp_norm)
                self.layers.append(ParallelLayer(next(joints), mixer, mlp_norm, mlp, tp))
                continue
            of_branches = next(joints), mixer, next(joints), mlp
            self.layers.append(DecoderLayer(*of_branches, None if branch is None else (next(joints), branch)))
        self.joint = next(joints)
        self.head_transform = _make_head_transform(model)
        self.lm_head = self._make_head(model, head_dtype)
        self.logit_scale, self.logit_cap = model.logit_scale, model.logit_cap

    def _make_head(self, model: Description, dtype: torch.dtype) -> Head:
        sizes = model.vocab_size, model.head_inputs, self.tp
        if model.labels and model.text_head is not None:
            return TextHead(model.text_head, model.hidden_size, model.labels, model.norm_eps)
        if model.labels is not None:
            return LabelHead(model.hidden_size, model.labels)
        if model.head_format != PLAIN:
            return QuantizedHead(HEAD, *sizes, model.formats, model.head_bias)
        if not model.tied:
            return VocabParallelEmbedding(HEAD, *sizes, dtype=dtype, bias=model.head_bias)
        if dtype != self.embedding.weight.dtype:
            return VocabParallelEmbedding(EMBEDDING, *sizes, HEAD, dtype, model.head_bias)
        return self.embedding

    @property
    def first_id(self) -> int:
        """The first of this rank's token ids."""
        return self.lm_head.first_id

    @property
    def num_ids(self) -> int:
        """How many token ids this rank holds."""
        return self.lm_head.num_ids

    def forward(self, token_ids: Tensor, context: Context) -> Tensor:
        """Compute hidden states, [tokens, hidden_size], from token ids, [tokens] int32."""
        if self.long_rotary is not None:
            context.rotary_rows = self.long_rotary.rows(context)
        x, residual = self.embedding(token_ids), None
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.embedding_projection is not None:  # of another rank's token it makes zeros of zeros
            x = self.embedding_projection.beside(context.adapters).product(x)
        if self.positions is not None:
            x = self.positions(x, context.positions)
        if self.token_types is not None:
            x = self.token_types(x, torch.zeros_like(token_ids) if context.types is None else context.types)
        if context.images is not None:
            self._put_images(x, context.images)
        if self.layer_inputs is not None:
            x = self.tp.all_reduce(x)
            context.layer_inputs = self.layer_inputs(token_ids, x, context.images, context.adapters)
        if self.embedding_norm is not None:
            x = normalize(self.tp.all_reduce(x), self.embedding_norm.norm)
        deep = [] if context.images is None else context.images.deep
        for number, layer in enumerate(self.layers):
            x, residual = layer(x, residual, context)
            if number < len(deep):
                assert context.images is not None
                residual.index_add_(0, context.images.places, deep[number])
        return self.joint(x, residual)[0]

    def _put_images(self, x: Tensor, images: ImageContext) -> None:
        """Put images' embeddings into this rank's part of the tokens': all ranks hold them, and one adds them."""
        x[images.places] = images.embeddings if self.tp.rank == 0 else 0

    @contextmanager
    def one_of_each(self) -> Iterator[None]:
        """Let a forward pass run one layer of each kind: it launches every kernel, and its result means nothing."""
        whole, self.layers = self.layers, nn.ModuleList(self.layers[number] for number in self.different_layers)
        try:
            yield
        finally:
            self.layers = whole

    def fix_order(self, sizes: list[int], tokens: int) -> None:
        """Let a GPU's products add up in the order of the inputs; raises ValueError if they cannot.

        sizes: the rows of decode steps whose bits are compared; tokens: those of a full step, which are compared too
        """
        for module in self.modules():
            if isinstance(module, (Matrix, MixtureOfExperts, GatedSharedExpert)):
                module.fix_order([*sizes, tokens])
        self.lm_head.fix_order(sizes)

    def fix_parts(self) -> None:
        """Let the CPU multiply by parts of the matrices, whose shapes do not depend on the number of ranks."""
        for module in self.modules():
            if isinstance(module, (Matrix, Experts)):
                module.fix_parts()
        self.lm_head.fix_parts()

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Compute logits, [rows, this rank's token ids], from [rows, hidden_size], into `out` if given."""
        if self.head_transform is not None:
            hidden = self.head_transform(hidden, adapters)
        logits = self.lm_head.beside(adapters)(hidden, out)
        if self.logit_scale != 1:
            logits *= self.logit_scale
        if self.logit_cap is not None:
            logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)
        return logits


def _norm(
    model: Description, layer: int, name: str | None, scale_name: str | None = None, eps: float | None = None
) -> NormLayer | None:
    if name is None:
        return None
    path = f"model.layers.{layer}.{name}"
    return NormLayer(path, model.hidden_size, eps or model.norm_eps, model.norm, scale_name=scale_name)


def _joints(model: Description, tp: TensorParallel) -> Iterator[Joint]:
    """Yield the joints in order: one before each branch, and one after the last layer."""
    if model.post_norm:
        yield from _joints_behind(model, tp)
        return
    names = model.names
    by_layer = model.layer_names or (names,) * model.num_layers
    whole = model.is_parallel or any(one.attention_post_norm or one.mlp_post_norm for one in by_layer)
    norm, post_eps = partial(_norm, model), model.post_norm_eps
    sparse = (False,) * model.num_layers if model.experts is None else model.experts.layers
    is_beside = model.experts is not None and model.experts.beside is not None
    post, scale, stream, sums = None, 1.0, None, model.layer_inputs is None and model.embedding_norm is None
    for layer, names in enumerate(by_layer):
        yield Joint(post, norm(layer, names.attention_norm, stream), tp, scale, whole, sums)
        scale = model.residual_scale
        if model.is_parallel:
            sums = True
            continue
        yield Joint(norm(layer, names.attention_post_norm, eps=post_eps), norm(layer, names.mlp_norm), tp, scale, whole)
        post = norm(layer, names.mlp_post_norm, eps=post_eps)
        sums = not (is_beside and sparse[layer])
        if model.layer_inputs is not None:
            yield Joint(post, None, tp, scale, whole, sums)
            post, sums = norm(layer, model.layer_inputs.post_norm), True
        stream = None if names.layer_scale is None else f"model.layers.{layer}.{names.layer_scale}"
    last = None
    if names.last_norm is not None:
        kind = model.last_norm or model.norm
        last = NormLayer(names.last_norm, model.hidden_size, model.norm_eps, kind, scale_name=stream)
    yield Joint(post, last, tp, scale, whole, sums)


def _joints_behind(model: Description, tp: TensorParallel) -> Iterator[Joint]:
    """Yield the joints of a model whose norms stand behind the sums."""
    yield Joint(None, None, tp, sums=model.embedding_norm is None)
    for layer in range(model.num_layers):
        for name in (model.names.attention_norm, model.names.mlp_norm):
            yield Joint(None, _norm(model, layer, name), tp, model.residual_scale, replaces=True)
