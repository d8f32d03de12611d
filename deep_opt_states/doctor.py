"""Can training start on this machine? Each check imports what it needs, so that a missing package is a finding."""

from __future__ import annotations

import importlib
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from deep_opt_states import activation
from deep_opt_states.host import machine
from deep_opt_states.names import CONFIG_KEY, SWITCH
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED, is_tested, is_too_old
from perf_model.prediction.memory import DEFAULT_SETUP, shadow_bytes
from perf_model.units import billions, counted, gigabytes, size

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""PyTorch's switch for all entry points of the group ``torch.backends``."""

CONNECTIONS, DEFAULT_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8
"""CUDA's number of hardware queues, which Megatron's scripts set to 1, and its default."""

STREAMS_IN_USE = 9
"""Four lanes, gradient copies, three streams of DeepSpeed, and NCCL's."""

LOCKS = ("lock", ".ninja_lock")
"""The files that PyTorch's extension loader and ninja hold while they build."""


class Status(Enum):
    """The severity of a finding."""

    OK = "OK"
    WARN = "WARN"
    """Training can start, but may be slower than possible."""
    FAIL = "FAIL"
    """Training cannot start, or would start without the plugin although the config enables it."""


@dataclass(frozen=True)
class Finding:
    """The value found with the rule that it breaks, and the remedy unless the status is OK."""

    status: Status
    found: str
    remedy: str = ""


OK, WARN, FAIL = (partial(Finding, status) for status in Status)


def examine(environ: Mapping[str, str]) -> dict[str, Finding]:
    """Return the findings about this machine by topic. A check that raises an exception is also a finding."""
    required, missing = requirements(), _missing_tools(environ)
    checks: dict[str, Callable[[], Finding]] = {
        **{each.name: partial(check_package, each, _version(each.name)) for each in required},
        "deepspeed": lambda: check_deepspeed(_version("deepspeed"), _import_error("deepspeed")),
        "activation hook": lambda: check_hook(environ.get(AUTOLOAD), _has_entry_point(), activation.activate()),
        SWITCH: lambda: check_switch(environ.get(SWITCH)),
        "accelerator": lambda: check_accelerator(*_accelerator(), environ.get("DS_ACCELERATOR")),
        "memlock limit": lambda: check_memlock(machine.memlock_limit_bytes(), machine.has_cuda()),
        CONNECTIONS: lambda: check_connections(environ.get(CONNECTIONS), machine.has_cuda()),
        "triton": lambda: check_triton(_version("triton"), machine.has_cuda()),
        "cpu_adam": lambda: check_extension(_cpu_adam(), missing, ours=False),
        "C++ Adam kernel": lambda: check_extension(_own_adam(), missing, ours=True),
        "locks of builds": lambda: check_locks(_locks()),
        "eager updates": lambda: describe_eager_updates(_free_host_bytes()),
    }
    findings = {}
    for topic, check in checks.items():
        try:
            findings[topic] = check()
        except Exception as error:  # noqa: BLE001 - the user has to know why a check failed
            remedy = "Solve the other problems first; if this one remains, report it with this output."
            findings[topic] = FAIL(f"cannot be checked: {type(error).__name__}: {error}", remedy)
    return findings


def requirements() -> list[Requirement]:
    """Return the required packages without extras; torch alone if the plugin is not installed."""
    lines = ["torch"] if _version("deep_opt_states") is None else metadata.requires("deep_opt_states") or []
    return [Requirement(line) for line in lines if "extra ==" not in line]


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _import_error(name: str) -> Exception | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - DeepSpeed's import also probes the accelerator, which can raise any type
        return error
    return None


def check_package(requirement: Requirement, version: str | None) -> Finding:
    """Check the version of a required package; ``version`` is None if it is not installed."""
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return OK(version)
    found = f"{version or 'not installed'}; must be {requirement.specifier or 'installed'}"
    return FAIL(found, f'pip install --upgrade "{requirement}"')


def check_deepspeed(version: str | None, error: Exception | None) -> Finding:
    """Check that DeepSpeed is not too old, and that its import raised no ``error``; warn of an untested release."""
    remedy = f"pip install deepspeed=={TESTED_DEEPSPEED[-1]}"
    if version is None or is_too_old(version):
        return FAIL(f"{version or 'not installed'}; must be {TESTED_DEEPSPEED[0]} or later", remedy)
    if error is not None:
        found = f"{version}, but import deepspeed fails with {type(error).__name__}: {error}"
        return FAIL(found, f'Run python -c "import deepspeed" to see the full error, or {remedy}')
    if not is_tested(version):
        found = f"{version}; was not tested with this release of the plugin: results may differ from stock's"
        return WARN(found, f"To avoid the risk, {remedy}")
    return OK(version)


