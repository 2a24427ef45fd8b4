"""The pages agree with the code that they describe."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import make_api
import make_speed
from make_speed import PANELS, Figures, fill

from nanoinfer import BUNDLED_MODEL, LLM, BeamSearchParams, SamplingParams


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert make_api.FILE.read_text() == make_api.render(), "run python docs/make_api.py"


def test_a_field_without_a_line_in_its_docstring_is_named() -> None:
    class Half:
        """Two fields.

        told: this one
        """

    with pytest.raises(ValueError, match="untold"):
        make_api.document(Half, {"told": make_api.Typed("int"), "untold": make_api.Typed("int")})


README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]*)(?:#([\w-]+))?\)")


def links(page: Path) -> list[tuple[str, Path]]:
    """A page's links: the text, and the file."""
    return [(text.replace("\\", ""), page.parent / target) for text, target, _ in LINK.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_file_is_there(page: Path) -> None:
    assert [str(file) for _, file in links(page) if not file.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_heading_is_there(page: Path) -> None:
    for _, target, heading in LINK.findall(page.read_text()):
        if heading:
            text = (page.parent / target if target else page).read_text()
            titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_the_readme_leads_to_every_page() -> None:
    assert {page.resolve() for page in PAGES} - {file.resolve() for _, file in links(README)} == {README}


def test_a_clone_comes_from_the_projects_address() -> None:
    urls = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.urls]")[1].split("\n\n")[0]
    address, *others = re.findall(r'^\w+ = "(.*)"$', urls, flags=re.MULTILINE)
    assert len(others) == 3
    assert all(other.startswith(f"{address}/") for other in others)
    for page in (README, ROOT / "CONTRIBUTING.md"):
        assert f"    git clone {address}\n    cd {Path(address).name}\n" in page.read_text(encoding="utf-8")


def names_in(file: Path) -> set[str]:
    """Return the names that a file defines: NAME, or CLASS.NAME for methods and attributes."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        names |= defined(node)
        if isinstance(node, ast.ClassDef):
            members = [*node.body, *(line for line in ast.walk(node) if isinstance(line, (ast.Assign, ast.AnnAssign)))]
            names |= {f"{node.name}.{name}" for member in members for name in defined(member)}
    return names


def defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {ast.unparse(target).removeprefix("self.") for target in targets}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_function_is_in_its_file(page: Path) -> None:
    """A link's text is "FOLDER/FILE.py", or "FOLDER/FILE.py: NAME"."""
    for text, file in links(page):
        if match := re.fullmatch(r"([\w/]+\.py)(?:: ([\w.]+))?", text):
            assert file.as_posix().endswith(match[1]), text
            assert match[2] is None or match[2] in names_in(file), f"{page.name}: {text}"


TOUR = (DOCS / "tour.md").read_text(encoding="utf-8")
TOPICS = ["Memory", "Scheduling", "Device", "Weights", "Ranks", "Failures", "Clients"]


def section_of(title: str) -> str:
    """A section of the tour, with the sections in it."""
    return TOUR.split(f"## {title}\n")[1].split("\n## ")[0]


def cells(text: str) -> list[list[str]]:
    """The cells of the tables in a text, row by row, without the rows of dashes."""
    rows = re.findall(r"^\| (.*) \|$", text, flags=re.MULTILINE)
    return [row.split(" | ") for row in rows]


def test_the_tour_has_questions_by_topic() -> None:
    topics = dict(topic.split("\n", maxsplit=1) for topic in section_of("Where is it?").split("### ")[1:])
    assert [*topics] == TOPICS
    rows = {name: cells(table)[1:] for name, table in topics.items()}
    questions = [question for table in rows.values() for question, _, _ in table]
    assert len(questions) == len(set(questions))
    assert [question for question in questions if not question.endswith("?")] == []


def test_each_question_of_the_tour_leads_to_named_places() -> None:
    for question, _, place in cells(section_of("Where is it?")):
        if question != "question":
            named = [text for text, _, _ in LINK.findall(place) if re.fullmatch(r"[\w/\\]+\.py: [\w.\\]+", text)]
            assert named, question
            assert LINK.sub("", place).strip(", ") == "", question


@pytest.mark.parametrize(
    "recipe",
    [
        "An option of LLM",
        "A sampling setting that changes logits",
        "A sampling setting that leaves tokens out of the draw",
        "A weight format",
        "A mixer",
        "An integration",
    ],
)
def test_the_tour_has_a_recipe(recipe: str) -> None:
    """Numbered steps, of which some name code, and one names a test."""
    steps = re.split(
        r"^\d\. ", section_of("Recipes").split(f"### {recipe}\n")[1].split("\n### ")[0], flags=re.MULTILINE
    )
    assert len(steps) > 3
    assert sum("nanoinfer/" in step for step in steps) > 1
    assert any("tests/" in step for step in steps)


def test_the_tour_says_for_every_file_which_tests_to_run() -> None:
    section = (DOCS / "tour.md").read_text().split("## Which tests to run")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.*|an .*) \|$", section, flags=re.MULTILINE)]
    paths = [path for changed, _ in rows for path in re.findall(r"`([^`]+)`", changed)]
    named = {test for _, tests in rows for test in re.findall(r"`([^`]+)`", tests)}
    package = ROOT / "nanoinfer"
    files = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if file.parent.name != "shakespeare-qwen3"
    }
    assert len(paths) == len(set(paths))
    assert [file for file in files if not any(file.startswith(path) for path in paths)] == []
    assert [path for path in paths if not any(file.startswith(path) for file in files)] == []
    assert named == {file.name for file in (ROOT / "tests").glob("test_*.py")}


