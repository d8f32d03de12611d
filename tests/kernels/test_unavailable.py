"""Check the error if a kernel cannot be compiled or imported: the reason in one line, the remedy, the full output."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from deep_opt_states.device import kernels
from deep_opt_states.device.kernels import library
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.library import FLAGS, KernelUnavailable
from deep_opt_states.device.kernels.triton_adam import TritonAdam

REMEDY = (
    "It needs a C++ compiler with OpenMP (apt-get install g++, or set CXX), ninja (pip install ninja), and a folder "
    "that this user can write to (set TORCH_EXTENSIONS_DIR)."
)


@pytest.fixture(autouse=True)
def built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Build under a name that PyTorch's loader has not seen in this process, and keep no result."""
    monkeypatch.setattr(library, "NAME", f"adam_of_{tmp_path.name}")
    monkeypatch.setattr(library, "_loaded", library._loaded.__wrapped__)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


def complaint() -> str:
    with pytest.raises(KernelUnavailable) as caught:
        library.library()
    reason, remedy = str(caught.value).splitlines()
    assert remedy == REMEDY
    found = re.fullmatch(r"The C\+\+ Adam kernel cannot be compiled or loaded \((.*)\)\.", reason)
    assert found is not None, reason
    return found[1]


def test_error_has_the_compilers_first_error_line_and_a_command_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "FLAGS", [*FLAGS, "-fno-such-flag"])
    found = re.fullmatch(r"RuntimeError: (.*error: .*-fno-such-flag.*); full output: (ninja .*)", complaint())
    assert found is not None
    again = subprocess.run(shlex.split(found[2]), capture_output=True, text=True)
    assert again.returncode != 0
    assert found[1] in again.stdout


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CXX", "/nowhere/c++", "/nowhere/c++: not found; full output: ninja"),
        ("CXX", "/bin/false", "CalledProcessError: "),
        ("TORCH_EXTENSIONS_DIR", "/proc/nowhere", "FileNotFoundError: "),
    ],
)
def test_a_compiler_or_a_folder_that_is_missing_is_reported(
    variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert reason in complaint()


@pytest.mark.parametrize(
    ("requires", "remedy"),
    [
        (["filelock", "triton==3.6.0; platform_system == 'Linux'"], "pip install triton==3.6.0"),
        (["filelock", "triton-xpu==3.6.0"], "pip install triton"),
        (None, "pip install triton"),
    ],
)
def test_the_version_of_triton_that_torch_pins_is_the_remedy(
    requires: list[str] | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # cannot be imported
    # Another test of this process may have imported the kernel.
    monkeypatch.delitem(sys.modules, "deep_opt_states.device.kernels.triton_kernel", raising=False)
    monkeypatch.delattr(kernels, "triton_kernel", raising=False)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    with pytest.raises(
        KernelUnavailable, match=r"The GPU Adam kernel needs Triton, .* \(ModuleNotFoundError"
    ) as caught:
        TritonAdam(Arithmetic(16, Tail.UNFUSED), (0.9, 0.999), adamw=True, device=torch.device("cuda", 0))
    assert str(caught.value).endswith(f": {remedy}")
