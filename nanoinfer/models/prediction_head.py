"""PredictionHeads: predict further tokens from a model's hidden state (DeepSeek-V3, DeepSeek-AI, 2024).

    hidden state ------------> norm --+
                                      |--> projection --> decoder layer --> norm --> the model's output projection
    next token's embedding --> norm --+

A head's layer is one more of the model's, and has its own keys: those of position p are made of the hidden state there,
and of the token at p + 1. So it predicts the token at p + 2. Of several, each stands at its own distance: head k takes
the token at p + 1 + k, and predicts the one behind it. All take the model's hidden state, none another head's: so
SGLang runs MiMo-V2's (sglang/srt/speculative/multi_layer_eagle_worker_v2.py, chain_mtp_hidden_states, 2026).
Embeddings and output projection are the model's own.
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
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.names import Part
from nanoinfer.weights.shards import Section

COPIES = "embed_tokens.weight", "shared_head.head.weight"  # of the model's own, in checkpoints


def describe_heads(model: Description, most: int) -> Description | None:
    """Describe a model's prediction heads as a model of a layer each; None: it has none. most: so many are wanted"""
    heads, experts = model.prediction, model.experts
    if heads is None:
        return None
    names = replace(model.names, layers=heads.layers, first=heads.first)
    count, like = min(heads.count, most), heads.like
    assert experts is not None or not heads.has_experts
    return replace(
        model,
        num_layers=count,
        kv_heads=(model.kv_heads[like],) * count,
        windows=(model.windows[like],) * count,
        ropes=(model.ropes[like],) * count,
        mixers=(model.mixers[like],) * count,
        sinks=(model.sinks[like],) * count if model.sinks else (),
        experts=None if experts is None else replace(experts, layers=(heads.has_experts,) * count),
        names=replace(names, mlp_norm=heads.mlp_norm or names.mlp_norm),
        formats=_formats_of(model),
    )


def _formats_of(model: Description) -> Formats:
    """Return the heads' formats: configs may say of the model's layers alone that o has another than most matrices."""
    heads, names, formats = model.prediction, model.names, model.formats
    if heads is None or heads.layers == names.layers:
        return formats
    like = heads.like % model.num_layers
    outputs = tuple(f"{heads.layers}.{heads.first + number}.{names.o}" for number in range(heads.count))
    return replace(formats, rules=((outputs, formats.of(names.prefix(like) + names.o)), *formats.rules))


def names_of_heads(heads: Description) -> Part:
    """Return the names that checkpoints have for the tensors of heads. heads: from describe_heads"""
    assert heads.prediction is not None
    prefixes = [heads.names.prefix(number) for number in range(heads.num_layers)]
    beside = [f"{module}." for prefix in prefixes for module in heads.prediction.modules(prefix)]
    return Part(replace(heads.beside, skipped=()), (*prefixes, *beside), COPIES)


def _one_of(heads: Description, number: int) -> Description:
    """Return one of several heads as a model of one layer."""
    assert heads.prediction is not None
    names = replace(heads.names, first=heads.names.first + number)
    experts, (embedding_norm, *_, last_norm) = heads.experts, heads.prediction.modules(names.prefix(0))
    return replace(
        heads,
        num_layers=1,
        kv_heads=heads.kv_heads[:1],
        windows=heads.windows[:1],
        ropes=heads.ropes[:1],
        mixers=heads.mixers[:1],
        sinks=heads.sinks[:1],
        experts=None if experts is None else replace(experts, layers=experts.layers[:1]),
        names=replace(names, last_norm=last_norm),
        embedding_norm=embedding_norm,
    )


class PredictionHeads(nn.Module):
    """One rank's share of a model's heads, in the order of the distances at which they predict."""

    def __init__(self, heads: Description, max_model_len: int, backend: AttentionBackend, tp: TensorParallel) -> None:
        """heads: from describe_heads; max_model_len: a sequence has at most so many tokens"""
        super().__init__()
        how = max_model_len, backend, tp
        self.heads = nn.ModuleList(PredictionHead(heads, number, *how) for number in range(heads.num_layers))

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, number: int) -> PredictionHead:
        head = self.heads[number]
        assert isinstance(head, PredictionHead)
        return head


class PredictionHead(nn.Module):
    """One rank's share of a head.

    All ranks have the projection whole, in the model's dtype: so DeepSeek-V3's files have it, whose other matrices are
    in FP8, without a word of it in the config. The model's own embeddings and output projection stand outside, so that
    they are no weights of the head's.
    """

    def __init__(
        self, heads: Description, number: int, max_model_len: int, backend: AttentionBackend, tp: TensorParallel
    ) -> None:
        """heads: from describe_heads; number: of this one; max_model_len: as for PredictionHeads"""
        super().__init__()
        head = _one_of(heads, number)
        self.number, self.tp, size = number, tp, head.hidden_size
        rotaries = {rope: RotaryEmbedding(rope, max_model_len) for rope in set(head.ropes) if rope is not None}
        (layer,), self.joint = make_layers(head, max_model_len, rotaries, backend, tp)
        assert isinstance(layer, DecoderLayer)
        assert head.prediction is not None
        embedding_norm, hidden_norm, projection, _ = head.prediction.modules(head.names.prefix(0))
        self.layer = layer
        self.embedding_norm = NormLayer(embedding_norm, size, head.norm_eps, head.norm)
        self.hidden_norm = NormLayer(hidden_norm, size, head.norm_eps, head.norm)
        section = Section(projection, size, (size, 2 * size), 0)
        self.projection = PLAIN.make_matrix([section], 2 * size, False)

    def forward(self, embedded: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """Compute hidden states, [tokens, hidden_size]: the output projection turns them into logits.

        embedded: [tokens, hidden_size], this rank's part of the embeddings of the tokens at the head's distance
        hidden: [tokens, hidden_size], the model's hidden states, or those that this returns of the tokens before
        context: of the positions of the hidden states
        """
        x, residual = self.layer(self._inputs(embedded, hidden), None, self._own(context))
        return self.joint(x, residual)[0]

    def remember(self, embedded: Tensor, hidden: Tensor, context: Context) -> None:
        """Compute the keys of tokens, and nothing behind these. Arguments: as for forward"""
        self.layer.mixer(self._inputs(embedded, hidden), None, self.layer.mixer_joint, self._own(context))

    def _own(self, context: Context) -> Context:
        """Return a context of all heads as this one's only layer sees it."""
        return replace(context, layers={0: context.layers[self.number]})

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        own = normalize(self.tp.all_reduce(embedded), self.embedding_norm.norm)
        return self.projection.product(torch.cat([own, normalize(hidden, self.hidden_norm.norm)], dim=-1))
