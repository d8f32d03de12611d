"""Test ``make gpu-check`` on any machine: it reports a missing GPU, stops parts that hang, and keeps all results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import copy
from benchmarks.harness.rows import Waived
from tests.gpu import run_parts
from tests.gpu import test_sanitizer as sanitizer
from tests.gpu.parts import Part, chosen_parts, measure_parts, parts, pytest_command, side_by_side
from tests.gpu.run_parts import GPU_LIMIT_S, check
from tests.gpu.time_left import PART_ENDS, REPORT_S, seconds_left
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_benchmark_without_a_gpu_is_waived() -> None:
    with pytest.raises(Waived, match="no GPU"):
        next(copy.measure(quick=True))


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


def test_a_part_that_cannot_be_killed_does_not_delay_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check this with a process that ignores SIGABRT and is not killed, as if it were inside the driver of a GPU."""
    monkeypatch.setattr(run_parts, "kill_all", lambda _: None)
    ignores = (
        "import os, signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    last = python("last", "print('this runs')")
    assert check([python("stuck", ignores, limit_s=8), last], tmp_path, gpu_found) == 1
    found = summary(tmp_path)
    pid = int(found["stuck"]["why"].split()[-1])
    assert not ended(pid, attempts=1)
    os.kill(pid, signal.SIGKILL)
    assert [found[name]["status"] for name in ("stuck", "last")] == ["TIMED OUT", "passed"]


def ended(pid: int, attempts: int = 100) -> bool:
    """Return whether the process ends within 0.1 s per attempt."""
    for _ in range(attempts):
        if not is_running(pid):
            return True
        time.sleep(0.1)
    return False


def test_the_outcome_of_a_part_is_written_before_the_next_part_starts(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    looks = f"import json; found, = json.load(open({str(path)!r})); assert found['status'] == 'passed'; print('seen')"
    assert check([python("first", "print('done')"), python("second", looks)], tmp_path, gpu_found) == 0
    assert summary(tmp_path)["second"]["why"] == "seen"
    assert (tmp_path / "summary.txt").read_text().count("passed") == 2


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
    appends = f"open({str(rows)!r}, 'a').write('{{\"new\": 2}}\\n')"
    assert check([python("measures", appends, rows=rows)], tmp_path / "out", gpu_found) == 0
    assert summary(tmp_path / "out")["measures"]["rows"] == [{"new": 2}]


def test_an_incomplete_row_of_a_killed_part_is_left_out(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    writes = f"import os; open({str(rows)!r}, 'w').write('{{\"whole\": 1}}\\n{{\"ha'); os.abort()"
    chosen = [python("killed", writes, rows=rows), python("last", "print('here')")]
    assert check(chosen, tmp_path / "out", gpu_found) == 1
    found = summary(tmp_path / "out")
    assert found["killed"]["rows"] == [{"whole": 1}]
    assert found["last"]["status"] == "passed"


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


@every_list
def test_each_part_runs_files_that_exist(which: Callable[[], list[Part]]) -> None:
    for part in which():
        for argument in part.command:
            if argument.startswith("tests/"):
                assert (REPOSITORY / argument).exists(), argument


def test_every_gpu_test_is_in_a_part() -> None:
    arguments = {argument for part in parts() for argument in part.command}
    files = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    assert files <= arguments


def test_a_part_may_use_the_time_that_earlier_parts_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([python("first", "", limit_s=500), python("second", "", limit_s=10)], tmp_path, gpu_found) == 0
    (limit_s,) = (float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if "second: at" in line)
    assert 10 < limit_s <= 510


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


def test_a_failed_collection_is_shown_at_once(tmp_path: Path) -> None:
    test = written(tmp_path / "test_none.py", "import no_such_module_anywhere")
    assert check([pytest_part("collected", test)], tmp_path / "out", gpu_found) == 1
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "no_such_module_anywhere" in log.split("----- at once")[1].split("= ERRORS =")[0]


def test_the_limit_of_a_test_is_shorter_than_that_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PART_ENDS, str(time.time() + 30))
    assert 0 < seconds_left() <= 30 - REPORT_S


def test_a_slow_sanitizer_is_skipped_before_its_part_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = written(tmp_path / "compute-sanitizer", "#!/bin/sh\nexec sleep 600")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(PART_ENDS, str(time.time() + REPORT_S + 1))
    with pytest.raises(pytest.skip.Exception, match="says nothing about the kernel"):
        sanitizer.test_compute_sanitizer_finds_no_access_out_of_bounds()
