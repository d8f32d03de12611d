"""Check the versions of the required packages, the import of DeepSpeed, and the accelerator that it finds."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deep_opt_states.doctor.finding import Finding, Status
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED, is_tested, is_too_old
from perf_model.units import gigabytes

OURS = "deep_opt_states"


@dataclass(frozen=True)
class Accelerator:
    """The accelerator that DeepSpeed finds."""

    name: str
    device_count: int
    gpus: Sequence[tuple[str, int]] = ()
    """The name and the memory in bytes of each GPU that this process can use."""


def python_version() -> str:
    """Return the version of this interpreter."""
    return platform.python_version()


def python_required() -> SpecifierSet:
    """Return the required versions of Python, from our own metadata; any version if the plugin is not installed."""
    if installed_version(OURS) is None:
        return SpecifierSet()
    return SpecifierSet(metadata.metadata(OURS)["Requires-Python"])


def installed_version(name: str) -> str | None:
    """Return the version of the installed package ``name``; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[Requirement]:
    """Return the required packages without extras, from our own metadata, the two most important ones first.

    Return only these two if the plugin is not installed.
    """
    if installed_version(OURS) is None:
        return [Requirement("torch"), Requirement("deepspeed")]
    found = [Requirement(line) for line in metadata.requires(OURS) or () if "extra ==" not in line]
    return sorted(found, key=lambda requirement: requirement.name not in ("torch", "deepspeed"))


def import_error(name: str) -> Exception | None:
    """Import the module ``name`` and return the exception that this raises, if any."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - DeepSpeed's import also probes the accelerator, which can raise any type
        return error
    return None


def accelerator() -> Accelerator:
    """Return the accelerator that DeepSpeed finds. Raise any exception that importing DeepSpeed raises."""
    import torch
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator()
    name, count = found.device_name(), found.device_count()
    if name != "cuda":
        return Accelerator(name, count)
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return Accelerator(name, count, [(gpu.name, gpu.total_memory) for gpu in gpus])


def check_python(version: str, required: SpecifierSet) -> Finding:
    """Check the version of Python."""
    if not required.contains(version, prereleases=True):
        found, remedy = f"{version}; must be {required}", f"Create an environment with Python {required}."
        return Finding("python", Status.FAIL, found, remedy)
    return Finding("python", Status.OK, version)


def check_ours(version: str | None) -> Finding:
    """Check that this package is installed; ``version`` is None if it is not."""
    if version is None:
        found = "importable, but not installed; must be installed, because PyTorch calls its entry point"
        return Finding(OURS, Status.FAIL, found, "Install it with pip; in a checkout, run pip install -e .")
    return Finding(OURS, Status.OK, version)


def check_package(requirement: Requirement, version: str | None) -> Finding:
    """Check the version of a required package; ``version`` is None if it is not installed."""
    remedy = f'pip install --upgrade "{requirement}"'
    if version is None:
        return Finding(requirement.name, Status.FAIL, "not installed; must be installed", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        found = f"{version}; must be {requirement.specifier}"
        return Finding(requirement.name, Status.FAIL, found, remedy)
    return Finding(requirement.name, Status.OK, version)


def check_deepspeed(version: str | None, error: Exception | None) -> Finding:
    """Check that DeepSpeed can be imported, and that it is a tested release.

    A local build tag is ignored. ``version`` is None if DeepSpeed is not installed, and ``error`` is the exception that
    importing it raised. A release that was not tested is a warning.
    """
    remedy = f"pip install deepspeed=={TESTED_DEEPSPEED[-1]}"
    if version is None:
        return Finding("deepspeed", Status.FAIL, f"not installed; must be {TESTED_DEEPSPEED[0]} or later", remedy)
    if is_too_old(version):
        return Finding("deepspeed", Status.FAIL, f"{version}; must be {TESTED_DEEPSPEED[0]} or later", remedy)
    if error is not None:
        found = f"{version}, but import deepspeed fails with {type(error).__name__}: {error}"
        return Finding(
            "deepspeed", Status.FAIL, found, f'Run python -c "import deepspeed" to see the full error, or {remedy}'
        )
    if not is_tested(version):
        found = f"{version}; was not tested with this release of the plugin: results may differ from stock's"
        return Finding("deepspeed", Status.WARN, found, f"To avoid the risk, {remedy}")
    return Finding("deepspeed", Status.OK, version)


def check_accelerator(found: Accelerator, chosen: str | None) -> Finding:
    """Check that the accelerator is supported.

    ``chosen`` is the value of DS_ACCELERATOR: if the user has chosen the CPU, there is no warning about it.
    """
    text = f"{found.name}, {found.device_count} device{'' if found.device_count == 1 else 's'}"
    if found.gpus:
        text += ": " + ", ".join(f"{name} ({gigabytes(memory_bytes)})" for name, memory_bytes in found.gpus)
    if found.name not in ("cuda", "cpu"):
        remedy = 'Train on a CUDA GPU, or with stock DeepSpeed: "enabled": false in "deep_optimizer_states".'
        return Finding("accelerator", Status.FAIL, f"{text}; must be cuda (or cpu, for tests)", remedy)
    if found.device_count == 0:
        remedy = "Check nvidia-smi, CUDA_VISIBLE_DEVICES, and whether torch was built for CUDA (torch.version.cuda)."
        return Finding("accelerator", Status.FAIL, f"{text}; must be at least 1", remedy)
    if found.name == "cpu" and chosen != "cpu":
        remedy = "If this machine has a GPU, check nvidia-smi and torch.version.cuda. If not, set DS_ACCELERATOR=cpu."
        return Finding("accelerator", Status.WARN, f"{text}; DeepSpeed found no GPU and fell back to the CPU", remedy)
    return Finding("accelerator", Status.OK, text)
