"""The report of a batch file's job: a page that shows the run, drawn by matplotlib or by hand."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import whole_only
from test_batch import SMALL, write

from nanoinfer import BUNDLED_MODEL, RequestOutput, SampleOutput
from nanoinfer.batch import run
from nanoinfer.batch.errors import MOST_KEPT, MOST_KINDS, OTHERS, Errors, kind_of
from nanoinfer.batch.lines import MOST_OF_REASON, Line, LineError
from nanoinfer.batch.report.report import (
    MOST_BINS,
    MOST_OF_ID,
    MOST_OF_PROMPT,
    MOST_OF_TEXT,
    MOST_RESULTS,
    RunReport,
)
from nanoinfer.engine.results.step_result import StepResult


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody installed matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def report(tmp_path: Path) -> RunReport:
    return RunReport(str(tmp_path / "page.html"))


def page_of(report: RunReport, errors: Errors | None = None) -> str:
    """The page, of which every tag is closed, and which needs no network."""
    report.write("a run", "done", errors or Errors())
    page = Path(report._file).read_text(encoding="utf-8")
    parsed(page)
    assert "http" not in page
    return page


def parsed(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.split("\n", 1)[1].replace('<meta charset="utf-8">', ""))


def rows_of(page: str, table: int) -> list[list[str]]:
    """The texts of a table's rows, but for its titles."""
    rows = list(parsed(page).iter("table"))[table].findall("tr")[1:]
    return [[cell.text or "" for cell in row] for row in rows]


def take_steps(report: RunReport, seconds: list[float]) -> None:
    """Five rows take a step at each of these times."""
    for ready_at in seconds:
        report.step(StepResult([], num_decode_tokens=5, ready_at=ready_at, num_running=5, blocks_used=0.5))


def add_result(report: RunReport, line_id: str | int, prompt: str | None, text: str) -> None:
    sample = SampleOutput(
        index=0, text=text, token_ids=[1, 2, 3], finish_reason="length", stop_reason=None, logprobs=None,
        kept_tokens=None, routed_experts=None,
    )  # fmt: skip
    output = RequestOutput(
        sample, request_id=0, prompt=prompt, prompt_token_ids=[5], prompt_logprobs=None, samples=[sample]
    )
    report.add(Line(1, line_id, "plain", {}), output)


def error(reason: str, number: int = 1) -> LineError:
    return LineError(Line(number, None, "plain", {}), reason)


class TestRun:
    @pytest.mark.parametrize("how", ["matplotlib", "by_hand"])
    def test_a_page_shows_it(self, how: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        if how == "by_hand":
            request.getfixturevalue(how)
        else:
            pytest.importorskip("matplotlib", reason="axes need matplotlib")
        rows = [{"id": i, "prompt": "ROMEO:", "max_tokens": 6, "ignore_eos": True} for i in range(5)]
        file = write(tmp_path / "in", [*rows, {"id": "<b>"}])
        run(file, tmp_path / "out", BUNDLED_MODEL, report=tmp_path / "page.html", **SMALL)
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        for title in ("Tokens per second", "Running rows", "KV-cache blocks in use", "Prompts by", "Samples by"):
            assert title in page
        assert "5 of 6 lines" in page
        assert "line 6: has no prompt" in page
        assert sorted(row[0] for row in rows_of(page, 0)) == ["0", "1", "2", "3", "4"]
        assert "http" not in page
        if how == "by_hand":
            assert "4 to 7: 5<" in page  # five samples have six tokens
        else:
            assert {"tokens/s", "rows", "%", "prompts", "samples"} <= {text.text for text in parsed(page).iter("text")}

    def test_a_long_one_takes_no_more_room(self, report: RunReport, by_hand: None) -> None:
        take_steps(report, [float(second) for second in range(10_000)])
        page = page_of(report)
        assert page.count("<rect") < 3 * MOST_BINS + 3
        numbers = [float(number) for number in re.findall(r"s: ([\d.]+)</title>", page)]
        count = len(numbers) // 3
        rates, rows, blocks = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        assert rates[:-1] == pytest.approx([5] * (count - 1), rel=0.02)  # the last stretch has not ended
        assert (set(rows), set(blocks)) == ({5.0}, {50.0})

    def test_it_does_not_look_idle_between_long_steps(self, report: RunReport, by_hand: None) -> None:
        take_steps(report, [0.7 * step for step in range(50)])
        rows = re.findall(r"s: ([\d.]+)</title>", page_of(report).split("Running rows")[1].split("</svg>")[0])
        assert len(rows) > 10
        assert set(rows) == {"5"}

    def test_names_may_hold_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        """As each name that is not ASCII, where the locale is C."""
        report = RunReport(str(tmp_path / "\udcff.html"))
        report.write("in\udcc3\udca9.jsonl", "done", Errors())
        assert r"<title>in\udcc3\udca9.jsonl</title>" in (tmp_path / "\udcff.html").read_text("utf-8")


class TestAxes:
    @pytest.fixture(autouse=True)
    def matplotlib(self) -> None:
        pytest.importorskip("matplotlib", reason="axes need matplotlib")

    @pytest.mark.parametrize(
        ("seconds", "name", "last"),
        [(100, "seconds", "80"), *whole_only([(1200, "minutes", "20"), (36_000, "hours", "10")])],
    )
    def test_they_have_units_and_numbers(self, seconds: int, name: str, last: str, report: RunReport) -> None:
        take_steps(report, [seconds / 1000 * step for step in range(1000)])
        add_result(report, 1, "ROMEO:", "But soft")
        (svg,) = parsed(page_of(report)).iter("svg")
        texts = [text.text for text in svg.iter("text")]
        assert texts.count(f"{name} since the first step") == 3
        assert {"tokens/s", "rows", "%", "prompts", "samples", "tokens", last} <= {*texts}
        assert "KV-cache blocks in use: at most 50 %" in texts

    def test_one_run_has_one_page(self, report: RunReport) -> None:
        take_steps(report, [0.1, 0.2, 0.3])
        page = page_of(report)
        assert page == page_of(report)
        names = re.findall(r'\bid="(.*?)"', page)
        assert len(names) == len({*names}) > 0

    def test_a_users_own_settings_neither_count_nor_change(self, report: RunReport) -> None:
        import matplotlib

        take_steps(report, [0.1, 0.2, 0.3])
        expected = page_of(report)
        with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "black", "svg.fonttype": "path"}):
            assert page_of(report) == expected
            assert matplotlib.rcParams["text.usetex"]

    def test_one_that_is_broken_is_as_none(self, report: RunReport, monkeypatch: pytest.MonkeyPatch) -> None:
        from matplotlib.figure import Figure

        def fail(*_: object, **__: object) -> None:
            raise AttributeError("module 'numpy' has no attribute 'product'")

        monkeypatch.setattr(Figure, "savefig", fail)
        take_steps(report, [0.1, 0.2, 0.3])
        assert page_of(report).count("<figcaption>") == 3

    def test_a_run_without_steps_has_none(self, report: RunReport) -> None:
        assert "<svg" not in page_of(report)


