"""Check DeepSpeed's CPU Adam op, which stock offloading needs, too, the tools that compile it, and Triton."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deep_opt_states.doctor.finding import Finding, Status


@dataclass(frozen=True)
class CpuAdamOp:
    """The state of DeepSpeed's CPU Adam op on this machine."""

    prebuilt: bool = False
    """Whether the op was built when DeepSpeed was installed."""
    folder: Path | None = None
    """The folder in which PyTorch's extension loader builds the op, unless it is prebuilt."""
    built: bool = False
    """Whether ``folder`` contains the built op."""
    locked: bool = False
    """Whether ``folder`` contains the lock of a build, which is running or was killed."""
    problem: str = ""
    """The reason why the op cannot be built or loaded; empty if there is none."""


def cpu_adam() -> CpuAdamOp:
    """Look for the op in the same places as ``OpBuilder.load``, but build nothing."""
    try:
        return _cpu_adam()
    except Exception as error:  # noqa: BLE001 - any name may be missing in an unknown or broken DeepSpeed
        return CpuAdamOp(problem=f"{type(error).__name__}: {error}")


def _cpu_adam() -> CpuAdamOp:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops, torch_info
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.utils.cpp_extension import _get_build_directory

    builder = CPUAdamBuilder()
    if installed_ops.get(builder.name, False) and accelerator_name == get_accelerator().device_name():
        builder.validate_torch_version(torch_info)
        return CpuAdamOp(prebuilt=True)
    if not builder.is_compatible(verbose=False):
        return CpuAdamOp(
            problem=builder.error_log or "DeepSpeed reports that the op is not compatible with this machine"
        )
    # This function is private and creates the (empty) folder, but guessing the path would be worse. If the folder
    # cannot be created, that is a finding.
    folder = Path(_get_build_directory(builder.name, verbose=False))
    return CpuAdamOp(folder=folder, built=(folder / f"{builder.name}.so").is_file(), locked=(folder / "lock").exists())


def compiler_command(environ: Mapping[str, str]) -> list[str]:
    """Return the command with which PyTorch calls the compiler. CXX may include arguments, as in ``ccache g++``."""
    return shlex.split(environ.get("CXX", "")) or ["c++"]


def first_output_line(*command: str) -> str | None:
    """Return the first line that ``command`` prints, or None if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def check_compiler(command: str, version: str | None, op: CpuAdamOp) -> Finding:
    """Check the C++ compiler. ``version`` is None if ``command`` cannot be run."""
    topic = "C++ compiler"
    if version is not None:
        return Finding(topic, Status.OK, f"{command}: {version}")
    remedy = "Install one, such as apt-get install g++, or set CXX to yours."
    if op.prebuilt or op.built:
        found = f"{command} cannot be run; it is needed when another PyTorch, DeepSpeed or ninja rebuilds cpu_adam"
        return Finding(topic, Status.WARN, found, remedy)
    return Finding(topic, Status.FAIL, f"{command} cannot be run; must run, because cpu_adam is not built", remedy)


def check_ninja(version: str | None, op: CpuAdamOp) -> Finding:
    """Check ninja. ``version`` is None if it cannot be run."""
    if version is not None:
        return Finding("ninja", Status.OK, version)
    remedy = "pip install ninja, and activate the virtual environment: it must be on PATH."
    if op.prebuilt:
        return Finding("ninja", Status.WARN, "cannot be run; it is needed when cpu_adam is no longer prebuilt", remedy)
    # A built op needs it, too: PyTorch lets ninja check whether the op is up to date before it loads the op.
    return Finding(
        "ninja", Status.FAIL, "cannot be run; must run, because PyTorch builds and loads cpu_adam with it", remedy
    )


def check_cpu_adam(op: CpuAdamOp, can_build: bool) -> Finding:
    """Check the op itself. ``can_build`` is whether there are a compiler and ninja."""
    topic = "cpu_adam"
    if op.problem:
        remedy = "Solve the other problems first; if this one remains, reinstall DeepSpeed for the installed PyTorch."
        return Finding(topic, Status.FAIL, f"cannot be used: {op.problem}", remedy)
    if op.prebuilt:
        return Finding(topic, Status.OK, "prebuilt with DeepSpeed")
    assert op.folder is not None
    if op.locked:
        lock = op.folder / "lock"
        found = f"locked by {lock}: every start waits until it is removed, and a build that was killed never removes it"
        return Finding(topic, Status.WARN, found, f"If no process is building or loading it now: rm {lock}")
    if op.built:
        return Finding(topic, Status.OK, f"built in {op.folder}")
    if can_build:
        remedy = (
            'Build it now: python -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"'
        )
        found = f"not built yet in {op.folder}: the first engine compiles it, which takes about a minute"
        return Finding(topic, Status.WARN, found, remedy)
    found = f"not built in {op.folder}, and cannot be built without a compiler and ninja"
    return Finding(topic, Status.FAIL, found, "Install the missing tools that are listed above.")


def check_triton(version: str, has_cuda: bool) -> Finding:
    """Check that Triton is installed; ``version`` is empty if it is not. Only an engine tries to compile our kernel."""
    if not has_cuda:
        return Finding("triton", Status.OK, f"{version or 'not installed'}; only GPUs need it")
    if not version:
        found = "not installed; without it, no update runs on the GPU, and placements other than cpu are refused"
        return Finding("triton", Status.WARN, found, "pip install triton")
    return Finding("triton", Status.OK, version)
