"""What needs a GPU, in parts that are bounded one by one, within 9 minutes together.

``make gpu-check``: the tests, the profile and small benchmarks. ``make gpu-bench``: benchmarks with billions of
parameters. Text and JSON are written after each part, into the folder that OUT names or into ``.cache``, so that a run
that is killed leaves what was done. The exit code: 0 where every part passed, 1 where one did not, 2 where there is no
GPU.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from tests.launch import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"

GPU_LIMIT_S = 25
"""For PyTorch to say whether there is one."""

REMEDY = (
    "Run it on a machine with a GPU, by a Python whose PyTorch is built for CUDA: make gpu-check PYTHON=python3, "
    "or another Python that has torch, deepspeed and what else setup.cfg names, its [test] included."
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """``rows``: a file to which the part appends JSON lines; those that it adds are its result."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    rows: Path | None = None


class Status(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED OUT"
    WAIVED = "WAIVED"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str
    status: Status
    seconds: float
    why: str
    rows: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.status.value:<9}  {self.name:<12}  {self.seconds:5.0f} s  {self.why}"


def _pytest(*paths: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *(f"tests/{path}.py" for path in paths))


BUILD = Part(
    name="build",
    command=(
        sys.executable,
        "-c",
        "from deep_opt_states.device.kernels.choice import known_arithmetic; print(known_arithmetic())",
    ),
    limit_s=60,
)


def parts(out: Path) -> list[Part]:
    """What the others need first, then the shortest first."""
    benchmark = (sys.executable, "-m")
    return [
        BUILD,
        Part(name="kernel", command=_pytest("gpu/test_kernel", "kernels/test_triton"), limit_s=75),
        Part(name="executor", command=_pytest("gpu/test_executor", "gpu/test_locking"), limit_s=45),
        Part(name="copy", command=(*benchmark, "benchmarks", "copy"), limit_s=15, rows=RESULTS / "copy.jsonl"),
        Part(name="adam", command=(*benchmark, "benchmarks", "adam"), limit_s=50, rows=RESULTS / "adam.jsonl"),
        Part(name="engine", command=_pytest("gpu/test_engine"), limit_s=125),
        Part(
            name="profile",
            command=(*benchmark, "deep_opt_states.cli", "profile", "--quick", "--output", str(out / "profile.json")),
            limit_s=35,
        ),
        Part(name="overlap", command=(*benchmark, "benchmarks", "overlap"), limit_s=60, rows=RESULTS / "overlap.jsonl"),
        Part(name="sanitizer", command=_pytest("gpu/test_sanitizer"), limit_s=45),
    ]


def bench_parts(out: Path) -> list[Part]:
    """What the product aims for on a GPU. Each writes its rows as arms have had all their turns, first what is aimed
    for: one that is stopped leaves what it has."""
    limits_s = {"training_step": 245, "model_error": 155, "trace": 50}
    benchmarks = [
        Part(
            name=name,
            command=(sys.executable, "-m", "benchmarks", name),
            limit_s=limit_s,
            rows=RESULTS / f"{name}.jsonl",
        )
        for name, limit_s in limits_s.items()
    ]
    return [BUILD, *benchmarks]


def no_gpu() -> str:
    """What keeps this Python from a GPU; empty where nothing does."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=GPU_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"PyTorch does not say within {GPU_LIMIT_S} s whether there is one"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["PyTorch cannot be imported"])[-1]
    if done.stdout.split("\n")[-2:-1] == ["none"]:
        return f"torch.cuda.is_available() is false in {sys.executable}"
    return ""


def check(chosen: Sequence[Part], out: Path, missing: Callable[[], str] = no_gpu) -> int:
    """The exit code. ``missing`` says what keeps it from a GPU."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    log.write_text("")
    outcomes: list[Outcome] = []
    problem = missing()
    for part in chosen:
        if problem:
            outcome = Outcome(name=part.name, status=Status.WAIVED, seconds=0, why=f"no GPU: {problem}")
        else:
            print(f"{part.name}: at most {part.limit_s:.0f} s", flush=True)
            outcome = _run(part, log)
        outcomes.append(outcome)
        _write(out, outcomes)
        print(outcome, flush=True)
    if problem:
        print(f"No GPU: {problem}.\n{REMEDY}")
        return 2
    print(f"Written: {out}")
    return int(any(outcome.status in (Status.FAILED, Status.TIMED_OUT) for outcome in outcomes))


def _run(part: Part, log: Path) -> Outcome:
    before = _lines(part.rows)
    start_s = time.monotonic()
    with log.open("ab") as text:
        text.write(f"\n===== {part.name}: {' '.join(part.command)}\n".encode())
        text.flush()
        begin = text.tell()
        process = subprocess.Popen(
            part.command,
            cwd=REPOSITORY,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=subprocess.STDOUT,
            # A group of its own: what it has started ends with it.
            start_new_session=True,
        )
        try:
            returncode: int | None = process.wait(timeout=part.limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    written = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
    if returncode is None:
        status, why = Status.TIMED_OUT, f"after {part.limit_s:.0f} s, at: {written[-1] if written else 'nothing yet'}"
    elif returncode == 0 and written and re.match(r"=* *\d+ skipped in ", written[-1]):
        status, why = Status.WAIVED, next(line for line in written if line.startswith("SKIPPED"))
    else:
        status = Status.PASSED if returncode == 0 else Status.FAILED
        why = written[-1] if written else f"exit code {returncode}"
    rows = tuple(json.loads(line) for line in _lines(part.rows)[len(before) :])
    return Outcome(name=part.name, status=status, seconds=time.monotonic() - start_s, why=why, rows=rows)


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


def _write(out: Path, outcomes: Sequence[Outcome]) -> None:
    """All or nothing: a run that is killed leaves a file that can be read."""
    summary = [{**asdict(outcome), "status": outcome.status.value} for outcome in outcomes]
    partial = out / ".summary.json"
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(partial, out / "summary.json")
    (out / "summary.txt").write_text("".join(f"{outcome}\n" for outcome in outcomes))


def _environment() -> Mapping[str, str]:
    return {
        **os.environ,
        "DS_ACCELERATOR": "cuda",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(REPOSITORY / ".cache"),
    }


def main() -> int:
    which = {"check": parts, "bench": bench_parts}[sys.argv[1]]
    out = Path(os.environ.get("OUT") or REPOSITORY / ".cache" / f"gpu-{sys.argv[1]}").resolve()
    return check(which(out), out)


if __name__ == "__main__":
    raise SystemExit(main())
