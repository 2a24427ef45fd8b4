"""The decoder: embeddings, layers of a mixer and a gated MLP on a residual stream, and logits.

    tokens --> embedding --> [ joint --> mixer --> joint --> MLP ] x layers --> joint --> logits

A mixer (models/mixers.py), such as attention, lets a token see those before it. A joint (layers/norm.py) adds a
branch's result to the residual stream and normalises the next branch's input. A Description says which mixers, norms,
biases, windows and scales the model has. Only constructors read it, no forward pass does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context
from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.steering import SteeredTokens
from nanoinfer.layers.delta import GatedDeltaMixer
from nanoinfer.layers.embedding import Head, QuantizedHead, VocabParallelEmbedding
from nanoinfer.layers.experts import GatedSharedExpert, MixtureOfExperts
from nanoinfer.layers.heads.head_transform import TransformBeforeHead
from nanoinfer.layers.heads.label_head import LabelHead
from nanoinfer.layers.heads.text_head import TextHead
from nanoinfer.layers.mamba import Mamba2Mixer
from nanoinfer.layers.norm import Joint
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.models.causal_lm import CausalLM, Place, anywhere
from nanoinfer.models.description import EMBEDDING, HEAD, Description
from nanoinfer.models.inputs import DecoderInputs
from nanoinfer.models.layers import make_layers
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.experts import Experts
from nanoinfer.weights.formats.matrix import LinearMap, Matrix
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.formats.plain.matrix import PlainMatrix
from nanoinfer.weights.shards import Section


def _make_result_projection(model: Description) -> LinearMap | None:
    if model.result_size is None:
        return None
    section = Section(model.result_projection, model.result_size, (model.result_size, model.hidden_size), 0)
    return model.formats.make_matrix([section], model.hidden_size, False)


def _make_head_transform(model: Description) -> TransformBeforeHead | None:
    if model.head_transform is None:
        return None
    how = model.hidden_size, model.norm_eps, model.norm, model.formats
    return TransformBeforeHead(model.head_transform, *how)


class Decoder(CausalLM):
    """A whole model."""

    def __init__(
        self,
        model: Description,
        max_model_len: int,
        backend: AttentionBackend,
        tp: TensorParallel,
        head_dtype: torch.dtype,
        place: Place = anywhere,
    ) -> None:
        """Build the layers; arguments: as CausalLM says."""
        super().__init__(model, max_model_len, backend, tp, head_dtype, place)
        self.tp, self.different_layers = tp, model.different_layers
        self.inputs = DecoderInputs(model, max_model_len, tp)
        self.embedding = self.inputs.embedding
        rotaries = {rope: RotaryEmbedding(rope, max_model_len) for rope in set(model.ropes) if rope is not None}
        self.long_rotary = next((rotary for rotary in rotaries.values() if rotary.long_from is not None), None)
        layers, self.joint = make_layers(model, max_model_len, rotaries, backend, tp, place)
        self.layers, self.num_layers = nn.ModuleList(layers), len(layers)
        self.result_projection = _make_result_projection(model)
        self.head_transform = _make_head_transform(model)
        self.lm_head = self._make_head(model, head_dtype)
        self.logit_scale, self.logit_cap = model.logit_scale, model.logit_cap
        for module in self.modules():
            if isinstance(module, PlainMatrix):
                module.may_pack = not model.is_encoder

    def _make_head(self, model: Description, dtype: torch.dtype) -> Head:
        sizes = model.vocab_size, model.head_inputs, self.tp
        if model.labels and model.text_head is not None:
            return TextHead(model.text_head, model.hidden_size, model.labels, model.norm_eps)
        if model.labels is not None:
            return LabelHead(model.hidden_size, model.labels)
        if model.head_format != PLAIN:
            return self.embedding if model.tied else QuantizedHead(HEAD, *sizes, model.formats, model.head_bias)
        if not model.tied:
            return VocabParallelEmbedding(HEAD, *sizes, dtype=dtype, bias=model.head_bias)
        if dtype != torch.get_default_dtype():
            return VocabParallelEmbedding(EMBEDDING, *sizes, HEAD, dtype, model.head_bias)
        return self.embedding

    @property
    def each_layer(self) -> Sequence[nn.Module]:
        """The layers, of two halves each if the model's have these."""
        return list(self.layers)

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
        x, residual = self.inputs(token_ids, context), None
        deep, places = ([], None) if context.media is None else (context.media.deep, context.media.places)
        context.media = None  # layers take the memory of its embeddings
        for number, layer in enumerate(self.pass_over(self.layers)):
            if context.steering is not None:
                self._steer(context.steering, number, x if residual is None else residual)
            x, residual = layer(x, residual, context)
            if number < len(deep):
                assert places is not None
                residual.index_add_(0, places, deep[number], alpha=1 / self.inputs.residual_scale)
        x = self.joint(x, residual)[0]
        if context.steering is not None:
            context.steering.add(x, len(self.layers))
        self.joint.keep(x)
        return x if self.result_projection is None else self.result_projection.beside(context.adapters).product(x)

    def _steer(self, steering: SteeredTokens, number: int, stream: Tensor) -> None:
        """Add vectors to the stream that a layer's first joint is about to complete, so that they are in its sum."""
        joint = self.layers[number].first_joint
        assert isinstance(joint, Joint)
        if number > 0 or self.tp.rank == 0 or not joint.sums:  # else another rank's part of the embeddings has them
            scale = None if joint.pre_norm is None else joint.pre_norm.stream_scale
            steering.add(stream, number, self.inputs.residual_scale, scale)

    def keep_hidden_states(self, slots: Mapping[int, Tensor]) -> None:
        """Copy hidden states of some numbers into slots, as CausalLM says."""
        for module in self.modules():
            if isinstance(module, Joint):
                module.whole = True
        for number, own in slots.items():
            if number == len(self.layers):
                self.joint.keep_stream(own, 1.0)
                continue
            joint = self.layers[number].first_joint
            assert isinstance(joint, Joint)
            joint.keep_stream(own, self.inputs.residual_scale)

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
            if isinstance(module, (Matrix, MixtureOfExperts, GatedSharedExpert, GatedDeltaMixer, Mamba2Mixer)):
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
