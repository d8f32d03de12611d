"""Install a framework into a virtual environment of its own, with the PyTorch and DeepSpeed of this environment.

These two are found where they are installed here. So their compiled operations are those of all other tests, which are
compiled once: DeepSpeed compiles them again if a path in the compiler's command is another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from tests.launch import REPOSITORY

FOLDER = REPOSITORY / ".cache" / "frameworks"
SHARED = ("torch", "deepspeed")
NOT_ON_CPU = ("torchvision", "torchaudio", "xformers", "flash-attn", "liger-kernel", "triton", "vllm")
"""Packages that need another build of PyTorch, or CUDA, and are left out unless a requirement names them."""

FINDER = '''
"""Find PyTorch and DeepSpeed in the environment of the tests."""

import sys
from importlib.machinery import PathFinder


class SharedPackages:
    """A finder of the packages that the environments share."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None and name in {{"torch", "torchgen", "functorch", "deepspeed"}}:
            return PathFinder.find_spec(name, [{site!r}])
        return None


sys.meta_path.append(SharedPackages)
'''
TORCHRUN = "#!{python}\nfrom torch.distributed.run import main\n\nmain()\n"


@cache
def uv() -> str:
    """Return the path of uv, which installs a framework in seconds, and install it first if it is not there."""
    folder = FOLDER / "uv"
    if not (folder / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", "uv"], check=True)
    return str(folder / "bin" / "uv")


@dataclass(frozen=True)
class FrameworkEnvironment:
    """A virtual environment in ``folder`` that has one framework."""

    folder: Path

    @property
    def python(self) -> Path:
        """Return the interpreter."""
        return self.folder / "bin" / "python"

    def install(self, requirement: str) -> None:
        """Install the framework and this plugin, if they are not there."""
        done = self.folder / "installed"
        if done.exists() and done.read_text() == requirement:
            return
        subprocess.run([uv(), "venv", "--quiet", "--clear", "--python", sys.executable, str(self.folder)], check=True)
        self._link_shared()
        needed = [line for name in SHARED for line in metadata.requires(name) or () if "extra ==" not in line]
        never = self.folder / "overrides.txt"
        others = {*SHARED, *NOT_ON_CPU} - {*requirement.split()}
        never.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in sorted(others)))
        subprocess.run(
            [
                *(uv(), "pip", "install", "--quiet", "--python", str(self.python), "--override", str(never)),
                *(*requirement.split(), *needed, "ninja", "setuptools", "--editable", str(REPOSITORY)),
            ],
            check=True,
        )
        if found := [*self.folder.glob("lib/python*/site-packages/torch")]:
            raise RuntimeError(f"the environment must have no PyTorch of its own, found {found[0]}")
        done.write_text(requirement)

    def _link_shared(self) -> None:
        site = Path(torch.__file__).parent.parent
        (target,) = self.folder.glob("lib/python*/site-packages")
        for name in SHARED:
            (found,) = site.glob(f"{name}-*.dist-info")
            (target / found.name).symlink_to(found)
        (target / "shared_packages.py").write_text(FINDER.format(site=str(site)))
        (target / "shared_packages.pth").write_text("import shared_packages\n")
        torchrun = self.folder / "bin" / "torchrun"
        torchrun.write_text(TORCHRUN.format(python=self.python))
        torchrun.chmod(0o755)

    def variables(self, **changes: str) -> dict[str, str]:
        """Return the environment variables of a command."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return {
            **ours,
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": str(Path(__file__).with_name("patches")),
            "PYTHONWARNINGS": "ignore::FutureWarning",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            # Otherwise axolotl reports each run to its makers, and waits for an answer.
            "AXOLOTL_DO_NOT_TRACK": "1",
            "DO_NOT_TRACK": "1",
            "HF_HOME": str(self.folder / "hub"),
            "XDG_CACHE_HOME": str(FOLDER / "cache"),
            **changes,
        }

    def versions(self) -> dict[str, str]:
        """Return the versions that decide how the framework trains."""
        code = (
            "import importlib.metadata, json, platform\n"
            "names = {'deepspeed', 'torch', 'transformers', 'accelerate', 'peft', 'trl'}\n"
            "found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}\n"
            "print(json.dumps({**found, 'python': platform.python_version()}))"
        )
        finished = subprocess.run([str(self.python), "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, str] = json.loads(finished.stdout)
        return found
