"""Which layers have experts, and what these are, as the settings of a config.json say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from nanoinfer.checks import as_int
from nanoinfer.kernels.experts.route import Routing
from nanoinfer.layers.experts_beside_mlp import BesideMLP
from nanoinfer.models.reading.settings import count_of, of_layers, positive, size_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class MoEConfig:
    """The experts that some layers have in place of one MLP, or beside it. Each token uses a few of them.

    layers: for each layer, whether it has experts
    count: how many experts such a layer has
    size: an expert's intermediate size
    latent_size: the numbers that the routed experts take, of which a projection makes them, and give; None: hidden_size
    routing: how a token chooses some of them, and weighs their results
    corrected: a learned correction is added to the scores, for the choice alone
    float32_router: logits are computed in float32, whatever the model's dtype
    shared_size: the intermediate size of one more expert, which every token uses; None: the layers have none
    shared_gate: the sigmoid of a gate weights its result
    biases: the router and the experts' projections have biases
    beside: given if the experts stand beside an MLP; "halves": each two layers are the halves of one, and the first
        half's experts stand beside both: they get what its MLP gets, and their result is added behind the second half;
        None: they stand in its place
    """

    layers: tuple[bool, ...]
    count: int
    size: int
    routing: Routing
    corrected: bool = False
    float32_router: bool = False
    shared_size: int | None = None
    shared_gate: bool = False
    biases: bool = False
    latent_size: int | None = None
    beside: BesideMLP | Literal["halves"] | None = None

    @property
    def used(self) -> int:
        """How many experts a token uses."""
        return self.routing.used

    @property
    def choices(self) -> int:
        """How many a router chooses among: experts, and identities."""
        return self.count + self.routing.identities

    @property
    def number_type(self) -> Literal["uint8", "int16"]:
        """The smallest type that holds the number of a router's choice."""
        return "uint8" if self.choices <= 256 else "int16"


def read_experts(
    config: PretrainedConfig,
    layers: tuple[bool, ...],
    size_field: str,
    normalised: bool | None = None,
    shared_size: int | None = None,
    count_field: str = "num_experts",
    used_field: str = "num_experts_per_tok",
    identities: int = 0,
) -> MoEConfig | None:
    """Read the experts of the given layers; returns None if no layer has any.

    layers: for each layer, whether it has experts
    size_field: the setting with an expert's intermediate size
    normalised: whether a token's weights add up to 1; None: as norm_topk_prob says
    shared_size: the intermediate size of a shared expert with a gate; None: the layers have none
    count_field, used_field: the settings with the number of experts, and of those that a token uses
    identities: as for Routing
    Raises ValueError, naming the setting, for sizes that no model can have.
    """
    if not any(layers):
        return None
    count, used = size_of(config, count_field), size_of(config, used_field)
    if used > count + identities:
        most = f"{count} + {identities}" if identities else f"{count}"
        raise ValueError(f"model: {used_field}={used} in its config: must be at most the number of experts, {most}")
    if normalised is None:
        normalised = bool(config.norm_topk_prob)
    routing = Routing(used, normalised=normalised, identities=identities)
    gate = shared_size is not None
    return MoEConfig(layers, count, size_of(config, size_field), routing, shared_size=shared_size, shared_gate=gate)


def read_corrected_experts(
    config: PretrainedConfig,
    layers: tuple[bool, ...],
    count_field: str = "n_routed_experts",
    shared_field: str | None = "n_shared_experts",
    scale_field: str = "routed_scaling_factor",
    normalised: bool | None = None,
) -> MoEConfig | None:
    """Read experts that are chosen as in DeepSeek-V3 (DeepSeek-AI, 2024); returns None if no layer has any.

    layers, count_field, normalised: as for read_experts
    shared_field: the setting with the number of experts that every token uses; None: there are none
    scale_field: the setting with the factor of the weights
    Raises ValueError, naming the setting, for sizes that no model can have.
    """
    experts = read_shared_experts(config, layers, normalised, count_field, shared_field, scale_field)
    if experts is None:
        return None
    routing = replace(experts.routing, scoring="sigmoid", epsilon=1e-20)
    routing = read_groups(config, experts.count, routing)
    return replace(experts, routing=routing, corrected=True, float32_router=True)


def read_shared_experts(
    config: PretrainedConfig,
    layers: tuple[bool, ...],
    normalised: bool | None = None,
    count_field: str = "n_routed_experts",
    shared_field: str | None = "n_shared_experts",
    scale_field: str = "routed_scaling_factor",
) -> MoEConfig | None:
    """Read experts beside those that every token uses; arguments and errors: as for read_corrected_experts."""
    experts = read_experts(config, layers, "moe_intermediate_size", normalised, count_field=count_field)
    if experts is None:
        return None
    scale = positive(scale_field, getattr(config, scale_field))
    routing = replace(experts.routing, scale=float(scale))
    shared = None if shared_field is None else experts.size * size_of(config, shared_field)
    return replace(experts, routing=routing, shared_size=shared)


def read_groups(config: PretrainedConfig, count: int, routing: Routing) -> Routing:
    """Return a routing among `count` experts with n_group and topk_group, if the class of configs has them."""
    if not hasattr(type(config), "n_group"):  # a config.json may have it nevertheless
        return routing
    groups, used = size_of(config, "n_group"), size_of(config, "topk_group")
    if used > groups:
        raise ValueError(f"model: topk_group={used} in its config: must be at most n_group={groups}")
    if used == groups:
        return routing
    if count % groups or count < 2 * groups:
        raise ValueError(
            f"model: n_group={groups} in its config: must divide {count} experts into groups of two or more"
        )
    if used * (count // groups) < routing.used:
        raise ValueError(
            f"model: topk_group={used} in its config: such groups have fewer experts than"
            f" num_experts_per_tok={routing.used}"
        )
    return replace(routing, groups=groups, used_groups=used)


def sparse_from(config: PretrainedConfig, name: str) -> tuple[bool, ...]:
    """Return which layers have experts: all but the first, as many as the setting says."""
    dense = count_of(config, name)
    return tuple(layer >= dense for layer in range(config.num_hidden_layers))


def sparse_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Return which layers have experts: those that decoder_sparse_step counts and mlp_only_layers does not name."""
    layers, dense = config.num_hidden_layers, config.mlp_only_layers or []
    if as_int(config.num_experts) == 0:
        return (False,) * layers
    step = size_of(config, "decoder_sparse_step")
    if any(as_int(layer) not in range(layers) for layer in dense):
        raise ValueError(f"model: mlp_only_layers={dense!r} in its config: must be layers from 0 to {layers - 1}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def listed_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Return which layers have experts: those that mlp_layer_types calls "sparse"; the others must be "dense"."""
    kinds = of_layers(config, "mlp_layer_types")
    for kind in kinds:
        if kind not in ("sparse", "dense"):
            raise ValueError(f"model: mlp_layer_types={kind!r} in its config: must be 'sparse' or 'dense'")
    return tuple(kind == "sparse" for kind in kinds)