def count_lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def test_the_afternoon_is_as_long_as_the_tour_says() -> None:
    """A count may be off by a tenth or 20 lines, a sum by a twentieth, so that a commit may add some lines."""
    page = (DOCS / "tour.md").read_text()
    rows = re.findall(r"^\| \[[\w/.]+\]\((\S+)\) \| (\d+) \|", page, flags=re.MULTILINE)
    files = [DOCS / target for target, _ in rows]
    assert len(files) > 10
    for file, (_, said) in zip(files, rows, strict=True):
        assert count_lines([file]) == pytest.approx(int(said), rel=0.1, abs=20), file
    package = [file for file in (ROOT / "nanoinfer").rglob("*.py") if "bundled" not in file.parts]
    path, whole = (
        int(said.replace(",", "")) for said in re.findall(r"about ([\d,]+)", page.split("## An afternoon")[1])
    )
    assert count_lines(files) == pytest.approx(path, rel=0.05)
    assert count_lines(package) == pytest.approx(whole, rel=0.05)


def test_the_tables_of_speed_are_what_the_figures_say() -> None:
    page = (DOCS / "speed.md").read_text()
    assert page == fill(page, Figures.read().tables()), "run python docs/make_speed.py"


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="0 places for the table 'runs'"):
        fill("no place", {"runs": "a table"})


def test_the_picture_shows_what_the_figures_say(tmp_path: Path) -> None:
    """Compare only the picture's text, which has every drawn figure: matplotlib versions draw a little differently."""
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")

    def text_of(file: Path) -> list[str]:
        return [element.text or "" for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]

    figures = Figures.read()
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    figures.draw(first)
    figures.draw(second)
    assert first.read_bytes() == second.read_bytes()
    shown = text_of(DOCS / "speed.svg")
    assert shown == text_of(first), "run python docs/make_speed.py"
    for arguments in PANELS:
        drawn = figures.by_system(arguments)
        assert len(drawn) > 1
        assert {f"{run['tokens_per_second']:,.0f}" for run in drawn.values()} <= set(shown)


