"""RESULTS.md, from the rows: no number in it is typed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment

from benchmarks.rows import read, said, told
from benchmarks.suite import BENCHMARKS

Rows = list[dict[str, Any]]

_MARKDOWN = Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
_PAGE = _MARKDOWN.from_string(
    """\
# What was measured

By `python -m benchmarks report`, from the rows in `benchmarks/results/`: the last run of each benchmark on each
machine. Medians, and the 20th to the 80th percentile. {{ unmeasured }}

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
{% for group in run.groups %}

{% if group.setting %}
{{ group.setting }}

{% endif %}
| arm | | median | spread | |
|---|---|---|---|---|
{% for row in group.rows %}
| {{ row|join(" | ") }} |
{% endfor %}
{% endfor %}

{% endfor %}
{% endfor %}
"""
)

_ON_GPU = "No row is of a GPU yet: what needs one is waived or missing, and `make gpu-check` measures it there."


def render(folder: Path) -> str:
    """Of all that is in ``folder``; quick runs measure nothing and are left out."""
    runs = {name: [_run(name, rows, folder) for rows in _last_runs(folder / f"{name}.jsonl")] for name in BENCHMARKS}
    measured_on_gpu = any(run["gpu"] for its in runs.values() for run in its)
    unmeasured = "" if measured_on_gpu else _ON_GPU
    return _PAGE.render(benchmarks=BENCHMARKS, runs=runs, unmeasured=unmeasured)


def _last_runs(path: Path) -> Iterator[Rows]:
    """The last one on each machine."""
    if not path.exists():
        return
    by_machine: dict[tuple[Any, ...], dict[str, Rows]] = {}
    for row in read(path):
        if not row["quick"]:
            by_machine.setdefault((row["gpu"], row["cpu"], row["cores"]), {}).setdefault(row["date"], []).append(row)
    for runs in by_machine.values():
        yield runs[max(runs)]


def _run(name: str, rows: Rows, folder: Path) -> dict[str, Any]:
    first = rows[0]
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault(_setting(row["setting"]), []).append(_cells(row))
    return {
        "gpu": first["gpu"],
        "machine": " with ".join(filter(None, [first["gpu"], first["cpu"]])),
        "cores": first["cores"],
        "versions": ", ".join(f"{package} {version}" for package, version in first["versions"].items()),
        "date": first["date"],
        "commit": first["commit"],
        "picture": f"{name}.png" if (folder / f"{name}.png").exists() else None,
        "groups": [{"setting": setting, "rows": cells} for setting, cells in groups.items()],
    }


def _setting(setting: dict[str, Any]) -> str:
    return ", ".join(said(key, value) for key, value in setting.items())


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["arm"], row["quantity"], *(cell.replace("|", "\\|") for cell in told(row)))
