"""Write RESULTS.md from the rows, so that no number on the page is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from benchmarks.harness.charts import chart_file_of, varying
from benchmarks.harness.headline import HEAD, headline, summary
from benchmarks.harness.rows import (
    BENCHMARKS,
    COMPLETE,
    EMULATED,
    SIMULATED,
    format_setting,
    format_with_spread,
    machine_of,
    read_rows,
)
from benchmarks.harness.targets import check_targets

Rows = list[dict[str, Any]]

LONGEST_CELL = 40
"""Length in characters of the longest text in a table. Longer texts are listed below their table."""

LONGEST_TABLE = 12
"""Number of lines of the longest table that is not folded."""

MOST_NOTES = 3
"""The most notes that a table which is shown at once has below it; more are folded."""

_MARKDOWN = Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
_MARKDOWN.filters["cells"] = lambda cells: " | ".join(cell.replace("|", "\\|") for cell in cells)
_PAGE = _MARKDOWN.from_string(
    """\
# Results of the benchmarks

{% if headline %}
{{ summary }}{% if unmeasured %} **No GPU has been measured yet.**{% endif %}


| {{ head|cells }} |
|{{ "---|" * head|length }}
{% for line in headline %}
| {{ line|cells }} |
{% endfor %}

*Stock and the plugin train the same model on the same data. The last column states whether losses and weights were
compared and equal to the last bit. An iteration is the median. The cost of the update is an iteration less one of the
same engine without an update. Retained are the tokens per second, of those without offload. Ratios are the median of
runs in turns, with the 20th to the 80th percentile. An EMULATED row is no measurement of a GPU: a small model trains
for real on a GPU in software, and copies, kernels and updates take the time that they would take on the machine, by
the rates of a preset.*

{% endif %}
## Aims

{% for line in targets %}
{% if loop.first %}
| aim | status | measured |
|---|---|---|
{% endif %}
| {{ line|cells }} |
{% endfor %}

## How to read this page

`python -m benchmarks report` writes this page from the rows in `benchmarks/results/`. It shows the last complete run of
each benchmark on each kind of GPU, and on a machine of each number of cores without one. A cell has the median and, in
parentheses, the 20th to the 80th percentile. A cell is *waived* if the machine cannot measure it; the reason is below
the table. Where a run measured the same thing twice, the page shows the later result.
[docs/benchmarking.md](../docs/benchmarking.md) explains how the benchmarks work and how to run them.

In the tables, *stock* is DeepSpeed's ZeRO-3 with optimizer offloading, and *ours* is stock with this plugin. The
*update* is the work of the optimizer step. Its *cost* is an iteration less one of the same engine without an update.
Its *exposed* part is the time for which the model waits. Its *hidden* part overlaps with forward or backward, and may
slow them down. *Retained* are the tokens per second, of those without offload. A speedup of 2x means half of the time.
A figure with the word *EMULATED* was not measured on a GPU: its seconds are those of an emulated machine
(`benchmarks/emulated/`).
{% if unmeasured %}

{{ unmeasured }}
{% endif %}

{% for name, question in benchmarks.items() %}
## {{ name }}: {{ question }}

{% if not runs[name] %}
**Not measured**: run `python -m benchmarks {{ name }}`.

{% endif %}
{% for run in runs[name] %}
{% if not loop.first %}
<details>
<summary>{{ run.how }} on {{ run.machine }}</summary>

{% endif %}
{{ run.how }} on {{ run.machine }}, {{ run.date }}, at commit {{ run.commit }}; {{ run.versions }}

{% if run.chart %}
![{{ name }}](results/{{ run.chart }})
{% endif %}
{% for table in run.tables %}

{% if table.folded %}
<details>
<summary>{{ table.summary }}</summary>

{% endif %}
{% if table.same %}
Setting of all rows: {{ table.same }}

{% endif %}
{% if table.lines %}
| {{ table.head|cells }} |
|{{ "---|" * table.head|length }}
{% for line in table.lines %}
| {{ line|cells }} |
{% endfor %}

{% endif %}
{% if table.folds_notes %}
<details>
<summary>{{ table.notes|length }} notes</summary>

{% endif %}
{% if table.notes %}
{% for note in table.notes %}
- {{ note }}
{% endfor %}

{% endif %}
{% if table.folds_notes %}
</details>

{% endif %}
{% if table.folded %}
</details>
{% endif %}
{% endfor %}
{% if not loop.first %}

</details>
{% endif %}

