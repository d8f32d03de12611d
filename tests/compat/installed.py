"""Install the wheel and the source distribution with an interpreter, train with each, and write ``results.json``.

``python -m tests.compat.installed FOLDER PYTHON``; FOLDER has the two, which ``make wheel`` builds. The interpreter's
fresh virtual environment is outside this checkout, and pip chooses the versions of all dependencies, 6 GB of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.compat.results import add_result, write_compiler
from tests.launch import free_port

NAME = "deep_opt_states"
PLAN = "--profile gh200 --model 13B --world-size 1 --ranks-per-node 1 --micro-batch 1 --sequence 2048"
TRAINING = Path(__file__).with_name("tiny_training.py")
VERSIONS = f"""
import json, platform, sys
from importlib.metadata import version
import {NAME}
assert {NAME}.__file__.startswith(sys.prefix), {NAME}.__file__
assert {NAME}.__version__ == version("{NAME}"), ({NAME}.__version__, version("{NAME}"))
print(json.dumps({{"python": platform.python_version(), "torch": version("torch"), "deepspeed": version("deepspeed")}}))
"""


def run(folder: Path, program: str, *arguments: str | Path) -> str:
    programs = folder / "venv" / "bin"
    # Paths and modules of the caller's environment must not reach this one.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    environ |= {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "CXX": str(write_compiler(folder)),
        "TORCH_EXTENSIONS_DIR": str(folder / "ops"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    print(f"  {' '.join(map(str, (program, *arguments)))[:100]}", flush=True)
    done = subprocess.run([programs / program, *arguments], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(done.stdout)
    done.check_returncode()
    return done.stdout


def pip(folder: Path, *arguments: str | Path) -> None:
    run(folder, "python", "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def try_distribution(folder: Path, distribution: Path) -> dict[str, Any]:
    """Install the distribution, run its commands and a tiny training, and return versions and differences."""
    pip(folder, "install", "--no-compile", distribution)
    pip(folder, "check")
    run(folder, "deep-opt-states", "plan", *PLAN.split())
    run(folder, "deep-opt-states", "doctor")
    found: dict[str, Any] = json.loads(run(folder, "python", "-c", VERSIONS))
    differences = json.loads(run(folder, "python", TRAINING).splitlines()[-1])
    pip(folder, "install", "--no-compile", f"{distribution}[test]")
    pip(folder, "check")
    pip(folder, "uninstall", "--yes", NAME)
    return {**found, "differences": differences}


def main(folder: Path, python: str) -> int:
    distributions = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    assert len(distributions) == 2, f"{folder} must have one wheel and one source distribution, found {distributions}"
    print(f"{python}, with {' and '.join(path.name for path in distributions)}:", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run([python, "-m", "venv", f"{temporary}/venv"], check=True)
        tried = [try_distribution(Path(temporary), path) for path in distributions]
    result = {**tried[-1], "differences": [line for found in tried for line in found["differences"]]}
    print(f"Python {result['python']}: {'; '.join(result['differences']) or 'equal'}")
    add_result("python", result["python"], result)
    return int(bool(result["differences"]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2]))
