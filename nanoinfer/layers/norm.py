"""Norms as layers, and the joints of the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.kernels.linear.dispatch import takes_lane
from nanoinfer.kernels.norm.norm import Norm, add_norm, add_residual, norm_add_norm, normalize
from nanoinfer.kernels.ranks.all_reduce_norm import all_reduce_add_norm
from nanoinfer.kernels.ranks.send_receive import VectorLane
from nanoinfer.parallel.inbox import Inbox
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.shards import Fill, Shard

ONE_OWNER_TOKENS = 48  # from here on one_owner is faster for more than two ranks: less traffic, but one more trip


@dataclass(frozen=True)
class NormKind:
    """What the norms of a model are.

    centred: LayerNorms; otherwise RMSNorms
    plus_one: checkpoints store their weights less one
    has_weight: False: nothing multiplies what is normalised; has_bias: of a LayerNorm, something is added to it
    """

    centred: bool = False
    plus_one: bool = False
    has_weight: bool = True
    has_bias: bool = False


RMS_NORM = NormKind()


class NormLayer(nn.Module):
    """The parameters of a norm over `size` numbers; this rank holds `share` of its weights, from `start` on."""

    weight: Tensor

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        kind: NormKind = RMS_NORM,
        start: int = 0,
        share: int | None = None,
        scale_name: str | None = None,
    ) -> None:
        """share: how many of the weights this rank holds; None: all

        scale_name: the tensor with the norm's stream_scale (kernels.norm.norm); None: it has none
        """
        super().__init__()
        self.name = name
        self.size = size
        self.start = start
        held = size if share is None else share
        if kind.has_weight:
            self.weight = nn.Parameter(torch.empty(held), requires_grad=False)
        else:
            self.register_buffer("weight", torch.ones(held), persistent=False)
        self.bias = nn.Parameter(torch.empty(held), requires_grad=False) if kind.has_bias else None
        self.scale_name = scale_name
        self.stream_scale = None if scale_name is None else nn.Parameter(torch.empty(1), requires_grad=False)
        self.norm = Norm(self.weight, eps, kind.plus_one, self.stream_scale, kind.centred, self.bias)
        self.kind = kind

    def shards(self) -> Iterator[Shard]:
        """Yield the weight's shard, the bias's, and that of stream_scale."""
        fill: Fill = "zeros" if self.kind.plus_one else "ones"
        if self.kind.has_weight:
            yield Shard(f"{self.name}.weight", self.weight, (self.size,), self.start, random=fill)
        if self.bias is not None:
            yield Shard(f"{self.name}.bias", self.bias, (self.size,), self.start, random="zeros")
        if self.scale_name is not None and self.stream_scale is not None:
            yield Shard(self.scale_name, self.stream_scale, (1,), random="ones", is_constant=True)


class Joint(nn.Module):
    """Adds a branch's result to the residual stream, and normalises the sum as the next branch's input.

        residual -----------------------> + -----> residual
                                          |  '---> pre norm ---> the next branch
        the branch's result --> post norm '

    With several ranks, the joint first adds up their parts. If the ranks keep the order, a branch's result is whole
    already. Either norm may be absent. The model's first joint has no residual yet: its x, the embeddings, becomes the
    residual stream. If it `replaces` the stream, what the pre norm returns goes on as the stream, too (Vaswani et al.,
    2017).
    """

    def __init__(
        self,
        post: NormLayer | None,
        pre: NormLayer | None,
        tp: TensorParallel,
        whole: bool = False,
        sums: bool = True,
        replaces: bool = False,
    ) -> None:
        """Store the norms; None: the model has no norm in that place.

        post: the norm of the branch's result
        pre: the norm of the next branch's input
        whole: every rank needs the residual stream of all tokens (see one_owner in kernels.ranks.all_reduce_norm)
        sums: False: each rank's x is the whole branch's result already
        """
        super().__init__()
        self.tp = tp
        self.post, self.pre = post, pre
        self.whole = whole
        self.sums = sums
        self.replaces = replaces
        self._kept: Tensor | None = None
        self._kept_scale = 1.0

    def keep_stream(self, slots: Tensor, scale: float) -> None:
        """Let `keep` copy the stream behind this joint, times a number, from now on. slots: [most tokens, size]"""
        self._kept, self._kept_scale = slots, scale

    def keep(self, stream: Tensor) -> None:
        """Copy the stream that this joint has returned, [tokens, size], if it was asked to."""
        if self._kept is None:
            return
        slots = self._kept[: len(stream)]
        if self._kept_scale == 1:
            slots.copy_(stream)
        else:
            torch.mul(stream, self._kept_scale, out=slots)

    @property
    def post_norm(self) -> Norm | None:
        """The norm of the branch's result."""
        return None if self.post is None else self.post.norm

    @property
    def pre_norm(self) -> Norm | None:
        """The norm of the next branch's input."""
        return None if self.pre is None else self.pre.norm

    def lane(self, x: Tensor) -> VectorLane | None:
        """Return a lane if the next product can add up the ranks' parts of x itself, as for one token; else None."""
        inbox, is_fused = self.tp.inbox, self.sums and not self.replaces
        if inbox is None or self.tp.keeps_order or not is_fused or not inbox.can_sum(x) or not takes_lane(x):
            return None
        return VectorLane(*inbox.vector_lane(), inbox.rank, inbox.stop)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to residual and normalise the sum.

        x: [tokens, size], or pieces (kernels.norm.norm), from RowParallelLinear or the embedding
        residual: [tokens, size]; None at the model's first joint
        Returns the next branch's input and the residual stream, both [tokens, size].
        """
        normed, total = self._join(x, residual)
        return normed, normed if self.replaces else total

    def _join(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        post, pre, inbox = self.post_norm, self.pre_norm, self.tp.inbox
        in_order = self.tp.keeps_order
        if inbox is not None and self.sums and not in_order and inbox.can_sum(x) and (post or pre):
            return self._through_inbox(inbox, x, residual)
        # Of the embeddings' parts, all but one are zeros. Here the ranks meet once a step, as Inbox.layer_lane needs.
        if self.sums and (not in_order or residual is None):
            x = self.tp.all_reduce(x)
        if residual is None:
            return (x, x) if pre is None else (normalize(x, pre), x)
        if pre is None:
            total = add_residual(x, residual, post)
            return total, total
        return add_norm(x, residual, pre) if post is None else norm_add_norm(x, residual, post, pre)

    def _through_inbox(self, inbox: Inbox, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add and normalise as forward does; one launch adds up the parts in the inboxes and applies the first norm."""
        post, pre = self.post_norm, self.pre_norm
        lane = inbox.embedding_lane if residual is None else inbox.layer_lane()
        one_owner = not self.whole and self.tp.size > 2 and len(x) >= ONE_OWNER_TOKENS
        how = lane, inbox.rank, inbox.stop, one_owner, inbox.take_stale()
        if post is None:
            assert pre is not None
            return all_reduce_add_norm(x, residual, pre, *how)
        assert residual is not None
        result = all_reduce_add_norm(x, None, post, *how)[0]
        if pre is None:
            total = add_residual(result, residual)
            return total, total
        return add_norm(result, residual, pre)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x, multiplied unless the factor is 1."""
    return x if factor == 1 else x * factor


def add_branches(x: Tensor, y: Tensor, factors: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return the sum of two branches' results, [tokens, size] or pieces each; pieces if one of them is.

    factors: of the results
    """
    x = scaled(x, factors[0])
    if x.dim() == y.dim() == 2:
        return x.add(y, alpha=factors[1])
    return torch.cat([part.float().view(-1, *part.shape[-2:]) for part in (x, scaled(y, factors[1]))])


def norm_of_sum(x: Tensor, norm: Norm, tp: TensorParallel) -> Tensor:
    """Return normalize of all ranks' x, added up; x: this rank's part of a branch's result, as for Joint.forward"""
    inbox = tp.inbox
    if tp.keeps_order or inbox is None or not inbox.can_sum(x):
        return normalize(x if tp.keeps_order else tp.all_reduce(x), norm)
    one_owner = tp.size > 2 and len(x) >= ONE_OWNER_TOKENS
    how = inbox.layer_lane(), inbox.rank, inbox.stop, one_owner, inbox.take_stale()
    return all_reduce_add_norm(x, None, norm, *how)[0]
