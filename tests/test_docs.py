"""The pages: each agrees with the code that it speaks of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import make_api


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert make_api.FILE.read_text() == make_api.render(), "run python docs/make_api.py"


def test_a_field_without_a_line_in_its_docstring_is_named() -> None:
    class Half:
        """Two fields.

        told: this one
        """

    with pytest.raises(ValueError, match="untold"):
        make_api.document(Half, {"told": make_api.Typed("int"), "untold": make_api.Typed("int")})
