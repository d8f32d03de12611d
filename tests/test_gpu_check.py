"""Test ``make gpu-check`` on any machine: it reports a missing GPU, stops parts that hang, and keeps all results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu import run_parts
from tests.gpu.parts import Part, chosen_parts, measure_parts, parts, side_by_side
from tests.gpu.run_parts import GPU_LIMIT_S, check
from tests.launch import REPOSITORY, is_running

LISTS = {"gpu-check": parts, "gpu-measure": measure_parts}


def python(name: str, code: str, limit_s: float = 60) -> Part:
    return Part(name=name, command=(sys.executable, "-c", code), limit_s=limit_s)


def summary(out: Path) -> dict[str, dict[str, str]]:
    return {outcome["name"]: outcome for outcome in json.loads((out / "summary.json").read_text())}


def gpu_found() -> str:
    """Return no reason against a GPU, as on a machine that has one."""
    return ""


def ended(pid: int) -> bool:
    """Return whether the process ends within 10 s."""
    for _ in range(100):
        if not is_running(pid):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(autouse=True)
def extensions_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep ``check`` from removing the locks of extensions that other tests compile or load at the same time."""
    folder = tmp_path_factory.mktemp("extensions")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        *((target, 2, "No GPU: torch.cuda.is_available() is false") for target in LISTS),
        *((target, 0, "WAIVED: no GPU") for target in ("gpu-bench", "gpu-bits")),
    ],
)
def test_every_target_reports_that_this_machine_has_no_gpu(
    target: str, code: int, message: str, tmp_path: Path
) -> None:
    command = ["make", "--silent", target, f"PYTHON={sys.executable}"]
    variables = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert message in done.stdout
    if target in LISTS:
        assert "make gpu-check PYTHON=python3" in done.stdout
        assert {outcome["status"] for outcome in summary(tmp_path).values()} == {"WAIVED"}
        assert set(summary(tmp_path)) == {part.name for part in LISTS[target]()}


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
    """Check this for parts that hang, crash, fail, or are skipped, and for the lock that a killed part has left."""
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
    assert check(chosen, tmp_path / "out", gpu_found) == 1
    found, log = summary(tmp_path / "out"), by_part(tmp_path / "out" / "log.txt")
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
    assert ended(int(child)), "a rank in a session of its own is killed as well"


def by_part(log: Path) -> dict[str, str]:
    """Return the output of each part."""
    texts = re.split(r"^===== (.+?): /", log.read_text(), flags=re.MULTILINE)
    return dict(zip(texts[1::2], texts[2::2], strict=True))


@pytest.mark.parametrize("which", LISTS.values(), ids=LISTS)
def test_all_parts_together_take_at_most_nine_minutes(which: Callable[[], list[Part]]) -> None:
    limits_s = [max(part.limit_s for part in group) for group in side_by_side(which())]
    assert GPU_LIMIT_S + sum(limits_s) < 9 * 60


def test_parts_that_measure_no_time_run_at_the_same_time_and_an_interrupt_kills_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = (
        "import os, pathlib, time\n"
        "pathlib.Path({mine!r}).write_text(str(os.getpid()))\n"
        "while not pathlib.Path({other!r}).exists(): time.sleep(0.1)\n"
    )
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    first = replace(python("first", waits.format(mine=one, other=two)), runs_beside=True)
    second = replace(python("second", waits.format(mine=two, other=one)), runs_beside=True)
    assert check([first, second], tmp_path / "out", gpu_found) == 0
    assert set(by_part(tmp_path / "out" / "log.txt")) == set(summary(tmp_path / "out")) == {"first", "second"}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_parts, "_write", interrupted)
    Path(two).unlink()
    second = replace(python("second", waits.format(mine=two, other=one) + "time.sleep(600)", 300), runs_beside=True)
    with pytest.raises(KeyboardInterrupt):
        check([first, second], tmp_path / "out", gpu_found)
    assert ended(int(Path(two).read_text()))
    # A part that outlives its limit is aborted first, and writes the stacks of its threads.
    assert "Aborted" not in (tmp_path / "out" / "log-second.txt").read_text()


def test_parts_are_chosen_by_name_and_every_gpu_test_is_in_a_part() -> None:
    assert [part.name for part in chosen_parts(parts(), ["long", "build"])] == ["build", "long"]
    assert chosen_parts(parts(), []) == parts()
    with pytest.raises(SystemExit, match=r"No part has the name 'nothing'\. The parts are: build, kernel"):
        chosen_parts(parts(), ["nothing"])
    files = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    assert files == {part.command[-1] for part in parts()[1:]}
