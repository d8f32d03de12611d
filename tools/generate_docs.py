"""Write the generated parts of the documentation: config keys, releases of DeepSpeed, and the tests of each promise.

``python tools/generate_docs.py`` writes them; ``--check`` exits with 1 if a committed page differs, and writes nothing.
A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PROMISES = {
    "P1": "Exact",
    "P2": "Placement does not change the result",
    "P3": "Enabled by JSON alone",
    "P4": "Stock checkpoints",
    "P5": "Chosen by measurement",
    "P6": "Loud",
}


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


def release_table() -> str:
    """Return one table row for each release of DeepSpeed, from the results of ``make compat``."""
    from tests.compat.golden import world_size

    results = json.loads((REPOSITORY / "tests" / "compat" / "results.json").read_text(encoding="utf-8"))
    rows = ["| DeepSpeed | 1 rank | 2 ranks | The others |", "|---|---|---|---|"]
    for release, cases in results["releases"].items():
        by_size = {size: [lines for name, lines in cases.items() if world_size(name) == size] for size in (1, 2)}
        equal = [f"{lines.count(['equal'])} of {len(lines)} equal" for lines in by_size.values()]
        others = [f"{name}: {'; '.join(lines)}" for name, lines in cases.items() if lines != ["equal"]]
        rows.append(f"| {release} | {' | '.join(equal)} | {'<br>'.join(others)} |")
    tried = f"Tried with torch {results['torch']} and Python {results['python']} on the CPU accelerator."
    return "\n".join([*rows, "", tried])


def promise_table() -> str:
    """Return one table row for each promise, with the tests that have its marker."""
    tests: dict[str, list[str]] = {promise: [] for promise in PROMISES}
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        link = f"[{path.relative_to(REPOSITORY)}](../{path.relative_to(REPOSITORY)})"
        for promise in _promises(tree):
            tests[promise].append(f"{link}, all tests")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                for promise in (name for marker in node.decorator_list for name in _marked(marker)):
                    tests[promise].append(f"{link}, `{node.name}`")
    rows = ["| Promise | Tests |", "|---|---|"]
    rows += [f"| {promise} {title} | {'<br>'.join(tests[promise])} |" for promise, title in PROMISES.items()]
    return "\n".join(rows)


def _promises(tree: ast.Module) -> Iterator[str]:
    """Yield the promises that a module's ``pytestmark`` names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            for value in node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]:
                yield from _marked(value)


def _marked(marker: ast.expr) -> Iterator[str]:
    """Yield the promises of ``pytest.mark.promise("P1", "P2")``."""
    if isinstance(marker, ast.Call) and ast.unparse(marker.func) == "pytest.mark.promise":
        yield from (ast.literal_eval(argument) for argument in marker.args)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "config": ("docs/configuration.md", config_table),
    "releases": ("docs/compatibility.md", release_table),
    "promises": ("docs/testing.md", promise_table),
}


def main(arguments: Sequence[str]) -> int:
    """Write every generated part, or compare it with ``--check``. Return the exit code."""
    stale = []
    for name, (page, generate) in PARTS.items():
        path = REPOSITORY / page
        text = path.read_text(encoding="utf-8")
        part = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        generated = generate()
        # A function, because a replacement string would interpret backslashes.
        fresh, count = part.subn(lambda match: f"{match[1]}{generated}{match[2]}", text)  # noqa: B023 (called at once)
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
