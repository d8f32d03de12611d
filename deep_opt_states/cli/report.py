"""``deep-opt-states report``: writes the page of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from deep_opt_states.report.page import render
from deep_opt_states.report.run_data import PAGE, Run, RunError


def run(folder: Path, output: Path | None) -> int:
    """The exit code: 1, and the reason on stderr, if there is no page."""
    path = folder / PAGE if output is None else output
    try:
        page = render(Run.read(folder), folder.resolve().name)
        try:
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"--output: must be a file that can be written, found {path}: {error.strerror}.\nName another."
            ) from None
    except RunError as error:
        Console(stderr=True).print(Text(str(error)), soft_wrap=True)
        return 1
    print(f"Written: {path}")
    return 0
