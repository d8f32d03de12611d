"""Run each framework's own command with stock and with the plugin, compare the saved files, and write ``results.json``.

``python -m tests.compat.frameworks [NAME ...]``; without arguments all frameworks. The logs are in
``.cache/frameworks/NAME``. A framework that cannot be installed, or a run that fails, is a result, too.
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
from pathlib import Path
from typing import Any

from deep_opt_states.names import CONFIG_KEY
from tests.compat.frameworks.cases import FRAMEWORKS, Framework, Run
from tests.compat.frameworks.environment import FOLDER, FrameworkEnvironment
from tests.compat.results import add_result
from tests.launch import free_port, kill_with_descendants, remove_shared_memory

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
