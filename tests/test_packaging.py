"""Test the metadata of the installed package."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from deep_opt_states.names import __version__
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED
from tests.compat.golden import TRIED_TORCH
from tests.launch import REPOSITORY
from tests.metadata import changelog, python_versions, setup


@pytest.mark.parametrize(
    ("package", "tried", "older"), [("deepspeed", TESTED_DEEPSPEED, "0.17.5"), ("torch", TRIED_TORCH, "2.9.1")]
)
def test_pip_accepts_every_release_that_was_tried(package: str, tried: Sequence[str], older: str) -> None:
    (line,) = (line for line in setup("options")["install_requires"].splitlines() if line.startswith(f"{package}>"))
    assert all(Requirement(line).specifier.contains(version) for version in tried)
    assert not Requirement(line).specifier.contains(older)


def test_the_entry_points_are_installed() -> None:
    (autoload,) = entry_points(group="torch.backends", name="deep_opt_states")
    assert autoload.value == "deep_opt_states.activation:activate"
    (command,) = entry_points(group="console_scripts", name="deep-opt-states")
    assert command.value == "deep_opt_states.cli.main:main"


def test_the_metadata_names_the_author_the_license_and_the_versions_of_python() -> None:
    assert all(setup("metadata")[key] for key in ("author", "description", "keywords", "license", "license_files"))
    assert python_versions() == ["3.10", "3.11", "3.12", "3.13"]
    assert setup("options")["python_requires"] == ">=3.10"


def test_the_extra_of_the_examples_has_what_they_import() -> None:
    imported = {
        name.partition(".")[0]
        for path in (REPOSITORY / "examples").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in _imported_names(node)
    }
    own = {path.stem for path in (REPOSITORY / "examples").iterdir()} | {"deep_opt_states", "perf_model"}
    needed = {Requirement(line).name for line in setup("options")["install_requires"].splitlines() if _is_package(line)}
    extra = set(setup("options.extras_require")["examples"].split())
    assert imported - sys.stdlib_module_names - own - needed == extra
    assert extra <= set(setup("options.extras_require")["test"].split())


def _is_package(line: str) -> bool:
    return bool(line) and not line.startswith("#")


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def test_the_chart_library_is_packaged_with_its_licence_and_in_the_stated_version() -> None:
    vendor = REPOSITORY / "deep_opt_states" / "report" / "vendor"
    (stated,) = re.findall(r"^# uPlot (\S+)$", (vendor / "README.md").read_text(), re.MULTILINE)
    assert f"uPlot (v{stated})" in (vendor / "uPlot.iife.min.js").read_text()[:100]
    assert "MIT" in (vendor / "LICENSE").read_text()
    assert "deep_opt_states/report/vendor/LICENSE" in setup("metadata")["license_files"].split()
    assert {"report/page.js", "report/vendor/*"} <= set(setup("options.package_data")["deep_opt_states"].split())


def test_the_changelog_has_this_version_and_a_section_for_the_next_one() -> None:
    following, present = list(changelog())[:2]
    assert Version(following) > Version(present) == Version(__version__)
