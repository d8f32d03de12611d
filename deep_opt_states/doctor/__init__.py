"""Can training with the plugin start on this machine, and how are the problems fixed if it cannot?

Every check is a function from facts to a ``Finding``. This module collects the facts and runs the checks, and ``cli``
prints the findings as ``deep-opt-states doctor``. No module here imports torch or DeepSpeed before a check needs it, so
that a missing package is a finding and does not end the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from packaging.requirements import Requirement

from deep_opt_states.doctor import compiled_kernels, hook, host_limits, software
from deep_opt_states.doctor.finding import Finding, Status
from deep_opt_states.host.machine import cores, has_cuda, memlock_limit_bytes, memory
from deep_opt_states.names import SWITCH

__all__ = ["Finding", "Status", "examine"]


def examine(environ: Mapping[str, str]) -> dict[str, list[Finding]]:
    """Return all findings by section. A check that raises an exception is a finding, too."""
    return {
        "Software": list(_software()),
        "Activation": list(_activation(environ)),
        "Machine": list(_machine(environ)),
        "Kernels": list(_kernels(environ)),
    }


def _software() -> Iterator[Finding]:
    yield _attempt("python", lambda: software.check_python(software.python_version(), software.python_required()))
    yield _attempt(software.OURS, lambda: software.check_ours(software.installed_version(software.OURS)))
    for requirement in software.requirements():
        yield _attempt(requirement.name, partial(_package, requirement))


def _package(requirement: Requirement) -> Finding:
    version = software.installed_version(requirement.name)
    if requirement.name == "deepspeed":
        return software.check_deepspeed(version, software.import_error("deepspeed"))
    return software.check_package(requirement, version)


def _activation(environ: Mapping[str, str]) -> Iterator[Finding]:
    active = _attempt(
        "activation hook", lambda: hook.check_hook(hook.import_torch(environ), environ.get(hook.AUTOLOAD))
    )
    yield active
    if active.status is Status.OK:
        yield _attempt("cost at import torch", lambda: hook.check_cost(hook.import_costs_s(environ)))
    yield hook.check_switch(environ.get(SWITCH))


def _machine(environ: Mapping[str, str]) -> Iterator[Finding]:
    yield _attempt(
        "accelerator", lambda: software.check_accelerator(software.accelerator(), environ.get("DS_ACCELERATOR"))
    )
    yield _attempt("cores", lambda: host_limits.check_cores(cores()))
    yield _attempt("OMP_NUM_THREADS", lambda: host_limits.check_omp(environ.get("OMP_NUM_THREADS"), cores().usable))
    yield _attempt("host memory", lambda: host_limits.check_memory(memory()))
    yield _attempt("memlock limit", lambda: host_limits.check_memlock(memlock_limit_bytes(), has_cuda()))
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    yield _attempt("CUDA_DEVICE_MAX_CONNECTIONS", lambda: host_limits.check_connections(connections, has_cuda()))


def _kernels(environ: Mapping[str, str]) -> Iterator[Finding]:
    command = compiled_kernels.compiler_command(environ)
    compiler, ninja = (
        compiled_kernels.first_output_line(*command, "--version"),
        compiled_kernels.first_output_line("ninja", "--version"),
    )
    op = compiled_kernels.cpu_adam()
    yield compiled_kernels.check_compiler(" ".join(command), compiler, op)
    yield compiled_kernels.check_ninja(ninja, op)
    yield compiled_kernels.check_cpu_adam(op, can_build=compiler is not None and ninja is not None)
    yield compiled_kernels.check_own_adam(
        compiled_kernels.own_adam(), has_compiler=compiler is not None, has_ninja=ninja is not None
    )
    yield _attempt(
        "triton", lambda: compiled_kernels.check_triton(software.installed_version("triton") or "", has_cuda())
    )


def _attempt(topic: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - the user has to know why a check failed
        found = f"cannot be checked: {type(error).__name__}: {error}"
        return Finding(
            topic,
            Status.FAIL,
            found,
            "Solve the other problems first; if this one remains, report it with this output.",
        )
