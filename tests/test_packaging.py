"""Test the metadata of the installed package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from configparser import ConfigParser
from importlib.metadata import entry_points

import pytest
from packaging.requirements import Requirement

from deep_opt_states.names import __version__
from deep_opt_states.zero.internals.releases import TRIED_DEEPSPEED
from tests.compat.golden import TRIED_TORCH
from tests.launch import REPOSITORY


@pytest.mark.parametrize(
    ("package", "tried", "older"), [("deepspeed", TRIED_DEEPSPEED, "0.18.4"), ("torch", TRIED_TORCH, "2.9.1")]
)
def test_pip_accepts_every_release_that_was_tried(package: str, tried: Sequence[str], older: str) -> None:
    lines = (REPOSITORY / "setup.cfg").read_text(encoding="utf-8").splitlines()
    (line,) = (line.strip() for line in lines if line.strip().startswith(f"{package}>"))
    assert all(Requirement(line).specifier.contains(version) for version in tried)
    assert not Requirement(line).specifier.contains(older)


def test_the_entry_points_are_installed() -> None:
    (autoload,) = entry_points(group="torch.backends", name="deep_opt_states")
    assert autoload.value == "deep_opt_states.activation:activate"
    (command,) = entry_points(group="console_scripts", name="deep-opt-states")
    assert command.value == "deep_opt_states.cli.main:main"


def test_the_metadata_names_the_author_the_license_and_the_versions_of_python() -> None:
    config = ConfigParser()
    config.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    metadata = config["metadata"]
    assert all(metadata[key] for key in ("author", "description", "keywords", "license", "license_files"))
    versions = re.findall(r"Python :: (3\.\d+)$", metadata["classifiers"], re.MULTILINE)
    assert versions == ["3.10", "3.11", "3.12", "3.13"]
    assert config["options"]["python_requires"] == f">={versions[0]}"


def test_the_changelog_has_this_version_and_a_section_for_the_next_one() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", __version__]
