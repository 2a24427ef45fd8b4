"""Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads are made of one latent a token.

The cache keeps the latents, and the part of a key that is rotated, which all heads share. There are two forms. Where
few queries meet a latent, as in decode steps, they go through the matrix of the keys, and meet the latents themselves;
what they find goes through the matrix of the values. Of prompts, keys and values of each head are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.attention import AttentionBackend
from nanoinfer.attention.context import Context, Scoring
from nanoinfer.attention.latents import Part, plan_prefill
from nanoinfer.kernels.attention.fp8 import read
from nanoinfer.kernels.fp8 import as_bytes
from nanoinfer.kernels.latent.store import rotate_and_store
from nanoinfer.kernels.norm.norm import normalize
from nanoinfer.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from nanoinfer.layers.norm import Joint, NormLayer
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.parallel.shares import share_of
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.formats.formats import Formats
from nanoinfer.weights.formats.matrix import Derived
from nanoinfer.weights.formats.plain.format import PLAIN
from nanoinfer.weights.shards import Section, Shard

MADE_BYTES = 1 << 29  # of keys and values that are made of latents at once
FEWER_QUERIES = 2 / 3  # than operations say, meet latents
NORM_EPS = 1e-6  # whatever other norms add


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a model's latent attention.

    heads: of queries
    latent: numbers in a token's latent
    plain, turning: numbers of a head's query, and of its key, that are not rotated, and that are
    value: numbers in a head's value
    query_latent: numbers in the latent of which all heads' queries are made; None: they have none
    has_biases: the projections to latents, and the one of the result, have biases
    factor: of a latent, behind its norm
    """

    heads: int
    latent: int
    plain: int
    turning: int
    value: int
    query_latent: int | None = None
    has_biases: bool = False
    factor: float = 1.0

    @property
    def cached(self) -> int:
        """Numbers of a token in the cache."""
        return self.latent + self.turning

    @property
    def few_queries(self) -> float:
        """Up to so many queries for a latent meet it sooner than keys and values that are made of it.

        That is two thirds of what the products' operations say, as measured on a CPU.
        """
        made = self.plain + self.value
        return FEWER_QUERIES * self.latent * made / max(2 * self.latent - made, 1)

    @property
    def query_weights(self) -> int:
        """Numbers in the matrix that makes queries of their latents; 0: there is none."""
        return (self.query_latent or 0) * self.heads * (self.plain + self.turning)

    @property
    def made_weights(self) -> int:
        """Numbers in the matrix that makes keys and values, which is multiplied in the model's dtype."""
        return self.latent * self.heads * (self.plain + self.value)

    @property
    def projected(self) -> int:
        """How many numbers of a token the projections of the hidden state give, and that of the results takes."""
        queries = self.heads * (self.plain + self.turning) if self.query_latent is None else self.query_latent
        return queries + self.cached + self.heads * self.value


