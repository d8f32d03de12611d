"""Versions of what we need, whether DeepSpeed can be imported, and the accelerator it finds."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deep_opt_states.doctor.finding import Finding, Status

OURS = "deep_opt_states"


@dataclass(frozen=True)
class Accelerator:
    """``gpus`` has name and memory in bytes of each one that this process sees."""

    name: str
    device_count: int
    gpus: Sequence[tuple[str, int]] = ()


def python_version() -> str:
    return platform.python_version()


def python_required() -> SpecifierSet:
    """From our own metadata, as all requirements; anything if we are not installed."""
    if installed_version(OURS) is None:
        return SpecifierSet()
    return SpecifierSet(metadata.metadata(OURS)["Requires-Python"])


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[Requirement]:
    """What setup.cfg asks for, extras left out, the two that matter most first; those two if we are not installed."""
    if installed_version(OURS) is None:
        return [Requirement("torch"), Requirement("deepspeed")]
    found = [Requirement(line) for line in metadata.requires(OURS) or () if "extra ==" not in line]
    return sorted(found, key=lambda requirement: requirement.name not in ("torch", "deepspeed"))


def import_error(name: str) -> Exception | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - DeepSpeed's import also probes the accelerator, with errors of any type
        return error
    return None


def supported_deepspeed() -> tuple[str, ...]:
    from deep_opt_states.zero.internals.compat import SUPPORTED_DEEPSPEED

    return SUPPORTED_DEEPSPEED


def accelerator() -> Accelerator:
    """Raises what importing DeepSpeed raises."""
    import torch
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator()
    name, count = found.device_name(), found.device_count()
    if name != "cuda":
        return Accelerator(name, count)
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return Accelerator(name, count, [(gpu.name, gpu.total_memory) for gpu in gpus])


def check_python(version: str, required: SpecifierSet) -> Finding:
    if not required.contains(version, prereleases=True):
        found, remedy = f"{version}; must be {required}", f"Make an environment with Python {required}."
        return Finding("python", Status.FAIL, found, remedy)
    return Finding("python", Status.OK, version)


def check_ours(version: str | None) -> Finding:
    if version is None:
        found = "importable, but not installed; must be installed, since its entry point is what PyTorch calls"
        return Finding(OURS, Status.FAIL, found, "Install it with pip; pip install -e . in a checkout.")
    return Finding(OURS, Status.OK, version)


def check_package(requirement: Requirement, version: str | None) -> Finding:
    remedy = f'pip install --upgrade "{requirement}"'
    if version is None:
        return Finding(requirement.name, Status.FAIL, "not installed; must be", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        found = f"{version}; must be {requirement.specifier}"
        return Finding(requirement.name, Status.FAIL, found, remedy)
    return Finding(requirement.name, Status.OK, version)


def check_deepspeed(version: str | None, error: Exception | None, supported: Sequence[str]) -> Finding:
    """The plugin overrides internals, so the version must be one of ``supported`` exactly, local build tag aside."""
    remedy = f"pip install deepspeed=={supported[-1]}"
    if version is None:
        return Finding("deepspeed", Status.FAIL, f"not installed; must be {' or '.join(supported)}", remedy)
    if version.split("+")[0] not in supported:
        found = f"{version}; must be {' or '.join(supported)}, whose internals this release knows"
        return Finding("deepspeed", Status.FAIL, found, remedy)
    if error is not None:
        found = f"{version}, but import deepspeed fails with {type(error).__name__}: {error}"
        return Finding("deepspeed", Status.FAIL, found, f'See all of it with python -c "import deepspeed", or {remedy}')
    return Finding("deepspeed", Status.OK, version)


def check_accelerator(found: Accelerator, chosen: str | None) -> Finding:
    """``chosen`` is DS_ACCELERATOR: who asks for the CPU gets no warning about it."""
    text = f"{found.name}, {found.device_count} device{'' if found.device_count == 1 else 's'}"
    if found.gpus:
        text += ": " + ", ".join(f"{name} ({memory_bytes / 1e9:.1f} GB)" for name, memory_bytes in found.gpus)
    if found.name not in ("cuda", "cpu"):
        remedy = 'Train on a CUDA GPU, or with stock DeepSpeed: "enabled": false in "deep_optimizer_states".'
        return Finding("accelerator", Status.FAIL, f"{text}; must be cuda (or cpu, for tests)", remedy)
    if found.device_count == 0:
        remedy = "See nvidia-smi, CUDA_VISIBLE_DEVICES, and whether torch was built for CUDA (torch.version.cuda)."
        return Finding("accelerator", Status.FAIL, f"{text}; must be at least 1", remedy)
    if found.name == "cpu" and chosen != "cpu":
        remedy = "With a GPU in this machine: see nvidia-smi and torch.version.cuda. Without: set DS_ACCELERATOR=cpu."
        return Finding("accelerator", Status.WARN, f"{text}; DeepSpeed found no GPU and fell back to it", remedy)
    return Finding("accelerator", Status.OK, text)
