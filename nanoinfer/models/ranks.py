"""Whether ranks can divide a model, and whether a token then has the bits that it has on one rank."""

from __future__ import annotations

from nanoinfer.kernels.linear.cpu.in_parts import ALIGNMENT, AT_ONCE, PARTS
from nanoinfer.layers.mamba import Mamba2
from nanoinfer.layers.mamba_beside_attention import BesideAttention
from nanoinfer.models.description import Description
from nanoinfer.models.reading.settings import find_uneven
from nanoinfer.parallel.group import MAX_RANKS


def check_ranks(model: Description, ranks: int) -> None:
    """Raise ValueError if the model cannot be split over this many ranks."""
    inner = {name: size for name, size in model.intermediate_sizes.items() if model.unit_of(size, ranks) == 1}
    sizes = {"num_attention_heads": model.num_heads, **inner}
    if model.layer_inputs is not None:
        sizes["hidden_size_per_layer_input"] = model.layer_inputs.size
    for mixer in model.mixers:
        sizes |= {} if mixer is None else mixer.divided
    for name, size in sizes.items():
        if size % ranks:
            divisors = ", ".join(str(n) for n in range(1, MAX_RANKS + 1) if size % n == 0)
            raise ValueError(
                f"tensor_parallel_size={ranks}: {name}={size} is not divisible by it; use a divisor: {divisors}"
            )
    for name, count in [*(("num_key_value_heads", count) for count in _kv_counts(model)), *_groups(model).items()]:
        if count % ranks and ranks % count:
            raise ValueError(
                f"tensor_parallel_size={ranks}: {name}={count} neither divides it nor is"
                " divided by it; use a divisor or a multiple"
            )
    if model.qkv_layout != "stacked" and (runs := _runs_of_heads(model)) % ranks:
        raise ValueError(
            f"tensor_parallel_size={ranks}: the checkpoint has queries, keys and values together, in {runs} runs, which"
            " is not divisible by it; use a divisor"
        )
    if ranks > 1 and model.formats.rotations:
        raise ValueError(
            f"tensor_parallel_size={ranks}: must be 1: the transform_config of the model's quantization_config rotates"
            " inputs or outputs, which ranks would share; data_parallel_size takes more processes"
        )
    if model.vocab_size < ranks**2:
        raise ValueError(f"tensor_parallel_size={ranks}: vocab_size={model.vocab_size} is too small; use fewer")


def check_in_order(model: Description, ranks: int, on_cpu: bool) -> None:
    """Raise ValueError if the model cannot give a token the same bits in any company, on this many ranks."""
    if model.is_encoder:
        raise ValueError("deterministic=True: must be False for this model: encoders have no order of sums")
    if model.latent is not None and not on_cpu:
        raise ValueError(
            "deterministic=True: must be False for this model on a GPU: prompts attend to keys made of latents,"
            " and generated tokens to latents, which adds up in another order; device='cpu' does not"
        )
    if ranks > 1:
        check_ranks_in_order(model, ranks, on_cpu)


def check_ranks_in_order(model: Description, ranks: int, on_cpu: bool) -> None:
    """Raise ValueError if this many ranks cannot give the bits that one rank gives."""
    heads = [("num_key_value_heads", count) for count in _kv_counts(model) if model.latent is None]
    gathered = [*heads, ("hidden_size", model.hidden_size), *model.intermediate_sizes.items()]
    fault, uneven = None, next((f"{name}={size}" for name, size in gathered if size % ranks), None)
    if uneven is not None:
        fault = f"{uneven} is not divisible by the number of ranks"
    elif on_cpu and PARTS % ranks:
        fault = f"on the CPU the number of ranks must divide {PARTS}"
    elif on_cpu and (model.score_cap is not None or model.logit_cap is not None):
        fault = "the CPU computes soft caps in another way for another number of heads"
    elif on_cpu and model.has_states:
        fault = "the CPU computes states in another way for another number of heads"
    elif divided := [f"{name}={count}" for name, count in _normed_groups(model).items() if count < ranks]:
        fault = f"{divided[0]}: ranks would add up the squares of one group's norm in another order than one rank"
    elif model.latent is not None:
        fault = "the CPU makes keys of latents in another way for another number of heads"
    elif on_cpu and any(model.sinks):
        fault = "the CPU computes sinks in another way for another number of heads"
    elif on_cpu and model.alibi:
        fault = "the CPU computes ALiBi in another way for another number of heads"
    elif on_cpu:  # it multiplies by parts, and gates a rank's share of a layer's input as a whole
        inputs = [] if model.layer_inputs is None else [("hidden_size_per_layer_input", model.layer_inputs.size)]
        fault = find_uneven(inputs, AT_ONCE * ranks, "on the CPU") or find_uneven(
            [*_outputs(model), ("vocab_size", model.vocab_size)], ALIGNMENT, "on the CPU"
        )
    else:  # the products with experts have the same bits for any share
        outputs = [(name, size) for name, size in _outputs(model) if name != "moe_intermediate_size"]
        for format in model.formats.quantized:
            together = format.outputs_together * ranks
            fault = fault or find_uneven(outputs, together, f"with weights in {format.name}")
    if fault is not None:
        raise ValueError(
            f"deterministic=True with tensor_parallel_size={ranks}: {fault}; use another number of ranks,"
            " such as one, and data_parallel_size for more processes"
        )


def _runs_of_heads(model: Description) -> int:
    """Return in how many runs one tensor has queries, each with its keys and values."""
    return 4 if model.qkv_layout == "quarters" else min(_kv_counts(model))


def _groups(model: Description) -> dict[str, int]:
    """Return how many groups the heads of Mamba2 have, as configs name it; a rank has some of them, or part of one."""
    return {mixer.groups_field: mixer.groups for mixer in _mamba(model)}


def _normed_groups(model: Description) -> dict[str, int]:
    """Return those of _groups which a norm takes, each by itself."""
    return {mixer.groups_field: mixer.groups for mixer in _mamba(model) if mixer.norm is not None}


def _mamba(model: Description) -> list[Mamba2]:
    """Return the Mamba2 of all layers that have it, alone or beside attention."""
    mixers = (mixer.mamba if isinstance(mixer, BesideAttention) else mixer for mixer in model.mixers)
    return [mixer for mixer in mixers if isinstance(mixer, Mamba2)]


def _kv_counts(model: Description) -> list[int]:
    """Return how many heads of keys layers have, each number once."""
    return list(dict.fromkeys(heads.count for heads in model.attending))


def _outputs(model: Description) -> list[tuple[str, int]]:
    """Return how many outputs the matrices of the layers have."""
    outputs = [("hidden_size", model.hidden_size), *model.intermediate_sizes.items()]
    for heads in dict.fromkeys(model.attending):
        outputs.append(("num_attention_heads * head_dim", model.num_heads * heads.dim))
        outputs.append(("num_key_value_heads * head_dim", heads.count * heads.dim))
        if heads.value_dim is not None:
            outputs.append(("num_key_value_heads * v_head_dim", heads.count * heads.value_dim))
    if model.layer_inputs is not None:
        outputs.append(("hidden_size_per_layer_input", model.layer_inputs.size))
    return outputs
