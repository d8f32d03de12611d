"""Write the HTML page of a training run."""

from __future__ import annotations

import argparse
import sys

from deep_opt_states.report.folder import PAGE, RecordedRun, RunError
from deep_opt_states.report.page import render, verdict
from perf_model.cli.screen import progress


def run(options: argparse.Namespace) -> int:
    """Write the page, and return the exit code: 1, with the reason on stderr, if there is no page."""
    path = options.output or options.folder / PAGE
    try:
        with progress("Making the page"):
            recorded = RecordedRun.read(options.folder)
            page = render(recorded, options.folder.resolve().name)
        try:
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"--output: must be a file that can be written, found {path}: {error.strerror}.\nName another file."
            ) from None
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    print(verdict(recorded))
    print(f"Written: {path}")
    return 0
