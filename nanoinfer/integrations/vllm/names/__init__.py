"""Puts nanoinfer under vLLM's names, for programs that were written for vLLM and cannot be edited.

    python -m nanoinfer.integrations.vllm script.py its arguments
    python -m nanoinfer.integrations.vllm -m module its arguments

or import nanoinfer.integrations.vllm.names before such a program's own modules. `import vllm` then finds our names, in
this process and in those that it starts. Programs that ask which version of vLLM is installed hear of 0.10.1, whose
defaults these names have.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

SITE = str(Path(__file__).parent / "site")
"""The folder that holds the package vllm, and what Python's importlib.metadata tells of it."""


def install() -> None:
    """Put the package vllm last on Python's path, here and for processes that start later.

    Raises ImportError if another package vllm is installed.
    """
    spec = find_spec("vllm")
    origin = spec.origin if spec is not None else None  # None: a mere folder of this name, after which ours comes
    if origin is not None and not origin.startswith(SITE):
        raise ImportError(
            f"vllm is installed, at {origin}: programs would find it under its names, not nanoinfer; use an environment"
            " without it"
        )
    if SITE not in sys.path:
        sys.path.append(SITE)
    before = os.environ.get("PYTHONPATH")
    if not before:
        os.environ["PYTHONPATH"] = SITE
    elif SITE not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = before + os.pathsep + SITE


install()
