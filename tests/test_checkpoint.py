"""pytest --model MODEL compares a checkpoint of the user's with transformers, as python -m nanoinfer.check does."""

from __future__ import annotations

import pytest

from nanoinfer.check.comparison import CHECKS, TableRow, compare


@pytest.fixture(scope="module")
def compared(pytestconfig: pytest.Config) -> tuple[dict[str, TableRow], str | None]:
    """The rows by their names, and the cause of a difference."""
    model = pytestconfig.getoption("model")
    if model is None:
        pytest.skip("compares a checkpoint of yours: pytest tests/test_checkpoint.py --model FOLDER")
    rows, cause = compare(model)
    return {row.name: row for row in rows}, cause


@pytest.mark.timeout(0)  # a large one loads for minutes
@pytest.mark.parametrize("name", CHECKS)
def test_a_checkpoint_equals_transformers(name: str, compared: tuple[dict[str, TableRow], str | None]) -> None:
    rows, cause = compared
    assert rows[name].is_fine, f"{rows[name].found}; {cause}"
