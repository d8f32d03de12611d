"""The commands and their exit codes: 0, 1 where nothing fits or nobody reads, 2 for input that cannot be used."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from perf_model.cli import explain, plan, profile, simulate, sweep, validate
from perf_model.prediction.hardware import ProfileError
from perf_model.published.runs import RunsError
from perf_model.search.budgets import DoesNotFit
from perf_model.training_run.model import ModelError

COMMANDS = (plan, sweep, simulate, explain, validate, profile)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Raises ``SystemExit(2)``, from argparse, for arguments that it does not know."""
    parser = argparse.ArgumentParser(
        prog="python -m perf_model", description="Plan and predict interleaved optimizer offloading."
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    options, unknown = parser.parse_known_args(arguments)
    if options.run is profile.run:
        options.arguments = unknown
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = options.run(options)
        # What is still in the buffer would otherwise fail at exit, where nobody catches it.
        sys.stdout.flush()
    except DoesNotFit as error:
        print(error, file=sys.stderr)
        return 1
    except (ModelError, ProfileError, RunsError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as head, has gone; at exit Python flushes once more, to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
