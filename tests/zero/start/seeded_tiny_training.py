"""Run the tiny training of an untested release, with beta powers that the plugin computes otherwise than stock."""

from __future__ import annotations

from deep_opt_states.zero.start.tiny_training import main
from tests.zero.parity.naive_rewrites import applied

if __name__ == "__main__":
    with applied("beta^t by pow"):
        main()
