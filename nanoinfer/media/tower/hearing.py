"""What Qwen2-Audio's tower makes of sounds; transformers' model has it inside its forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def hear(model: Any, features: Tensor, frames: Tensor) -> Tensor:
    """Return embeddings, [sounds, places, hidden_size]; those behind a sound's own mean nothing.

    model: transformers' own; features: [sounds, bins, frames] of a fixed length; frames: [sounds], of each sound
    """
    from transformers.masking_utils import create_bidirectional_mask

    tower = model.audio_tower
    lengths, _ = tower._get_feat_extract_output_lengths(frames)
    places = torch.arange((features.shape[-1] - 2) // 2 + 1, device=features.device)
    seen = (places < lengths[:, None]).long()
    empty = torch.empty(*seen.shape, 1, dtype=tower.dtype, device=features.device)
    mask = create_bidirectional_mask(config=tower.config, inputs_embeds=empty, attention_mask=seen)
    embeddings: Tensor = model.multi_modal_projector(tower(features, attention_mask=mask).last_hidden_state)
    return embeddings
