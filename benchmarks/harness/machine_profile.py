"""This machine's profile, measured as users do."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.rows import REPOSITORY


@contextmanager
def measured_profile(*, quick: bool) -> Iterator[Path]:
    """By ``deep-opt-states profile``, in a process of its own; the file is gone at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "deep_opt_states.cli", "profile", "--output", str(path)]
        command += ["--quick"] if quick else []
        # Errors are told on stderr.
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
        yield path
