"""The report of a batch file's job: a page that shows the run, drawn by matplotlib, or told in words."""

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
from nanoinfer.batch.lines.errors import MOST_KEPT, MOST_KINDS, OTHERS, Errors, kind_of
from nanoinfer.batch.lines.requests import MOST_OF_REASON, Line, LineError
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
        index=0, text=text, reasoning=None, answer=text, token_ids=[1, 2, 3], finish_reason="length", stop_reason=None,
        logprobs=None, kept_tokens=None, entropies=None, routed_experts=None, hidden_states=None,
    )  # fmt: skip
    output = RequestOutput(
        sample, request_id=0, prompt=prompt, prompt_token_ids=[5], prompt_logprobs=None, samples=[sample]
    )
    report.add(Line(1, line_id, "plain", {}), output)


def error(reason: str, number: int = 1) -> LineError:
    return LineError(Line(number, None, "plain", {}), reason)


class TestRun:
    @pytest.mark.parametrize("is_installed", [True, False])
    def test_a_page_shows_it(self, is_installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        if is_installed:
            pytest.importorskip("matplotlib", reason="pictures need matplotlib")
        else:
            monkeypatch.setitem(sys.modules, "matplotlib", None)
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
        assert "Samples by their tokens: 5 samples of 4 to 7 tokens" in page  # each has six
        texts = {text.text for text in parsed(page).iter("text")}
        assert ({"tokens/s", "rows", "%", "prompts", "samples"} <= texts) == is_installed
        assert ("pip install matplotlib" in page) != is_installed

    def test_a_long_one_takes_no_more_room(self, report: RunReport) -> None:
        take_steps(report, [float(second) for second in range(10_000)])
        rates, rows, blocks = (chart.values for chart in report.charts())
        assert len(rates) == len(rows) == len(blocks) <= MOST_BINS
        assert rates[:-1] == pytest.approx([5] * (len(rates) - 1), rel=0.02)  # the last stretch has not ended
        assert (set(rows), set(blocks)) == ({5.0}, {50.0})

    def test_it_does_not_look_idle_between_long_steps(self, report: RunReport) -> None:
        take_steps(report, [0.7 * step for step in range(50)])
        _, rows, _ = report.charts()
        assert len(rows.values) > 10
        assert set(rows.values) == {5.0}

    def test_names_may_hold_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        """As each name that is not ASCII, where the locale is C."""
        report = RunReport(str(tmp_path / "\udcff.html"))
        report.write("in\udcc3\udca9.jsonl", "done", Errors())
        assert r"<title>in\udcc3\udca9.jsonl</title>" in (tmp_path / "\udcff.html").read_text("utf-8")


class TestWords:
    """What stands on a page that matplotlib does not draw."""

    def shown(self, report: RunReport) -> list[str | None]:
        """The items and paragraphs behind the summary."""
        page = page_of(report)
        assert not {"<svg", "<figure"} & {*re.findall(r"<\w+", page)}
        texts = [element.text for element in parsed(page).iter() if element.tag in ("li", "p")]
        assert texts[0] == "done"
        return texts[1:]

    def test_they_say_what_the_pictures_would_show_and_how_to_get_these(
        self, report: RunReport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        take_steps(report, [0.1 * step for step in range(100)])
        for line_id in range(20):
            add_result(report, line_id, "ROMEO:", "But soft")
        speed, *words, install = self.shown(report)
        assert re.fullmatch(r"Tokens per second, of prompts and outputs: at most \d+ tokens/s", str(speed))
        assert words == [
            "Running rows: at most 5 rows",
            "KV-cache blocks in use: at most 50 %",
            "Prompts by their tokens: 20 prompts of 1 to 1 tokens",
            "Samples by their tokens: 20 samples of 2 to 3 tokens",
        ]
        assert str(install).startswith(
            "To see pictures here, install a matplotlib that works: pip install matplotlib ("
        )

    def test_a_matplotlib_that_is_broken_is_as_none(self, report: RunReport, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("matplotlib", reason="one that is broken is there")
        from matplotlib.figure import Figure

        def fail(*_: object, **__: object) -> None:
            raise AttributeError("module <numpy> has no attribute 'product'")

        monkeypatch.setattr(Figure, "savefig", fail)
        take_steps(report, [0.1, 0.2, 0.3])
        *words, install = self.shown(report)
        assert len(words) == 3
        assert str(install).endswith("pip install matplotlib (module <numpy> has no attribute 'product').")

    def test_a_run_without_steps_has_neither_words_nor_pictures(self, report: RunReport) -> None:
        assert self.shown(report) == []


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
