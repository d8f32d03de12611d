"""Execute launches of the Triton kernel that sums parameters by PyTorch on the CPU, on a stream of the device."""

from __future__ import annotations

from typing import Any

import torch

from tests.kernels import plain_checksum
from tests.software_gpu import device


class SoftwareChecksumKernel:
    """The kernel that replaces the jitted function of Triton in ``TritonChecksum``."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self._launch

    def _launch(
        self,
        bits: torch.Tensor,
        sums: torch.Tensor,
        differs: torch.Tensor,
        numel: int,
        *,
        COMPARES: bool,
        BLOCK: int,
        num_warps: int,
    ) -> None:
        assert numel == bits.numel()
        views = [(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype) for tensor in (bits, sums, differs)]

        def compute() -> None:
            values, known, found = (device.host_view(*view) for view in views)
            if COMPARES:
                plain_checksum.compare(values, known, found)
            else:
                known.copy_(plain_checksum.sums_of(values))

        device.launch(compute, "checksum")
