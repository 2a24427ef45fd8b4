"""What Qwen's towers derive from the numbers of patches in images: computed on the host, so that no one waits."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def derive(tower: Any, grids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a tower takes in host memory, and what it takes on its device, by the names of its arguments.

    grids: [images, 3] of each image's frames, rows and columns of patches, in host memory

    The numbers are those of transformers' functions, which the tower would call.
    """
    from transformers import vision_utils as of  # here, for a model that cannot see does without

    merged = tower.spatial_merge_size
    ends = {"cu_seqlens": of.get_vision_cu_seqlens(grids)}
    placed = {"position_ids": of.get_vision_position_ids(grids, merged)}
    if hasattr(tower, "interpolation_mode"):
        placed["interp_indices"], placed["interp_weights"] = of.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merged,
        )
    if hasattr(tower, "window_size"):
        placed["window_index"], ends["cu_window_seqlens"] = of.get_vision_window_index(
            grids, merged, tower.window_size, tower.patch_size
        )
    return ends, placed
