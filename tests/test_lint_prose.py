"""Check the lint of the prose: it finds every kind of line that it refuses, and accepts plain English."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY

ACCEPTED = '''
"""Copy states between the host and the accelerator."""


class Slot:
    """A staging slot on the accelerator."""

    numel: int
    """The number of elements, which ``narrow`` may reduce."""

    def narrow(self, numel: int) -> None:
        """Return the first ``numel`` elements. Raise ``ValueError`` if there are fewer."""
        # The copy stream waits for the event: the kernel may still read the slot.
'''


def lint(path: Path, source: str) -> subprocess.CompletedProcess[str]:
    path.write_text(source)
    command = [sys.executable, str(REPOSITORY / "tools" / "lint_prose.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_plain_english_is_accepted(tmp_path: Path) -> None:
    done = lint(tmp_path / "module.py", ACCEPTED)
    assert done.returncode == 0, done.stdout
    assert "1 function docstrings: 100% begin with a verb" in done.stdout


@pytest.mark.parametrize(
    ("now", "instead", "finding"),
    [
        ("Return the first", "Of the first", "begins with 'Of'"),
        ("Return the first", "By the first", "begins with 'By'"),
        ("Return the first", "Those of the first", "begins with 'Those'"),
        ("Return the first", "The first", "no imperative verb"),
        ("Return the first", "Order of the first", "no imperative verb"),
        ("A staging slot", "What a staging slot is", "begins with 'What'"),
        ("The number of elements", "Of elements", "begins with 'Of'"),
        ("Copy states", "Of states", "begins with 'Of'"),
        ("numel: int) ->", "its: int) ->", "identifier 'its'"),
        ("def narrow", "def of", "identifier 'of'"),
        ("    numel: int\n", "    told: int\n", "identifier 'told'"),
        ("The copy stream waits for", "The copy stream hears of", "the word 'hears'"),
        ("waits for the event", "knows what is done, what is not and what comes", "more than 1 'what'"),
    ],
)
def test_each_kind_of_dialect_is_refused(tmp_path: Path, now: str, instead: str, finding: str) -> None:
    assert now in ACCEPTED
    done = lint(tmp_path / "module.py", ACCEPTED.replace(now, instead))
    assert done.returncode == 1
    assert finding in done.stdout


def test_quoted_code_is_not_judged(tmp_path: Path) -> None:
    quoted = ACCEPTED.replace("A staging slot", 'A slot, as in ``tell(what)`` and "what is told",')
    assert lint(tmp_path / "module.py", quoted).returncode == 0


def test_pages_are_checked_without_their_code(tmp_path: Path) -> None:
    page = "# Title\n\nThe plan `tells` nothing.\n\n    tell\n\n```\ntold\n```\n"
    assert lint(tmp_path / "page.md", page).returncode == 0
    done = lint(tmp_path / "page.md", f"{page}The log tells it.\n")
    assert done.returncode == 1
    assert "page.md:10: the word 'tells'" in done.stdout
