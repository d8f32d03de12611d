"""Test the metadata of the installed package."""

from __future__ import annotations

from importlib.metadata import entry_points

from packaging.requirements import Requirement

from deep_opt_states.zero.internals.releases import TRIED_DEEPSPEED
from tests.launch import REPOSITORY


def test_pip_accepts_every_release_of_deepspeed_that_was_tried() -> None:
    lines = (REPOSITORY / "setup.cfg").read_text(encoding="utf-8").splitlines()
    (line,) = (line.strip() for line in lines if line.strip().startswith("deepspeed"))
    assert all(Requirement(line).specifier.contains(version) for version in TRIED_DEEPSPEED)
    assert not Requirement(line).specifier.contains("0.18.4")


def test_the_entry_points_are_installed() -> None:
    (autoload,) = entry_points(group="torch.backends", name="deep_opt_states")
    assert autoload.value == "deep_opt_states.activation:activate"
    (command,) = entry_points(group="console_scripts", name="deep-opt-states")
    assert command.value == "deep_opt_states.cli.main:main"
