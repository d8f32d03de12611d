"""Print each failure's traceback at once, as a pytest plugin: a part that is killed never reaches the summary."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    config.pluginmanager.register(AtOnce(config))


class AtOnce:
    """A plugin that prints the traceback of each failed test and each failed collection."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the traceback of a failed test."""
        self._print(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Print the traceback of a failed collection."""
        self._print(report)

    def _print(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.failed:
            return
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(f"----- at once: {report.nodeid}\n{report.longreprtext}")
        for title, text in report.sections:
            terminal.write_line(f"----- {title}\n{text}")
        terminal.flush()
