"""Test that the first lines that a user of a framework sees are about the plugin and its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.screen import check_first_lines
from tests.launch import run_ranks

TRAINERS = ["Trainer", "TRL SFT", "DPO", "DPO with LoRA", "LLaMA-Factory", "axolotl", "ms-swift"]
OTHERS = ["Accelerate", "OpenRLHF"]

LINES = dict.fromkeys([*TRAINERS, *OTHERS], 10) | {"TRL SFT with LoRA": 12}
"""The number of first lines. TRL, transformers and DeepSpeed print ten before the plugin's two for SFT with LoRA."""


@pytest.mark.thorough
@pytest.mark.parametrize(("framework", "lines"), LINES.items())
def test_the_first_lines_state_that_the_plugin_is_on_and_what_it_planned(
    framework: str, lines: int, tmp_path: Path
) -> None:
    """Train in a fresh process. Lines that its imports print are not counted: they precede the user's script."""
    program = ["-m", "tests.frameworks.first_lines", framework, str(tmp_path)]
    # A terminal shows each line at once. GPUs are hidden, because frameworks would use them.
    (finished,) = run_ranks(1, program, 400, fresh=True, PYTHONUNBUFFERED="1", CUDA_VISIBLE_DEVICES="")
    # Not ``read_text``, which replaces carriage returns.
    screen = (tmp_path / "screen").read_bytes().decode()
    assert finished.returncode == 0, finished.output + screen[-5000:]
    check_first_lines(screen, lines)
