"""Find the installed Triton, and the one that the installed PyTorch needs."""

from __future__ import annotations

from importlib import metadata


def triton_version() -> str:
    """Return the version of Triton, or an empty string if it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def triton_requirement() -> str:
    """Return the requirement of PyTorch, such as ``triton==3.6.0``, or ``triton`` if its build has none."""
    requirements = [line.split(";")[0].strip() for line in metadata.requires("torch") or ()]
    return next((line for line in requirements if line.startswith("triton=")), "triton")
