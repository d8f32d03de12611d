"""Print the findings of the doctor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deep_opt_states.doctor import Finding, Status, examine

STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def run() -> int:
    """Print the findings, and return the exit code: 1 if training cannot start."""
    sections = examine(os.environ)
    _print_findings(sections)
    return exit_code(finding for findings in sections.values() for finding in findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if one of ``findings`` keeps training from starting, else 0."""
    return int(any(finding.status is Status.FAIL for finding in findings))


def _print_findings(sections: Mapping[str, Sequence[Finding]]) -> None:
    console = Console()
    for title, findings in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            text = finding.found + (f"\n-> {finding.remedy}" if finding.remedy else "")
            # Text, because the value found may contain square brackets, which are markup in a str.
            table.add_row(Text(finding.status.value, STYLES[finding.status]), Text(finding.topic), Text(text))
        console.print(table)
        console.print()
    failed = [finding.topic for findings in sections.values() for finding in findings if finding.status is Status.FAIL]
    console.print(Text(f"FAIL: {', '.join(failed)}; see the remedies (->) above." if failed else "Training can start."))
