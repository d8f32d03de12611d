"""DeepSpeed's CPU Adam op, which stock offloading needs as much as we do, what it takes to compile it, and Triton."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deep_opt_states.doctor.finding import Finding, Status


@dataclass(frozen=True)
class Op:
    """Came ``prebuilt`` with DeepSpeed, or lies in ``folder``, where PyTorch's extension loader builds it.

    ``problem`` says what keeps it from being built or loaded; ``locked`` that a build runs, or died, in ``folder``.
    """

    prebuilt: bool = False
    folder: Path | None = None
    built: bool = False
    locked: bool = False
    problem: str = ""


def cpu_adam() -> Op:
    """Looks for the op as ``OpBuilder.load`` does, but builds nothing."""
    try:
        return _cpu_adam()
    except Exception as error:  # noqa: BLE001 - with a DeepSpeed unknown or broken, anything may be missing here
        return Op(problem=f"{type(error).__name__}: {error}")


def _cpu_adam() -> Op:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops, torch_info
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.utils.cpp_extension import _get_build_directory

    builder = CPUAdamBuilder()
    if installed_ops.get(builder.name, False) and accelerator_name == get_accelerator().device_name():
        builder.validate_torch_version(torch_info)
        return Op(prebuilt=True)
    if not builder.is_compatible(verbose=False):
        return Op(problem=builder.error_log or "DeepSpeed says that the op is not compatible with this machine")
    # Private, and makes the (empty) folder; but to guess it would be worse, and one that cannot be made is a finding.
    folder = Path(_get_build_directory(builder.name, verbose=False))
    return Op(folder=folder, built=(folder / f"{builder.name}.so").is_file(), locked=(folder / "lock").exists())


def compiler_command(environ: Mapping[str, str]) -> list[str]:
    """The one that PyTorch calls. CXX may have arguments, as in ``ccache g++``."""
    return shlex.split(environ.get("CXX", "")) or ["c++"]


def answer(*command: str) -> str | None:
    """The first line that ``command`` prints, or None where it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def check_compiler(command: str, version: str | None, op: Op) -> Finding:
    topic = "C++ compiler"
    if version is not None:
        return Finding(topic, Status.OK, f"{command}: {version}")
    remedy = "Install one, such as apt-get install g++, or set CXX to yours."
    if op.prebuilt or op.built:
        found = f"{command} cannot be run; is needed again once another PyTorch, DeepSpeed or ninja rebuilds cpu_adam"
        return Finding(topic, Status.WARN, found, remedy)
    return Finding(topic, Status.FAIL, f"{command} cannot be run; must be, since cpu_adam is not built", remedy)


def check_ninja(version: str | None, op: Op) -> Finding:
    if version is not None:
        return Finding("ninja", Status.OK, version)
    remedy = "pip install ninja, and activate the virtual environment: it must be on PATH."
    if op.prebuilt:
        return Finding("ninja", Status.WARN, "cannot be run; is needed once cpu_adam no longer comes prebuilt", remedy)
    # Also to load what is built: PyTorch asks ninja whether it is up to date.
    return Finding(
        "ninja", Status.FAIL, "cannot be run; must be, since PyTorch builds and loads cpu_adam by it", remedy
    )


def check_cpu_adam(op: Op, can_build: bool) -> Finding:
    topic = "cpu_adam"
    if op.problem:
        remedy = "Solve the other problems first; if this stays, reinstall DeepSpeed for the PyTorch you have."
        return Finding(topic, Status.FAIL, f"cannot be used: {op.problem}", remedy)
    if op.prebuilt:
        return Finding(topic, Status.OK, "prebuilt with DeepSpeed")
    assert op.folder is not None
    if op.locked:
        lock = op.folder / "lock"
        found = f"locked by {lock}: every start waits until it is gone, which is never if its build was killed"
        return Finding(topic, Status.WARN, found, f"If no process is building or loading it now: rm {lock}")
    if op.built:
        return Finding(topic, Status.OK, f"built in {op.folder}")
    if can_build:
        remedy = 'Do it now: python -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"'
        found = f"not built yet in {op.folder}: the first engine compiles it, which takes about a minute"
        return Finding(topic, Status.WARN, found, remedy)
    found = f"not built in {op.folder}, and cannot be without a compiler and ninja"
    return Finding(topic, Status.FAIL, found, "Install what is missing above.")


def check_triton(version: str, has_cuda: bool) -> Finding:
    """``version`` is empty where it is not installed. Whether it compiles our kernel, the first engine finds out."""
    if not has_cuda:
        return Finding("triton", Status.OK, f"{version or 'not installed'}; only GPUs update by it")
    if not version:
        found = "not installed; without it nothing is updated on the GPU, and other placements than cpu are refused"
        return Finding("triton", Status.WARN, found, "pip install triton")
    return Finding("triton", Status.OK, version)
