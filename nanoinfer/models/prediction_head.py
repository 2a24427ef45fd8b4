"""PredictionHead: predicts the token after the next one from a model's hidden state (DeepSeek-V3, DeepSeek-AI, 2024).

    hidden state ------------> norm --+
                                      |--> projection --> decoder layer --> norm --> the model's output projection
    next token's embedding --> norm --+

Its layer is one more of the model's, and has its own keys: those of position p are made of the hidden state there, and
of the token at p + 1. Embeddings and output projection are the model's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context
from nanoinfer.kernels.norm.norm import normalize
from nanoinfer.layers.norm import NormLayer
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.models.description import Description
from nanoinfer.models.layers import DecoderLayer, make_layers
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.names import Part
from nanoinfer.weights.shards import Section

COPIES = "embed_tokens.weight", "shared_head.head.weight"  # of the model's own, in checkpoints


def describe_head(model: Description) -> Description | None:
    """Describe a model's prediction head as a model of one layer; None: it has none. All heads have experts."""
    layer, experts = model.prediction_layer, model.experts
    if layer is None or experts is None:
        return None
    names = replace(model.names, first=layer)
    return replace(
        model,
        num_layers=1,
        kv_heads=model.kv_heads[-1:],
        windows=model.windows[-1:],
        ropes=model.ropes[-1:],
        mixers=model.mixers[-1:],
        experts=replace(experts, layers=(True,)),
        names=replace(names, last_norm=f"{names.prefix(0)}shared_head.norm"),
        embedding_norm=f"{names.prefix(0)}enorm",
    )


def names_of_head(head: Description) -> Part:
    """Return the names that checkpoints have for a head's tensors. head: from describe_head"""
    return Part(replace(head.beside, skipped=()), head.names.prefix(0), COPIES)


class PredictionHead(nn.Module):
    """One rank's share of a head.

    All ranks have the projection whole, in the model's dtype: so DeepSeek-V3's files have it, whose other matrices are
    in FP8, without a word of it in the config. The model's own embeddings and output projection stand outside, so that
    they are no weights of the head's.
    """

    def __init__(self, head: Description, max_model_len: int, backend: AttentionBackend, tp: TensorParallel) -> None:
        """head: from describe_head; max_model_len: a sequence has at most so many tokens"""
        super().__init__()
        self.tp, size, prefix = tp, head.hidden_size, head.names.prefix(0)
        rotaries = {rope: RotaryEmbedding(rope, max_model_len) for rope in set(head.ropes) if rope is not None}
        (layer,), self.joint = make_layers(head, max_model_len, rotaries, backend, tp)
        assert isinstance(layer, DecoderLayer)
        assert head.embedding_norm is not None
        self.layer = layer
        self.embedding_norm = NormLayer(head.embedding_norm, size, head.norm_eps, head.norm)
        self.hidden_norm = NormLayer(f"{prefix}hnorm", size, head.norm_eps, head.norm)
        section = Section(f"{prefix}eh_proj", size, (size, 2 * size), 0)
        self.projection = PLAIN.make_matrix([section], 2 * size, False)

    def forward(self, embedded: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """Compute hidden states, [tokens, hidden_size]: the output projection turns them into logits.

        embedded: [tokens, hidden_size], this rank's part of the next tokens' embeddings
        hidden: [tokens, hidden_size], the model's hidden states, or those that this returns of the tokens before
        context: of the positions of the hidden states
        """
        x, residual = self.layer(self._inputs(embedded, hidden), None, context)
        return self.joint(x, residual)[0]

    def remember(self, embedded: Tensor, hidden: Tensor, context: Context) -> None:
        """Compute the keys of tokens, and nothing behind these. Arguments: as for forward"""
        self.layer.mixer(self._inputs(embedded, hidden), None, self.layer.mixer_joint, context)

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        own = normalize(self.tp.all_reduce(embedded), self.embedding_norm.norm)
        return self.projection.product(torch.cat([own, normalize(hidden, self.hidden_norm.norm)], dim=-1))
