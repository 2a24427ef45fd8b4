"""Shared experts: whether one stands apart from the others, or its parts are further ones of their stack.

An expert of m times the size of the others computes what m of them do together. So in a stack, the rows of its gates
and ups, and the columns of its downs, are those of m experts that every token takes with weight 1. Then a layer has
three launches less: two products, and a sum.
"""

from __future__ import annotations

from nanoinfer.kernels.linear.one_row import MAX_IN_FEATURES
from nanoinfer.models.description import Description
from nanoinfer.models.reading.experts import MoEConfig


def parts_in_stack(model: Description, experts: MoEConfig, layer: int) -> int:
    """Return how many experts of the stack a layer's shared expert makes; 0: it stands apart, or there is none.

    The number of ranks decides nothing: their results may have to have the same bits.
    """
    size = experts.shared_size or 0
    if size == 0 or size % experts.size or not model.joins_shared:
        return 0
    parts = size // experts.size
    return parts if _can_join(model, experts, layer, parts) and _is_fast(experts, parts) else 0


def _can_join(model: Description, experts: MoEConfig, layer: int, parts: int) -> bool:
    names = model.names_of(layer)
    is_other = experts.shared_gate or experts.latent_size is not None or experts.routing.identities > 0
    if is_other or experts.biases or model.mlp_bias or names.paired_experts:
        return False
    first = f"{names.prefix(layer)}{names.expert.format(0)}"
    own = (*([names.expert_gate] if model.is_gated else []), names.expert_up, names.expert_down)
    modules = *(f"{first}.{name}" for name in own), *shared_projections(model, layer)
    formats = {model.formats.of(module) for module in modules}
    return len(formats) == 1 and formats.pop().stores_parts(experts.size, parts)


def _is_fast(experts: MoEConfig, parts: int) -> bool:
    """Return whether products are faster with parts in the stack: unless one row is too long for its kernel then."""
    fits, apart = ((experts.used + more) * experts.size <= MAX_IN_FEATURES for more in (parts, 0))
    return fits or not apart


def shared_modules(model: Description, layer: int) -> tuple[str, ...]:
    """Return the shared expert's module, by each name that a checkpoint may give it."""
    return tuple(model.names.prefix(layer) + name for name in model.names.shared_experts)


def shared_projections(model: Description, layer: int) -> tuple[str, ...]:
    """Return the modules of its projections, by the first of these names."""
    return tuple(f"{shared_modules(model, layer)[0]}.{name}" for name in model.names.shared_projections)