class LatentAttention(nn.Module):
    """The layer: each rank has a share of the heads, and all latents."""

    def __init__(
        self,
        output: str,
        layer: int,
        sizes: LatentSizes,
        hidden_size: int,
        rotary: RotaryEmbedding,
        query_scales: Tensor | None,
        scoring: Scoring,
        backend: AttentionBackend,
        tp: TensorParallel,
        formats: Formats,
    ) -> None:
        """output: the name of the results' projection, in the module that has the other ones

        layer: its number, here and in the KV cache; query_scales: [positions] float32, see rotate_and_store
        """
        super().__init__()
        prefix = output[: output.rindex(".") + 1]
        self.layer, self.sizes, self.rotary, self.query_scales = layer, sizes, rotary, query_scales
        self.prefix, self.scoring, self.backend = prefix, scoring, backend
        head = sizes.plain + sizes.turning
        kv = Projection(f"{prefix}kv_a_proj_with_mqa", 1, sizes.cached, 0, sizes.cached, sizes.cached)
        latents, rows = [kv], sizes.heads * head  # of a single unit, each rank has the whole
        if sizes.query_latent is not None:
            own = (sizes.query_latent,) * 2
            latents = [Projection(f"{prefix}q_a_proj", 1, own[0], 0, *own), kv]
        self.latent_proj = ColumnParallelLinear(latents, hidden_size, tp, sizes.has_biases, formats)
        name, inputs = ("q_proj", hidden_size) if sizes.query_latent is None else ("q_b_proj", sizes.query_latent)
        queries = Projection(f"{prefix}{name}", sizes.heads, head, 0, head, rows)
        self.q_proj = ColumnParallelLinear([queries], inputs, tp, formats=formats)
        self.q_norm = None
        if sizes.query_latent is not None:
            self.q_norm = NormLayer(f"{prefix}q_a_layernorm", sizes.query_latent, NORM_EPS)
        self.kv_norm = NormLayer(f"{prefix}kv_a_layernorm", sizes.latent, NORM_EPS)
        self.maker = KeysAndValues(f"{prefix}kv_b_proj", sizes, tp, formats)
        how = tp, sizes.has_biases, formats
        self.o_proj = RowParallelLinear(output, sizes.heads * sizes.value, hidden_size, *how, unit=sizes.value)

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context) -> tuple[Tensor, Tensor]:
        """Return the branch's result, and the residual stream; the next joint adds the two."""
        q, kv, residual = self._project(x, residual, joint, context)
        (cache, _), group, rotary, sizes = context.layers[self.layer], context.groups[0], self.rotary, self.sizes
        of_latents = None
        turned = q[..., sizes.plain :]
        if context.prefill is None:  # all queries meet latents
            of_latents = q.new_empty(*q.shape[:2], sizes.cached)
            turned = of_latents[..., sizes.latent :]
        how = rotary.cos_sin, rotary.interleaved, self.query_scales, context.rotary_rows
        into = cache, group.slot_mapping, self.scoring.kv_scales
        rotate_and_store(q, turned, kv, self.kv_norm.norm, *how, *into, sizes.factor)
        if of_latents is not None:
            heads = self._meet_latents(q, of_latents, context)
        else:
            if group.plan is None:
                group.plan = plan_prefill(context, group, cache.shape[1], self.backend, sizes.few_queries)
            met = [self._meet(part, q[part.tokens], cache) for part in group.plan]
            heads = met[0] if len(met) == 1 else torch.cat(met)
        return self.o_proj(heads.flatten(1), adapters=context.adapters), residual

    def shards(self) -> Iterator[Shard]:
        """Yield the shards of the scale that a checkpoint may have for latents in FP8; the values' is the same."""
        assert self.scoring.kv_scales is not None
        for scale in self.scoring.kv_scales.split(1):
            yield Shard(f"{self.prefix}k_scale", scale, (1,), random="ones", optional=True)

    def _project(
        self, x: Tensor, residual: Tensor | None, joint: Joint, context: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, [tokens, heads, head_dim]; latents and shared keys, [tokens, cached]; and the stream."""
        if self.q_norm is None:
            joined, residual = joint(x, residual)
            kv = self.latent_proj.project(joined, adapters=context.adapters)
        else:
            both, residual = self.latent_proj(x, residual, joint, adapters=context.adapters)
            own, kv = both.split([self.q_norm.size, self.sizes.cached], dim=-1)
            joined = normalize(own.contiguous(), self.q_norm.norm)
        q = self.q_proj.project(joined, adapters=context.adapters)
        return q.unflatten(-1, (-1, self.sizes.plain + self.sizes.turning)), kv, residual

    def _meet(self, part: Part, q: Tensor, cache: Tensor) -> Tensor:
        """Attend from some sequences of a prefill step; q: theirs. Returns [tokens, heads, numbers of a value]."""
        if part.pages is not None:
            return self._meet_keys(q, as_bytes(cache)[part.pages].view(cache.dtype), part.context)
        of_latents = q.new_empty(*q.shape[:2], self.sizes.cached)
        of_latents[..., self.sizes.latent :] = q[..., self.sizes.plain :]
        return self._meet_latents(q, of_latents, part.context)

    def _meet_latents(self, q: Tensor, of_latents: Tensor, context: Context) -> Tensor:
        """Attend to latents; returns [tokens, heads, numbers of a value].

        of_latents: [tokens, heads, cached], the queries that meet latents; the rotated numbers are there, the others
            are yet to be made of q's
        """
        keys, values = self.maker.by_head
        sizes, cached = self.sizes, context.layers[self.layer]
        plain = q[..., : sizes.plain].transpose(0, 1)
        torch.bmm(plain, keys, out=of_latents[..., : sizes.latent].transpose(0, 1))
        attend = self.backend.decode if context.prefill is None else self.backend.prefill
        found = attend(of_latents, *cached, context, context.groups[0], self.scoring)
        heads = q.new_empty(*q.shape[:2], sizes.value)
        torch.bmm(found.transpose(0, 1), values.transpose(1, 2), out=heads.transpose(0, 1))
        return heads

    def _meet_keys(self, q: Tensor, pages: Tensor, context: Context) -> Tensor:
        """Make keys and values of some sequences' latents, for a few heads at a time, and attend to them.

        q: [tokens, heads, head_dim], of these sequences; pages: [pages, block_size, 1, cached], of the cache
        Returns [tokens, heads, numbers of a value].
        """
        scales = self.scoring.kv_scales
        sizes, latents = self.sizes, read(pages, q.dtype, None if scales is None else scales[0]).squeeze(2)
        numbers = latents.shape[0] * latents.shape[1] * (sizes.plain + sizes.turning + sizes.value)
        some = max(1, MADE_BYTES // (numbers * q.itemsize))
        met = []
        for first in range(0, q.shape[1], some):
            heads = slice(first, first + some)
            keys, values = self.maker.make(latents, heads)
            met.append(self.backend.prefill(q[:, heads], keys, values, context, context.groups[0], self.scoring))
        return met[0] if len(met) == 1 else torch.cat(met, dim=1)


class KeysAndValues(Derived):
    """The matrix that makes a rank's keys and values of latents, [heads, plain + value, latent], in the model's dtype.

    A stored matrix of few bits stays beside it, whole on each rank, as heads may cut what shares a scale.
    """

    def __init__(self, name: str, sizes: LatentSizes, tp: TensorParallel, formats: Formats) -> None:
        super().__init__()
        self.sizes = sizes
        rows = sizes.plain + sizes.value
        self.name, self.shape = name, (sizes.heads * rows, sizes.latent)
        self.share = share_of(self.shape[0], tp.rank, tp.size, rows)
        self.weight = nn.Parameter(torch.empty(len(self.share), sizes.latent), requires_grad=False)
        self.stored = None
        if formats.of(name) != PLAIN:
            self.stored = formats.make_matrix([Section(name, self.shape[0], self.shape, 0)], sizes.latent, False)

    def shards(self) -> Iterator[Shard]:
        """Yield the weight's shard, unless it is made of what is stored."""
        if self.stored is None:
            yield Shard(f"{self.name}.weight", self.weight, self.shape, self.share.start)

    def finish(self) -> None:
        """Make the weight of what is stored: its product with each unit vector is a column."""
        if self.stored is not None:
            unit = torch.eye(self.sizes.latent, dtype=self.weight.dtype, device=self.weight.device)
            made = self.stored.product(unit)[:, self.share.start : self.share.stop]
            self.weight.copy_(made.T)

    @property
    def by_head(self) -> tuple[Tensor, Tensor]:
        """The matrices of the keys, [heads, plain, latent], and of the values, [heads, value, latent]."""
        weights = self.weight.unflatten(0, (-1, self.sizes.plain + self.sizes.value))
        keys, values = weights.split([self.sizes.plain, self.sizes.value], dim=1)
        return keys, values

    def make(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return keys, [pages, block_size, heads, head_dim], and values, of what the cache has of tokens.

        latents: [pages, block_size, latent + turning]
        """
        sizes, tokens = self.sizes, latents.flatten(0, 1)
        key_makers, value_makers = (matrices[heads].transpose(1, 2) for matrices in self.by_head)
        own = tokens[:, : sizes.latent].expand(len(key_makers), -1, -1)
        keys = latents.new_empty(*latents.shape[:2], len(own), sizes.plain + sizes.turning)
        values = latents.new_empty(*keys.shape[:3], sizes.value)
        plain, turning = keys.flatten(0, 1).split([sizes.plain, sizes.turning], dim=-1)
        torch.bmm(own, key_makers, out=plain.transpose(0, 1))
        turning.copy_(tokens[:, None, sizes.latent :])
        torch.bmm(own, value_makers, out=values.flatten(0, 1).transpose(0, 1))
        return keys, values
