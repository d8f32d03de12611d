"""What anyone may have written: JSON that is read or refused, and a value of it for a message, however large it is."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """Raises ``OSError`` or ``ValueError``."""
    # A byte order mark is not part of the text; some editors write one.
    return path.read_text(encoding="utf-8-sig")


def parse_json(text: str) -> Any:
    """Raises ``ValueError``."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown(value: object) -> str:
    return _SHORT.repr(value)


def is_printable(text: str) -> bool:
    """JSON can spell half a character, which no terminal or file takes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
