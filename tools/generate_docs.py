"""Write the generated parts of the documentation: config keys and releases that were tried.

``python tools/generate_docs.py`` writes them; ``--check`` exits with 1 if a committed page differs, and writes nothing.
Only ``--all`` also writes the predicted sizes, which takes a minute. A test checks some rows of them.
A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parent.parent


def config_table() -> str:
    """Return one table row for each key of the config block, from the pydantic model."""
    from deep_opt_states.config import Config

    rows = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for key, schema in Config.model_json_schema()["properties"].items():
        default = schema.get("default")
        shown = "" if default is None else f"`{json.dumps(default)}`"
        meaning = " ".join(schema["description"].split())
        rows.append(f"| `{key}` | {_type(schema)} | {shown} | {meaning} |")
    return "\n".join(rows)


def _type(schema: dict[str, Any]) -> str:
    """Return a key's type and range in words."""
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f'`"{value}"`' for value in schema["enum"])
    if schema["type"] == "array":
        # A list of values ends with the last value, and a list of a type with the plural.
        return f"a list of {_type(schema['items'])}{'' if 'enum' in schema['items'] else 's'}"
    bounds = [
        f"at {word} {schema[bound]:g}" for bound, word in (("minimum", "least"), ("maximum", "most")) if bound in schema
    ]
    return " ".join([schema["type"], ", ".join(bounds)]).strip()


def deepspeed_table() -> str:
    """Return one table row for successive releases of DeepSpeed that were tried with the same result."""
    from tests.compat.results import read_results

    entries = read_results()["deepspeed"].values()
    rows = ["| DeepSpeed | 1 rank | 2 ranks | The others | Plugin |", "|---|---|---|---|---|"]
    for compared, alike in groupby(entries, key=lambda entry: _compared(entry["cases"])):
        releases, plugins = zip(*((entry["deepspeed"], _plugin(entry)) for entry in alike), strict=True)
        rows.append(f"| {', '.join(releases)} | {compared} | {', '.join(dict.fromkeys(plugins))} |")
    return "\n".join([*rows, "", _tried_with(entries, "torch")])


def torch_table() -> str:
    """Return one table row for each release of PyTorch that was tried, and for the one of all tests."""
    from tests.compat.results import read_results

    results = read_results()
    *_, of_all_tests = results["deepspeed"].values()
    entries = sorted([of_all_tests, *results["torch"].values()], key=lambda entry: Version(entry["torch"]))
    rows = ["| PyTorch | Build | 1 rank | 2 ranks | The others | Plugin |", "|---|---|---|---|---|---|"]
    for entry in entries:
        release, _, build = entry["torch"].partition("+")
        rows.append(f"| {release} | {build} | {_compared(entry['cases'])} | {_plugin(entry)} |")
    return "\n".join([*rows, "", _tried_with(entries, "deepspeed")])


def python_table() -> str:
    """Return one table row for each release of Python with which the distributions were installed and trained."""
    from tests.compat.results import read_results

    tried = "A tiny training with the wheel, and with the source distribution"
    rows = [f"| Python | PyTorch | DeepSpeed | {tried} | Plugin |"]
    rows.append("|---|---|---|---|---|")
    for entry in read_results()["python"].values():
        trained = "<br>".join(entry["differences"]) or "equal to stock"
        cells = [entry["python"], entry["torch"], entry["deepspeed"], trained, _plugin(entry)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def frameworks_table() -> str:
    """Return one table row for each framework whose own commands were run."""
    from tests.compat.results import read_results

    rows = ["| Framework | With | It pins DeepSpeed | Tensors that were saved | Plugin |", "|---|---|---|---|---|"]
    for entry in read_results()["frameworks"].values():
        versions = dict(entry["versions"])
        found = ", ".join(f"{name} {versions[name]}" for name in sorted(versions, key=str.lower))
        runs = "<br>".join(f"{name}: {result}" for name, result in entry["runs"].items())
        rows.append(f"| `{entry['requirement']}` | {found} | {entry['pins']} | {runs} | {_plugin(entry)} |")
    return "\n".join(rows)


def _plugin(entry: Mapping[str, str]) -> str:
    """Return the version and the commit of the plugin that was tried."""
    return f"{entry['deep_opt_states']} ({entry['commit']})"


def _compared(cases: Mapping[str, list[str]]) -> str:
    """Return the cells for 1 and 2 ranks, and the one with the cases that are not equal to stock."""
    from tests.compat.golden import world_size

    by_size = {size: [lines for name, lines in cases.items() if world_size(name) == size] for size in (1, 2)}
    equal = [f"{lines.count(['equal'])} of {len(lines)} equal" for lines in by_size.values()]
    others = [f"{name}: {'; '.join(lines)}" for name, lines in cases.items() if lines != ["equal"]]
    return f"{' | '.join(equal)} | {'<br>'.join(others)}"


def _tried_with(entries: Iterable[Mapping[str, Any]], package: str) -> str:
    """Return the sentence about what all entries were tried with."""
    ((version, python),) = {(entry[package], entry["python"]) for entry in entries}
    name = {"torch": "PyTorch", "deepspeed": "DeepSpeed"}[package]
    return f"Tried with {name} {version} and Python {python} on the CPU accelerator."


def sizes_part() -> str:
    """Return the tables of predicted sizes."""
    from tools.sizes import sizes_tables

    return sizes_tables()


def from_stage_2_part() -> str:
    """Return the table about ZeRO-2."""
    from tools.sizes import from_stage_2_table

    return from_stage_2_table()


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "config": ("docs/configuration.md", config_table),
    "releases of deepspeed": ("docs/compatibility.md", deepspeed_table),
    "releases of torch": ("docs/compatibility.md", torch_table),
    "releases of python": ("docs/compatibility.md", python_table),
    "frameworks": ("docs/compatibility.md", frameworks_table),
    "from ZeRO-2": ("docs/sizes.md", from_stage_2_part),
}


def main(arguments: Sequence[str]) -> int:
    """Write every generated part, or compare it with ``--check``. Return the exit code."""
    stale = []
    slow = {"sizes": ("docs/sizes.md", sizes_part)} if "--all" in arguments else {}
    for name, (page, generate) in {**PARTS, **slow}.items():
        path = REPOSITORY / page
        text = path.read_text(encoding="utf-8")
        part = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        generated = generate()
        # A function, because a replacement string would interpret backslashes.
        fresh, count = part.subn(lambda match: f"{match[1]}{generated}{match[2]}", text)  # noqa: B023 (called here)
        assert count == 1, f"{page} must have the generated part {name!r} once, found {count}"
        if fresh != text:
            stale.append(page)
            if "--check" not in arguments:
                path.write_text(fresh, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"Out of date: {', '.join(stale)}. Run `python tools/generate_docs.py` and commit the result.")
        return 1
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    sys.exit(main(sys.argv[1:]))
