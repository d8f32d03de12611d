"""Check the documentation, the prose and the metadata: links lead somewhere, and quoted parts are true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import deep_opt_states
from deep_opt_states import sharing
from deep_opt_states.names import __version__
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED
from tests.compat.golden import TRIED_TORCH
from tests.compat.results import read_results
from tests.launch import REPOSITORY
from tools import lint_prose
from tools.sizes import MACHINES, commands, table_row

LIST_PAGES = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
PAGES = [REPOSITORY / line for line in subprocess.check_output(LIST_PAGES, cwd=REPOSITORY, text=True).splitlines()]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
PATH = re.compile(r"`((?:deep_opt_states|perf_model|benchmarks|tests|examples|docs|tools)/[\w./-]*)`")


def read(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", CODE.sub(lambda match: match[0].strip("`"), page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for file, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{file}#{anchor}")
    return dead


def test_links_and_paths_lead_to_files_and_headings_that_exist_and_the_readme_links_every_page(tmp_path: Path) -> None:
    assert {page: dead for page in PAGES if (dead := dead_links(page))} == {}
    for page in PAGES:
        # The changelog and the reports of measurements name files of earlier versions, and reports are never edited.
        if page.name != "CHANGELOG.md" and page.parent.name != "reports":
            named = PATH.findall(page.read_text(encoding="utf-8"))
            assert not [path for path in named if not (REPOSITORY / path).exists()], page
    faulty = tmp_path / "page.md"
    faulty.write_text("# One heading\n[a](#one-heading) [b](page.md#one-heading) [c](gone.md) [d](#two)")
    assert dead_links(faulty) == ["gone.md#", "#two"]
    pages, readme = (REPOSITORY / "docs").glob("*.md"), read("README.md")
    assert not [page.name for page in pages if f"docs/{page.name}" not in readme]


def test_generated_parts_and_some_predicted_sizes_are_up_to_date() -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "generate_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # All lines of ``plan`` behind this page take a minute together.
    for command_line in [line for machine in MACHINES for line in commands(machine)][2::28]:
        remedy = "Run `python tools/generate_docs.py --all` and commit the result."
        assert table_row(command_line) in read("docs/sizes.md").splitlines(), remedy


def test_the_reference_lists_what_may_be_imported() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", read("docs/api.md"), re.MULTILINE)
    exported = {f"{package.__name__}.{name}" for package in (deep_opt_states, sharing) for name in package.__all__}
    modules = [path for name in ("deep_opt_states", "perf_model") for path in (REPOSITORY / name).rglob("*.py")]
    files = {str(path.relative_to(REPOSITORY)) for path in modules if "\n__all__ = " in path.read_text()}
    assert files == {"deep_opt_states/__init__.py", "deep_opt_states/sharing/__init__.py"}
    assert sorted(rows) == sorted(exported)


def test_every_promise_has_a_marker_and_tests(pytestconfig: pytest.Config) -> None:
    stated = re.findall(r"^- \*\*(P\d) ", read("docs/dev/design.md"), re.MULTILINE)
    registered = [line.partition(":")[0] for line in pytestconfig.getini("markers")]
    assert stated == [name for name in registered if re.fullmatch(r"P\d", name)] != []
    tests = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    for promise in stated:
        assert re.search(rf"pytest\.mark\.{promise}\b", tests), promise


def test_the_documents_stay_short() -> None:
    pages = ["README.md", *(str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs").rglob("*.md"))]
    assert len(read("README.md").split()) <= 800
    assert sum(len(re.findall(r"\S*\w\S*", read(page))) for page in pages) <= 15_000


def table_rows(page: str) -> list[list[str]]:
    lines = read(page).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_readme_repeats_the_predicted_sizes() -> None:
    rows = [row for row in table_rows("docs/sizes.md") if len(row) == 12 and row[3].endswith(" s")]
    sizes = {(row[0], row[8], row[3], row[4]) for row in rows}
    models = {model for model, *_ in sizes}
    rows = table_rows("README.md")
    shown = [(model, *row[-3:]) for row in rows for model in models.intersection(", ".join(row).split(", "))]
    assert len(shown) == 9
    assert set(shown) <= sizes


QUOTED = re.compile(r"\.\.\.|: |, found .*| s so far. ")
"""The places at which a quoted message continues with a value, or with another part of the message."""


def test_troubleshooting_quotes_messages_that_exist() -> None:
    quotes = re.findall(r"^```text\n(.*?)^```", read("docs/troubleshooting.md"), re.DOTALL | re.MULTILINE)
    parts = {part.strip() for quote in quotes for line in quote.splitlines() for part in QUOTED.split(line)}
    modules = [path for name in ("deep_opt_states", "perf_model") for path in (REPOSITORY / name).rglob("*.py")]
    messages = "\n".join(map(texts_of, modules))
    assert len(quotes) == 10
    assert not [part for part in parts if part not in messages]


def texts_of(path: Path) -> str:
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            lines.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
        elif isinstance(node, ast.Constant):
            lines.append(str(node.value))
    return "\n".join(lines)


def test_dialect_is_refused_and_quoted_code_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "module.py"
    module.write_text('def narrow() -> None:\n    """Return ``tells``, "those of" and "what was told", too short."""\n')
    assert lint_prose.main([str(module)]) == 0
    module.write_text('def of() -> None:\n    """Of the states, which it tells, those\nof stock, too: at once."""\n')
    assert lint_prose.main([str(module)]) == 1
    shown = capsys.readouterr().out
    for finding in ("begins with 'Of'", "no imperative verb", "identifier 'of'", "the word 'tells'"):
        assert finding in shown
    for phrase in ("those of", "stock, too", "at once"):
        assert f"{phrase!r} is translated English" in shown


SETUP = ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg", encoding="utf-8")
NEEDED = [line for line in SETUP["options"]["install_requires"].splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("package", "tried", "older"), [("deepspeed", TESTED_DEEPSPEED, "0.17.5"), ("torch", TRIED_TORCH, "2.9.1")]
)
def test_pip_accepts_every_release_that_was_tried(package: str, tried: tuple[str, ...], older: str) -> None:
    (requirement,) = (Requirement(line) for line in NEEDED if line.startswith(f"{package}>"))
    assert all(requirement.specifier.contains(version) for version in tried)
    assert not requirement.specifier.contains(older)


def test_the_metadata_name_the_author_the_license_and_the_versions_of_python_that_a_release_was_tried_with() -> None:
    metadata = SETUP["metadata"]
    assert all(metadata[key] for key in ("author", "description", "keywords", "license", "license_files"))
    named = re.findall(r"Python :: (3\.\d+)$", metadata["classifiers"], re.MULTILINE)
    assert named == ["3.10", "3.11", "3.12", "3.13"]
    assert SETUP["options"]["python_requires"] == ">=3.10"
    tried = {version.rpartition(".")[0] for version in read_results()["python"]}
    # Between two releases, the distributions of the next one cannot have been tried with all interpreters yet.
    unreleased = next(iter(changelog().values()))
    assert tried <= set(named) if unreleased else tried == set(named), "run make release-check"


def changelog() -> dict[str, str]:
    _, *found = re.split(r"^## \[(.+?)\].*$", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(found[::2], found[1::2], strict=True)}


def test_the_changelog_has_this_version_and_a_section_for_the_next_one() -> None:
    following, present = list(changelog())[:2]
    assert Version(following) > Version(present) == Version(__version__)


def test_the_extra_of_the_examples_has_what_they_import() -> None:
    code = "\n".join(path.read_text("utf-8") for path in (REPOSITORY / "examples").rglob("*.py"))
    imported = {*re.findall(r"^ *(?:import|from) (\w+)", code, re.MULTILINE)} - sys.stdlib_module_names
    own = {path.stem for path in (REPOSITORY / "examples").iterdir()} | {"deep_opt_states", "perf_model"}
    extra = set(SETUP["options.extras_require"]["examples"].split())
    assert imported - own - {Requirement(line).name for line in NEEDED} == extra
    assert extra <= set(SETUP["options.extras_require"]["test"].split())


def test_the_chart_library_is_packaged_with_its_licence_and_in_the_stated_version() -> None:
    vendor = REPOSITORY / "deep_opt_states" / "report" / "vendor"
    (stated,) = re.findall(r"^# uPlot (\S+)$", (vendor / "README.md").read_text(), re.MULTILINE)
    assert f"uPlot (v{stated})" in (vendor / "uPlot.iife.min.js").read_text()[:100]
    assert "MIT" in (vendor / "LICENSE").read_text()
    assert "deep_opt_states/report/vendor/LICENSE" in SETUP["metadata"]["license_files"].split()
    assert {"report/page.js", "report/vendor/*"} <= set(SETUP["options.package_data"]["deep_opt_states"].split())