def test_figures_take_a_run_from_benchs_file() -> None:
    figures = Figures.read()
    assert figures.text() == (DOCS / "figures.json").read_text()
    result = {
        "command": "--workload stream --config 8b --json run.json --repeats 2", "tokens_per_second": 254.6,
        "seconds": 2.0123, "floor_seconds": 1.826, "fraction_of_floor": 0.907, "repeats": [2.01, 2.02],
    }  # fmt: skip
    figures.add("ours", result)
    assert figures.by_system("8b --workload stream")["nanoinfer"] == {
        "arguments": "8b --workload stream", "setup": "ours", "tokens_per_second": 255, "seconds": 2.01,
        "floor_seconds": 1.83, "fraction_of_floor": 0.91, "repeats": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"setup 'theirs': figures.json has 'ours'"):
        figures.add("theirs", result)
    with pytest.raises(ValueError, match=r"command '--model here': must have --config"):
        figures.add("ours", {**result, "command": "--model here"})


def test_help_of_figures_writes_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Path, "write_text", lambda *args: pytest.fail("a file is written"))
    monkeypatch.setattr(sys, "argv", ["make_speed.py", "--help"])
    with pytest.raises(SystemExit) as exited:
        make_speed.main()
    assert exited.value.code == 0
    assert "run.json" in capsys.readouterr().out


def test_the_command_of_the_figures_says_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("figures.json", "speed.md"):
        shutil.copy(DOCS / name, tmp_path)
    monkeypatch.setattr(make_speed, "DOCS", tmp_path)
    monkeypatch.setattr(Figures, "draw", lambda _, file: file.write_text("drawn", "utf-8"))
    monkeypatch.setattr(sys, "argv", ["make_speed.py"])
    make_speed.main()
    told = capsys.readouterr()
    assert not told.out
    steps = told.err.splitlines()
    assert [step.split()[-1] for step in steps] == ["docs/figures.json", "docs/speed.md", "docs/speed.svg"]
    assert {file.name for file in tmp_path.iterdir()} == {"figures.json", "speed.md", "speed.svg"}


def test_only_runs_on_one_machine_stand_beside_each_other() -> None:
    figures = Figures.read()
    figures.setups["elsewhere"] = {**figures.setups["ours"], "machine": "a machine of its own"}
    figures.runs.append({**figures.by_system("8b")["nanoinfer"], "setup": "elsewhere"})
    assert figures.by_system("8b").keys() == {"nanoinfer"}
    with pytest.raises(ValueError, match=r"arguments '9b': figures.json has no run of nanoinfer"):
        figures.by_system("9b")


def test_every_figure_says_when_and_where_it_was_measured() -> None:
    figures = Figures.read()
    entries = [*figures.runs, *figures.others, *figures.archive]
    for entry in entries:
        setup = figures.setup(entry)
        assert all(setup[name] for name in ("system", "commit", "date", "machine", "versions"))
    assert {entry["setup"] for entry in entries} == figures.setups.keys()


ELSEWHERE = (DOCS / "coming-from-elsewhere.md").read_text(encoding="utf-8")
TRANSLATIONS = re.findall(r"^\|[^|]*\|[^|]*\| `([^|]*)` \|$", ELSEWHERE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def namespace() -> Iterator[dict[str, object]]:
    """The names that the translations use."""
    with LLM(BUNDLED_MODEL) as llm:
        prompts, params = ["ROMEO:\n"], SamplingParams(max_tokens=4, logprobs=1, n=2)
        output = llm.generate(prompts, params, use_tqdm=False)[0]
        yield {
            "llm": llm,
            "prompts": prompts,
            "params": params,
            "ids": [30, 31],
            "chat": [{"role": "user", "content": "Good morrow"}],
            "output": output,
            "token_id": output["token_ids"][0],
            "SamplingParams": SamplingParams,
            "BeamSearchParams": BeamSearchParams,
        }


def test_the_table_has_translations() -> None:
    assert len(TRANSLATIONS) >= 14


# One statement closes the LLM, so it comes last.
@pytest.mark.parametrize("statement", sorted(TRANSLATIONS, key="llm.close()".__eq__))
def test_what_the_table_tells_to_write_works(statement: str, namespace: dict[str, object]) -> None:
    exec(statement, namespace)
