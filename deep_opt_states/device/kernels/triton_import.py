"""Find the installed Triton, and name the one to install if it cannot be imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from deep_opt_states.device.kernels.library import KernelUnavailable


def triton_version() -> str:
    """Return the version of Triton, or an empty string if it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


@contextmanager
def importing_triton(kernel: str) -> Iterator[None]:
    """Raise ``KernelUnavailable``, which names ``kernel`` and the remedy, if an import inside the context fails."""
    try:
        yield
    except Exception as error:
        # An incompatible installation can raise many kinds of errors when it is imported.
        raise KernelUnavailable(
            f"{kernel} needs Triton, which cannot be imported ({type(error).__name__}: {error}): "
            f"pip install {_requirement()}"
        ) from error


def _requirement() -> str:
    """Return the requirement of the installed torch, such as ``triton==3.6.0``, or ``triton`` if torch has none.

    Builds of torch without CUDA have no such requirement.
    """
    requirements = [line.split(";")[0].strip() for line in metadata.requires("torch") or ()]
    return next((line for line in requirements if line.startswith("triton=")), "triton")
