"""Layers whose attention and MLP stand side by side, as GPT-J's (Wang and Komatsuzaki, 2021)."""

from __future__ import annotations

from torch import Tensor, nn

from nanoinfer.attention.context import Context
from nanoinfer.layers.norm import Joint, NormLayer, add_branches
from nanoinfer.models.mixers import Mixer
from nanoinfer.models.mlps import AnyMLP
from nanoinfer.parallel.tensor_parallel import TensorParallel


class ParallelLayer(nn.Module):
    """One layer, whose branches read the same stream, through one norm or each through its own.

        residual --+--> the joint's norm --> mixer --+--> the layer's result
                   '--> MLP's norm --------> MLP ----'

    The ranks' parts of both results are added up at once, by the next joint.
    """

    def __init__(self, joint: Joint, mixer: Mixer, mlp_norm: NormLayer | None, mlp: AnyMLP, tp: TensorParallel) -> None:
        """mlp_norm: None: the joint's norm is the MLP's, too; the joint's stream is whole on every rank"""
        super().__init__()
        self.mixer_joint, self.mixer = joint, mixer
        self.mlp_joint, self.mlp = Joint(None, mlp_norm or joint.pre, tp, sums=False), mlp

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """Run both branches; returns the sum of their results, not yet added, and the residual stream.

        x, residual: as for DecoderLayer.forward
        """
        x, residual = self.mixer(x, residual, self.mixer_joint, context)
        y, _ = self.mlp(residual, None, self.mlp_joint, context.adapters)
        return add_branches(x, y), residual
