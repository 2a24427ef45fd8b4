"""Checkpoints whose tokenizers know the markers of thoughts: the bundled model with some of its tokens renamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from nanoinfer import BUNDLED_MODEL

THINK = ("<think>", "</think>")
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
GEMMA = ("<|channel>", "<channel|>")


def write_thinker(folder: Path, names: tuple[str, ...], is_special: bool = False, template: str | None = None) -> str:
    """Copy the bundled model to a folder; its last tokens get these names. Returns the folder.

    is_special: whether texts leave them out; template: the chat template in place of its own
    """
    shutil.copytree(BUNDLED_MODEL, folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    model = content["model"]
    spelled = {number: token for token, number in model["vocab"].items()}
    for number, name in zip(range(len(spelled) - 1, 0, -1), names, strict=False):
        old = spelled[number]
        del model["vocab"][old]
        model["vocab"][name] = number
        model["merges"] = [
            merge for merge in model["merges"] if "".join(_pair(merge)) != old and old not in _pair(merge)
        ]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": number, "content": name, "special": is_special, **flags})
    file.write_text(json.dumps(content), "utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    return str(folder)


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge
