"""reference: a model whose log-probabilities are, bit for bit, those of a deterministic engine, and have gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from nanoinfer.checks import as_int, as_list, short
from nanoinfer.config import Config
from nanoinfer.layers.norm import RMS_NORM
from nanoinfer.layers.rotary import Rope, RotaryEmbedding
from nanoinfer.models.description import EMBEDDING, HEAD, Description
from nanoinfer.models.module_names import ModuleNames
from nanoinfer.process.torch_state import fresh_torch_state
from nanoinfer.trainer import functions
from nanoinfer.trainer.functions import Heads, PackedSequences
from nanoinfer.weights.finite import describe_not_finite, find_not_finite
from nanoinfer.weights.names import AS_STORED
from nanoinfer.weights.shards import Shard, table_of
from nanoinfer.weights.sources import FileSource, TensorSource


def reference(
    model: str,
    checkpoint: str | Path | Mapping[str, Tensor] | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
) -> Reference:
    """Make a model whose log-probabilities have gradients, and on a GPU the bits of LLM(model, deterministic=True).

    It is a torch module. Call it with a list of sequences, each a list of token ids. It returns a float32 tensor for
    each, with the log-probability of every token but the first. The parameters have the checkpoint's names and shapes.
    The bits are those of an LLM of the same dtype, with the default options for other dtypes and for log-probabilities.

    model: as for LLM; a dense model that is built as Llama and Qwen3 are
    checkpoint: the weights: a folder of safetensors files, or tensors by their names; None: the model's own
    dtype: as for LLM
    device: as for LLM; "cuda" is the process's current device
    max_model_len: the most tokens of a sequence; None: the model's own limit

    Raises ValueError if the model is built otherwise, or if the weights do not fit it.
    """
    config = Config(
        model,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,  # type: ignore[arg-type]  # None is the option's default
        load_format="dummy",  # leaves the files to FileSource
        deterministic=True,
        images=False,
    )
    if (other := _find_other(config.description)) is not None:
        raise ValueError(f"model={model!r}: reference has no {other}; it is for models as Llama and Qwen3 are")
    source = FileSource(config.model) if checkpoint is None else _open(checkpoint)
    description = config.description
    if description.tied and _has_own_head(source):
        description = replace(description, tied=False)
    with fresh_torch_state():
        with torch.device("meta"):  # so that nothing is drawn
            made = Reference(description, config.max_model_len, config.torch_dtype)
        made.to_empty(device=torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else "cpu")
        made.tie()
        _fill(made, source)
    return made


def _open(checkpoint: object) -> FileSource | dict[str, Tensor]:
    """Return where the weights come from."""
    if isinstance(checkpoint, (str, Path)):
        return FileSource(str(checkpoint), argument="checkpoint")
    if isinstance(checkpoint, Mapping) and all(isinstance(value, Tensor) for value in checkpoint.values()):
        return dict(checkpoint)
    raise ValueError(
        f"checkpoint={short(checkpoint, 80)}: must be a folder of safetensors files, or tensors by their names, as"
        " state_dict() gives them"
    )


def _has_own_head(source: FileSource | dict[str, Tensor]) -> bool:
    """Return whether the weights hold an output projection unlike the embedding."""
    names = f"{HEAD}.weight", f"{EMBEDDING}.weight"
    if isinstance(source, FileSource):
        return source.has_own_head(*names)
    head, embedding = map(source.get, names)
    return head is not None and embedding is not None and not torch.equal(head, embedding.to(head.device))


def _fill(made: Reference, source: FileSource | dict[str, Tensor]) -> None:
    table = table_of(made)
    if isinstance(source, FileSource):
        source.fill(table)
        return
    tensors = TensorSource(source)
    tensors.what = "checkpoint's tensors"
    names = []
    for name, tensor in tensors.tensors(table):
        table[name][0].target.copy_(tensor)
        names.append(name)
    if (wrong := find_not_finite(table, names)) is not None:
        raise ValueError(f"checkpoint: {describe_not_finite(table, wrong)}")


def _find_other(model: Description) -> str | None:
    """Return what the model has that a Reference lacks; None: nothing."""
    others = {
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
        "layers that keep a state": model.has_states,
        "output gates of attention": model.output_gate,
        "sinks of attention": any(model.sinks),
        "values of another size than keys": model.has_other_values,
        "scaled values": model.value_scale != 1,
        "ALiBi": bool(model.alibi),
        "quantized weights": bool(model.formats.quantized),
        "rotated inputs or outputs": bool(model.formats.rotations),
        "images": model.is_multimodal,
        "soft caps": model.score_cap is not None or model.logit_cap is not None,
        "norms of all heads at once": model.qk_norm == "full",
        "norms whose weights are stored less one": model.norm.plus_one,
        "norms other than RMSNorms with weights": model.norm != RMS_NORM or model.head_norms is not None,
        "branches side by side": model.is_parallel,
        "MLPs without gates": not model.is_gated,
        "vectors for positions": model.positions is not None,
        "other names of tensors": model.spelling != AS_STORED,
        "a biased output projection": model.head_bias,
        "projections that share a tensor": 1 in (len(model.names.qkv), len(model.names.gate_up)),
        "norms of a branch's result": model.names != ModuleNames(),
        "factors of its embeddings, branches, logits or queries": model.query_scaling is not None
        or {model.embedding_scale, model.residual_scale, model.logit_scale} != {1.0},
        "other rotations for long sequences": model.long_from is not None,
    }
    return next((name for name, is_there in others.items() if is_there), None)


class Reference(nn.Module):
    """A Llama or Qwen3, whose parameters have the names that transformers gives them.

    On a GPU, its products, norms, attention and log-probabilities are computed as a deterministic engine computes them.
    So they have the same bits. On the CPU they agree as closely as rounding allows.
    """

    def __init__(self, model: Description, max_model_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocab_size, self.max_model_len = model.vocab_size, max_model_len
        self.model = Backbone(model, max_model_len, dtype)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False, dtype=dtype)
        self.is_tied = model.tied
        self.tie()

    def tie(self) -> None:
        """Let a tied output projection be the embedding's matrix again, after `to_empty` has parted them."""
        if self.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute the log-probability of each token of each sequence, by those before it, in one packed pass.

        sequences: of token ids, at least one and at most max_model_len of them
        Returns [its length - 1] float32 for each sequence: its first token has none.
        Raises ValueError, naming the sequence, for any other.
        """
        rows = self._check(sequences)
        lengths = [len(row) for row in rows]
        device = self.lm_head.weight.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_device, torch.autocast(device.type, enabled=False):  # which would change the bits
            with fresh_torch_state():  # nothing here has gradients
                token_ids = torch.tensor([token for row in rows for token in row], device=device)
                packing = PackedSequences.of(lengths, device)
            hidden = self.model(token_ids, packing)
            # A token's log-probability comes from the token before it. That of a sequence's last one is not used.
            logprobs = functions.token_logprobs_of(hidden, self.lm_head.weight, token_ids.roll(-1))
        return [some[:-1] for some in logprobs.split(lengths)]

    def shards(self) -> Iterator[Shard]:
        """Yield what fills the parameters: tensors of the same names."""
        for name, parameter in self.named_parameters():
            yield Shard(name, parameter.detach(), tuple(parameter.shape))
        if self.is_tied:
            weight = self.lm_head.weight.detach()
            yield Shard(f"{HEAD}.weight", weight, tuple(weight.shape), replaces=(f"{EMBEDDING}.weight",))

    def _check(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        rows = as_list(sequences)
        if not rows:
            raise ValueError(f"sequences={short(sequences)}: must be a list of lists of token ids, at least one")
        checked = []
        for number, row in enumerate(rows):
            ids = [as_int(token) for token in as_list(row) or ()]
            if not ids or not all(token is not None and 0 <= token < self.vocab_size for token in ids):
                raise ValueError(
                    f"sequences[{number}]={short(row, 80)}: must be a list of token ids from 0 to"
                    f" {self.vocab_size - 1}, at least one"
                )
            if len(ids) > self.max_model_len:
                raise ValueError(
                    f"sequences[{number}] has {len(ids)} tokens: max_model_len={self.max_model_len} is the most"
                )
            checked.append([token for token in ids if token is not None])
        return checked


class Backbone(nn.Module):
    """All but the output projection."""

    def __init__(self, model: Description, max_model_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Layer(model, layer, dtype) for layer in range(model.num_layers))
        self.norm = ReferenceNorm(model.hidden_size, model.norm_eps, dtype)
        self.ropes, self.max_model_len = model.ropes, max_model_len
        self._tables: dict[torch.device, dict[Rope, Tensor]] = {}

    def forward(self, token_ids: Tensor, packing: PackedSequences) -> Tensor:
        """Compute hidden states, [tokens, hidden_size]."""
        tables = self._tables_on(token_ids.device)
        x, residual = self.embed_tokens(token_ids), None
        for layer, rope in zip(self.layers, self.ropes, strict=True):
            x, residual = layer(x, residual, None if rope is None else tables[rope], packing)
        return self.norm.add(x, residual)[0]

    def _tables_on(self, device: torch.device) -> dict[Rope, Tensor]:
        """Return the cosines and sines of each rotation, computed on the device. No buffers: these may be rounded."""
        if device not in self._tables:
            with fresh_torch_state(), device:
                self._tables[device] = {
                    rope: RotaryEmbedding(rope, self.max_model_len).cos_sin for rope in self.ropes if rope is not None
                }
        return self._tables[device]


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, model: Description, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = ReferenceNorm(model.hidden_size, model.norm_eps, dtype)
        self.self_attn = ReferenceAttention(model, layer, dtype)
        self.post_attention_layernorm = ReferenceNorm(model.hidden_size, model.norm_eps, dtype)
        self.mlp = ReferenceMLP(model, dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos_sin: Tensor | None, packing: PackedSequences
    ) -> tuple[Tensor, Tensor]:
        """Return the MLP's result, not yet added, and the residual stream. x, residual: those of the layer before"""
        normed, residual = self.input_layernorm.add(x, residual)
        attended = self.self_attn(normed, cos_sin, packing)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed), residual


class ReferenceAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, model: Description, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        heads, kv_heads, head_dim = model.num_heads, model.kv_heads[0].count, model.kv_heads[0].dim
        self.head_dim = head_dim
        self.q_proj = Linear(model.hidden_size, heads * head_dim, model.qkv_bias, dtype=dtype)
        self.k_proj = Linear(model.hidden_size, kv_heads * head_dim, model.qkv_bias, dtype=dtype)
        self.v_proj = Linear(model.hidden_size, kv_heads * head_dim, model.qkv_bias, dtype=dtype)
        self.o_proj = Linear(heads * head_dim, model.hidden_size, model.o_bias, dtype=dtype)
        self.q_norm, self.k_norm = (
            None if model.qk_norm is None else ReferenceNorm(head_dim, model.norm_eps, dtype) for _ in range(2)
        )
        rope = model.ropes[layer]
        is_interleaved = rope is not None and rope.interleaved
        self.heads = Heads(heads, kv_heads, model.norm_eps, is_interleaved, model.attention_scale, model.windows[layer])

    def forward(self, x: Tensor, cos_sin: Tensor | None, packing: PackedSequences) -> Tensor:
        """Attend within each sequence; both [tokens, hidden_size]."""
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=1).unflatten(1, (-1, self.head_dim))
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        heads: Tensor = self.o_proj(functions.attend(qkv, q_norm, k_norm, cos_sin, self.heads, packing).flatten(1))
        return heads


class ReferenceMLP(nn.Module):
    """The gated MLP."""

    def __init__(self, model: Description, dtype: torch.dtype) -> None:
        super().__init__()
        size, inner_size = model.hidden_size, model.intermediate_size
        self.gate_proj = Linear(size, inner_size, model.mlp_bias, dtype=dtype)
        self.up_proj = Linear(size, inner_size, model.mlp_bias, dtype=dtype)
        self.down_proj = Linear(inner_size, size, model.mlp_bias, dtype=dtype)
        self.activation = model.activation

    def forward(self, x: Tensor) -> Tensor:
        """Compute the branch's result; both [tokens, hidden_size]."""
        gate_up = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=1)
        result: Tensor = self.down_proj(functions.gate_mul(gate_up, self.activation))
        return result


class Linear(nn.Linear):
    """A projection whose products add up in the engine's order."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [tokens, in_features] to [tokens, out_features]."""
        return functions.linear(x, self.weight, self.bias)


class ReferenceNorm(nn.Module):
    """RMSNorm's weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual; without a residual, of x."""
        if residual is None:
            return functions.normalize(x, self.weight, self.eps), x
        return functions.add_norm(x, residual, self.weight, self.eps)
