"""Run each framework's own command with stock and with the plugin, compare the saved files, and write ``results.json``.

``python -m tests.compat.frameworks [NAME ...]``; without arguments all frameworks. The logs are in
``.cache/frameworks/NAME``. A framework that cannot be installed, or a run that fails, is a result, too. Each has a
virtual environment of its own, which finds PyTorch and DeepSpeed where they are installed here, so that their ops are
those of all other tests: DeepSpeed compiles them again if a path in the compiler's command is another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deep_opt_states.names import CONFIG_KEY
from tests.compat.frameworks.cases import FRAMEWORKS, Framework, Run
from tests.compat.results import add_result
from tests.launch import REPOSITORY, free_port, kill_with_descendants, remove_shared_memory

FOLDER = REPOSITORY / ".cache" / "frameworks"
SHARED = ("torch", "deepspeed")
NOT_ON_CPU = ("torchvision", "torchaudio", "xformers", "flash-attn", "liger-kernel", "triton", "vllm")
"""Packages that need another build of PyTorch, or CUDA, and are left out unless a requirement names them."""

FINDER = """
import sys
from importlib.machinery import PathFinder


class SharedPackages:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None and name in {{"torch", "torchgen", "functorch", "deepspeed"}}:
            return PathFinder.find_spec(name, [{site!r}])
        return None


sys.meta_path.append(SharedPackages)
"""
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


TIMEOUT_S = 900
BLOCK: Mapping[str, Any] = {CONFIG_KEY: {}}
LOGGED = "[deep_opt_states] CPU update on rank"
"""The start of an update's line. A long build is logged by the plugin also without the block."""
EQUAL = "tensors equal"
HERE = Path(__file__).parent


class RunFailed(RuntimeError):
    """A command that failed, with the line of its log that says why."""


@dataclass(frozen=True)
class FrameworkRuns:
    """A framework in its environment, and the folder for its runs."""

    framework: Framework
    environment: FrameworkEnvironment
    folder: Path

    def train(self, run: Run, name: str, block: Mapping[str, Any], halfway_of: Path | None = None) -> Path:
        """Run the command with or without the block, and return the folder with everything that it has saved.

        ``halfway_of`` is the folder of the run whose checkpoint is resumed.
        """
        out = self.folder / f"{run.name}, {name}".replace(", ", "-").replace(" ", "-")
        shutil.rmtree(out, ignore_errors=True)
        command = run.command
        if halfway_of is not None:
            copy = out / run.halfway
            shutil.copytree(halfway_of / run.halfway, copy)
            # DeepSpeed's own file, by which OpenRLHF finds the checkpoint.
            (copy.parent / "latest").write_text(copy.name)
            head, separator, tail = command.partition(" -- ")
            command = f"{head} {run.resume}{separator}{tail}"
        config, yaml = (out.with_name(f"{out.name}.{suffix}") for suffix in ("json", "yaml"))
        config.write_text(json.dumps({**self._config(), **block}))
        values = {"data": self.folder / "data", "config": config, "yaml": yaml, "out": out, "ranks": run.ranks}
        yaml.write_text(run.yaml.format(**values))
        port = free_port()
        self.call(
            [part.format(**values) for part in shlex.split(command)],
            out.with_name(f"{out.name}.log"),
            BLOCK=json.dumps(block),
            CPU_PATCHES=self.framework.patches,
            MASTER_PORT=str(port),
        )
        remove_shared_memory(port)
        if (LOGGED in out.with_name(f"{out.name}.log").read_text(errors="replace")) != bool(block):
            raise RunFailed("the plugin was on in a run without the block, or off in one with it")
        return out

    def compare(self, stock: Path, ours: Path) -> str:
        """Return the result of comparing all saved tensors."""
        command = [str(self.environment.python), str(HERE / "same_bits.py"), str(stock), str(ours)]
        log = ours.with_name(f"{ours.name}.bits")
        self.call(command, log)
        found = json.loads(log.read_text().splitlines()[-1])
        if found["differences"]:
            return f"{len(found['differences'])} of {found['tensors']} tensors differ: {found['differences'][0]}"
        return f"{found['tensors']} {EQUAL}" if found["tensors"] else "nothing was saved"

    def _config(self) -> Mapping[str, Any]:
        config = self.framework.config
        if isinstance(config, str):
            (path,) = self.environment.folder.glob(f"lib/python*/site-packages/{config}")
            config = json.loads(path.read_text())
        return config

    def call(self, command: Sequence[str], log: Path, **changes: str) -> None:
        """Run a command of the environment, and raise ``RunFailed`` if it fails or outlives the timeout."""
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=self.environment.variables(**changes),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                code = process.wait(TIMEOUT_S)
            except BaseException as error:
                kill_with_descendants(process)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RunFailed(f"did not end in {TIMEOUT_S} s") from error
                raise
        if code:
            raise RunFailed(f"exit status {code}: {_reason(log)}")


def _reason(log: Path) -> str:
    """Return the part of a log that names the first exception, or the last line."""
    text = log.read_text(errors="replace").strip()
    named = re.search(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Unsupported): .*)", text, re.MULTILINE)
    return (named[1] if named else text.rpartition("\n")[2])[:300]


def try_run(tried: FrameworkRuns, run: Run) -> dict[str, str]:
    """Return the results of a run and of its resumption, by name."""
    results = {}
    name = run.name
    try:
        stock = tried.train(run, "stock", {})
        ours = tried.train(run, "plugin", BLOCK)
        results[name] = tried.compare(stock, ours)
        if run.resume:
            name = f"{run.name}, resumed"
            resumed = tried.train(run, "resumed", BLOCK, halfway_of=ours)
            results[name] = tried.compare(stock, resumed)
            if not results[name].endswith(EQUAL):
                # ms-swift trains with other data after a resumption, with stock, too.
                stock = tried.train(run, "stock resumed", {}, halfway_of=stock)
                results[name] = f"compared with stock resumed: {tried.compare(stock, resumed)}"
    except RunFailed as failure:
        results[name] = str(failure)
    return results


def try_framework(framework: Framework) -> dict[str, Any]:
    """Return the versions in the framework's environment, and the results of its runs."""
    environment = FrameworkEnvironment(FOLDER / framework.name / "environment")
    tried = FrameworkRuns(framework, environment, FOLDER / framework.name)
    tried.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"requirement": framework.requirement, "pins": framework.pins, "versions": {}, "runs": {}}
    try:
        environment.install(framework.requirement)
        found["versions"] = environment.versions()
        data = tried.folder / "data"
        tried.call([str(environment.python), str(HERE / "tiny.py"), str(data)], data.with_suffix(".log"))
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return {**found, "runs": {"installation": str(error)}}
    for run in framework.runs:
        began = time.monotonic()
        results = try_run(tried, run)
        found["runs"] |= results
        for name, result in results.items():
            print(f"{framework.name}, {name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return found


def main(arguments: Sequence[str]) -> int:
    """Try the frameworks, and return 1 if a result differs from the last one."""
    known = {framework.name: framework for framework in FRAMEWORKS}
    parser = argparse.ArgumentParser(prog="python -m tests.compat.frameworks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *known], metavar="NAME")
    names = parser.parse_args(arguments).names or list(known)
    changed = [add_result("frameworks", name, try_framework(known[name])) for name in names]
    return int(any(changed))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(FOLDER / "ops"))
    sys.exit(main(sys.argv[1:]))
