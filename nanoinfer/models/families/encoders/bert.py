"""BERT (Devlin et al., 2019) and its kin: RoBERTa (Liu et al., 2019), XLM-R (Conneau et al., 2020), ELECTRA (2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.layers.heads.text_head import TextHeadNames
from nanoinfer.layers.norm import NormKind
from nanoinfer.layers.positions import PositionTable
from nanoinfer.models.description import Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.models.reading.settings import refuse, size_of
from nanoinfer.models.reading.shared import describe_common, heads_of_their_own
from nanoinfer.weights.names import Spelling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ModuleNames(
    attention_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    o="attention.output.dense",
    gate_up=("intermediate.dense",),
    down="output.dense",
)
TOKENS, LAYERS = "embeddings.word_embeddings.", "encoder.layer."
OLD_NORMS = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))  # files of 2018
UNREAD = (".position_ids", ".token_type_ids")
PAIR_HEAD = TextHeadNames("classifier.dense", "classifier.out_proj")  # of all but BERT


def describe_bert(config: PretrainedConfig) -> Description:
    """Describe a BERT, whose classifier stands behind its pooler."""
    head = TextHeadNames("model.pooler.dense", "classifier")
    return describe_kin(config, "bert", skipped=("cls.",), text_head=head)


def describe_roberta(config: PretrainedConfig) -> Description:
    """Describe a RoBERTa or an XLM-R, whose positions begin behind that of padding."""
    first = config.pad_token_id + 1
    return describe_kin(config, "roberta", first, text_head=PAIR_HEAD)


def describe_electra(config: PretrainedConfig) -> Description:
    """Describe an ELECTRA, whose embeddings may be smaller than its layers."""
    own: dict[str, Any] = {"text_head": replace(PAIR_HEAD, activation="gelu")}
    if (size := size_of(config, "embedding_size")) != config.hidden_size:
        own |= {"embedding_size": size, "embedding_projection": "model.embeddings_project", "projects_last": True}
    return describe_kin(config, "electra", **own)


def describe_kin(config: PretrainedConfig, prefix: str, first: int = 0, **own: Any) -> Description:
    """Describe an encoder of this kind. prefix: what may begin the names; first: the row of the first position"""
    refuse(config, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    rows = size_of(config, "max_position_embeddings")
    table = "model.embeddings."
    fields = {
        "names": NAMES,
        "spelling": spelling(prefix, TOKENS, LAYERS),
        "skipped": ("cls.", "lm_head.", "generator_", "discriminator_", "model.pooler."),
        "norm": NormKind(centred=True, has_bias=True),
        "is_encoder": True,
        "post_norm": True,
        "embedding_norm": f"{table}LayerNorm",
        "positions": PositionTable(f"{table}position_embeddings", rows, first),
        "max_position": rows - first,
        "kv_heads": heads_of_their_own(config),
        "ropes": (None,) * config.num_hidden_layers,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "is_gated": False,
        "tied": False,
    }
    if "token_types" not in own:
        fields["token_types"] = PositionTable(f"{table}token_type_embeddings", size_of(config, "type_vocab_size"))
    return describe_common(config, eps_field="layer_norm_eps", **(fields | own))


def spelling(prefix: str, tokens: str, layers: str) -> Spelling:
    """Return the spelling of names that may lack the encoder's own, which is `prefix`."""
    ours = [(tokens, "model.embed_tokens."), (layers, "model.layers.")]
    ours += [(f"{name}.", f"model.{name}.") for name in ("embeddings", "embeddings_project", "encoder", "pooler")]
    ours.append(("final_norm.", "model.final_norm."))
    return Spelling((*((f"{prefix}.{begin}", known) for begin, known in ours), *ours), unread=UNREAD, parts=OLD_NORMS)
