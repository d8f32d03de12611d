"""Test the metadata of the installed package."""

from __future__ import annotations

from importlib.metadata import entry_points, requires

from deep_opt_states.zero.internals.compat import SUPPORTED_DEEPSPEED


def test_pip_installs_a_supported_version_of_deepspeed() -> None:
    (pin,) = [requirement for requirement in requires("deep_opt_states") or [] if requirement.startswith("deepspeed")]
    assert pin.removeprefix("deepspeed==") in SUPPORTED_DEEPSPEED


def test_the_entry_points_are_installed() -> None:
    (autoload,) = entry_points(group="torch.backends", name="deep_opt_states")
    assert autoload.value == "deep_opt_states.activation:activate"
    (command,) = entry_points(group="console_scripts", name="deep-opt-states")
    assert command.value == "deep_opt_states.cli.main:main"
