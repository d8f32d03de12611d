"""Check the error if our C++ kernel cannot be compiled: the reason in one line, the remedy, and the full output."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from deep_opt_states.device.kernels import library
from deep_opt_states.device.kernels.library import FLAGS, KernelUnavailable

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
    """Return the reason in the error, without the sentence around it that is always the same."""
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


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "/nowhere/c++: not found; full output: ninja" in complaint()


def test_compiler_that_does_not_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert complaint().startswith("CalledProcessError: ")


def test_missing_build_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/nowhere")
    assert complaint().startswith("FileNotFoundError: ")
