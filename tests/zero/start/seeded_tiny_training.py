"""Run the tiny training of an untested release, with beta powers that the plugin computes otherwise than stock."""

from __future__ import annotations

from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic
from deep_opt_states.zero.start.tiny_training import main
from tests.zero.parity.naive_rewrites import applied

if __name__ == "__main__":
    # Before the powers are changed. Otherwise no arithmetic would have stock's bits, and stock's op would update.
    find_arithmetic()
    with applied("beta^t by pow"):
        main()
