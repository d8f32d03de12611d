"""Run the planning commands of ``deep-opt-states`` where torch is not installed: ``python -m perf_model``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from perf_model.cli.planning_commands import interruptible, new_program

COMMANDS_THAT_NEED_TORCH = ("profile", "doctor", "report", "delink")


@interruptible
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments``, by default of the process, and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, _ = new_program("python -m perf_model", "Plan and predict interleaved optimizer offloading.")
    if arguments and arguments[0] in COMMANDS_THAT_NEED_TORCH:
        parser.error(
            f"argument command: must be a planning command, which needs no torch, found {arguments[0]!r}. "
            f"Run: deep-opt-states {arguments[0]}"
        )
    options = parser.parse_args(arguments)
    code: int = options.run(options) or 0
    return code


if __name__ == "__main__":
    sys.exit(main())
