"""Parse user-supplied JSON and shorten its values for error messages."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def read_text(path: Path) -> str:
    """Return the UTF-8 text of the file. Raise ``OSError`` or ``ValueError`` if it cannot be read as such."""
    # Some editors write a byte order mark, which is not part of the text.
    return path.read_text(encoding="utf-8-sig")


def parse_json(text: str) -> Any:
    """Return the value that ``text`` spells. Raise ``ValueError`` if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shorten(value: object) -> str:
    """Return ``repr(value)`` for an error message, shortened if it is long."""
    return _SHORT.repr(value)


def is_printable(text: str) -> bool:
    """Return whether ``text`` has no lone surrogates: JSON allows them, UTF-8 output does not."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
