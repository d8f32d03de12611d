"""Run the tests and benchmarks that need a GPU, in parts that each have a time limit, within 9 minutes in total.

``python3 -m tests.gpu.run_parts check [PART ...]`` (or ``measure``). Text and JSON are written after each part, into
the folder named by OUT or into ``.cache``, so that a killed run leaves the results of the finished parts. The exit code
is 0 if every part passed, 1 if one did not, and 2 if there is no GPU. A part may use its own limit, plus the time that
the parts before it did not use.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu.parts import PART_ENDS, Part, chosen_parts, measure_parts, parts, side_by_side
from tests.launch import REPOSITORY

GPU_LIMIT_S = 25
THREADS_BESIDE = 2
ABORT_S = 1.0
"""The end of a part's limit, in which it writes the stacks of all its threads before it is killed."""

REMEDY = (
    "Run it on a machine with a GPU, with a Python whose PyTorch is built for CUDA: make gpu-check PYTHON=python3, "
    "or another Python that has torch, deepspeed and all other packages that setup.cfg lists, including [test]."
)
PASSED, FAILED, TIMED_OUT, WAIVED = "passed", "FAILED", "TIMED OUT", "WAIVED"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str
    status: str
    seconds: float
    why: str

    def __str__(self) -> str:
        return f"{self.status:<9}  {self.name:<12}  {self.seconds:5.0f} s  {self.why}"


def no_gpu() -> str:
    code = "import torch; print('GPU' if torch.cuda.is_available() else 'none')"
    options = {"cwd": REPOSITORY, "env": _environment(), "capture_output": True, "text": True, "timeout": GPU_LIMIT_S}
    try:
        done = subprocess.run([sys.executable, "-c", code], **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return f"PyTorch does not report within {GPU_LIMIT_S} s whether there is one"
    if done.returncode != 0:
        return str((done.stderr.strip().splitlines() or ["PyTorch cannot be imported"])[-1])
    return f"torch.cuda.is_available() is false in {sys.executable}" if done.stdout.split()[-1] == "none" else ""


def check(chosen: Sequence[Part], out: Path, missing: Callable[[], str] = no_gpu) -> int:
    """Run the parts and return the exit code. ``missing`` returns why no GPU can be used, or ""."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    log.write_text("")
    outcomes: list[Outcome] = []
    problem = missing()
    ends_s = time.monotonic()
    for group in side_by_side(chosen):
        ends_s += max(part.limit_s for part in group)
        remove_compiler_locks(Path(_environment()["TORCH_EXTENSIONS_DIR"]))
        # If this loop is interrupted, the generator is closed and kills the parts that still run.
        with closing(_outcomes(group, out, ends_s, problem)) as found:
            for outcome in found:
                outcomes.append(outcome)
                part_log = _log_of(outcome.name, out)
                if part_log.exists():
                    with log.open("ab") as whole:
                        whole.write(part_log.read_bytes())
                    part_log.unlink()
                _write(out, outcomes)
                print(outcome, flush=True)
    if problem:
        print(f"No GPU: {problem}.\n{REMEDY}")
        return 2
    print(f"Written: {out}")
    return int(any(outcome.status in (FAILED, TIMED_OUT) for outcome in outcomes))


def _log_of(name: str, out: Path) -> Path:
    return out / f"log-{name.replace(' ', '-')}.txt"


def _outcomes(group: Sequence[Part], out: Path, ends_s: float, problem: str) -> Generator[Outcome]:
    """Run the parts at the same time, and yield each outcome when its part ends. Run none if there is a ``problem``."""
    if problem:
        for part in group:
            yield Outcome(name=part.name, status=WAIVED, seconds=0, why=f"no GPU: {problem}")
        return
    started: list[str] = []
    with ThreadPoolExecutor(len(group)) as threads:
        running = [
            threads.submit(_run, part, out, max(part.limit_s, ends_s - time.monotonic()), started) for part in group
        ]
        try:
            for future in as_completed(running):
                yield future.result()
        except BaseException:
            # The processes have sessions of their own: an interrupt from the terminal does not reach them.
            for variable in started:
                kill_all(variable)
            raise


def _run(part: Part, out: Path, limit_s: float, started: list[str]) -> Outcome:
    print(f"{part.name}: at most {limit_s:.0f} s", flush=True)
    log, start_s = _log_of(part.name, out), time.monotonic()
    # The value identifies the part: all processes that the part starts inherit it, and no other process has it.
    variables = {PART_ENDS: str(time.time() + limit_s - ABORT_S), "OUT": str(out)}
    variable = f"{PART_ENDS}={variables[PART_ENDS]}"
    started.append(variable)
    if part.runs_beside:
        # Each part would start a thread per core otherwise, and the parts would wait for each other's threads.
        variables["OMP_NUM_THREADS"] = str(THREADS_BESIDE)
    with log.open("wb") as text:
        text.write(f"\n===== {part.name}: {' '.join(part.command)}\n".encode())
        text.flush()
        begin = text.tell()
        process = subprocess.Popen(
            part.command,
            cwd=REPOSITORY,
            env={**_environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout=max(0.1, limit_s - ABORT_S))
        except subprocess.TimeoutExpired:
            timed_out = True
        written = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
        if timed_out:
            # Python writes the stacks of all threads (PYTHONFAULTHANDLER).
            process.send_signal(signal.SIGABRT)
        # A process inside the driver of a GPU that hangs cannot be killed: do not let other parts wait for it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=ABORT_S)
        kill_all(variable)
    last = written[-1] if written else "nothing yet"
    status, why = PASSED, last
    if timed_out:
        status, why = TIMED_OUT, f"after {limit_s:.0f} s, at: {last}"
    elif process.returncode < 0:
        status, why = FAILED, f"ended by {signal.Signals(-process.returncode).name}: see its stacks in log.txt"
    elif process.returncode > 0:
        status = FAILED
    elif re.match(r"=* *\d+ skipped(, \d+ (warnings?|deselected))* in ", last):
        status, why = WAIVED, next(line for line in written if line.startswith("SKIPPED"))
    return Outcome(name=part.name, status=status, seconds=time.monotonic() - start_s, why=why)


def remove_compiler_locks(extensions: Path) -> None:
    """Remove the locks of killed builds, for which PyTorch would wait forever. Nothing compiles while no part runs."""
    for lock in extensions.rglob("lock"):
        lock.unlink(missing_ok=True)


def kill_all(variable: str) -> None:
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # has ended, or is another user's
            if variable.encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _write(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes so far; the JSON file is replaced atomically, so that a killed run leaves a readable file."""
    partial = out / ".summary.json"
    partial.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    os.replace(partial, out / "summary.json")
    (out / "summary.txt").write_text("".join(f"{outcome}\n" for outcome in outcomes))


def _environment() -> Mapping[str, str]:
    return {
        **os.environ,
        "DS_ACCELERATOR": "cuda",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR") or str(REPOSITORY / ".cache/torch_extensions"),
        "XDG_CACHE_HOME": str(REPOSITORY / ".cache"),
    }


if __name__ == "__main__":
    which, *names = sys.argv[1:]
    listed = {"check": parts, "measure": measure_parts}[which]()
    output = Path(os.environ.get("OUT") or REPOSITORY / ".cache" / f"gpu-{which}").resolve()
    raise SystemExit(check(chosen_parts(listed, names), output))
