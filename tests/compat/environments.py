"""Install releases of DeepSpeed next to each other, and run ranks with one of them.

Everything else is that of this interpreter. Each release has its own folder for the ops that PyTorch compiles.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.launch import REPOSITORY, Finished, run_ranks

FOLDER = REPOSITORY / ".cache" / "compat"

WITHOUT_TORCH = 'raise ImportError("hidden, because importing PyTorch takes most of the time of the installation")\n'
WITHOUT_DEBUG_INFORMATION = '#!/bin/sh\nexec c++ "$@" -g0\n'
"""A compiler that needs about half the time for DeepSpeed's ops, with the same instructions."""


def install(release: str) -> Path:
    """Return the folder with this release of DeepSpeed, installed from PyPI without dependencies if it is not there."""
    target = FOLDER / release
    if not target.exists():
        hidden = FOLDER / "without torch"
        hidden.mkdir(parents=True, exist_ok=True)
        (hidden / "torch.py").write_text(WITHOUT_TORCH)
        partial = target.with_name(f"{release}.{os.getpid()}")
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target"]
        command = [sys.executable, "-m", "pip", "install", *options, str(partial), f"deepspeed=={release}"]
        # A constraint of the environment would exclude all releases but one.
        environ = {**os.environ, "PYTHONPATH": str(hidden), "PIP_CONSTRAINT": ""}
        subprocess.run(command, env=environ, check=True)
        partial.rename(target)
    return target


def run_with(release: str, world_size: int, arguments: list[str], timeout_s: float) -> list[Finished]:
    """Run ``python -m`` with ``arguments`` as ranks that import this release of DeepSpeed."""
    compiler = FOLDER / "c++"
    paths = [str(REPOSITORY), str(install(release))]
    compiler.write_text(WITHOUT_DEBUG_INFORMATION)
    compiler.chmod(0o755)
    return run_ranks(
        world_size,
        ["-m", *arguments],
        timeout_s,
        fresh=True,
        PYTHONPATH=os.pathsep.join(paths),
        TORCH_EXTENSIONS_DIR=str(FOLDER / f"{release} ops"),
        CXX=str(compiler),
    )
