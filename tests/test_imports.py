"""Imports run one way: each room of nanoinfer/ imports only rooms that docs/tour.md puts further down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanoinfer"
FILES = sorted(file for file in PACKAGE.rglob("*.py") if "bundled" not in file.parts)


def floors() -> dict[str, int]:
    """Each room's floor, counted from the top, as the tour lists them: a line a floor, in the block of the section."""
    section = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8").split("## Imports run one way")[1]
    block = re.search(r"\n\n((?:    .+\n)+)", section)
    assert block is not None
    return {room: floor for floor, line in enumerate(block[1].splitlines()) for room in line.split()}


FLOORS = floors()


def room_of(module: str) -> str:
    """The room of nanoinfer.ROOM or nanoinfer.ROOM.MODULE; "nanoinfer" for itself and for names that it has."""
    room = module.split(".")[1] if "." in module else module
    return room if room in FLOORS else "nanoinfer"


def room_of_file(file: Path) -> str:
    """The room of a file, which is a folder or a module of the package's own."""
    room = file.relative_to(PACKAGE).with_suffix("").parts[0]
    return "nanoinfer" if room == "__init__" else room


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the module of each import of nanoinfer's, wherever it stands; those for types count, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names if name.name.split(".")[0] == "nanoinfer")
        elif isinstance(node, ast.ImportFrom) and node.module == "nanoinfer":
            yield from ((node.lineno, f"nanoinfer.{name.name}") for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoinfer."):
            yield node.lineno, str(node.module)


def upward(room: str, source: str) -> list[str]:
    """The imports in a room's source that do not run down."""
    found = [(line, room_of(module)) for line, module in imported(ast.parse(source))]
    return [f"line {line}: {other}" for line, other in found if other != room and FLOORS[other] <= FLOORS[room]]


def test_the_tour_has_a_floor_for_every_room() -> None:
    assert {room_of_file(file) for file in FILES} == FLOORS.keys()


def test_imports_run_down() -> None:
    found = {
        file.relative_to(PACKAGE).as_posix(): upward(room_of_file(file), file.read_text(encoding="utf-8"))
        for file in FILES
    }
    assert {file: imports for file, imports in found.items() if imports} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "from nanoinfer.engine.scheduler import Scheduler",
        "def late():\n    import nanoinfer.llm",
        "if TYPE_CHECKING:\n    from nanoinfer import llm",
    ],
)
def test_an_import_that_runs_up_is_found(statement: str) -> None:
    assert len(upward("kernels", statement)) == 1
    assert upward("integrations", statement) == []
