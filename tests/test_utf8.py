"""Files are read and written as UTF-8, whatever the locale."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoinfer import BUNDLED_MODEL

ROOT = Path(__file__).parent.parent
SOURCES = [ROOT / "bench.py", ROOT / "example.py", *(ROOT / "docs").glob("*.py"), *(ROOT / "nanoinfer").rglob("*.py")]


def opened_as_text(source: str) -> Iterator[ast.Call]:
    """Yield the calls that open a file as text by the locale's encoding, as far as their names tell."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owner = getattr(getattr(call.func, "value", None), "id", "")
        given = [
            argument.value for argument in (*call.args, *(key.value for key in call.keywords)) if is_text(argument)
        ]
        is_encoded = "utf-8" in given or any(key.arg is None for key in call.keywords)
        if name in ("read_text", "write_text", "TextIOWrapper", "fdopen") and not is_encoded:
            yield call
        modes = [value for value in given if value and set(value) <= set("rwxabt+")]
        is_file = isinstance(call.func, ast.Name) or modes
        if name == "open" and owner not in ("os", "gzip") and is_file and not is_encoded and "b" not in "".join(modes):
            yield call
        if owner == "subprocess" and any(key.arg in ("text", "universal_newlines") for key in call.keywords):
            yield call


def is_text(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) and isinstance(argument.value, str)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("open(name)", True),
        ('open(name, "rb")', False),
        ('open(name, encoding="utf-8")', False),
        ('path.open("w")', True),
        ('path.open("ab", buffering=0)', False),
        ("Checkpoint.open(folder)", False),
        ("path.read_text()", True),
        ('path.read_text("utf-8")', False),
        ('path.write_text(text, encoding="utf-8")', False),
        ("path.write_text(text)", True),
        ("os.open(name, os.O_RDONLY)", False),
        ("subprocess.run(command, text=True)", True),
    ],
)
def test_what_counts_as_a_file_of_the_locales_encoding(line: str, found: bool) -> None:
    assert bool(list(opened_as_text(line))) == found


def test_no_file_has_the_locales_encoding() -> None:
    assert len(SOURCES) > 100
    assert [(file, call.lineno) for file in SOURCES for call in opened_as_text(file.read_text("utf-8"))] == []


@pytest.mark.whole  # the one above reads all sources in a fifth of the time
def test_a_job_runs_where_the_locale_knows_ascii_alone(tmp_path: Path) -> None:
    """The texts of the model's files, of the job's lines and of its page are not ASCII."""
    model = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((model / name).read_text("utf-8")) if (model / name).exists() else {}
        (model / name).write_text(json.dumps({**content, "note": "schön 日本"}, ensure_ascii=False), "utf-8")
    (model / "chat_template.jinja").write_text("Grüße, {{ messages[0].content }}", "utf-8")
    rows = [{"id": "é", "prompt": "ROMEO é:"}, {"id": "日", "messages": [{"role": "user", "content": "日本"}]}]
    (tmp_path / "in").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "nanoinfer.batch", tmp_path / "in", tmp_path / "out", "--model", model]
    options = ["--max-tokens", "2", "--report", tmp_path / "page.html", "--num-kvcache-blocks", "32", "--device", "cpu"]
    done = subprocess.run([*command, *options], env=os.environ | locale, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    results = [json.loads(line) for line in (tmp_path / "out").read_text("utf-8").splitlines()]
    assert {row["id"]: len(row["token_ids"]) for row in results} == {"é": 2, "日": 2}
    assert "<html" in (tmp_path / "page.html").read_text("utf-8")
