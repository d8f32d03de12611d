"""Refuse docstrings, comments, pages and identifiers that do not follow the style of this project.

``python tools/lint_prose.py [FILE...]`` checks the files, or every Python and Markdown file of the repository, and
prints how the prose compares with the figures that we aim for. ``docs/style.md`` explains the style.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())
"""Imperative verbs that may begin a function docstring. Add a verb to the file when a docstring needs it."""

FRAGMENTS = ("Of", "By", "What", "Those")
"""Words that begin a fragment rather than a sentence."""

PREPOSITIONS = frozenset(["By", "For", "From", "In", "Of", "On", "To", "With", "Without", "At"])
PRONOUNS = frozenset(("its", "it", "of", "told", "said"))
"""Identifiers that do not name the thing that they stand for."""

HOUSEHOLD_WORDS = frozenset(
    ("tell", "tells", "told", "hear", "hears", "heard", "torn", "lent", "lends", "settle", "settles")
)
"""Words that have a technical counterpart: report, log, inconsistent, view, wait."""

UNNAMED_CALLERS = frozenset(("somebody", "nobody", "whoever"))
"""Words that hide which caller, thread or rank is meant."""

SUBSTITUTIONS = {
    "those of": "same as, or the noun",
    "that of": "same as, or the noun",
    "None stands for": "defaults to",
    "begin of": "start, beginning",
    "gives? (it |them |[a-z]+ )?back": "release, discard, evict",
    "given back": "release, discard, evict",
    "takes? away": "release, discard, evict",
    "forgets?": "discard, release",
    r"\S*, too(?! )": "also",
    "beside": "alongside, with",
    "the bits of stock": "bit-identical to stock",
    "at once": "immediately, at the same time, in one launch",
    "never tried": "untested",
    "in turns": "interleaved",
    "ends the training": "aborts",
    "for long": "persistently",
    "DeepSpeed keeps gathered": "persistent parameters",
}
"""Phrases of translated English, as regular expressions, and the field's words: the ten of ``docs/style.md``."""

MAX_WHAT_PER_1000_WORDS = 1.0
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"``.*?``|`[^`]*`|\"[^\"]*\"", re.DOTALL)
"""Text that quotes code or output: the rules for words do not apply to it."""


@dataclass
class Figures:
    """The counts that the aims are stated in."""

    functions: int = 0
    verb_first: int = 0
    preposition_first: int = 0
    words: int = 0
    whats: int = 0
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        functions, words = max(1, self.functions), max(1, self.words)
        return (
            f"{self.functions} function docstrings: {self.verb_first / functions:.0%} begin with a verb, "
            f"{self.preposition_first / functions:.1%} with a preposition; "
            f"{1000 * self.whats / words:.2f} 'what' per 1,000 of {self.words} words"
        )


def check(files: Sequence[Path]) -> Figures:
    """Return the figures of ``files``, with one finding for each rule that a line breaks."""
    figures = Figures()
    for path in files:
        source = path.read_text(encoding="utf-8")
        # Only the words of a Markdown page are checked.
        found = _words_of_page(source, figures) if path.suffix == ".md" else _findings(source, figures)
        name = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
        for line, finding in sorted(found):
            figures.findings.append(f"{name}:{line}: {finding}")
    return figures


def _words_of_page(text: str, figures: Figures) -> Iterator[tuple[int, str]]:
    """Check the words of a Markdown page, without its code."""
    # Code keeps its line breaks, so that lines are counted right.
    prose = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(prose.splitlines(), start=1):
        # Rows of emulated results repeat the names of variants.
        if not line.startswith(("    ", "|EMULATED")):
            yield from ((number, finding) for finding in _words(line, figures))


def _findings(source: str, figures: Figures) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    for line, owner, text in _docstrings(tree):
        is_function = isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from ((line, finding) for finding in _opening(text, is_function=is_function, figures=figures))
        yield from ((line, finding) for finding in _words(text, figures))
    for line, text in _comments(source):
        yield from ((line, finding) for finding in _words(text, figures))
    for line, name in _identifiers(tree):
        if name in PRONOUNS:
            yield line, f"the identifier {name!r} does not name a thing: use a noun"


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, ast.AST | None, str]]:
    """Yield line, documented definition and text; the definition is None for the docstring of an attribute."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for position, statement in enumerate(body if isinstance(body, list) else []):
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, node if position == 0 else None, statement.value.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each block of comments that stands in successive lines."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield start, " ".join(block)
            block = []
        if not block:
            start = token.start[0]
        block.append(token.string.lstrip("#:! "))
        last = token.start[0]
    if block:
        yield start, " ".join(block)


def _opening(text: str, *, is_function: bool, figures: Figures) -> Iterator[str]:
    """Yield the rules that the first words of a docstring break."""
    words = text.split()
    if not words:
        yield "the docstring is empty"
        return
    first = words[0].rstrip(",.:;")
    if first in FRAGMENTS:
        yield f"the docstring begins with {first!r}: write a full sentence"
    if not is_function:
        return
    figures.functions += 1
    figures.preposition_first += first in PREPOSITIONS
    follows = words[1] if len(words) > 1 else ""
    if first.lower() in VERBS and first[0].isupper() and follows != "of":
        figures.verb_first += 1
    else:
        yield f"the function docstring begins with {first!r}, which is no imperative verb (tools/verbs.txt)"


def _words(text: str, figures: Figures) -> Iterator[str]:
    """Count the words of ``text`` and yield the words to replace."""
    prose = " ".join(_CODE.sub(" ", text).split())
    for phrase, replacement in SUBSTITUTIONS.items():
        if found := re.search(rf"(?<!\w){phrase}\b", prose, re.IGNORECASE):
            yield f"{found[0]!r} is translated English: {replacement} (docs/style.md)"
    words = [word.lower() for word in _WORD.findall(prose)]
    figures.words += len(words)
    figures.whats += words.count("what")
    for word in sorted(HOUSEHOLD_WORDS.intersection(words)):
        yield f"the word {word!r} is not the field's: name the technical action"
    for word in sorted(UNNAMED_CALLERS.intersection(words)):
        yield f"the word {word!r} hides who acts: name the caller, the thread or the rank"


def _identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.lineno, node.arg or ""
        elif isinstance(node, ast.Attribute):
            yield node.end_lineno or node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            yield node.lineno, node.name or ""
        elif isinstance(node, ast.alias):
            yield node.lineno, node.asname or ""


def tracked_files() -> list[Path]:
    """Return the Python and Markdown files that git knows and does not ignore, without dated reports: those stay."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md", ":!benchmarks/reports"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    paths = (REPOSITORY / line for line in listed.stdout.splitlines())
    return [path for path in paths if path.exists()]


def main(arguments: Sequence[str]) -> int:
    """Print findings and figures, and return the exit code: 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description="Check the style of docstrings, comments, pages and names.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all files of the repository")
    files = parser.parse_args(arguments).files
    figures = check([path.resolve() for path in files] or tracked_files())
    print(*figures.findings, sep="\n", end="\n" if figures.findings else "")
    print(figures)
    too_many = 1000 * figures.whats > MAX_WHAT_PER_1000_WORDS * figures.words
    if too_many:
        print(f"There are more than {MAX_WHAT_PER_1000_WORDS:g} 'what' per 1,000 words: name the thing instead.")
    return int(bool(figures.findings) or too_many)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
