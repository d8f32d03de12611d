"""Test that the examples are five scripts, and that the plain one trains with the config next to it."""

from __future__ import annotations

import re

import pytest

from tests.launch import REPOSITORY, run_ranks


def test_only_the_five_scripts_lie_next_to_their_config() -> None:
    scripts = {"accelerated.py", "demo.py", "hf_trainer.py", "train.py", "with_lightning.py"}
    assert {path.name for path in (REPOSITORY / "examples").iterdir() if path.is_file()} == {*scripts, "ds_config.json"}


@pytest.mark.thorough
def test_the_plain_script_trains_with_its_config() -> None:
    """Check it on two ranks. The script does not mention the plugin: the JSON config enables it."""
    assert "deep_opt" not in (REPOSITORY / "examples" / "train.py").read_text()
    script = ["examples/train.py", "--deepspeed_config", "examples/ds_config.json", "--steps", "2"]
    first, second = run_ranks(2, script, timeout_s=180)
    for finished in (first, second):
        assert "Traceback" not in finished.output, finished.output[-3000:]
    assert re.search(r"\[deep_opt_states\] \d+ sub-groups, .* [1-9]\d* streamed", first.output)
    assert re.findall(r"step +(\d+) +loss", first.output) == ["0", "1"]
