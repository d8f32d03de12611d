"""Test ``make gpu-check`` on any machine: it reports a missing GPU, stops parts that hang, and keeps all results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.parts import Part, chosen_parts, measure_parts, parts, side_by_side
from tests.gpu.run_parts import GPU_LIMIT_S, check
from tests.launch import REPOSITORY, is_running


def python(name: str, code: str, limit_s: float = 60) -> Part:
    return Part(name=name, command=(sys.executable, "-c", code), limit_s=limit_s)


def summary(out: Path) -> dict[str, dict[str, str]]:
    return {outcome["name"]: outcome for outcome in json.loads((out / "summary.json").read_text())}


@pytest.fixture(autouse=True)
def extensions_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep ``check`` from removing the locks of extensions that other tests compile or load at the same time."""
    folder = tmp_path_factory.mktemp("extensions")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_make_reports_that_this_machine_has_no_gpu(tmp_path: Path) -> None:
    command = ["make", "--silent", "gpu-check", f"PYTHON={sys.executable}"]
    variables = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "No GPU: torch.cuda.is_available() is false" in done.stdout
    assert "make gpu-check PYTHON=python3" in done.stdout
    found = summary(tmp_path)
    assert {name: outcome["status"] for name, outcome in found.items()} == {part.name: "WAIVED" for part in parts()}


COMPILES = """
import os
from torch.utils.file_baton import FileBaton
baton = FileBaton(os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "op", "lock"))
if not baton.try_acquire():
    baton.wait()
print("compiled")
"""
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
SKIPS = "import pytest\n\n\n@pytest.mark.skip(reason='no such tool')\ndef test_tool(): pass\n"


def test_every_part_runs_after_failures_of_earlier_parts(tmp_path: Path, extensions_of_its_own: Path) -> None:
    (extensions_of_its_own / "op").mkdir()
    (extensions_of_its_own / "op" / "lock").touch()
    skips = tmp_path / "test_none.py"
    skips.write_text(SKIPS)
    pytest_command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(skips))
    chosen = [
        python("hangs", HANGS, limit_s=3),
        python("crashes", CRASHES),
        python("fails", "raise SystemExit('no such thing')"),
        Part(name="skipped", command=pytest_command, limit_s=60),
        python("compiles", COMPILES),
    ]
    assert check(chosen, tmp_path / "out", lambda: "") == 1
    found = summary(tmp_path / "out")
    texts = re.split(r"^===== (.+?): /", (tmp_path / "out" / "log.txt").read_text(), flags=re.MULTILINE)
    log = dict(zip(texts[1::2], texts[2::2], strict=True))
    assert {name: (outcome["status"], outcome["why"].partition(": see")[0]) for name, outcome in found.items()} == {
        "hangs": ("TIMED OUT", "after 3 s, at: here"),
        "crashes": ("FAILED", "ended by SIGSEGV"),
        "fails": ("FAILED", "no such thing"),
        "skipped": ("WAIVED", f"SKIPPED [1] {os.path.relpath(skips, REPOSITORY)}:4: no such tool"),
        "compiles": ("passed", "compiled"),
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
def test_all_parts_together_take_at_most_nine_minutes(which: Callable[[], list[Part]]) -> None:
    limits_s = [max(part.limit_s for part in group) for group in side_by_side(which())]
    assert GPU_LIMIT_S + sum(limits_s) < 9 * 60


def test_parts_are_chosen_by_name_and_every_gpu_test_is_in_a_part() -> None:
    assert [part.name for part in chosen_parts(parts(), ["long", "build"])] == ["build", "long"]
    assert chosen_parts(parts(), []) == parts()
    with pytest.raises(SystemExit, match=r"No part has the name 'nothing'\. The parts are: build, kernel"):
        chosen_parts(parts(), ["nothing"])
    files = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    assert files == {part.command[-1] for part in parts()[1:]}
