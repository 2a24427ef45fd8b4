"""RowDecoder: decode steps of a single row, all layers in one launch, for the models that one launch takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context
from nanoinfer.attention.triton_backend import TritonBackend
from nanoinfer.kernels.decoder.row import DecoderRow
from nanoinfer.kernels.decoder.row_model import RowLayer, RowModel, is_faster
from nanoinfer.layers.embedding import VocabParallelEmbedding
from nanoinfer.layers.rotary import Rope
from nanoinfer.models.attention.heads import KVHeads
from nanoinfer.models.attention.self_attention import SelfAttention
from nanoinfer.models.causal_lm import CausalLM
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.description import Description
from nanoinfer.models.layers import DecoderLayer
from nanoinfer.models.mlps import MLP
from nanoinfer.weights.formats.plain.matrix import PlainMatrix

CachedLayers = Mapping[int, tuple[Tensor, Tensor]]  # of the KV cache: for each layer, its keys and its values


class RowDecoder:
    """Runs a model over one token, as CausalLM.forward does. Its weights and the KV cache stay where they are."""

    def __init__(self, model: RowModel) -> None:
        self._run = DecoderRow(model)

    @classmethod
    def of(
        cls, model: CausalLM, description: Description, cached: CachedLayers, backend: AttentionBackend
    ) -> RowDecoder | None:
        """Return the decoder of a model on a GPU; None if the model's steps take a launch for each product."""
        if type(backend) is not TritonBackend:  # deterministic steps have another, whose sums have one order
            return None
        row = row_model_of(model, description, cached)
        return cls(row) if row is not None and is_faster(row) else None

    @staticmethod
    def takes(token_ids: Tensor, context: Context) -> bool:
        """Return whether a decode step is one row's, and has nothing beside its token."""
        return len(token_ids) == 1 and context.guesses is None and context.prefixes is None

    def __call__(self, token_ids: Tensor, context: Context) -> Tensor:
        """Compute hidden states, [1, hidden_size], from token_ids, [1] int32; the backend need not prepare the step."""
        group = context.groups[0]  # further ones are a draft model's
        return self._run(token_ids, context.positions, group.slot_mapping, group.block_tables)


def row_model_of(model: CausalLM, description: Description, cached: CachedLayers) -> RowModel | None:
    """Return a model's parts as kernels.decoder takes them; None if it has parts that the kernel does not compute."""
    if not isinstance(model, Decoder) or model.tp.size > 1 or not is_plain(description):
        return None
    if not isinstance(model.embedding, VocabParallelEmbedding):
        return None
    layers = list(_layers_of(model, cached))
    embeddings, last_norm = model.embedding.weight, model.joint.pre
    if len(layers) < model.num_layers or {part.dtype for part in layers[0]} != {embeddings.dtype}:
        return None
    mixer = model.layers[0].mixer
    assert isinstance(mixer, SelfAttention)
    assert mixer.attention.rotary is not None
    assert last_norm is not None
    numbers = description.norm_eps, description.attention_scale
    return RowModel(layers, embeddings, last_norm.weight, mixer.attention.rotary.cos_sin, *numbers)


def is_plain(model: Description) -> bool:
    """Return whether a model is its sizes, and nothing else that a description can say: such as Qwen3."""
    heads, rope, layers = model.kv_heads[0], model.ropes[0], model.num_layers
    if rope is None or 2 * len(rope.frequencies) != heads.dim:
        return False
    plain = Description(
        model.vocab_size,
        model.hidden_size,
        model.intermediate_size,
        layers,
        model.num_heads,
        (KVHeads(heads.count, heads.dim),) * layers,
        model.max_position,
        model.norm_eps,
        model.tied,
        "silu",
        model.attention_scale,
        (None,) * layers,
        (Rope(rope.frequencies, rope.factor),) * layers,
        (None,) * layers,
        qk_norm="head",
        logit_scale=model.logit_scale,  # what is behind the layers is computed as ever
        logit_cap=model.logit_cap,
        skipped=model.skipped,
    )
    return model == plain


def _layers_of(model: Decoder, cached: CachedLayers) -> Iterator[RowLayer]:
    """Yield the layers whose matrices are weights alone."""
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, SelfAttention)
        assert isinstance(mlp, MLP)
        matrices = mixer.qkv_proj.matrix, mixer.o_proj.matrix, mlp.gate_up_proj.matrix, mlp.down_proj.matrix
        operands = [matrix.operand() for matrix in matrices if isinstance(matrix, PlainMatrix)]
        weights = [operand for operand in operands if isinstance(operand, Tensor)]
        if len(weights) < len(matrices):
            return
        qkv, o, gate_up, down = weights
        norms = mixer.attention.q_norm, mixer.attention.k_norm, layer.mixer_joint.pre_norm, layer.mlp_joint.pre_norm
        q_norm, k_norm, mixer_norm, mlp_norm = (norm.weight for norm in norms if norm is not None)
        yield RowLayer(qkv, o, gate_up, down, mixer_norm, mlp_norm, q_norm, k_norm, *cached[number])
