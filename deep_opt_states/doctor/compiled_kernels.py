"""Check DeepSpeed's CPU Adam op, which stock needs, too, our own kernels, and the tools that compile them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deep_opt_states.doctor.finding import Finding, Status


@dataclass(frozen=True)
class Extension:
    """The state of a compiled extension on this machine: DeepSpeed's CPU Adam op, or our own library."""

    prebuilt: bool = False
    """Whether it was built when DeepSpeed was installed."""
    folder: Path | None = None
    """The folder in which PyTorch's extension loader builds it, unless it is prebuilt."""
    built: bool = False
    """Whether ``folder`` contains the built extension."""
    locked: bool = False
    """Whether ``folder`` contains the lock of a build, which is running or was killed."""
    problem: str = ""
    """The reason why it cannot be built or loaded; empty if there is none."""


def cpu_adam() -> Extension:
    """Look for the op in the same places as ``OpBuilder.load``, but build nothing."""
    try:
        return _cpu_adam()
    except Exception as error:  # noqa: BLE001 - any name may be missing in an unknown or broken DeepSpeed
        return Extension(problem=f"{type(error).__name__}: {error}")


def _cpu_adam() -> Extension:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops, torch_info
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    if installed_ops.get(builder.name, False) and accelerator_name == get_accelerator().device_name():
        builder.validate_torch_version(torch_info)
        return Extension(prebuilt=True)
    if not builder.is_compatible(verbose=False):
        return Extension(
            problem=builder.error_log or "DeepSpeed reports that the op is not compatible with this machine"
        )
    return _built_by_loader(builder.name)


def own_adam() -> Extension:
    """Look for the library of our C++ Adam kernel where PyTorch's extension loader builds it, but build nothing."""
    try:
        from deep_opt_states.device.kernels.library import NAME

        return _built_by_loader(NAME)
    except Exception as error:  # noqa: BLE001 - PyTorch may be missing or broken
        return Extension(problem=f"{type(error).__name__}: {error}")


def _built_by_loader(name: str) -> Extension:
    from torch.utils.cpp_extension import _get_build_directory

    # This function is private and creates the (empty) folder, but guessing the path would be worse. If the folder
    # cannot be created, that is a finding.
    folder = Path(_get_build_directory(name, verbose=False))
    return Extension(folder=folder, built=(folder / f"{name}.so").is_file(), locked=(folder / "lock").exists())


def compiler_command(environ: Mapping[str, str]) -> list[str]:
    """Return the command with which PyTorch calls the compiler. CXX may include arguments, as in ``ccache g++``."""
    return shlex.split(environ.get("CXX", "")) or ["c++"]


def first_output_line(*command: str) -> str | None:
    """Return the first line that ``command`` prints, or None if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def check_compiler(command: str, version: str | None, op: Extension) -> Finding:
    """Check the C++ compiler. ``version`` is None if ``command`` cannot be run."""
    topic = "C++ compiler"
    if version is not None:
        return Finding(topic, Status.OK, f"{command}: {version}")
    remedy = "Install one, such as apt-get install g++, or set CXX to yours."
    if op.prebuilt or op.built:
        found = (
            f"{command} cannot be run; it is needed to build our own kernel, and when another PyTorch, DeepSpeed or "
            "ninja rebuilds cpu_adam"
        )
        return Finding(topic, Status.WARN, found, remedy)
    return Finding(topic, Status.FAIL, f"{command} cannot be run; must run, because cpu_adam is not built", remedy)


def check_ninja(version: str | None, op: Extension) -> Finding:
    """Check ninja. ``version`` is None if it cannot be run."""
    if version is not None:
        return Finding("ninja", Status.OK, version)
    remedy = "pip install ninja, and activate the virtual environment: it must be on PATH."
    if op.prebuilt:
        found = "cannot be run; PyTorch loads our own kernel with it, and cpu_adam if that is no longer prebuilt"
        return Finding("ninja", Status.WARN, found, remedy)
    # A built op needs it, too: PyTorch lets ninja check whether the op is up to date before it loads the op.
    return Finding(
        "ninja", Status.FAIL, "cannot be run; must run, because PyTorch builds and loads cpu_adam with it", remedy
    )


def check_cpu_adam(op: Extension, can_build: bool) -> Finding:
    """Check the op itself. ``can_build`` is whether there are a compiler and ninja."""
    topic = "cpu_adam"
    if op.problem:
        remedy = "Solve the other problems first; if this one remains, reinstall DeepSpeed for the installed PyTorch."
        return Finding(topic, Status.FAIL, f"cannot be used: {op.problem}", remedy)
    if op.prebuilt:
        return Finding(topic, Status.OK, "prebuilt with DeepSpeed")
    assert op.folder is not None
    if op.locked:
        return _locked(topic, op.folder)
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


def check_own_adam(kernel: Extension, *, has_compiler: bool, has_ninja: bool) -> Finding:
    """Check the library of our C++ Adam kernel. Without it, training starts with stock's op on the CPU."""
    topic = "C++ Adam kernel"
    without = "without it, an update on the CPU takes three slower passes, and no update runs on the GPU"
    if kernel.problem:
        remedy = "Solve the other problems first; if this one remains, report it with this output."
        return Finding(topic, Status.WARN, f"cannot be used: {kernel.problem}; {without}", remedy)
    assert kernel.folder is not None
    if kernel.locked:
        return _locked(topic, kernel.folder)
    # PyTorch lets ninja check whether the library is up to date before it loads the library.
    if kernel.built and has_ninja:
        return Finding(topic, Status.OK, f"built in {kernel.folder}")
    if has_compiler and has_ninja:
        found = f"not built yet in {kernel.folder}: the first engine compiles it, which takes about a minute"
        remedy = 'Build it now: python -c "from deep_opt_states.device.kernels.library import library; library()"'
        return Finding(topic, Status.WARN, found, remedy)
    state = "built" if kernel.built else "not built"
    needed = "loaded without ninja" if kernel.built else "built without a compiler and ninja"
    found = f"{state} in {kernel.folder}, and cannot be {needed}; {without}"
    return Finding(topic, Status.WARN, found, "Install the missing tools that are listed above.")


def _locked(topic: str, folder: Path) -> Finding:
    lock = folder / "lock"
    found = f"locked by {lock}: every start waits until it is removed, and a build that was killed never removes it"
    return Finding(topic, Status.WARN, found, f"If no process is building or loading it now: rm {lock}")


def check_triton(version: str, has_cuda: bool) -> Finding:
    """Check that Triton is installed; ``version`` is empty if it is not. Only an engine tries to compile our kernel."""
    if not has_cuda:
        return Finding("triton", Status.OK, f"{version or 'not installed'}; only GPUs need it")
    if not version:
        found = "not installed; without it, no update runs on the GPU, and placements other than cpu are refused"
        return Finding("triton", Status.WARN, found, "pip install triton")
    return Finding("triton", Status.OK, version)
