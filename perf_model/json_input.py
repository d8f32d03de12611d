"""Read the JSON files of users, and shorten the values in errors about them."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 10_000_000
"""Real files are below 1 MB. A larger file is a mistake, such as a checkpoint."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def read_text(path: Path, rule: str, remedy: str, error: type[ValueError]) -> str:
    """Return the UTF-8 text of the file ``path``. Raise ``error`` with the rule, the reason and the remedy."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES / 1e6:,.0f} MB")
        # Some editors write a byte order mark, which is not part of the text.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as found:
        raise error(f"{rule}, found {printable(path)}: {reason(found)}.\n{remedy}") from None


def parse_json(text: str, rule: str, remedy: str, error: type[ValueError]) -> Any:
    """Return the value that ``text`` spells. Raise ``error`` unless it is JSON without repeated keys."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as found:
        raise error(f"{rule}, found other text: {found}.\n{remedy}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"the key {shorten(twice[0])} occurs twice in one object")
    return dict(pairs)


def reason(error: OSError | ValueError) -> str:
    """Return the reason why a file cannot be read, without the name of the file."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def shorten(value: object) -> str:
    """Return ``repr(value)`` for an error message, shortened if it is long."""
    return printable(_SHORT.repr(value))


def printable(text: object, most: int | None = None) -> str:
    """Return ``text`` in one line with escapes such as ``\\n``, and at most ``most`` characters, without the middle."""
    characters = str(text)
    if most is not None and len(characters) > most:
        left, right = most * 2 // 3, most // 3
        left_out = f"[... {len(characters) - left - right:,} characters ...]"
        characters = f"{characters[:left]}{left_out}{characters[-right:]}"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in characters)
