"""Linear layers whose weights are split over the ranks (Megatron-LM, Shoeybi et al., 2019)."""

from __future__ import annotations

from torch import Tensor, nn

from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.kernels.ranks.gather import gather_features
from nanoinfer.layers.norm import Joint
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.fp8_format import Fp8Format
from nanoinfer.weights.matrix import make_matrix
from nanoinfer.weights.shards import Section


def gather(x: Tensor, tp: TensorParallel) -> Tensor:
    """Put the ranks' shares side by side: [rows, share] to [rows, ranks * share]."""
    assert x.is_contiguous()
    inbox = tp.inbox
    if inbox is None or not inbox.can_gather(x):
        return tp.gather_features(x)
    return gather_features(x, inbox.layer_lane(), inbox.rank, inbox.stop)


def share_of_heads(heads: int, ranks: int) -> int:
    """Return how many of the heads, or other units, a rank holds: an equal share, or one that several ranks hold."""
    assert heads % ranks == 0 or ranks % heads == 0
    return max(heads // ranks, 1)


class ColumnParallelLinear(nn.Module):
    """Several projections of one input as one matrix product; each rank holds a share of each projection's outputs.

    names: the projections' names in the checkpoint; one name if one tensor holds them, one after another
    sizes: the outputs of each projection over all ranks, in units of head_dim
    head_dim: the outputs that stay together on a rank: a head's, or a single one. If a projection has fewer such units
        than there are ranks, several ranks hold the same unit
    fp8: the format of the checkpoint's matrices, which may leave out these; None: all have the model's dtype
    """

    def __init__(
        self,
        names: tuple[str, ...],
        in_features: int,
        sizes: tuple[int, ...],
        tp: TensorParallel,
        head_dim: int = 1,
        bias: bool = False,
        fp8: Fp8Format | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        is_fused = len(names) == 1
        sections, before = [], 0
        for name, size in zip(names * len(sizes) if is_fused else names, sizes, strict=True):
            rows = share_of_heads(size, tp.size) * head_dim
            start = (before + tp.rank * size // tp.size) * head_dim
            shape = (sum(sizes) if is_fused else size) * head_dim, in_features
            sections.append(Section(name, rows, shape, start, fused=size * head_dim if is_fused else None))
            before += size if is_fused else 0
        self.matrix = make_matrix(sections, in_features, bias, fp8)

    def forward(
        self, x: Tensor, residual: Tensor | None, joint: Joint, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Let the joint add x to residual and normalise the sum; then project. x, residual: as for Joint.forward.

        activation: applied to two projections, gate and up: the output is act(gate) * up (kernels.linear.activation)
        Returns this rank's share of each projection, side by side in [tokens, share], and the residual stream. With an
        activation, the share is that of act(gate) * up alone.
        """
        lane = joint.lane(x)
        if self.tp.size == 1 or lane is not None:
            x = joint.scaled(x)
            return self.matrix.norm_product(x, residual, joint.pre_norm, joint.post_norm, activation, lane)
        joined, residual = joint(x, residual)
        return self.project(joined, activation), residual

    def project(self, joined: Tensor, activation: Activation | None = None) -> Tensor:
        """Project a joint's output, [tokens, in_features]; returns the first of forward's results."""
        return self.matrix.product(joined, activation)


class RowParallelLinear(nn.Module):
    """A projection whose input is split over the ranks. Each rank computes its part: the parts add up to the output.

    The next joint adds them. The first rank's part includes the bias.

    Such a sum depends on the number of ranks. Ranks that keep the order split the outputs instead. Each gathers the
    whole input, and then the whole output.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        bias: bool = False,
        fp8: Fp8Format | None = None,
    ) -> None:
        """fp8: as for ColumnParallelLinear"""
        super().__init__()
        self.tp = tp
        shape = out_features, in_features
        if tp.splits_outputs:
            share = out_features // tp.size
            assert share * tp.size == out_features
            self.matrix = make_matrix([Section(name, share, shape, tp.rank * share)], in_features, bias, fp8)
        else:
            share = in_features // tp.size
            assert share * tp.size == in_features
            self.matrix = make_matrix([Section(name, out_features, shape, tp.rank * share, dim=1)], share, bias, fp8)

    def can_apply_activation(self, tokens: int) -> bool:
        """Return whether a launch that prepares so many tokens for this product can apply an activation, too."""
        return self.matrix.can_apply_activation(tokens)

    def forward(self, x: Tensor, before: Activation | None = None) -> Tensor:
        """Multiply [tokens, this rank's share of in_features]; returns [tokens, out_features].

        The result is this rank's part, or if the rank splits outputs, the whole sum.
        before: if given, x is twice as wide, gates before ups, and act(gate) * up is multiplied
        A single rank may return pieces, [pieces, tokens, out_features] float32, which the next joint adds.
        """
        return self._product(x, before, may_split=self.tp.size == 1)

    def project(self, x: Tensor, before: Activation | None = None) -> Tensor:
        """Multiply as forward does, but return no pieces."""
        return self._product(x, before)

    def _product(self, x: Tensor, before: Activation | None, may_split: bool = False) -> Tensor:
        if not self.tp.splits_outputs:
            return self.matrix.product(x, may_split=may_split, with_bias=self.tp.rank == 0, before=before)
        assert before is None
        return gather(self.matrix.product(gather(x, self.tp)), self.tp)