def _has_entry_point() -> bool:
    return any(entry.value.startswith("deep_opt_states") for entry in metadata.entry_points(group="torch.backends"))


def check_hook(autoload: str | None, has_entry_point: bool, is_active: bool) -> Finding:
    """Check that ``import torch`` calls our entry point, unless ``autoload`` forbids it, and activates the plugin."""
    if autoload not in (None, "1"):
        found = f'{AUTOLOAD}={autoload}; must be unset or 1, or "{CONFIG_KEY}" in the JSON is ignored'
        return FAIL(found, f"Unset {AUTOLOAD}, or import deep_opt_states in the training script.")
    if not has_entry_point:
        found = "PyTorch finds no entry point of the plugin; must find it, or the JSON block is ignored"
        return FAIL(found, "Install the plugin with pip; in a checkout, run pip install -e .")
    if not is_active:
        error = _import_error("wrapt")
        found = f"must be active after import torch, found that it fails: {type(error).__name__}: {error}"
        return FAIL(found, "Reinstall the package: pip install --force-reinstall wrapt")
    return OK("active after import torch: the JSON block is enough")


def check_switch(value: str | None) -> Finding:
    if value in (None, "1"):
        return OK(value or "unset")
    if value == "0":
        found = "0: the plugin is switched off, and stock DeepSpeed trains even if the JSON enables the plugin"
        return WARN(found, f"Unset {SWITCH} to train with the plugin.")
    found = f"{value!r} has no meaning; must be unset or 1 (on), or 0 (off)"
    return WARN(found, f"Set {SWITCH}=0 to switch the plugin off, or unset it.")


def _accelerator() -> tuple[str, int, list[tuple[str, int]]]:
    """Return DeepSpeed's accelerator, the number of its devices, and the name and bytes of each GPU."""
    import torch
    from deepspeed.accelerator import get_accelerator

    name, count = get_accelerator().device_name(), get_accelerator().device_count()
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)] if name == "cuda" else []
    return name, count, [(gpu.name, gpu.total_memory) for gpu in gpus]


def check_accelerator(name: str, count: int, gpus: Sequence[tuple[str, int]], chosen: str | None) -> Finding:
    """Check that the accelerator is supported. ``chosen`` is DS_ACCELERATOR: a CPU that was chosen is no warning."""
    text = f"{name}, {counted(count, 'device')}"
    text += "".join(f", {gpu} ({gigabytes(memory_bytes)})" for gpu, memory_bytes in gpus)
    if name not in ("cuda", "cpu"):
        remedy = f'Train on a CUDA GPU, or with stock DeepSpeed: "enabled": false in "{CONFIG_KEY}".'
        return FAIL(f"{text}; must be cuda (or cpu, for tests)", remedy)
    if count == 0:
        remedy = "Check nvidia-smi, CUDA_VISIBLE_DEVICES, and whether torch was built for CUDA (torch.version.cuda)."
        return FAIL(f"{text}; must be at least 1", remedy)
    if name == "cpu" and chosen != "cpu":
        remedy = "If this machine has a GPU, check nvidia-smi and torch.version.cuda. If not, set DS_ACCELERATOR=cpu."
        return WARN(f"{text}; DeepSpeed found no GPU and fell back to the CPU", remedy)
    return OK(text)


def check_memlock(limit_bytes: int | None, has_cuda: bool) -> Finding:
    """Check the memlock limit; ``limit_bytes`` is None if unlimited."""
    if limit_bytes is None:
        return OK("unlimited")
    if not has_cuda:
        return OK(f"{size(limit_bytes)}; nothing is pinned without a GPU")
    found = f"{size(limit_bytes)}; training tests at start whether the driver applies it to pinned optimizer states"
    return WARN(
        found, "ulimit -l unlimited, or docker run --ulimit memlock=-1, if pinning memory or NCCL's start fails."
    )


def _free_host_bytes() -> int:
    left_bytes = machine.memory_left_bytes(machine.cgroup_folders("memory"))
    available_bytes = machine.memory().available_bytes
    return available_bytes if left_bytes is None else max(0, min(available_bytes, left_bytes))


def describe_eager_updates(free_bytes: int) -> Finding:
    """Describe the memory for the second versions of states: half of what training leaves of ``free_bytes``."""
    numel = free_bytes // 2 // shadow_bytes(DEFAULT_SETUP.widths)
    return OK(
        f"{size(free_bytes)} of host memory are free; second versions of states may take half of what training leaves, "
        f"at most {size(free_bytes // 2)} for {billions(numel)} parameters"
    )


