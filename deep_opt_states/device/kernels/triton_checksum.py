"""Notice writes to parameters on the GPU, by launching ``triton_checksum_kernel.py``."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from deep_opt_states.device.kernels.checksum import BLOCK_NUMEL, num_sums
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.kernels.triton_import import importing_triton

WARPS = 4


class TritonChecksum:
    """The Triton kernel, launched on the CUDA stream that is current.

    The constructor compiles it, so that no step does. Raise ``KernelUnavailable`` if Triton cannot be imported or
    cannot compile.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernel = _import_kernel()
        example = torch.zeros(2, dtype=torch.int16, device=device)
        one = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            # Triton compiles another kernel for parameters that begin at no multiple of 16 bytes.
            for offset, compares in product((0, 1), (False, True)):
                self._launch(example[offset:][:1], one, one, compares=compares)
        except Exception as error:
            raise KernelUnavailable(
                f"Triton cannot compile the kernel that sums parameters ({type(error).__name__}: {error}); it needs a "
                f"CUDA GPU of compute capability 8.0 or later and a C compiler (apt-get install gcc)."
            ) from error

    def record(self, param: torch.Tensor, sums: torch.Tensor) -> None:
        self._launch(param.view(torch.int16), sums, sums, compares=False)

    def compare(self, param: torch.Tensor, sums: torch.Tensor, differs: torch.Tensor) -> None:
        self._launch(param.view(torch.int16), sums, differs, compares=True)

    def _launch(self, bits: torch.Tensor, sums: torch.Tensor, differs: torch.Tensor, *, compares: bool) -> None:
        numel = bits.numel()
        self._kernel[(num_sums(numel),)](
            bits, sums, differs, numel, COMPARES=compares, BLOCK=BLOCK_NUMEL, num_warps=WARPS
        )


def _import_kernel() -> Any:
    """Return the kernel. Raise ``KernelUnavailable`` if Triton cannot be imported."""
    with importing_triton("The kernel that sums parameters"):
        from deep_opt_states.device.kernels import triton_checksum_kernel
    return triton_checksum_kernel.checksum
