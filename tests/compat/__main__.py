"""Try releases of DeepSpeed with the golden cases, and write ``results.json``, from which the docs have their table.

``python -m tests.compat [RELEASE ...]``; without arguments all releases that the plugin names as tried.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deep_opt_states.zero.internals.releases import TRIED_DEEPSPEED
from tests.compat.environments import run_with
from tests.compat.golden import GOLDEN, QUICK, world_size

RESULTS = Path(__file__).with_name("results.json")
TIMEOUT_S = 3600


def try_release(release: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the result of each case with this release, by name; the results of all ranks are joined."""
    results: dict[str, list[str]] = {}
    for size in sorted(set(map(world_size, names))):
        of_size = [name for name in names if world_size(name) == size]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results"
            ranks = run_with(release, size, ["tests.compat.golden_ranks", str(path), *of_size], TIMEOUT_S)
            for rank, finished in enumerate(ranks):
                written = path.with_name(f"results.{rank}")
                if not written.exists():
                    raise RuntimeError(f"rank {rank} with DeepSpeed {release} failed:\n{finished.output[-5000:]}")
                found = json.loads(written.read_text())
                assert found["deepspeed"].split("+")[0] == release, found["deepspeed"]
                for name in of_size:
                    lines = found["cases"].get(name, ["not run, because an earlier case failed"])
                    results[name] = list(dict.fromkeys([*results.get(name, []), *lines]))
    return results


def main(arguments: Sequence[str]) -> int:
    """Try the releases, print each case that is not equal, and return 1 if one differs from its last result."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"releases": {}}
    quick = "--quick" in arguments
    releases = [argument for argument in arguments if not argument.startswith("--")] or TRIED_DEEPSPEED
    changed = 0
    for release in releases:
        found = try_release(release, QUICK if quick else GOLDEN)
        print(f"DeepSpeed {release}: {sum(lines == ['equal'] for lines in found.values())} of {len(found)} equal")
        for name, lines in found.items():
            if lines != ["equal"]:
                print(f"  {name}: {'; '.join(lines)[:500]}")
        before = results["releases"].get(release, {})
        changed += any(before.get(name) != lines for name, lines in found.items())
        results["releases"][release] = {**before, **found}
    results |= {"torch": torch.__version__, "python": platform.python_version()}
    results["releases"] = {release: results["releases"][release] for release in sorted(results["releases"])}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
