"""Check the kernel that sums parameters in Triton's interpreter. ``test_checksum.py`` runs this program."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from deep_opt_states.device.kernels.checksum import BLOCK_NUMEL, num_sums
from deep_opt_states.device.kernels.triton_checksum import TritonChecksum
from tests.kernels.plain_checksum import sums_of
from tests.launch import answer

LENGTHS = (1, 63, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 3 * BLOCK_NUMEL + 77)


def main() -> None:
    kernel = TritonChecksum(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    wrong, unnoticed, false_alarms = [], [], []
    for numel in LENGTHS:
        param = torch.randn(numel, generator=generator).bfloat16()
        sums = torch.full((num_sums(numel),), -7)
        kernel.record(param, sums)
        if not torch.equal(sums, sums_of(param)):
            wrong.append(numel)
        differs = torch.zeros(1, dtype=torch.int64)
        kernel.compare(param, sums, differs)
        if differs.any():
            false_alarms.append(numel)
        for place in {0, numel // 2, numel - 1}:
            written = param.clone()
            written.view(torch.int16)[place] ^= 1
            differs.zero_()
            kernel.compare(written, sums, differs)
            if int(differs) != 1 + place // BLOCK_NUMEL:
                unnoticed.append((numel, place, int(differs)))
    answer({"wrong": wrong, "unnoticed": unnoticed, "false alarms": false_alarms})


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
