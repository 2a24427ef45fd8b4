"""Every example of every page runs as it stands: a block that is marked python or shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"\n\n    \S")
PACKAGES = {"peft": "trl", "ray": "ray", "trl": "trl"}
"""Maps a package that examples import to the extra that has it."""
NEED_NO_FIRST_EXAMPLE = {"README.md", "add-a-model.md"}  # they begin with commands, and with questions


def learns(printed: str) -> None:
    """Check the trainer's rewards: a letter's share of the text, at first about 0.06, as in any English text."""
    rewards = [float(line.split()[1]) for line in printed.splitlines() if re.match(r"\d+ 0\.", line)]
    assert len(rewards) == 16
    assert max(rewards[:2]) < 0.08
    assert min(rewards[-2:]) > 0.12


def twice_the_same(printed: str) -> None:
    """Check that two ranks have printed the same tokens."""
    first, second = re.findall(r"\[[\d, ]+\]", printed)
    assert first == second


def one_number_twice(printed: str) -> None:
    """Check that two numbers are equal, up to the last bits, which only a GPU promises."""
    first, second = map(float, printed.split())
    assert first == pytest.approx(second, abs=1e-4)


def kept_close(printed: str) -> None:
    """Check that the adapter learns, and that its KL term, at first 0, stays small beside the texts' length."""
    learns(printed)
    terms = [float(term) for term in re.findall(r"KL (-?[\d.]+)", printed)]
    assert terms[:2] == [0, 0]
    assert min(terms[-2:]) > 1
    assert max(terms) < 32


def some_were_guessed(printed: str) -> None:
    """Check that later samples guess from earlier ones."""
    assert sum(int(count) for count in re.findall(r"(\d+) of \d+ tokens had been guessed", printed)) > 0


PRINTED: dict[str, list[str | Callable[[str], None]]] = {
    "README.md": ["glorious summer"],
    "adapters.md": ["\n1 8\n", "weep.\n {1}\n", kept_close],
    "add-a-model.md": [""],
    "batch-files.md": ['"id": "juliet", "text": "More light', '"custom_id": "b"', "1 0\n"],
    "coming-from-elsewhere.md": ["weep.", "'ROMEO:\\nO", "More light", "weep."],
    "embeddings.md": ["(192,) float32 [0.", "read 500"],
    "evaluation.md": [" window breaks? [-0.0", "perplexity 1."],
    "hidden-states.md": ["torch.Size([10, 192])"],
    "images.md": ["77 [", "64 ["],
    "past-one-machine.md": ["['stop', 'length', 'stop', 'length'", "weep.", "has no prompt"],
    "prompt-embeddings.md": ["True True"],
    "reasoning.md": ["beggar, tread", " 33"],
    "speculation.md": [some_were_guessed, " guesses held", " of "],
    "logits-processors.md": ["go sit and weep. O ", "[70, 70, 70, 70]"],
    "steering.md": ["{'calm': (2, 4)}"],
    "structured-outputs.md": ["'age': ", "is no JSON\nstop {'says': 'Good morrow'}", "True True ab"],
    "training.md": [" 2\n", learns, "3\n", twice_the_same, one_number_twice],
    "what-holds.md": ["True True\n", "temperature=-1: must be"],
}
"""What each example prints: a part of it, or a check. Each page's examples come in their order."""


class Example(NamedTuple):
    """A block of a page."""

    language: str
    text: str

    def run(self) -> str:
        """Run the example in the current folder; returns what it printed, if it ran by a command.

        Commands run without a GPU, of which they may need two.
        """
        if self.language == "shell":
            return run_command(["bash", "-euc", self.text])
        if torchrun := re.match(r"# torchrun (.*) (\w+\.py)\n", self.text):
            Path(torchrun[2]).write_text(self.text, encoding="utf-8")
            return run_command([sys.executable, "-m", "torch.distributed.run", *torchrun[1].split(), torchrun[2]])
        exec(compile(self.text, "example", "exec", dont_inherit=True), {"__name__": "__main__"})
        return ""


def run_command(command: list[str]) -> str:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def examples(page: Path) -> list[Example]:
    return [Example(*block) for block in FENCED.findall(page.read_text(encoding="utf-8"))]


def cases() -> list[object]:
    """Return each page's examples: the first one, unless it is a command, and TRL's run always."""
    found = []
    for page in PAGES:
        pairs = zip(examples(page), PRINTED.get(page.name, []), strict=True)
        for number, (example, printed) in enumerate(pairs, 1):
            is_first = number == 1 and example.language == "python"
            marks = [] if is_first or "trl" in example.text else [pytest.mark.whole]
            found.append(pytest.param(example, printed, marks=marks, id=f"{page.stem}-{number}"))
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize(("example", "printed"), cases())
def test_the_example_runs(
    example: Example,
    printed: str | Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    needed = [name for name in PACKAGES if re.search(rf"^(import|from) {name}\b", example.text, re.MULTILINE)]
    for name in needed:
        pytest.importorskip(name, reason=f"needs {name}: pip install -e '.[{PACKAGES[name]}]'")
    if "nanoinfer-batch " in example.text and not shutil.which("nanoinfer-batch", path=Path(sys.executable).parent):
        pytest.skip("needs the command nanoinfer-batch: pip install -e .")
    monkeypatch.chdir(tmp_path)
    try:
        output = example.run() + capsys.readouterr().out
    finally:
        if "ray" in needed:
            sys.modules["ray"].shutdown()
    if callable(printed):
        printed(output)
    else:
        assert printed in output


@pytest.mark.parametrize("name", sorted(PRINTED.keys() - NEED_NO_FIRST_EXAMPLE))
def test_a_pages_first_lines_are_an_example(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    first = FENCED.search(text)
    indented = INDENTED.search(text)
    assert first is not None
    assert indented is None or first.start() < indented.start()
    assert first.start() < 500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_that_is_fenced_is_an_example(page: Path) -> None:
    """What cannot run here, for it needs GPUs or the Hub, is indented instead."""
    assert {example.language for example in examples(page)} <= {"python", "shell"}
