"""RESULTS.md, from the rows: no number in it is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from benchmarks.harness.aims import judged
from benchmarks.harness.picture import picture_of, varying
from benchmarks.harness.rows import COMPLETE, machine_of, read, said, told
from benchmarks.harness.suite import BENCHMARKS

Rows = list[dict[str, Any]]

LONGEST_CELL = 40
"""Longer texts are put below their table."""

_MARKDOWN = Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
_MARKDOWN.filters["cells"] = lambda cells: " | ".join(cell.replace("|", "\\|") for cell in cells)
_PAGE = _MARKDOWN.from_string(
    """\
# What was measured

By `python -m benchmarks report`, from the rows in `benchmarks/results/`: the last run of each benchmark on each
machine. Medians, and in parentheses the 20th to the 80th percentile. {{ unmeasured }}

| aim | | measured |
|---|---|---|
{% for line in aims %}
| {{ line|cells }} |
{% endfor %}

{% for name, question in benchmarks.items() %}
## {{ name }}: {{ question }}

{% if not runs[name] %}
**Unmeasured**: `python -m benchmarks {{ name }}` measures it.

{% endif %}
{% for run in runs[name] %}
{{ run.machine }}; {{ run.cores }} cores; {{ run.versions }}; {{ run.date }}, commit {{ run.commit }}

{% if run.picture %}
![{{ name }}](results/{{ run.picture }})
{% endif %}
{% for table in run.tables %}

{% if table.same %}
{{ table.same }}:

{% endif %}
{% if table.lines %}
| {{ table.head|cells }} |
|{{ "---|" * table.head|length }}
{% for line in table.lines %}
| {{ line|cells }} |
{% endfor %}

{% endif %}
{% if table.notes %}
{% for note in table.notes %}
- {{ note }}
{% endfor %}
{% endif %}
{% endfor %}

{% endfor %}
{% endfor %}
"""
)

_ON_GPU = (
    "No row is of a GPU yet: what needs one is waived or missing. `python -m benchmarks all` measures it on a machine "
    "with a GPU; `make gpu-bench PYTHON=python3` what is aimed for there, in 9 minutes."
)


def last_runs(folder: Path) -> dict[str, list[Rows]]:
    """By benchmark, of each machine; quick runs measure nothing and are left out."""
    return {name: list(_last_runs(folder / f"{name}.jsonl")) for name in BENCHMARKS}


def render(last: dict[str, list[Rows]]) -> str:
    rows = [row for runs in last.values() for its in runs for row in its]
    return _PAGE.render(
        benchmarks=BENCHMARKS,
        runs={name: [_run(its) for its in runs] for name, runs in last.items()},
        unmeasured="" if any(row["gpu"] for row in rows) else _ON_GPU,
        aims=judged(rows),
    )


def _last_runs(path: Path) -> Iterator[Rows]:
    """The last one on each machine that ran to its end, or where none did the last."""
    if not path.exists():
        return
    by_machine: dict[str, dict[str, Rows]] = {}
    for row in read(path):
        if not row["quick"]:
            by_machine.setdefault(machine_of(row), {}).setdefault(row["date"], []).append(row)
    for runs in by_machine.values():
        ended = [date for date, rows in runs.items() if rows[-1]["quantity"] == COMPLETE]
        yield _last_of_each(runs[max(ended or runs)])


def _last_of_each(rows: Rows) -> Rows:
    """What was measured twice in a run counts as it was measured last."""
    of = {(row["arm"], row["quantity"], json.dumps(row["setting"])): row for row in rows}
    return [row for row in of.values() if row["quantity"] != COMPLETE]


def _run(rows: Rows) -> dict[str, Any]:
    first = rows[0]
    alike: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        alike.setdefault(tuple(row["setting"]), []).append(row)
    return {
        "machine": " with ".join(filter(None, [first["gpu"], first["cpu"]])),
        "cores": first["cores"],
        "versions": ", ".join(f"{package} {version}" for package, version in first["versions"].items()),
        "date": first["date"],
        "commit": first["commit"],
        "picture": picture_of(rows),
        "tables": [_Table.of(its) for its in alike.values()],
    }


@dataclass(frozen=True)
class _Table:
    """A line for each arm and setting, a column for each quantity; ``same`` is what all lines have in common."""

    same: str
    head: list[str]
    lines: list[list[str]]
    notes: list[str]

    @classmethod
    def of(cls, rows: Rows) -> _Table:
        keys = varying([row["setting"] for row in rows])
        same = {key: value for key, value in rows[0]["setting"].items() if key not in keys}
        shown = [row for row in rows if not _is_note(row)]
        columns = list(dict.fromkeys(row["quantity"] for row in shown if "waived" not in row))
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in shown:
            of = (*(_value(row["setting"][key]) for key in keys), row["arm"])
            lines.setdefault(of, {})[row["quantity"]] = _cell(row)
        return cls(
            same=", ".join(said(key, value) for key, value in same.items()),
            head=[*(key.replace("_", " ") for key in keys), "arm", *columns],
            lines=[[*of, *(cells.get(column, "") for column in columns)] for of, cells in lines.items() if columns],
            notes=[*_texts(rows), *_reasons(rows)],
        )


def _is_note(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("said"), str) and len(row["said"]) > LONGEST_CELL and row["quantity"] != "trace"


def _cell(row: Mapping[str, Any]) -> str:
    value, spread = told(row)
    if "waived" in row:
        return "waived"
    if row["quantity"] == "trace":
        return f"[trace](results/{row['said']})"
    return f"{value} ({spread})" if spread else value


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _texts(rows: Rows) -> list[str]:
    notes = [f"**{row['arm']}**, {row['quantity']}: {row['said']}" for row in rows if _is_note(row)]
    return list(dict.fromkeys(notes))


def _reasons(rows: Rows) -> list[str]:
    """Why something is waived: an arm as a whole, or a quantity of those that run."""
    running = {row["arm"] for row in rows if "waived" not in row}
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "waived" in row:
            of = row["quantity"] if row["arm"] in running else row["arm"]
            reasons.setdefault(row["waived"], []).append(of)
    return [f"Waived, {why}: {', '.join(dict.fromkeys(of))}" for why, of in reasons.items()]
