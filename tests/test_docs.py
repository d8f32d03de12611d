"""Check the documentation: links lead somewhere, generated parts are up to date, and the README stays short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deep_opt_states
from deep_opt_states import sharing
from tests.launch import REPOSITORY
from tools.sizes import MACHINES, commands, table_row

PAGES = [
    REPOSITORY / line
    for line in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
PATH = re.compile(r"`((?:deep_opt_states|perf_model|benchmarks|tests|examples|docs|tools)/[\w./-]*)`")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of ``page``."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub(lambda match: match[0].strip("`"), page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Return the links of ``page`` to files or headings that do not exist."""
    dead = []
    for file, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{file}#{anchor}")
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    assert not dead_links(page)


# The changelog and the reports of measurements name files of earlier versions, and reports are never edited.
CURRENT_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "reports"]


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_paths_that_are_named_exist(page: Path) -> None:
    assert not [path for path in PATH.findall(page.read_text(encoding="utf-8")) if not (REPOSITORY / path).exists()]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](#one-heading) [b](page.md#one-heading) [c](gone.md) [d](#two)")
    assert dead_links(page) == ["gone.md#", "#two"]


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in sorted((REPOSITORY / "docs").glob("*.md")) if f"docs/{page.name}" not in readme]
    assert not missing


def test_generated_parts_are_up_to_date() -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "generate_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


SOME_SIZES = [line for machine in MACHINES for line in commands(machine)][2::7]
"""A part of the lines of ``plan`` behind docs/sizes.md, which take a minute together."""


@pytest.mark.parametrize("command", SOME_SIZES)
def test_some_predicted_sizes_are_up_to_date(command: str) -> None:
    row = table_row(command)
    remedy = "Run `python tools/generate_docs.py --all` and commit the result."
    assert row in (REPOSITORY / "docs/sizes.md").read_text(encoding="utf-8").splitlines(), remedy


def test_the_reference_lists_what_may_be_imported() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", (REPOSITORY / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    exported = {f"{package.__name__}.{name}" for package in (deep_opt_states, sharing) for name in package.__all__}
    files = {
        str(path.relative_to(REPOSITORY))
        for package in ("deep_opt_states", "perf_model")
        for path in (REPOSITORY / package).rglob("*.py")
        if "\n__all__ = " in path.read_text(encoding="utf-8")
    }
    assert files == {"deep_opt_states/__init__.py", "deep_opt_states/sharing/__init__.py"}
    assert sorted(rows) == sorted(exported)


def test_every_promise_has_tests_and_selecting_it_lists_them(pytestconfig: pytest.Config) -> None:
    stated = re.findall(r"^- \*\*(P\d) ", (REPOSITORY / "docs/dev/design.md").read_text(encoding="utf-8"), re.MULTILINE)
    registered = [line.partition(":")[0] for line in pytestconfig.getini("markers")]
    assert stated == [name for name in registered if re.fullmatch(r"P\d", name)] != []
    with_promise = {
        promise: [
            path
            for path in (REPOSITORY / "tests").rglob("test_*.py")
            if re.search(rf"pytest\.mark\.promise\([^)]*\"{promise}\"", path.read_text(encoding="utf-8"))
        ]
        for promise in stated
    }
    assert all(with_promise.values()), with_promise
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "P3", "tests/test_config.py"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert re.findall("::(.*)", listed) == ["test_accelerate_accepts_a_block_that_writes_all_defaults_down"]


PAGES_FOR_USERS = (
    *("quickstart", "configuration", "compatibility", "checkpoints", "planning"),
    *("troubleshooting", "monitoring", "api", "style"),
)


def test_the_pages_for_users_stay_short() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs" / f"{name}.md" for name in PAGES_FOR_USERS)]
    # Samples of output explain themselves.
    texts = [re.sub(r"```text\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages]
    words = [len(GENERATED.sub("", text).split()) for text in texts]
    assert words[0] <= 800
    assert sum(words) <= 7500


def table_rows(page: str) -> list[list[str]]:
    """Return the cells of each row of the tables on ``page``."""
    lines = (REPOSITORY / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_readme_repeats_the_predicted_sizes() -> None:
    rows = [row for row in table_rows("docs/sizes.md") if len(row) == 12 and row[3].endswith(" s")]
    sizes = {(row[0], row[8], row[3], row[4]) for row in rows}
    models = {model for model, *_ in sizes}
    shown = [
        (model, *row[-3:])
        for row in table_rows("README.md")
        for model in models.intersection(", ".join(row).split(", "))
    ]
    assert len(shown) == 9
    assert set(shown) <= sizes


def test_troubleshooting_quotes_messages_that_exist() -> None:
    page = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    # Messages are composed of a key, a rule and a value.
    parts = {part.strip() for quote in quotes for line in quote.splitlines() for part in QUOTED.split(line)}
    modules = [path for name in ("deep_opt_states", "perf_model") for path in (REPOSITORY / name).rglob("*.py")]
    messages = "\n".join(map(texts_of, modules))
    assert len(quotes) == 10
    assert not [part for part in parts if part not in messages]


QUOTED = re.compile(r"\.\.\.|: |, found .*| s so far. ")
"""The places at which a quoted message continues with a value, or with another part of the message."""


def texts_of(path: Path) -> str:
    """Return the strings of a module, one per line, without the values that they format."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            constants = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
            lines.append("".join(map(str, constants)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines.append(node.value)
    return "\n".join(lines)