def check_connections(value: str | None, has_cuda: bool) -> Finding:
    if not has_cuda or value is None:
        return OK(f"{value or 'unset'}; a GPU has {DEFAULT_QUEUES} hardware queues by default")
    if value.isdigit() and int(value) >= DEFAULT_QUEUES:
        return OK(f"{value} hardware queues")
    found = (
        f"{value!r}; must be at least {DEFAULT_QUEUES}, CUDA's default, for the {STREAMS_IN_USE} streams in use: those "
        f"that share a hardware queue wait for each other, so that transfers, the update and the model do not overlap"
    )
    return WARN(found, f"Unset it, or set it to a number from {DEFAULT_QUEUES} to 32.")


def check_triton(version: str | None, has_cuda: bool) -> Finding:
    """Check that Triton is installed; ``version`` is None if it is not."""
    if version is None and has_cuda:
        found = "not installed; without it, no update runs on the GPU, and placements other than cpu are refused"
        return WARN(found, "pip install triton")
    return OK(f"{version or 'not installed'}{'' if has_cuda else '; only GPUs need it'}")


def _cpu_adam() -> Path | None:
    """Return the library of the op, which ``OpBuilder.load`` may build; None if it was prebuilt with DeepSpeed."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops, torch_info
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    if installed_ops.get(builder.name, False) and accelerator_name == get_accelerator().device_name():
        builder.validate_torch_version(torch_info)
        return None
    if not builder.is_compatible(verbose=False):
        raise RuntimeError(builder.error_log or "DeepSpeed reports that the op does not fit this machine")
    return _built_by_loader(builder.name)


def _own_adam() -> Path:
    from deep_opt_states.device.kernels.library import NAME

    return _built_by_loader(NAME)


def _built_by_loader(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    # This private function creates the folder, but guessing the path would be worse.
    return Path(_get_build_directory(name, verbose=False)) / f"{name}.so"


def _missing_tools(environ: Mapping[str, str]) -> list[str]:
    def runs(command: Sequence[str]) -> bool:
        try:
            return subprocess.run([*command, "--version"], capture_output=True, timeout=5).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return False

    # CXX may include arguments, as in ``ccache g++``.
    compiler = shlex.split(environ.get("CXX", "")) or ["c++"]
    return [shlex.join(command) for command in (compiler, ["ninja"]) if not runs(command)]


def check_extension(library: Path | None, missing: Sequence[str], *, ours: bool) -> Finding:
    """Check that ``library`` is built or prebuilt (None), or that none of the tools that it needs is ``missing``."""
    if library is None:
        return OK("prebuilt with DeepSpeed")
    folder, is_built = library.parent, library.is_file()
    # PyTorch runs ninja before it loads an extension that is built.
    if needed := [tool for tool in missing if tool == "ninja" or not is_built]:
        found = f"{folder}: cannot be {'loaded' if is_built else 'built'}; must run {', '.join(needed)}"
        remedy = "Install a compiler (apt-get install g++) or set CXX, and pip install ninja in the active environment."
        without = "; without it, an update on the CPU takes three slower passes, and no update runs on the GPU"
        return WARN(found + without, remedy) if ours else FAIL(found, remedy)
    if is_built:
        return OK(f"built in {folder}")
    found = f"not built yet in {folder}: the first engine compiles it, which takes about a minute"
    call = "deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    if ours:
        call = "deep_opt_states.device.kernels.library import library; library()"
    return WARN(found, f'Build it now: python -c "from {call}"')


def _locks() -> dict[Path, list[int]]:
    """Return the locks of extensions, with the processes that have each open."""
    from torch.utils import cpp_extension

    from deep_opt_states.waiting import holders, may_be_stale

    builds, names = _own_adam().parent.parent, LOCKS if may_be_stale(cpp_extension) else LOCKS[1:]
    return holders(lock for name in names for lock in sorted(builds.glob(f"*/{name}")))


def check_locks(holders: Mapping[Path, Sequence[int]]) -> Finding:
    """Check that a process has each lock of a build open: a build that was killed leaves its lock behind."""
    if dead := [str(lock) for lock, processes in holders.items() if not processes]:
        found = (
            f"{', '.join(dead)}: left by a build that was killed, because no process of this user on this machine has "
            f"it open; every start that loads such an extension waits until the file is removed"
        )
        return FAIL(found, f"Unless another user or machine is building there now: rm {shlex.join(dead)}")
    if holders:
        running = [f"{lock} (process {', '.join(map(str, processes))})" for lock, processes in holders.items()]
        return WARN(f"being built now: {', '.join(running)}", "Wait until it is built, as each start does.")
    return OK("none")
