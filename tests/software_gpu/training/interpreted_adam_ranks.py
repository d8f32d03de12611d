"""Train with updates on the device that are interpreted PTX, and print the differences from stock on the CPU."""

from __future__ import annotations

from deep_opt_states.device.kernels.triton_kernel import OPTIONS
from tests.launch import answer
from tests.software_gpu.interpreted_adam_kernel import InterpretedAdamKernel
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import LAZY
from tests.zero.parity.case import Case, by_sub_group
from tests.zero.parity.training import differences, run_variant

BLOCK = {**by_sub_group("streamed", "resident", "cpu", "streamed", "resident"), "num_slots": 1}
CASE = Case(name="interpreted Adam", blocks=(BLOCK,), clip=0.5, steps=3, zero={"stage3_param_persistence_threshold": 0})


def main() -> None:
    expected = run_variant(CASE, None)
    kernel = InterpretedAdamKernel()
    with plugged(LAZY, adam_kernel=(kernel, OPTIONS)):
        found = run_variant(CASE, BLOCK)
    answer({"differences": differences(expected, found), "launches": kernel.launches})


if __name__ == "__main__":
    with software_process_group():
        main()
