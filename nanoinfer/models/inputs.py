"""DecoderInputs: what a model's first layer reads: embeddings, and what is added to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.attention.context import Context, MediaContext
from nanoinfer.kernels.norm.norm import normalize
from nanoinfer.layers.embedding import QuantizedEmbedding, VocabParallelEmbedding
from nanoinfer.layers.layer_inputs import LayerInputs
from nanoinfer.layers.norm import NormLayer
from nanoinfer.layers.positions import PositionEmbedding
from nanoinfer.layers.text_attention import BiasTable
from nanoinfer.models.description import EMBEDDING, HEAD, Description
from nanoinfer.parallel.shares import share_of
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.matrix import LinearMap
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.shards import Section


class DecoderInputs(nn.Module):
    """Looks up embeddings, scales them, puts in images', projects them, adds positions and types, and normalises.

    The residual stream begins with them, divided by the factor of what layers add to it. Each rank has its part of
    them, which the first joint adds up, unless something before needs whole vectors.
    """

    def __init__(self, model: Description, max_model_len: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        shape = model.embedded_ids or model.vocab_size, model.embedding_size or model.hidden_size
        self.embedding = _make_embedding(model, *shape, tp)
        # transformers rounds the scale to the embeddings' dtype
        self.scale = torch.tensor(model.embedding_scale, dtype=torch.get_default_dtype()).item()
        self.projection, self.projects_last = _make_projection(model), model.projects_last
        width = shape[1] if model.projects_last else model.hidden_size
        self.positions = None if model.positions is None else PositionEmbedding(model.positions, width, tp)
        self.types = None if model.token_types is None else PositionEmbedding(model.token_types, width, tp)
        self.layer_inputs = _make_layer_inputs(model, tp)
        self.biases = _make_biases(model, max_model_len, tp)
        self.given_normalised = model.given_normalised
        self.norm = None
        if model.embedding_norm is not None:
            kind = model.inner_norm or model.norm
            self.norm = NormLayer(model.embedding_norm, width, model.norm_eps, kind)
        self.residual_scale = model.residual_scale

    def forward(self, token_ids: Tensor, context: Context) -> Tensor:
        """Return [tokens, hidden_size] of token ids, [tokens] int32; sets what layers get beside them."""
        if self.biases is not None:
            context.distance_biases = self.biases.by_distance()
        x: Tensor = self.embedding(token_ids)
        if self.scale != 1:
            x = x * self.scale
        if context.media is not None and not self.given_normalised:
            self._put_media(x, context.media)
        if self.projection is not None and not self.projects_last:  # of another rank's token it makes zeros of zeros
            x = self.projection.beside(context.adapters).product(x)
        if self.positions is not None:
            x = self.positions(x, context.positions)
        if self.types is not None:
            x = self.types(x, torch.zeros_like(token_ids) if context.types is None else context.types)
        if self.layer_inputs is not None:
            x = self.tp.all_reduce(x)
            context.layer_inputs = self.layer_inputs(token_ids, x, context.media, context.adapters)
        if self.norm is not None:
            x = normalize(self.tp.all_reduce(x), self.norm.norm)
        if context.media is not None and self.given_normalised:
            x[context.media.places] = context.media.embeddings  # here each rank has whole vectors
        if self.projection is not None and self.projects_last:
            x = self.projection.beside(context.adapters).product(x)
        return x if self.residual_scale == 1 else x / self.residual_scale

    def _put_media(self, x: Tensor, media: MediaContext) -> None:
        """Put images' embeddings, and given ones, into this rank's part of the tokens': one rank adds what all hold."""
        x[media.places] = media.embeddings if self.tp.rank == 0 else 0


def _make_embedding(
    model: Description, count: int, size: int, tp: TensorParallel
) -> VocabParallelEmbedding | QuantizedEmbedding:
    other_name = HEAD if model.tied else None
    if model.embedding_format != PLAIN:
        return QuantizedEmbedding(EMBEDDING, count, size, tp, model.formats, other_name)
    return VocabParallelEmbedding(EMBEDDING, count, size, tp, other_name, bias=model.tied and model.head_bias)


def _make_projection(model: Description) -> LinearMap | None:
    size = model.embedding_size
    if size is None:
        return None
    section = Section(model.embedding_projection, model.hidden_size, (model.hidden_size, size), 0)
    return model.formats.make_matrix([section], size, model.projects_last)


def _make_biases(model: Description, max_model_len: int, tp: TensorParallel) -> BiasTable | None:
    if model.distance_biases is None:
        return None
    share = share_of(model.num_heads, tp.rank, tp.size)
    return BiasTable(model.distance_biases, share, model.num_heads, max_model_len)


def _make_layer_inputs(model: Description, tp: TensorParallel) -> LayerInputs | None:
    if model.layer_inputs is None:
        return None
    shape = model.num_layers, model.vocab_size, model.hidden_size
    return LayerInputs(model.layer_inputs, *shape, model.norm_eps, tp, model.formats)
