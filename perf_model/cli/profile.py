"""``profile``: runs the other package's program, so that this one stays without torch."""

from __future__ import annotations

import argparse
import subprocess
import sys


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # Its arguments, --help among them, are the other program's to know.
    parser = commands.add_parser("profile", help="measure this machine (runs deep-opt-states profile)", add_help=False)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    return subprocess.run([sys.executable, "-m", "deep_opt_states.cli", "profile", *options.arguments]).returncode
