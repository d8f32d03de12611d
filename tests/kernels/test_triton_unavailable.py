"""Check that the error names the version to install if Triton cannot be imported."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest
import torch

from deep_opt_states.device import kernels
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.kernels.triton_adam import TritonAdam


@pytest.mark.parametrize(
    ("requires", "remedy"),
    [
        (["filelock", "triton==3.6.0; platform_system == 'Linux'"], "pip install triton==3.6.0"),
        (["filelock", "triton-xpu==3.6.0"], "pip install triton"),
        (None, "pip install triton"),
    ],
)
def test_the_version_that_torch_pins_is_the_remedy(
    requires: list[str] | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # cannot be imported
    # Another test of this process may have imported the kernel.
    monkeypatch.delitem(sys.modules, "deep_opt_states.device.kernels.triton_kernel", raising=False)
    monkeypatch.delattr(kernels, "triton_kernel", raising=False)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    with pytest.raises(KernelUnavailable) as caught:
        TritonAdam(Arithmetic(16, Tail.UNFUSED), (0.9, 0.999), adamw=True, device=torch.device("cuda", 0))
    assert str(caught.value).startswith(
        "The GPU Adam kernel needs Triton, which cannot be imported (ModuleNotFoundError"
    )
    assert str(caught.value).endswith(f": {remedy}")
