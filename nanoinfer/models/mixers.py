"""Mixers: what lets a layer's token see those before it: attention, another that its description names, or both."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from nanoinfer.attention import AttentionBackend
from nanoinfer.layers.delta import GatedDelta, GatedDeltaMixer
from nanoinfer.layers.latent_attention import LatentAttention
from nanoinfer.layers.mamba import Mamba2, Mamba2Mixer
from nanoinfer.layers.mamba_beside_attention import BesideAttention, MambaBesideAttention
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.layers.short_convolution import ShortConvolutionMixer
from nanoinfer.models.attention.parts import over_cache, scoring_of, within_texts
from nanoinfer.models.attention.self_attention import SelfAttention
from nanoinfer.models.description import Description, NoMixer
from nanoinfer.parallel.tensor_parallel import TensorParallel

Mixer: TypeAlias = (
    "SelfAttention | LatentAttention | GatedDeltaMixer | Mamba2Mixer | MambaBesideAttention | ShortConvolutionMixer"
)


def make_mixer(
    model: Description,
    layer: int,
    rotary: RotaryEmbedding | None,
    scales: Tensor | None,
    backend: AttentionBackend,
    tp: TensorParallel,
) -> Mixer:
    """Make the mixer of a layer that has one. rotary, scales, backend: for attention"""
    sizes, prefix = model.mixers[layer], model.names.prefix(layer)
    assert not isinstance(sizes, NoMixer)
    if model.is_encoder:
        return SelfAttention(model, layer, within_texts(model, layer, rotary, tp), tp)
    if model.latent is not None:
        assert rotary is not None
        attends = rotary, scales, scoring_of(model, layer, tp), backend
        output = prefix + model.names_of(layer).o
        return LatentAttention(output, layer, model.latent, model.hidden_size, *attends, tp, model.formats)
    how = model.hidden_size, model.norm_eps, tp, model.formats
    if sizes is None or isinstance(sizes, BesideAttention):
        attention = SelfAttention(model, layer, over_cache(model, layer, rotary, scales, backend, tp), tp)
        if sizes is None:
            return attention
        mamba = Mamba2Mixer(f"{prefix}{sizes.mamba.module}.", layer, sizes.mamba, *how)
        return MambaBesideAttention(sizes, attention, mamba, tp)
    if isinstance(sizes, GatedDelta):
        return GatedDeltaMixer(f"{prefix}{sizes.module}.", layer, sizes, *how)
    if isinstance(sizes, Mamba2):
        return Mamba2Mixer(f"{prefix}{sizes.module}.", layer, sizes, *how)
    return ShortConvolutionMixer(f"{prefix}{sizes.module}.", layer, sizes, tp, model.formats)
