"""Define the parser of commands, whose errors are short, and the types of its numbers."""

from __future__ import annotations

import argparse
from decimal import Decimal, InvalidOperation
from typing import NoReturn

from perf_model.json_input import printable, shorten

MAX_MESSAGE = 1_500
"""The most characters of a line of an error. Longer ones repeat a value of the user."""

MAX_DIGITS = 30
"""The most characters of a number: every valid number is shorter."""


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an error in two lines, without the usage of a screen, and without control characters."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and the remedy to stderr, and exit with code 2."""
        self.exit(
            2, f"{self.prog}: error: {printable(message, MAX_MESSAGE)}\nFor all options, run: {self.prog} --help\n"
        )


def error_text(error: Exception) -> str:
    """Return the message of ``error`` with escapes for control characters, and without the middle of long lines."""
    return "\n".join(printable(line, MAX_MESSAGE) for line in str(error).splitlines())


def integer(text: str) -> int:
    """Return the integer that ``text`` spells. Raise ``ArgumentTypeError`` unless it does, in few characters."""
    try:
        if len(text) <= MAX_DIGITS:
            return int(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be an integer, found {shorten(text)}")


def parameters(text: str) -> int:
    """Return the number that ``text`` spells, such as 32e9. Raise ``ArgumentTypeError`` unless it is a whole number."""
    try:
        value = Decimal(text) if len(text) <= MAX_DIGITS else Decimal("nan")
    except InvalidOperation:
        value = Decimal("nan")
    # Compare before the conversion, which would write out all digits of 1e999999.
    if value.is_finite() and 0 < value <= 10**18 and value == int(value):
        return int(value)
    raise argparse.ArgumentTypeError(f"must be a whole number of parameters such as 32e9, found {shorten(text)}")
