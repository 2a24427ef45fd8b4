"""Runs a script or a module that imports vllm: see nanoinfer.integrations.vllm."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from nanoinfer.integrations.vllm.names import install

USAGE = "usage: python -m nanoinfer.integrations.vllm [-m] SCRIPT_OR_MODULE [ARGUMENT ...]"


def main() -> None:
    """Run what the command line names, as Python itself would."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    sys.argv = arguments[1:] if is_module else arguments
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.exit(USAGE)
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        install()  # for a vllm may lie beside the script
        runpy.run_path(sys.argv[0], run_name="__main__")
