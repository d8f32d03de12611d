"""Test ``make gpu-check`` on any machine: it reports a missing GPU, stops parts that hang, and keeps all results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu import run_parts
from tests.gpu.parts import Part, chosen_parts, measure_parts, parts, pytest_command, side_by_side
from tests.gpu.run_parts import GPU_LIMIT_S, check
from tests.launch import REPOSITORY, is_running

LISTS = {"gpu-check": parts, "gpu-measure": measure_parts}
every_list = pytest.mark.parametrize("which", LISTS.values(), ids=LISTS)


def python(name: str, code: str, limit_s: float = 60, rows: Path | None = None) -> Part:
    return Part(name=name, command=(sys.executable, "-c", code), limit_s=limit_s, rows=rows)


def summary(out: Path) -> dict[str, dict]:
    return {outcome["name"]: outcome for outcome in json.loads((out / "summary.json").read_text())}


def gpu_found() -> str:
    """Return no reason against a GPU, as on a machine that has one."""
    return ""


@pytest.fixture(autouse=True)
def extensions_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep ``check`` from removing the locks of extensions that other tests compile or load at the same time."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))


def test_without_a_gpu_nothing_runs_and_the_remedy_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    code = check([python("one", f"open({str(ran)!r}, 'w')")], tmp_path / "out", lambda: "none here")
    assert code == 2
    assert not ran.exists()
    assert summary(tmp_path / "out")["one"]["status"] == "WAIVED"
    shown = capsys.readouterr().out
    assert "No GPU: none here." in shown
    assert "make gpu-check PYTHON=python3" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("target", LISTS)
def test_every_target_reports_that_this_machine_has_no_gpu(target: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "--silent", target, f"PYTHON={sys.executable}"],
        cwd=REPOSITORY,
        env={**os.environ, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "torch.cuda.is_available() is false" in done.stdout
    assert {outcome["status"] for outcome in summary(tmp_path).values()} == {"WAIVED"}
    assert set(summary(tmp_path)) == {part.name for part in LISTS[target]()}


def test_a_part_that_hangs_is_killed_with_its_children_and_the_other_parts_run(tmp_path: Path) -> None:
    hangs = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('child', child.pid, flush=True); time.sleep(600)"
    )
    first = python("first", "print('all is well')", limit_s=5)
    last = python("last", "print('so is this')")
    assert check([first, python("hangs", hangs, limit_s=2), last], tmp_path, gpu_found) == 1
    found = summary(tmp_path)
    assert [found[name]["status"] for name in ("first", "hangs", "last")] == ["passed", "TIMED OUT", "passed"]
    child = int(found["hangs"]["why"].split()[-1])
    assert ended(child)
    log = (tmp_path / "log.txt").read_text()
    assert "all is well" in log
    assert f"child {child}" in log, "the output of the killed part is kept"


def ended(pid: int, attempts: int = 100) -> bool:
    """Return whether the process ends within 0.1 s per attempt."""
    for _ in range(attempts):
        if not is_running(pid):
            return True
        time.sleep(0.1)
    return False


def test_a_part_that_fails_makes_the_check_fail(tmp_path: Path) -> None:
    broken = Part(name="broken", command=(sys.executable, "-c", "raise SystemExit('no such thing')"), limit_s=60)
    assert check([broken, python("fine", "")], tmp_path, gpu_found) == 1
    found = summary(tmp_path)
    assert (found["broken"]["status"], found["broken"]["why"]) == ("FAILED", "no such thing")
    assert found["fine"]["status"] == "passed"


def test_tests_that_are_all_skipped_are_waived_with_the_reason(tmp_path: Path) -> None:
    test = tmp_path / "test_none.py"
    test.write_text("import pytest\n\n\n@pytest.mark.skip(reason='no such tool')\ndef test_tool(): pass\n")
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(test))
    assert check([Part(name="skipped", command=command, limit_s=60)], tmp_path / "out", gpu_found) == 0
    found = summary(tmp_path / "out")["skipped"]
    assert found["status"] == "WAIVED"
    assert "no such tool" in found["why"]


def test_rows_that_a_part_appends_are_in_its_outcome(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"old": 1}\n')
    # The last row is incomplete, as that of a killed part.
    appends = f"open({str(rows)!r}, 'a').write('{{\"new\": 2}}\\n{{\"ha')"
    assert check([python("measures", appends, rows=rows)], tmp_path / "out", gpu_found) == 0
    assert summary(tmp_path / "out")["measures"]["rows"] == [{"new": 2}]


@every_list
def test_all_parts_together_take_at_most_nine_minutes(which: Callable[[], list[Part]]) -> None:
    limits_s = [max(part.limit_s for part in group) for group in side_by_side(which())]
    assert GPU_LIMIT_S + sum(limits_s) < 9 * 60


def test_parts_that_measure_no_time_run_at_the_same_time(tmp_path: Path) -> None:
    waits = (
        "import pathlib, time\n"
        "pathlib.Path({mine!r}).touch()\n"
        "while not pathlib.Path({other!r}).exists(): time.sleep(0.1)"
    )
    paths = [str(tmp_path / name) for name in ("one", "two")]
    both = [
        replace(python(name, waits.format(mine=mine, other=other)), runs_beside=True)
        for name, mine, other in (("first", *paths), ("second", *reversed(paths)))
    ]
    assert check([*both, python("last", "print('alone')")], tmp_path / "out", gpu_found) == 0
    assert set(summary(tmp_path / "out")) == {"first", "second", "last"}
    assert set(by_part(tmp_path / "out" / "log.txt")) == {"first", "second", "last"}


def test_an_interrupt_kills_the_parts_that_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_parts, "_write", interrupted)
    pid = tmp_path / "pid"
    sleeps = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(pid)!r}).exists(): time.sleep(0.1)"
    both = [replace(python(name, code), runs_beside=True) for name, code in (("sleeps", sleeps), ("waits", waits))]
    with pytest.raises(KeyboardInterrupt):
        check([replace(part, limit_s=300) for part in both], tmp_path / "out", gpu_found)
    assert ended(int(pid.read_text()))
    # A part that outlives its limit is aborted first, and writes the stacks of its threads.
    assert "Aborted" not in (tmp_path / "out" / "log-sleeps.txt").read_text()


def test_parts_are_chosen_by_name() -> None:
    assert [part.name for part in chosen_parts(parts(), ["long", "build"])] == ["build", "long"]
    assert chosen_parts(parts(), []) == parts()
    with pytest.raises(SystemExit, match=r"No part has the name 'nothing'\. The parts are: build, kernel"):
        chosen_parts(parts(), ["nothing"])


def test_every_gpu_test_is_in_a_part() -> None:
    arguments = {argument for part in parts() for argument in part.command}
    files = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    assert files == {argument for argument in arguments if argument.startswith("tests/gpu/test_")}


def written(path: Path, code: str) -> Path:
    path.write_text(textwrap.dedent(code))
    return path


def pytest_part(name: str, path: Path, limit_s: float = 100) -> Part:
    """Return a part that runs the tests of a file as ``gpu-check`` does."""
    return Part(name=name, command=(*pytest_command(), str(path)), limit_s=limit_s)


LOCKED = """
    import os, signal
    from pathlib import Path
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], "op")
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    print("compiling", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

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
    print("rank", rank.pid, flush=True)
    ctypes.string_at(0)
"""

HANGS = """
    import time

    def waiting():
        time.sleep(600)

    print("here", flush=True)
    waiting()
"""

PROGRAM = """
    import os, sys
    from tests.gpu.one_by_one import answer_each
    work = {
        "first": lambda: {"result": 1},
        "raises": lambda: 1 / 0,
        "second": lambda: {"result": 2},
        "ends the process": lambda: os._exit(7),
        "last": lambda: {"result": 3},
    }
    answer_each(work, sys.argv[1:])
"""

CASES = """
    from pathlib import Path

    import pytest
    from tests.gpu.one_by_one import run_each

    NAMES = ["first", "raises", "second", "ends the process", "last"]

    @pytest.fixture(scope="module")
    def found():
        return run_each([str(Path(__file__).with_name("program.py"))], NAMES, 60)

    @pytest.mark.parametrize("name", NAMES)
    def test_case(name, found):
        assert found.result(name)["result"] > 0

    def test_the_process_exits_without_an_error(found):
        assert found.ending == ""
"""

FAILS_AND_HANGS = """
    import time

    def test_fails():
        print("what it had printed")
        missing = 41
        assert missing == 42

    def stuck():
        time.sleep(600)

    def test_hangs():
        stuck()
"""


@pytest.mark.thorough
def test_every_part_runs_after_failures_of_earlier_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this for parts that are killed while they compile, crash, hang or have failing tests and cases."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    written(tmp_path / "program.py", PROGRAM)
    # The first two parts are stopped at their own limits. The locks and processes of all parts must not stop others.
    chosen = [
        python("hangs", textwrap.dedent(HANGS), limit_s=4),
        pytest_part("fails and hangs", written(tmp_path / "test_hangs.py", FAILS_AND_HANGS), limit_s=14),
        python("killed", textwrap.dedent(LOCKED)),
        python("compiles", textwrap.dedent(COMPILES)),
        python("crashes", textwrap.dedent(CRASHES)),
        pytest_part("cases", written(tmp_path / "test_cases.py", CASES)),
        python("last", "print('all is well')"),
    ]
    out = tmp_path / "out"
    assert check(chosen, out, gpu_found) == 1
    found, log = summary(out), by_part(out / "log.txt")
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        "hangs": "TIMED OUT",
        "fails and hangs": "TIMED OUT",
        "killed": "FAILED",
        "compiles": "passed",
        "crashes": "FAILED",
        "cases": "FAILED",
        "last": "passed",
    }, log

    assert found["hangs"]["why"].endswith("at: here")
    assert "in waiting" in log["hangs"], "the stack of the hanging thread is written"

    assert "assert missing == 42" in log["fails and hangs"]
    assert "what it had printed" in log["fails and hangs"]
    assert "test_hangs.py::test_hangs" in found["fails and hangs"]["why"]
    assert "in stuck" in log["fails and hangs"]

    assert "SIGKILL" in found["killed"]["why"]
    assert found["compiles"]["why"] == "compiled", "the lock of the killed part was removed"

    assert "SIGSEGV" in found["crashes"]["why"]
    assert "Fatal Python error: Segmentation fault" in log["crashes"]
    (rank,) = re.findall(r"^rank (\d+)$", log["crashes"], re.MULTILINE)
    assert ended(int(rank)), "a rank in a session of its own is killed as well"

    # pytest prints the name of a test before it runs, and its result after the output of the test.
    assert "2 failed, 4 passed" in found["cases"]["why"]
    failed = set(re.findall(r"^----- at once: .*::test_case\[(.+)\]$", log["cases"], re.MULTILINE))
    assert failed == {"raises", "ends the process"}
    assert "ZeroDivisionError" in log["cases"]
    assert "the process ended with 7" in log["cases"]


def by_part(log: Path) -> dict[str, str]:
    """Return the output of each part."""
    texts = re.split(r"^===== (.+?): /", log.read_text(), flags=re.MULTILINE)
    return dict(zip(texts[1::2], texts[2::2], strict=True))
