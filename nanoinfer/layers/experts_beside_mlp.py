"""Layers that have experts beside their MLP, as Gemma 4's (Gemma Team, 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.kernels.adapters.pairs import AdapterRows
from nanoinfer.kernels.experts.route import Routes
from nanoinfer.kernels.norm.norm import Norm, add_residual, normalize
from nanoinfer.layers.experts import MixtureOfExperts
from nanoinfer.layers.norm import Joint, NormLayer, norm_of_sum
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.shards import Shard


@dataclass(frozen=True)
class BesideMLP:
    """The names that a checkpoint gives to what surrounds experts beside an MLP, without the layer's prefix.

    mlp_post_norm, experts_post_norm: the norms of the two results, before they are added
    experts_norm: that of the experts' input
    router_scale: the weights of the norm of the router's input
    """

    mlp_post_norm: str
    experts_norm: str
    experts_post_norm: str
    router_scale: str


class ExpertsBesideMLP(nn.Module):
    """An MLP and experts, which read the residual stream through norms of their own. Their normalised results add up.

        residual --+--> the joint's norm --> MLP ------> norm --+--> the branch's result
                   +--> norm --------------> experts --> norm --'
                   '--> norm --------------> router

    Norms need whole vectors: so all ranks' parts are added up here, and not in the next joint.
    """

    def __init__(
        self, prefix: str, names: BesideMLP, mlp: nn.Module, experts: MixtureOfExperts, eps: float, tp: TensorParallel
    ) -> None:
        """prefix: the layer's, with a dot; mlp: its forward is that of a branch; eps: of all norms"""
        super().__init__()
        self.mlp, self.experts = mlp, experts
        size = experts.router.weight.shape[1]
        self.mlp_post = NormLayer(prefix + names.mlp_post_norm, size, eps)
        self.experts_pre = NormLayer(prefix + names.experts_norm, size, eps)
        self.experts_post = NormLayer(prefix + names.experts_post_norm, size, eps)
        self.router_scale_name = prefix + names.router_scale
        self.router_scale = nn.Parameter(torch.empty(size), requires_grad=False)
        self.router_norm = Norm(self.router_scale, eps)
        self.tp = tp

    def forward(
        self, x: Tensor, residual: Tensor, joint: Joint, adapters: AdapterRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the branch's result, whole on every rank, and the residual stream; the next joint adds the two."""
        dense, residual = self.mlp(x, residual, joint, adapters)
        normed = normalize(residual, self.experts_pre.norm)
        sparse = self.experts.mix(normed, self._routes(residual), self.tp, adapters)
        sparse = norm_of_sum(sparse, self.experts_post.norm, self.tp)
        if self.tp.size == 1:
            return add_residual(dense, sparse, self.mlp_post.norm), residual
        return norm_of_sum(dense, self.mlp_post.norm, self.tp) + sparse, residual

    def _routes(self, residual: Tensor) -> Routes:
        router = self.experts.router
        return router.choose(router.score(normalize(residual, self.router_norm)))

    def shards(self) -> Iterator[Shard]:
        """Yield the shard of the router's norm."""
        yield Shard(self.router_scale_name, self.router_scale, tuple(self.router_scale.shape), random="ones")
