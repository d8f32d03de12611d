"""Try releases of DeepSpeed and PyTorch with the golden cases, and write ``results.json`` for the tables in the docs.

``python -m tests.compat [deepspeed==VERSION | torch==VERSION ...]``; without arguments all releases that were tried.
Each is installed into a folder of its own. PyTorch's, 3 to 6 GB each, are tried with this environment's
DeepSpeed, and removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED
from tests.compat.golden import EQUAL, GOLDEN, TRIED_TORCH, world_size
from tests.compat.results import add_result, write_compiler
from tests.launch import REPOSITORY, run_ranks

FOLDER = REPOSITORY / ".cache" / "compat"
TIMEOUT_S = 3600

OPTIONS = {
    # DeepSpeed's requirements come from this environment.
    "deepspeed": ("--no-deps", "--no-build-isolation"),
    # PyTorch's CUDA builds cannot be imported without CUDA's libraries, which are packages of their own.
    "torch": ("--no-compile", "--no-warn-conflicts"),
}
WITHOUT_TORCH = 'raise ImportError("hidden, because importing PyTorch takes most of the time of the installation")\n'


class Release(NamedTuple):
    """A release of ``deepspeed`` or ``torch``, which ranks import instead of the one of this environment."""

    package: str
    version: str

    @staticmethod
    def from_requirement(text: str) -> Release:
        package, version = text.split("==")
        return Release(package, version)

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.package}-{self.version}"

    def install(self) -> None:
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


def try_release(release: Release, names: Sequence[str]) -> dict[str, Any]:
    release.install()
    variables = {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(release.folder)]),
        "TORCH_EXTENSIONS_DIR": str(FOLDER / f"{release.folder.name} ops"),
        "CXX": str(write_compiler(FOLDER)),
    }
    cases: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for size in sorted(set(map(world_size, names))):
        of_size = [name for name in names if world_size(name) == size]
        with tempfile.TemporaryDirectory() as folder:
            program = ["-m", "tests.compat.golden_ranks", f"{folder}/results", *of_size]
            for rank, finished in enumerate(run_ranks(size, program, TIMEOUT_S, fresh=True, **variables)):
                written = Path(folder, f"results.{rank}")
                if not written.exists():
                    raise RuntimeError(f"rank {rank} with {release} failed:\n{finished.output[-5000:]}")
                found = json.loads(written.read_text())
                assert found["versions"][release.package].split("+")[0] == release.version, found["versions"]
                for name in of_size:
                    lines = found["cases"].get(name, ["not run, because an earlier case failed"])
                    cases[name] = list(dict.fromkeys([*cases.get(name, []), *lines]))
    return {**found["versions"], "missing_names": found["missing_names"], "cases": cases}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("releases", nargs="*", type=Release.from_requirement, metavar="PACKAGE==VERSION")
    all_tried = [("deepspeed", version) for version in TESTED_DEEPSPEED] + [("torch", each) for each in TRIED_TORCH]
    changed = 0
    for release in parser.parse_args(arguments).releases or [Release(*each) for each in all_tried]:
        found = try_release(release, GOLDEN)
        different = {name: lines for name, lines in found["cases"].items() if lines != EQUAL}
        print(f"{' '.join(release)}: {len(GOLDEN) - len(different)} of {len(GOLDEN)} equal", flush=True)
        for name, lines in different.items():
            print(f"  {name}: {'; '.join(lines)[:500]}")
        changed += add_result(*release, found)
        if release.package == "torch":
            shutil.rmtree(release.folder)
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
