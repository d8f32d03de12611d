"""Install releases of DeepSpeed or PyTorch next to each other, and run ranks with one of them.

Everything else is that of this interpreter. Each release has its own folder for the ops that PyTorch compiles.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.launch import REPOSITORY, Finished, run_ranks

FOLDER = REPOSITORY / ".cache" / "compat"

OPTIONS = {
    # DeepSpeed's requirements are those of this environment.
    "deepspeed": ("--no-deps", "--no-build-isolation"),
    # PyTorch's CUDA builds cannot be imported without CUDA's libraries, which are packages of their own.
    "torch": ("--no-compile", "--no-warn-conflicts"),
}
WITHOUT_TORCH = 'raise ImportError("hidden, because importing PyTorch takes most of the time of the installation")\n'
WITHOUT_DEBUG_INFORMATION = '#!/bin/sh\nexec c++ "$@" -g0\n'
"""A compiler that needs about half the time for DeepSpeed's ops, with the same instructions."""


def write_compiler(folder: Path) -> Path:
    """Write the compiler into ``folder``, and return its path."""
    compiler = folder / "c++"
    compiler.write_text(WITHOUT_DEBUG_INFORMATION)
    compiler.chmod(0o755)
    return compiler


@dataclass(frozen=True)
class Release:
    """A release of ``deepspeed`` or ``torch``, which ranks import instead of the one of this environment."""

    package: str
    version: str

    @staticmethod
    def from_requirement(text: str) -> Release:
        """Return the release that an argument such as ``torch==2.14.1`` names, or raise ``ArgumentTypeError``."""
        package, equals, version = text.partition("==")
        if package not in OPTIONS or not equals or not version:
            expected = " or ".join(f"{name}==VERSION" for name in OPTIONS)
            raise argparse.ArgumentTypeError(f"a release must be {expected}, found {text!r}")
        return Release(package, version)

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def folder(self) -> Path:
        """Return the folder that has the release if it is installed."""
        return FOLDER / f"{self.package}-{self.version}"

    def install(self) -> None:
        """Install the release from PyPI if it is not there."""
        if self.folder.exists():
            return
        hidden = FOLDER / "without torch"
        hidden.mkdir(parents=True, exist_ok=True)
        (hidden / "torch.py").write_text(WITHOUT_TORCH)
        partial = self.folder.with_name(f"{self.folder.name}.{os.getpid()}")
        options = ["--quiet", "--disable-pip-version-check", *OPTIONS[self.package], "--target", str(partial)]
        command = [sys.executable, "-m", "pip", "install", *options, f"{self.package}=={self.version}"]
        # An empty file replaces a constraint of the environment, which would exclude all releases but one.
        environ = {**os.environ, "PYTHONPATH": str(hidden), "PIP_CONSTRAINT": os.devnull}
        try:
            subprocess.run(command, env=environ, check=True)
            partial.rename(self.folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def remove(self) -> None:
        """Remove the installed release."""
        shutil.rmtree(self.folder)

    def run(self, world_size: int, arguments: list[str], timeout_s: float) -> list[Finished]:
        """Run ``python -m`` with ``arguments`` as ranks that import this release."""
        self.install()
        return run_ranks(
            world_size,
            ["-m", *arguments],
            timeout_s,
            fresh=True,
            PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(self.folder)]),
            TORCH_EXTENSIONS_DIR=str(FOLDER / f"{self.folder.name} ops"),
            CXX=str(write_compiler(FOLDER)),
        )
