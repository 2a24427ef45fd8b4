"""Linear layers whose weights are split over the ranks (Megatron-LM, Shoeybi et al., 2019)."""

from __future__ import annotations

from torch import Tensor, nn

from nanoinfer.kernels.linear.activation import Activation
from nanoinfer.layers.norm import Joint
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.weights.plain_matrix import Piece, PlainMatrix


def share_of_heads(heads: int, ranks: int) -> int:
    """How many of the heads, or other units, a rank holds: an equal share, or one that others hold too."""
    assert heads % ranks == 0 or ranks % heads == 0
    return max(heads // ranks, 1)


class ColumnParallelLinear(nn.Module):
    """Several projections of one input as one matrix product; each rank holds a share of every one's outputs.

    names: of the projections in the checkpoint; one name if it has them in one tensor, one after another
    sizes: of their outputs over all ranks, in units of head_dim
    head_dim: the unit that is not divided: a head, or a single feature; where there are fewer than ranks, several ranks
        hold the same one
    activation: of two projections, a gate and what it gates; see kernels.linear.activation
    """

    def __init__(
        self,
        names: tuple[str, ...],
        in_features: int,
        sizes: tuple[int, ...],
        tp: TensorParallel,
        head_dim: int = 1,
        bias: bool = False,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.activation = activation
        is_fused = len(names) == 1
        pieces, before = [], 0
        for name, size in zip(names * len(sizes) if is_fused else names, sizes, strict=True):
            rows = share_of_heads(size, tp.size) * head_dim
            start = (before + tp.rank * size // tp.size) * head_dim
            pieces.append(Piece(name, rows, ((sum(sizes) if is_fused else size) * head_dim, in_features), start))
            before += size if is_fused else 0
        self.matrix = PlainMatrix(pieces, in_features, bias)

    def forward(self, x: Tensor, residual: Tensor | None, joint: Joint) -> tuple[Tensor, Tensor]:
        """Project what the joint makes of x and residual, see there.

        Returns this rank's share of every projection, side by side in [tokens, share], and the residual stream. With an
        activation the share is of one projection.
        """
        if self.tp.size == 1:
            x = joint.scaled(x)
            return self.matrix.norm_product(x, residual, joint.pre_norm, joint.post_norm, self.activation)
        joined, residual = joint(x, residual)
        return self.matrix.product(joined, self.activation), residual


class RowParallelLinear(nn.Module):
    """A projection whose input is split over the ranks, each of which is left with its part of a sum.

    The joint behind it adds it up. The first rank's part has the bias.
    """

    def __init__(self, name: str, in_features: int, out_features: int, tp: TensorParallel, bias: bool = False) -> None:
        super().__init__()
        self.tp = tp
        share = in_features // tp.size
        assert share * tp.size == in_features
        piece = Piece(name, out_features, (out_features, in_features), tp.rank * share, dim=1)
        self.matrix = PlainMatrix([piece], share, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, this rank's share of in_features] to its part of the sum, [tokens, out_features].

        Alone, a rank may leave that in pieces: [pieces, tokens, out_features] float32.
        """
        return self.matrix.product(x, may_split=self.tp.size == 1, with_bias=self.tp.rank == 0)
