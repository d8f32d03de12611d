"""What is said where our C++ kernel cannot be compiled: one line of the reason, the remedy, and where the rest is."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from deep_opt_states.device.kernels import library
from deep_opt_states.device.kernels.library import FLAGS, KernelUnavailable

REMEDY = "It takes a C++ compiler with OpenMP (apt-get install g++, or set CXX) and ninja (pip install ninja)."


@pytest.fixture(autouse=True)
def built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under a name that PyTorch's loader has not heard in this process, and nothing is kept."""
    monkeypatch.setattr(library, "NAME", f"adam_of_{tmp_path.name}")
    monkeypatch.setattr(library, "_loaded", library._loaded.__wrapped__)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


def complaint() -> str:
    """Without the frame that is the same for all."""
    with pytest.raises(KernelUnavailable) as caught:
        library.library()
    reason, remedy = str(caught.value).splitlines()
    assert remedy == REMEDY
    found = re.fullmatch(r"The C\+\+ Adam kernel cannot be compiled or loaded \((.*)\)\.", reason)
    assert found is not None, reason
    return found[1]


def test_the_compilers_complaint_and_how_to_see_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "FLAGS", [*FLAGS, "-fno-such-flag"])
    found = re.fullmatch(r"RuntimeError: (.*error: .*-fno-such-flag.*); all of it: (ninja .*)", complaint())
    assert found is not None
    again = subprocess.run(shlex.split(found[2]), capture_output=True, text=True)
    assert again.returncode != 0
    assert found[1] in again.stdout


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "/nowhere/c++: not found; all of it: ninja" in complaint()


def test_a_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert complaint().startswith("CalledProcessError: ")


def test_no_folder_to_compile_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/nowhere")
    assert complaint().startswith("FileNotFoundError: ")
