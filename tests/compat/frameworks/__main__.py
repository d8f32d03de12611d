"""Run each framework's own command with stock and with the plugin, compare the saved files, and write ``results.json``.

``python -m tests.compat.frameworks [NAME ...]``; without arguments all frameworks. The logs are in
``.cache/frameworks/NAME``. Each has a virtual environment of its own, which finds PyTorch and DeepSpeed where they are
installed here: DeepSpeed compiles its ops again if a path in the compiler's command is another.
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
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deep_opt_states.names import CONFIG_KEY
from tests.compat.frameworks.cases import FRAMEWORKS, Framework, Run
from tests.compat.results import add_result
from tests.launch import REPOSITORY, free_port, kill_with_descendants, remove_shared_memory

FOLDER, HERE = REPOSITORY / ".cache" / "frameworks", Path(__file__).parent
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
VERSIONS = """
import importlib.metadata, json, platform
names = {'deepspeed', 'torch', 'transformers', 'accelerate', 'peft', 'trl'}
found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
print(json.dumps({**found, 'python': platform.python_version()}))
"""

TIMEOUT_S = 900
BLOCK: Mapping[str, Any] = {CONFIG_KEY: {}}
LOGGED = "[deep_opt_states] CPU update on rank"
"""The start of an update's line. A long build is logged by the plugin also without the block."""
EQUAL = "tensors equal"


class RunFailed(RuntimeError):
    """A command that failed, with the line of its log that says why."""