class TestResults:
    def test_the_page_has_the_beginnings_of_the_first(self, report: RunReport) -> None:
        for line in range(2 * MOST_RESULTS):
            add_result(report, f"{line} {'i' * 1000}", "p" * 1000, "t" * 1000)
        rows = rows_of(page_of(report), 0)
        begins = [f"{'p' * MOST_OF_PROMPT}...", f"{'t' * MOST_OF_TEXT}..."]
        ids = [f"{line} {'i' * (MOST_OF_ID - 2)}..." for line in range(MOST_RESULTS)]
        assert rows == [[line_id, *begins, "3", "length"] for line_id in ids]

    def test_any_text_can_be_shown(self, report: RunReport) -> None:
        add_result(report, "<b>", "a & \ud800 \x00\x1b\n", "</td><script>\udc00 é🙂")
        (row,) = rows_of(page_of(report), 0)
        assert row[:3] == ["<b>", "a & \\ud800 \\x00\\x1b\n", "</td><script>\\udc00 é🙂"]

    def test_tokens_stand_where_there_is_no_text(self, report: RunReport) -> None:
        add_result(report, 1, None, "")
        assert rows_of(page_of(report), 0) == [["1", "[5]", "[1, 2, 3]", "3", "length"]]


class TestErrors:
    @pytest.mark.parametrize(
        ("kind", "reasons"),
        [
            ("prompt has ... tokens", ["prompt has 100 tokens: must be fewer", "prompt has 2,000 tokens: must be"]),
            ("prompt['messages'] has ... tokens", ["prompt['messages'] has 70 tokens: must be fewer"]),
            (
                "prompt['messages'] has ...",
                ["prompt['messages'] has {'role': 'x'}: no", "prompt['messages'] has 5"],
            ),
            ("is no JSON", ["is no JSON: Expecting value: line 1", "is no JSON: Extra data: line 1 column 5"]),
            ("temperature=...", ["temperature=-1", "temperature='a: b': no"]),
            (
                "temperature=...: must be a number, at least ...",
                ["temperature=-1: must be a number, at least 0", "temperature=': must ': must be a number, at least 2"],
            ),
            (
                "is ...: must be a JSON object",
                ["is [1, {'a: b': 2}]: must be a JSON object", "is 'text': must be a JSON object"],
            ),
            ("an earlier line has its id ...", ["an earlier line has its id 'a'", "an earlier line has its id 7"]),
            ("... has no chat template", ["'/x' has no chat template: give", '"it\'s: y" has no chat template: give']),
            ("... has no tool ...", [r"'a \'b\' has' has no tool 'c'", "'' has no tool 'd': no"]),
            ("unknown argument ...", ["unknown argument 'max_new_tokens': did you mean 'max_tokens'"]),
            ("a batch file's results come whole", ["a batch file's  results\ncome whole"]),
        ],
    )
    def test_a_kind_is_what_its_reasons_share(self, kind: str, reasons: list[str]) -> None:
        assert {kind_of(reason) for reason in reasons} == {kind}

    def test_the_page_counts_them_and_shows_the_first_of_each(self, report: RunReport) -> None:
        errors = Errors()
        for number, reason in enumerate(["is no JSON: a", "prompt has 70 tokens: <b>", "prompt has 80 tokens: c"], 1):
            errors.add(error(reason, number))
        assert str(errors) == "errors by kind: 2 prompt has ... tokens; 1 is no JSON"
        assert rows_of(page_of(report, errors), 0) == [
            ["prompt has ... tokens", "2", "line 2: prompt has 70 tokens: <b>"],
            ["is no JSON", "1", "line 1: is no JSON: a"],
        ]

    def test_what_is_kept_has_a_limit(self) -> None:
        errors, count = Errors(), 1000
        for number in range(count):
            errors.add(error(f"{chr(0x4E00 + number)} is wrong", number))
        kinds = [*errors.kinds()]
        assert len(kinds) == MOST_KINDS + 1
        assert (kinds[0].name, kinds[0].num_errors) == (OTHERS, count - MOST_KINDS)
        assert len(errors) == count
        assert len(errors.messages) == MOST_KEPT

    def test_a_message_has_a_limit(self, report: RunReport) -> None:
        errors, reason = Errors(), "unknown argument '" + "k" * 100_000
        errors.add(error(reason))
        assert errors.messages == [f"line 1: {reason[:MOST_OF_REASON]}..."]
        assert len(page_of(report, errors)) < 10_000
