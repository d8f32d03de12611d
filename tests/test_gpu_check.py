"""``make gpu-check`` on any machine: honest without a GPU, bounded where a part hangs, and it keeps what was done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import copy
from benchmarks.harness.suite import Waived
from tests.gpu.check import GPU_LIMIT_S, Part, bench_parts, check, parts
from tests.launch import REPOSITORY


def python(name: str, code: str, limit_s: float = 60, rows: Path | None = None) -> Part:
    return Part(name=name, command=(sys.executable, "-c", code), limit_s=limit_s, rows=rows)


def summary(out: Path) -> dict[str, dict]:
    return {outcome["name"]: outcome for outcome in json.loads((out / "summary.json").read_text())}


def there() -> str:
    return ""


def test_without_a_gpu_nothing_runs_and_the_remedy_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    code = check([python("one", f"open({str(ran)!r}, 'w')")], tmp_path / "out", lambda: "none here")
    assert code == 2
    assert not ran.exists()
    assert summary(tmp_path / "out")["one"]["status"] == "WAIVED"
    shown = capsys.readouterr().out
    assert "No GPU: none here." in shown
    assert "make gpu-check PYTHON=python3" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("target", "which"), [("gpu-check", parts), ("gpu-bench", bench_parts)])
def test_this_machine_has_none(target: str, which: Callable[[Path], list[Part]], tmp_path: Path) -> None:
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
    assert set(summary(tmp_path)) == {part.name for part in which(tmp_path)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_benchmark_says_so_too() -> None:
    with pytest.raises(Waived, match="no GPU"):
        next(copy.measure(quick=True))


def test_a_part_that_hangs_is_ended_with_what_it_started_and_the_others_run(tmp_path: Path) -> None:
    hangs = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('child', child.pid, flush=True); time.sleep(600)"
    )
    first = python("first", "print('all is well')")
    last = python("last", "print('so is this')")
    start_s = time.monotonic()
    assert check([first, python("hangs", hangs, limit_s=2), last], tmp_path, there) == 1
    assert time.monotonic() - start_s < 300, "not the 600 s for which it sleeps"
    found = summary(tmp_path)
    assert [found[name]["status"] for name in ("first", "hangs", "last")] == ["passed", "TIMED OUT", "passed"]
    child = int(found["hangs"]["why"].split()[-1])
    assert ended(child)
    log = (tmp_path / "log.txt").read_text()
    assert "all is well" in log
    assert f"child {child}" in log, "what it had written is kept"


def ended(pid: int) -> bool:
    """Killed; whoever has to wait for it, may not have yet."""
    status = Path(f"/proc/{pid}/status")
    for _ in range(100):
        try:
            state = next(line for line in status.read_text().splitlines() if line.startswith("State:"))
        except OSError:
            return True
        if "Z" in state.split()[1]:
            return True
        time.sleep(0.1)
    return False


def test_what_was_done_is_written_before_the_next_part_starts(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    looks = f"import json; found, = json.load(open({str(path)!r})); assert found['status'] == 'passed'; print('seen')"
    assert check([python("first", "print('done')"), python("second", looks)], tmp_path, there) == 0
    assert summary(tmp_path)["second"]["why"] == "seen"
    assert (tmp_path / "summary.txt").read_text().count("passed") == 2


def test_a_part_that_fails_makes_the_check_fail(tmp_path: Path) -> None:
    broken = Part(name="broken", command=(sys.executable, "-c", "raise SystemExit('no such thing')"), limit_s=60)
    assert check([broken, python("fine", "")], tmp_path, there) == 1
    found = summary(tmp_path)
    assert (found["broken"]["status"], found["broken"]["why"]) == ("FAILED", "no such thing")
    assert found["fine"]["status"] == "passed"


def test_tests_that_are_all_skipped_are_waived_with_the_reason(tmp_path: Path) -> None:
    test = tmp_path / "test_none.py"
    test.write_text("import pytest\n\n\n@pytest.mark.skip(reason='no such tool')\ndef test_it(): pass\n")
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(test))
    assert check([Part(name="skipped", command=command, limit_s=60)], tmp_path / "out", there) == 0
    found = summary(tmp_path / "out")["skipped"]
    assert found["status"] == "WAIVED"
    assert "no such tool" in found["why"]


def test_rows_that_a_part_appends_are_its_result(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"old": 1}\n')
    appends = f"open({str(rows)!r}, 'a').write('{{\"new\": 2}}\\n')"
    assert check([python("measures", appends, rows=rows)], tmp_path / "out", there) == 0
    assert summary(tmp_path / "out")["measures"]["rows"] == [{"new": 2}]


@pytest.mark.parametrize("which", [parts, bench_parts])
def test_all_of_it_is_bounded_by_nine_minutes(which: Callable[[Path], list[Part]], tmp_path: Path) -> None:
    assert GPU_LIMIT_S + sum(part.limit_s for part in which(tmp_path)) < 9 * 60


@pytest.mark.parametrize("which", [parts, bench_parts])
def test_each_part_runs_what_is_there(which: Callable[[Path], list[Part]], tmp_path: Path) -> None:
    for part in which(tmp_path):
        for argument in part.command:
            if argument.startswith("tests/"):
                assert (REPOSITORY / argument).exists(), argument