@dataclass(frozen=True)
class FrameworkRuns:
    framework: Framework

    @property
    def folder(self) -> Path:
        return FOLDER / self.framework.name

    @property
    def python(self) -> str:
        return str(self.folder / "environment" / "bin" / "python")

    def install(self) -> None:
        """Install the framework and this plugin with uv, which takes seconds, if they are not there."""
        requirement, environment, uv = self.framework.requirement, self.folder / "environment", FOLDER / "uv" / "bin"
        done = environment / "installed"
        if done.exists() and done.read_text() == requirement:
            return
        if not (uv / "uv").exists():
            subprocess.run([sys.executable, "-m", "venv", str(uv.parent)], check=True)
            subprocess.run([str(uv / "pip"), "install", "--quiet", "uv"], check=True)
        command = [str(uv / "uv"), "venv", "--quiet", "--clear", "--python", sys.executable, str(environment)]
        subprocess.run(command, check=True)
        site = Path(torch.__file__).parent.parent
        (target,) = environment.glob("lib/python*/site-packages")
        for name in SHARED:
            (found,) = site.glob(f"{name}-*.dist-info")
            (target / found.name).symlink_to(found)
        (target / "shared_packages.py").write_text(FINDER.format(site=str(site)))
        (target / "shared_packages.pth").write_text("import shared_packages\n")
        torchrun = environment / "bin" / "torchrun"
        torchrun.write_text(TORCHRUN.format(python=self.python))
        torchrun.chmod(0o755)
        needed = [line for name in SHARED for line in metadata.requires(name) or () if "extra ==" not in line]
        never = environment / "overrides.txt"
        others = {*SHARED, *NOT_ON_CPU} - {*requirement.split()}
        never.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in sorted(others)))
        command = [str(uv / "uv"), "pip", "install", "--quiet", "--python", self.python, "--override", str(never)]
        packages = [*requirement.split(), *needed, "ninja", "setuptools", "--editable", str(REPOSITORY)]
        subprocess.run([*command, *packages], check=True)
        if (target / "torch").exists():
            raise RuntimeError(f"the environment must have no PyTorch of its own, found {target / 'torch'}")
        done.write_text(requirement)

    def train(self, run: Run, name: str, block: Mapping[str, Any], halfway_of: Path | None = None) -> Path:
        """Run the command with or without the block, and return the folder with everything that it has saved."""
        out = self.folder / f"{run.name}, {name}".replace(", ", "-").replace(" ", "-")
        shutil.rmtree(out, ignore_errors=True)
        command, config = run.command, self.framework.config
        if halfway_of is not None:
            copy = out / run.halfway
            shutil.copytree(halfway_of / run.halfway, copy)
            # DeepSpeed's own file, by which OpenRLHF finds the checkpoint.
            (copy.parent / "latest").write_text(copy.name)
            head, separator, tail = command.partition(" -- ")
            command = f"{head} {run.resume}{separator}{tail}"
        if isinstance(config, str):
            (path,) = self.folder.glob(f"environment/lib/python*/site-packages/{config}")
            config = json.loads(path.read_text())
        written, yaml, log = (out.with_name(f"{out.name}.{suffix}") for suffix in ("json", "yaml", "log"))
        written.write_text(json.dumps({**config, **block}))
        values = {"data": self.folder / "data", "config": written, "yaml": yaml, "out": out, "ranks": run.ranks}
        yaml.write_text(run.yaml.format(**values))
        port = free_port()
        changes = {"BLOCK": json.dumps(block), "CPU_PATCHES": self.framework.patches, "MASTER_PORT": str(port)}
        self.call([part.format(**values) for part in shlex.split(command)], log, **changes)
        remove_shared_memory(port)
        if (LOGGED in log.read_text(errors="replace")) != bool(block):
            raise RunFailed("the plugin was on in a run without the block, or off in one with it")
        return out

    def compare(self, stock: Path, ours: Path) -> str:
        log = ours.with_name(f"{ours.name}.bits")
        self.call([self.python, str(HERE / "same_bits.py"), str(stock), str(ours)], log)
        found = json.loads(log.read_text().splitlines()[-1])
        if found["differences"]:
            return f"{len(found['differences'])} of {found['tensors']} tensors differ: {found['differences'][0]}"
        return f"{found['tensors']} {EQUAL}" if found["tensors"] else "nothing was saved"

    def call(self, command: Sequence[str], log: Path, **changes: str) -> None:
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PATH": os.pathsep.join([str(Path(self.python).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(HERE / "patches"),
            "PYTHONWARNINGS": "ignore::FutureWarning",
            **{"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            # Otherwise axolotl reports each run to its makers, and waits for an answer.
            **{"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"},
            **{"HF_HOME": str(self.folder / "environment" / "hub"), "XDG_CACHE_HOME": str(FOLDER / "cache")},
            **changes,
        }
        with log.open("w") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                command, env=variables, cwd=self.folder, text=True, start_new_session=True, **streams
            )
            try:
                code = process.wait(TIMEOUT_S)
            except BaseException as error:
                kill_with_descendants(process)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RunFailed(f"did not end in {TIMEOUT_S} s") from error
                raise
        if code:
            # The part of the log that names the first exception, or the last line.
            text = log.read_text(errors="replace").strip()
            named = re.search(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Unsupported): .*)", text, re.MULTILINE)
            raise RunFailed(f"exit status {code}: {(named[1] if named else text.rpartition(chr(10))[2])[:300]}")

    def results(self, run: Run) -> dict[str, str]:
        results, name = {}, run.name
        try:
            stock, ours = self.train(run, "stock", {}), self.train(run, "plugin", BLOCK)
            results[name] = self.compare(stock, ours)
            if run.resume:
                name = f"{run.name}, resumed"
                resumed = self.train(run, "resumed", BLOCK, halfway_of=ours)
                results[name] = self.compare(stock, resumed)
                if not results[name].endswith(EQUAL):
                    # ms-swift trains with other data after a resumption, also with stock.
                    stock = self.train(run, "stock resumed", {}, halfway_of=stock)
                    results[name] = f"compared with stock resumed: {self.compare(stock, resumed)}"
        except RunFailed as failure:
            results[name] = str(failure)
        return results


def try_framework(framework: Framework) -> dict[str, Any]:
    tried = FrameworkRuns(framework)
    tried.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"requirement": framework.requirement, "pins": framework.pins, "versions": {}, "runs": {}}
    try:
        tried.install()
        found["versions"] = json.loads(subprocess.check_output([tried.python, "-c", VERSIONS], text=True))
        data = tried.folder / "data"
        tried.call([tried.python, str(HERE / "tiny.py"), str(data)], data.with_suffix(".log"))
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return {**found, "runs": {"installation": str(error)}}
    for run in framework.runs:
        began = time.monotonic()
        for name, result in tried.results(run).items():
            found["runs"][name] = result
            print(f"{framework.name}, {name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return found


def main(arguments: Sequence[str]) -> int:
    known = {framework.name: framework for framework in FRAMEWORKS}
    parser = argparse.ArgumentParser(prog="python -m tests.compat.frameworks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *known], metavar="NAME")
    names = parser.parse_args(arguments).names or list(known)
    changed = [add_result("frameworks", name, try_framework(known[name])) for name in names]
    return int(any(changed))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(FOLDER / "ops"))
    sys.exit(main(sys.argv[1:]))
