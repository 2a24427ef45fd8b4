"""Files: the folder of an adapter, as PEFT's save_pretrained makes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanoinfer.hub import find_folder
from nanoinfer.process.torch_state import fresh_torch_state

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"


def read_folder(source: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors of an adapter's folder, or of a Hub id.

    Raises ValueError if there is no such folder, or a file is missing or cannot be read.
    """
    folder = Path(find_folder("source", source, None, [CONFIG_FILE, TENSOR_FILE], kind="adapter"))
    for name in (CONFIG_FILE, TENSOR_FILE):
        if not (folder / name).is_file():
            others = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
            raise ValueError(
                f"source={str(source)!r}: must have {CONFIG_FILE} and {TENSOR_FILE}, as PEFT's save_pretrained writes"
                f" them: it has {others}"
            )
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG_FILE}: cannot be read: {error}") from error
    try:
        with fresh_torch_state():
            return settings, load_file(folder / TENSOR_FILE)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / TENSOR_FILE}: cannot be read: {error}") from error
