"""Reads the transform_config of compressed-tensors: rotations, as SpinQuant and QuIP write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nanoinfer.weights.formats.configs.settings import (
    EXPRESSION,
    check_known,
    check_patterns,
    flag_in,
    mapping_in,
    mappings_in,
    wrong,
)
from nanoinfer.weights.formats.rotated.format import Rotation
from nanoinfer.weights.formats.rotated.matrix import Side

TRANSFORM = "transform_config"
FUSED = ("weight_input", "weight_output")  # the checkpoint's weights are rotated already
SCORED = ("q_attn", "k_cache")  # rotated alike, queries and keys have the products that they had
ONLINE = ("input", "output")
DTYPES = tuple(f"torch.{name}" for name in ("float64", "float32", "bfloat16", "float16"))  # rotations here: float32
EMBEDDING = "model.embed_tokens"
LINEAR = "Linear"  # among targets: all matrices


def read_rotations(config: Mapping[str, Any]) -> tuple[Rotation, ...]:
    """Read which inputs and outputs are rotated when matrices multiply.

    Raises ValueError, naming the setting, for what is unknown, and for rotations other than Hadamard's.
    """
    transforms = mapping_in(config, TRANSFORM)
    check_known(transforms, ("config_groups",), inside=TRANSFORM)
    groups = mappings_in(transforms, "config_groups").items()
    return tuple(rotation for name, scheme in groups for rotation in _read_scheme(name, scheme))


def _read_scheme(name: str, scheme: Mapping[str, Any]) -> Iterator[Rotation]:
    inside = f"{TRANSFORM}.config_groups[{name!r}]"
    check_known(scheme, ("type", "apply", "randomize", "requires_grad", "head_dim"), {"precision": DTYPES}, inside)
    places = _apply_of(scheme, inside)
    online = [place for place in places if place["location"] not in FUSED]
    if online and (scheme.get("type") != "hadamard" or flag_in(scheme, "randomize", False)):
        kind = {key: scheme.get(key) for key in ("type", "randomize")}
        raise wrong(inside, kind, "'hadamard' and not randomized, where it is no part of the weights")
    queries, keys = ([_where(place) for place in online if place["location"] == location] for location in SCORED)
    if sorted(queries) != sorted(keys):
        raise wrong(f"{inside}.apply", places, f"the same for {' and '.join(SCORED)}")
    block = scheme.get("head_dim")
    if block is not None and (type(block) is not int or block < 1):
        raise wrong(f"{inside}.head_dim", block, "an integer above 0")
    for place in online:
        if (location := place["location"]) in ONLINE:
            tensor = f"{name}_{location}.weight"
            rotation = Rotation(*_where(place), of_outputs=location == "output", side=Side(tensor, block))
            _check_targets(rotation, inside)
            yield rotation


def _check_targets(rotation: Rotation, inside: str) -> None:
    """Raise ValueError for what is no linear layer: for another class, or the embedding."""
    names = *rotation.targets, *rotation.ignored
    check_patterns(names)
    classes = [name for name in names if name[:1].isupper()]
    if classes or (EXPRESSION not in rotation.targets and rotation.holds(EMBEDDING)):
        raise wrong(f"{inside}.apply", list(names), f"{LINEAR!r}, or the names of linear layers")


def _apply_of(scheme: Mapping[str, Any], inside: str) -> list[Mapping[str, Any]]:
    """Return where a rotation is, each with a known location."""
    places = scheme.get("apply") or []
    if not isinstance(places, list) or not all(isinstance(place, dict) for place in places):
        raise wrong(f"{inside}.apply", places, "a list of mappings")
    for place in places:
        check_known(place, ("targets", "location", "ignore", "inverse"), inside=f"{inside}.apply")
        if place.get("location") not in (*FUSED, *SCORED, *ONLINE):
            raise wrong(f"{inside}.location", place.get("location"), f"one of {', '.join((*FUSED, *SCORED, *ONLINE))}")
    return places


def _where(place: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the patterns of a place's targets, and of what it ignores."""
    return _patterns(place, "targets"), _patterns(place, "ignore")


def _patterns(place: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = place.get(name) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise wrong(f"{TRANSFORM}.{name}", value, "a name or a list of names")
    return tuple(EXPRESSION if one == LINEAR else one for one in names)
