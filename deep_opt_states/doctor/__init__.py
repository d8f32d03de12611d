"""``deep-opt-states doctor``: can training with the plugin start here, and if not, what has to be done?

Every check is a function from facts to a ``Finding``. This file asks for the facts and says which checks there are;
``cli`` prints what they find. Nothing here imports torch or DeepSpeed before a check needs it, so a missing package
is a finding and not the end of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from packaging.requirements import Requirement

from deep_opt_states.doctor import hook, kernels, machine, software
from deep_opt_states.doctor.finding import Finding, Status
from deep_opt_states.host.machine import cores, has_cuda, memlock_limit_bytes, memory
from deep_opt_states.names import SWITCH

__all__ = ["Finding", "Status", "examine"]


def examine(environ: Mapping[str, str]) -> dict[str, list[Finding]]:
    """All findings, by section. A check that raises is a finding, too."""
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
        return software.check_deepspeed(version, software.import_error("deepspeed"), software.supported_deepspeed())
    return software.check_package(requirement, version)


def _activation(environ: Mapping[str, str]) -> Iterator[Finding]:
    live = _attempt("activation hook", lambda: hook.check_hook(hook.import_torch(environ), environ.get(hook.AUTOLOAD)))
    yield live
    if live.status is Status.OK:
        yield _attempt("cost at import torch", lambda: hook.check_cost(hook.import_costs_s(environ)))
    yield hook.check_switch(environ.get(SWITCH))


def _machine(environ: Mapping[str, str]) -> Iterator[Finding]:
    yield _attempt(
        "accelerator", lambda: software.check_accelerator(software.accelerator(), environ.get("DS_ACCELERATOR"))
    )
    yield _attempt("cores", lambda: machine.check_cores(cores()))
    yield _attempt("OMP_NUM_THREADS", lambda: machine.check_omp(environ.get("OMP_NUM_THREADS"), cores().usable))
    yield _attempt("host memory", lambda: machine.check_memory(memory()))
    yield _attempt("memlock limit", lambda: machine.check_memlock(memlock_limit_bytes(), has_cuda()))
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    yield _attempt("CUDA_DEVICE_MAX_CONNECTIONS", lambda: machine.check_connections(connections, has_cuda()))


def _kernels(environ: Mapping[str, str]) -> Iterator[Finding]:
    command = kernels.compiler_command(environ)
    compiler, ninja = kernels.answer(*command, "--version"), kernels.answer("ninja", "--version")
    op = kernels.cpu_adam()
    yield kernels.check_compiler(" ".join(command), compiler, op)
    yield kernels.check_ninja(ninja, op)
    yield kernels.check_cpu_adam(op, can_build=compiler is not None and ninja is not None)
    yield _attempt("triton", lambda: kernels.check_triton(software.installed_version("triton") or "", has_cuda()))


def _attempt(topic: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever keeps us from looking is what the user has to know
        found = f"cannot be looked at: {type(error).__name__}: {error}"
        return Finding(
            topic, Status.FAIL, found, "Solve the other problems first; if this stays, report it with this page."
        )