{% endfor %}
{% endfor %}
"""
)

_NO_GPU_ROWS = """\
No row was measured on a GPU yet: results that need a GPU are waived or missing. On a machine with a GPU,
`python -m benchmarks all` measures everything, and `make gpu-bench PYTHON=python3` compares all ways to train 1.7
billion parameters within 9 minutes."""


def last_runs(folder: Path) -> dict[str, list[Rows]]:
    """Return the last run on each kind of machine by benchmark, those on GPUs first.

    Quick runs measure nothing and are left out.
    """
    return {name: list(_last_runs(folder / f"{name}.jsonl")) for name in BENCHMARKS}


def render(runs_by_benchmark: dict[str, list[Rows]]) -> str:
    """Return the page in Markdown."""
    rows = [row for runs in runs_by_benchmark.values() for run in runs for row in run]
    speed_ups = headline(runs_by_benchmark)
    return _PAGE.render(
        benchmarks=BENCHMARKS,
        runs={name: [_describe_run(run) for run in runs] for name, runs in runs_by_benchmark.items()},
        unmeasured="" if any(row["gpu"] for row in rows) else _NO_GPU_ROWS,
        targets=check_targets(rows),
        head=HEAD,
        headline=[speed_up.cells for speed_up in speed_ups],
        summary=summary(speed_ups),
    )


def _last_runs(path: Path) -> Iterator[Rows]:
    """Yield the last complete run on each kind of machine, or its last run if none is complete.

    Machines without a GPU are of one kind if they have as many cores: the aims are for such machines, and runs of
    several commits must not be compared with them at once.
    """
    if not path.exists():
        return
    by_kind: dict[tuple[bool, str], dict[str, Rows]] = {}
    for row in read_rows(path):
        if not row["quick"]:
            has_gpu = row["gpu"] is not None
            kind = has_gpu, machine_of(row) if has_gpu else f"{row['cores']} cores"
            by_kind.setdefault(kind, {}).setdefault(row["date"], []).append(row)
    # GPUs before machines without one, and of each the newest first.
    for _, runs in sorted(by_kind.items(), key=lambda item: (item[0][0], max(item[1])), reverse=True):
        complete = [date for date, rows in runs.items() if rows[-1]["quantity"] == COMPLETE]
        yield _without_repeated_rows(runs[max(complete or runs)])


def _without_repeated_rows(rows: Rows) -> Rows:
    """Keep the last row of each variant, quantity and setting: a run may measure the same thing twice."""
    last = {(row["variant"], row["quantity"], json.dumps(row["setting"])): row for row in rows}
    return [row for row in last.values() if row["quantity"] != COMPLETE]


def _describe_run(rows: Rows) -> dict[str, Any]:
    """Return everything that the template shows of one run."""
    first = rows[0]
    by_keys: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        by_keys.setdefault(tuple(row["setting"]), []).append(row)
    return {
        "how": _how_made(rows),
        "machine": " with ".join(filter(None, [first["gpu"], first["cpu"], f"{first['cores']} cores"])),
        "versions": ", ".join(f"{package} {version}" for package, version in first["versions"].items()),
        "date": first["date"],
        "commit": first["commit"],
        "chart": chart_file_of(rows),
        "tables": [_ResultTable.from_rows(table, first=not number) for number, table in enumerate(by_keys.values())],
    }


def _how_made(rows: Rows) -> str:
    """Return ``Measured``, or the words for rows that are emulated or simulated, or a part of each."""
    labels = [f"{row['variant']} {row['quantity']}" for row in rows]
    words = [word for word in (EMULATED, SIMULATED) if any(word in label for label in labels)]
    is_measured = any(not any(word in label for word in words) for label in labels)
    return " and ".join(["Measured"] * is_measured + words)


@dataclass(frozen=True)
class _ResultTable:
    """A line for each variant and setting, and a column for each quantity. ``same`` is the setting of all lines.

    Of a run, only the first table is shown at once, and only if it is short; the others are folded.
    """

    same: str
    head: list[str]
    lines: list[list[str]]
    notes: list[str]
    first: bool

    @property
    def folded(self) -> bool:
        """Return whether a reader has to open the table."""
        return not self.first or len(self.lines) > LONGEST_TABLE

    @property
    def folds_notes(self) -> bool:
        """Return whether a reader has to open the notes: those of a folded table are folded with it."""
        return not self.folded and len(self.notes) > MOST_NOTES

    @property
    def summary(self) -> str:
        """Return the line that opens the table."""
        varying_keys = ", ".join(self.head[: self.head.index("variant")])
        count = "1 line" if len(self.lines) == 1 else f"{len(self.lines)} lines"
        return f"{count}{f' by {varying_keys}' if varying_keys else ''}"

    @classmethod
    def from_rows(cls, rows: Rows, *, first: bool) -> _ResultTable:
        """Return the table of rows whose settings have the same keys."""
        keys = varying([row["setting"] for row in rows])
        same = {key: value for key, value in rows[0]["setting"].items() if key not in keys}
        shown = [row for row in rows if not _is_note(row)]
        columns = list(dict.fromkeys(row["quantity"] for row in shown if "waived" not in row))
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in shown:
            names = (*(_setting_cell(row["setting"][key]) for key in keys), row["variant"])
            lines.setdefault(names, {})[row["quantity"]] = _cell(row)
        return cls(
            same=", ".join(format_setting(key, value) for key, value in same.items()),
            head=[*(key.replace("_", " ") for key in keys), "variant", *columns],
            lines=[
                [*names, *(cells.get(column, "") for column in columns)] for names, cells in lines.items() if columns
            ],
            notes=[*_notes(rows), *_waivers(rows)],
            first=first,
        )


def _is_note(row: Mapping[str, Any]) -> bool:
    """Return whether the row is a text that is too long for a cell."""
    return isinstance(row.get("value"), str) and len(row["value"]) > LONGEST_CELL and row["quantity"] != "trace"


def _cell(row: Mapping[str, Any]) -> str:
    if "waived" in row:
        return "waived"
    if row["quantity"] == "trace":
        return f"[trace](results/{row['value']})"
    return format_with_spread(row)


def _setting_cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _notes(rows: Rows) -> list[str]:
    notes = [f"{row['quantity']} of **{row['variant']}**: {row['value']}" for row in rows if _is_note(row)]
    return [note[0].upper() + note[1:] for note in dict.fromkeys(notes)]


def _waivers(rows: Rows) -> list[str]:
    """Return the reasons for waivers, each with its variants, or with its quantities for variants that ran."""
    measured_variants = {row["variant"] for row in rows if "waived" not in row}
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "waived" in row:
            name = row["quantity"] if row["variant"] in measured_variants else row["variant"]
            reasons.setdefault(row["waived"], []).append(name)
    return [f"Waived ({reason}): {'; '.join(dict.fromkeys(names))}" for reason, names in reasons.items()]
