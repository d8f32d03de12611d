"""Print the problems that keep training from starting on this machine, or with a DeepSpeed config."""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from deep_opt_states.doctor import Status, examine
from deep_opt_states.names import PARAGRAPH
from perf_model.cli.screen import progress

STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def run(options: argparse.Namespace) -> int:
    """Print the findings, and return the exit code: 1 if training cannot start, or would start without the plugin."""
    with progress("Checking"):
        if options.config is None:
            findings = examine(os.environ)
        else:
            from deep_opt_states.cli.config_check import examine_config

            findings = examine_config(options.config)
    console = Console()
    table = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    below_the_table = []
    for topic, finding in findings.items():
        remedy, *more = finding.remedy.split(PARAGRAPH)
        below_the_table += more
        text = finding.found + (f"\n-> {remedy}" if remedy else "")
        # The value found may contain square brackets, which are markup in a str.
        table.add_row(Text(finding.status.value, STYLES[finding.status]), Text(topic), Text(text))
    console.print(table)
    console.print()
    for text in below_the_table:
        # To paste: rich would wrap long lines.
        print(f"{text}\n")
    failed = [topic for topic, finding in findings.items() if finding.status is Status.FAIL]
    console.print(Text(f"FAIL: {', '.join(failed)}; see the remedies (->) above." if failed else "Training can start."))
    return int(bool(failed))
