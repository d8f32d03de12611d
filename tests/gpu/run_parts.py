"""Run the tests and benchmarks that need a GPU, in parts that each have a time limit, within 9 minutes in total.

``make gpu-check`` runs the tests and the profile, and ``make gpu-measure`` small benchmarks. ``summary.json`` is
written after each part, beside its log, into the folder named by OUT or into ``.cache``, so that a killed run leaves
the results of the finished parts. The exit code is 0 if every part passed, 1 if one did not, and 2 if there is no GPU.
Names of parts after the name of the list choose some of its parts:
``python3 -m tests.gpu.run_parts check build kernel``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu.parts import PART_ENDS, Part, chosen_parts, measure_parts, parts
from tests.launch import REPOSITORY

GPU_LIMIT_S = 25
"""The limit for PyTorch to report whether there is a GPU."""

ABORT_S = 1.0
"""The end of a part's limit, in which it writes the stacks of all its threads before it is killed."""

REMEDY = (
    "Run it on a machine with a GPU, with a Python whose PyTorch is built for CUDA: make gpu-check PYTHON=python3, "
    "or another Python that has torch, deepspeed and all other packages that setup.cfg lists, including [test]."
)
PASSED, FAILED, TIMED_OUT, WAIVED = "passed", "FAILED", "TIMED OUT", "WAIVED"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a part: its status, which is one of the four words above, and an explanation."""

    name: str
    status: str
    seconds: float
    why: str

    def __str__(self) -> str:
        return f"{self.status:<9}  {self.name:<12}  {self.seconds:5.0f} s  {self.why}"


def no_gpu() -> str:
    """Return the reason why this Python cannot use a GPU, or an empty string if it can."""
    code = "import torch; print('GPU' if torch.cuda.is_available() else 'none')"
    options = {"cwd": REPOSITORY, "env": _environment(), "capture_output": True, "text": True, "timeout": GPU_LIMIT_S}
    try:
        done = subprocess.run([sys.executable, "-c", code], **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return f"PyTorch does not report within {GPU_LIMIT_S} s whether there is one"
    if done.returncode != 0:
        return str((done.stderr.strip().splitlines() or ["PyTorch cannot be imported"])[-1])
    return f"torch.cuda.is_available() is false in {sys.executable}" if done.stdout.split()[-1] == "none" else ""


def check(groups: Sequence[Sequence[Part]], out: Path, missing: Callable[[], str] = no_gpu) -> int:
    """Run the parts, those of a group at the same time, write their outcomes to ``out``, and return the exit code.

    ``missing`` returns the reason why no GPU can be used, or an empty string.
    """
    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        # The file is replaced at once, so that a killed run leaves a readable one.
        partial = out / ".summary.json"
        partial.write_text(json.dumps([asdict(each) for each in outcomes], indent=2) + "\n")
        os.replace(partial, out / "summary.json")
        print(outcome, flush=True)

    if problem := missing():
        for part in (part for group in groups for part in group):
            note(Outcome(name=part.name, status=WAIVED, seconds=0, why=f"no GPU: {problem}"))
        print(f"No GPU: {problem}.\n{REMEDY}")
        return 2
    for group in groups:
        remove_compiler_locks(Path(_environment()["TORCH_EXTENSIONS_DIR"]))
        # All processes that a part starts inherit its variable, and no other process has it.
        variables = {part: f"{time.time() + part.limit_s - ABORT_S} {part.name}" for part in group}
        # Several parts would start a thread per core each otherwise, and wait for each other's threads.
        threads_of_each = {"OMP_NUM_THREADS": "2"} if len(group) > 1 else {}
        with ThreadPoolExecutor(len(group)) as threads:
            running = [
                threads.submit(_run, part, out, {**threads_of_each, PART_ENDS: variable})
                for part, variable in variables.items()
            ]
            try:
                for future in as_completed(running):
                    note(future.result())
            finally:
                # The processes have sessions of their own: an interrupt from the terminal does not reach them.
                for variable in variables.values():
                    kill_all(f"{PART_ENDS}={variable}")
    print(f"Written: {out}")
    return int(any(outcome.status in (FAILED, TIMED_OUT) for outcome in outcomes))


def _run(part: Part, out: Path, variables: Mapping[str, str]) -> Outcome:
    print(f"{part.name}: at most {part.limit_s:.0f} s", flush=True)
    log, start_s, timed_out = out / f"log-{part.name}.txt", time.monotonic(), False
    env = {**_environment(), **variables, "OUT": str(out)}
    with log.open("wb") as text:
        process = subprocess.Popen(
            part.command,
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=max(0.1, part.limit_s - ABORT_S))
        except subprocess.TimeoutExpired:
            timed_out = True
        written = log.read_text(errors="replace").strip().splitlines() or ["nothing yet"]
        if timed_out:
            # Python writes the stacks of all threads (PYTHONFAULTHANDLER).
            process.send_signal(signal.SIGABRT)
        # A process inside the driver of a GPU that hangs cannot be killed: do not let other parts wait for it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=ABORT_S)
        kill_all(f"{PART_ENDS}={variables[PART_ENDS]}")
    status, why = (FAILED if process.returncode else PASSED), written[-1]
    if timed_out:
        status, why = TIMED_OUT, f"after {part.limit_s:.0f} s, at: {why}"
    elif process.returncode < 0:
        why = f"ended by {signal.Signals(-process.returncode).name}: see its stacks in {log.name}"
    return Outcome(name=part.name, status=status, seconds=time.monotonic() - start_s, why=why)


def remove_compiler_locks(extensions: Path) -> None:
    """Remove the locks of killed processes in the folder ``extensions``.

    PyTorch waits forever for the lock of an extension that another process compiles. Nothing compiles while no part
    runs, so every lock that exists then is left over.
    """
    for lock in extensions.rglob("lock"):
        lock.unlink(missing_ok=True)


def kill_all(variable: str) -> None:
    """Kill every process that was started with this ``NAME=value`` in its environment.

    Ranks have sessions of their own, and would continue to use the GPU if only the test that started them were killed.
    """
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # has ended, or is another user's
            if variable.encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


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
