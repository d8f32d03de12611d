"""Define the parser of commands, whose errors are short."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an error in two lines, without the usage of a screen."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and the remedy to stderr, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\nFor all options, run: {self.prog} --help\n")
