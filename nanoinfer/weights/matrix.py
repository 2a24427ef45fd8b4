"""Chooses the format of matrices."""

from __future__ import annotations

from nanoinfer.weights.fp8_experts import Fp8Experts
from nanoinfer.weights.fp8_format import Fp8Format
from nanoinfer.weights.fp8_matrix import Fp8Matrix
from nanoinfer.weights.plain_experts import ExpertSizes, ExpertTensors, OutputShare, PlainExperts
from nanoinfer.weights.plain_matrix import PlainMatrix
from nanoinfer.weights.shards import Section


def make_matrix(
    sections: list[Section], in_features: int, bias: bool, fp8: Fp8Format | None
) -> PlainMatrix | Fp8Matrix:
    """Make the matrix of these sections; raises ValueError if FP8 is the format of some of them alone."""
    in_fp8 = [section.name for section in sections if fp8 is not None and fp8.stores(section.name)]
    if fp8 is None or not in_fp8:
        return PlainMatrix(sections, in_features, bias)
    others = [section.name for section in sections if section.name not in in_fp8]
    if others:
        raise ValueError(f"model: its config says that {in_fp8[0]} is in FP8 and {others[0]} not: must be both or none")
    return Fp8Matrix(sections, in_features, bias, fp8)


def make_experts(
    tensors: ExpertTensors, sizes: ExpertSizes, fp8: Fp8Format | None, output_share: OutputShare | None, biases: bool
) -> PlainExperts | Fp8Experts:
    """Make a layer's experts; arguments: as for PlainExperts. One format holds for all of them."""
    if fp8 is None or not fp8.stores(tensors.expert.format(0) + f".{tensors.gate}"):
        return PlainExperts(tensors, sizes, output_share, biases)
    assert not biases
    return Fp8Experts(tensors, sizes, fp8, output_share)
