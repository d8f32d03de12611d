"""Print text, tables and progress with rich, which is imported only then."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def show(printed: str | Table, *, soft_wrap: bool = False) -> None:
    """Print a text or a table, wrapped at the width of the terminal unless ``soft_wrap``."""
    from rich.console import Console

    # A text may contain square brackets, which would be markup.
    Console().print(printed, highlight=False, markup=False, soft_wrap=soft_wrap)


def new_table(headers: Iterable[str], left: Collection[str] = (), *, gap: int = 1) -> Table:
    """Return a table without rows. Columns are aligned to the right, except for those in ``left``."""
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", no_wrap=True)
    return table


def tables(headers: Sequence[str], rows: Sequence[Sequence[str]], keys: int, left: Collection[str]) -> Iterator[Table]:
    """Yield tables of as many columns as fit into the terminal. Each starts with the first ``keys`` columns."""
    widths = [1 + max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    first, terminal = keys, shutil.get_terminal_size().columns
    while first < len(headers):
        last = first + 1
        while last < len(headers) and sum(widths[:keys]) + sum(widths[first : last + 1]) <= terminal:
            last += 1
        shown = [*range(keys), *range(first, last)]
        table = new_table([headers[column] for column in shown], left)
        for row in rows:
            table.add_row(*(row[column] for column in shown))
        yield table
        first = last


@contextmanager
def progress(task: str) -> Iterator[None]:
    """Show ``task`` on the terminal from the first second on. Print nothing inside, and nothing is shown in a pipe."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # DeepSpeed, which is imported inside, would keep a replaced stdout.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    bar.add_task(task)
    timer = Timer(1.0, bar.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
