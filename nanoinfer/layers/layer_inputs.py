"""Inputs of each layer beside the residual stream, from embeddings of its own (Gemma 3n and 4, Gemma Team, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.attention.context import Context, MediaContext
from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.linear.activation import Activation, gate_mul
from nanoinfer.kernels.norm.norm import normalize
from nanoinfer.layers.embedding import VocabParallelEmbedding
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, side_by_side
from nanoinfer.layers.norm import Joint, NormLayer
from nanoinfer.parallel.shares import share_of
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.matrix import LinearMap
from nanoinfer.weights.shards import Section


@dataclass(frozen=True)
class LayerInputSizes:
    """The sizes of the inputs, and the names that a checkpoint gives to what makes them and what uses them.

    size: numbers that a layer gets for a token
    embedding: None: there is none, and projections make the inputs alone
    embedding, projection, norm: of the whole model; gate, output, post_norm: of a layer, without its prefix
    image_token: whose embedding for the layers images' placeholders get
    """

    size: int
    embedding: str | None
    projection: str
    norm: str
    gate: str
    output: str
    post_norm: str
    image_token: int = 0


class LayerInputs(nn.Module):
    """Makes the inputs of all layers at once, from an embedding of their own and a projection of the usual one.

    token id --> embedding of all layers * sqrt(size) ---+
                                                         +--> * sqrt(1/2) --> [tokens, layers, size]
    usual embedding --> projection --> norm by layer ----'
    """

    def __init__(
        self,
        sizes: LayerInputSizes,
        num_layers: int,
        vocab_size: int,
        hidden_size: int,
        eps: float,
        tp: TensorParallel,
        formats: Formats,
    ) -> None:
        """formats: as for ColumnParallelLinear"""
        super().__init__()
        self.tp, self.size, self.image_token = tp, sizes.size, sizes.image_token
        total = num_layers * sizes.size
        self.embedding = None
        if sizes.embedding is not None:
            self.embedding = VocabParallelEmbedding(sizes.embedding, vocab_size, total, tp)
        section = Section(sizes.projection, total, (total, hidden_size), 0)
        self.projection: LinearMap = formats.make_matrix([section], hidden_size, False)
        # The model divides what it normalises by sqrt(hidden_size). The norm undoes that, but for a larger eps.
        self.norm = NormLayer(sizes.norm, sizes.size, eps * hidden_size)

    def forward(
        self, token_ids: Tensor, x: Tensor, media: MediaContext | None, adapters: AdapterRows | None = None
    ) -> Tensor:
        """Return the inputs, [tokens, layers, size]; every rank computes all.

        token_ids: [tokens] int32
        x: [tokens, hidden_size], their usual embeddings, scaled, or images', whole on every rank
        media, adapters: the step's
        """
        projected = self.projection.beside(adapters).product(x).view(-1, self.size)
        made = normalize(projected, self.norm.norm).view(len(token_ids), -1, self.size)
        if self.embedding is None:
            return made
        if media is not None:
            token_ids = token_ids.index_fill(0, media.places, self.image_token)
        own = self.tp.all_reduce(self.embedding(token_ids)).unflatten(1, (-1, self.size)).mul_(self.size**0.5)
        return made.add_(own).mul_(0.5**0.5)


class LayerInputBranch(nn.Module):
    """A layer's last branch: the stream gates the layer's input, activation(gate) * input, and projects it back."""

    def __init__(
        self,
        prefix: str,
        layer: int,
        sizes: LayerInputSizes,
        hidden_size: int,
        activation: Activation,
        tp: TensorParallel,
        formats: Formats,
    ) -> None:
        """prefix: the layer's, with a dot; layer: its number"""
        super().__init__()
        self.layer, self.activation = layer, activation
        share = share_of(sizes.size, tp.rank, tp.size)
        self.share = slice(share.start, share.stop)
        gate = side_by_side((prefix + sizes.gate,), (sizes.size,))
        self.gate = ColumnParallelLinear(gate, hidden_size, tp, formats=formats)
        self.output = RowParallelLinear(prefix + sizes.output, sizes.size, hidden_size, tp, formats=formats)

    def forward(self, x: Tensor, residual: Tensor, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        assert context.layer_inputs is not None
        gate, residual = self.gate(x, residual, joint, adapters=context.adapters)
        inputs = context.layer_inputs[:, self.layer, self.share]
        gated = gate_mul(torch.cat([gate, inputs], dim=-1), self.activation)
        return self.output(gated, adapters=context.adapters), residual
