"""Test ``make gpu-check`` on any machine: it reports a missing GPU, stops parts that hang, and keeps all results."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.parts import Part, chosen_parts, measure_parts, parts
from tests.gpu.run_parts import GPU_LIMIT_S, check
from tests.launch import REPOSITORY, is_running


def python(name: str, code: str, limit_s: float = 60) -> Part:
    return Part(name=name, command=(sys.executable, "-c", code), limit_s=limit_s)


def summary(out: Path) -> dict[str, dict[str, str]]:
    return {outcome["name"]: outcome for outcome in json.loads((out / "summary.json").read_text())}


@pytest.fixture(autouse=True)
def extensions_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep ``check`` from removing the locks of extensions that other tests compile or load at the same time."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(parts(), tmp_path) == 2
    shown = capsys.readouterr().out
    assert "No GPU: torch.cuda.is_available() is false" in shown
    assert "make gpu-check PYTHON=python3" in shown
    statuses = {name: outcome["status"] for name, outcome in summary(tmp_path).items()}
    assert statuses == {part.name: "WAIVED" for group in parts() for part in group}


CRASHES = """
import ctypes, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", rank.pid, flush=True)
ctypes.string_at(0)
"""
HANGS = """
import time
def waiting():
    time.sleep(600)
print("here", flush=True)
waiting()
"""


def test_every_part_runs_after_failures_of_earlier_parts(tmp_path: Path) -> None:
    first = [python("hangs", HANGS, limit_s=3), python("crashes", CRASHES), python("fails", "raise SystemExit('no')")]
    assert check([first, [python("passes", "print('done')")]], tmp_path, lambda: "") == 1
    found = summary(tmp_path)
    log = {name: (tmp_path / f"log-{name}.txt").read_text() for name in found}
    assert {name: (outcome["status"], outcome["why"].partition(": see")[0]) for name, outcome in found.items()} == {
        "hangs": ("TIMED OUT", "after 3 s, at: here"),
        "crashes": ("FAILED", "ended by SIGSEGV"),
        "fails": ("FAILED", "no"),
        "passes": ("passed", "done"),
    }, log
    assert "in waiting" in log["hangs"], "the stack of the hanging thread is written"
    assert "Fatal Python error: Segmentation fault" in log["crashes"]
    (child,) = re.findall(r"^child (\d+)$", log["crashes"], re.MULTILINE)
    for _ in range(100):
        if not is_running(int(child)):
            return
        time.sleep(0.1)
    raise AssertionError("a rank in a session of its own must be killed as well")


@pytest.mark.parametrize("which", [parts, measure_parts])
def test_all_parts_together_take_at_most_nine_minutes(which: Callable[[], list[list[Part]]]) -> None:
    assert GPU_LIMIT_S + sum(max(part.limit_s for part in group) for group in which()) < 9 * 60


def test_parts_are_chosen_by_name_and_every_gpu_test_is_in_a_part() -> None:
    assert [[part.name for part in group] for group in chosen_parts(parts(), ["long", "build"])] == [
        ["build"],
        ["long"],
    ]
    assert chosen_parts(parts(), []) == parts()
    with pytest.raises(SystemExit, match=r"No part has the name 'nothing'\. The parts are: build, kernel"):
        chosen_parts(parts(), ["nothing"])
    files = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    assert files == {part.command[-1] for group in parts()[1:] for part in group}
