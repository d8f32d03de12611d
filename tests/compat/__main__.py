"""Try releases of DeepSpeed and PyTorch with the golden cases, and write ``results.json`` for the tables in the docs.

``python -m tests.compat [deepspeed==VERSION | torch==VERSION ...]``; without arguments all releases that were tried.
Releases of PyTorch are tried with this environment's DeepSpeed, the newest that was tried, and removed afterwards: each
has 3 to 6 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED
from tests.compat.environments import Release
from tests.compat.golden import GOLDEN, TRIED_TORCH, world_size
from tests.compat.results import add_result

TIMEOUT_S = 3600


def try_release(release: Release, names: Sequence[str]) -> dict[str, Any]:
    """Return the versions that the ranks had, and the result of each case, by name, joined from all ranks.

    ``missing_names`` are the names of DeepSpeed that the plugin uses and the release lacks.
    """
    cases: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    missing_names: list[str] = []
    for size in sorted(set(map(world_size, names))):
        of_size = [name for name in names if world_size(name) == size]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results"
            ranks = release.run(size, ["tests.compat.golden_ranks", str(path), *of_size], TIMEOUT_S)
            for rank, finished in enumerate(ranks):
                written = path.with_name(f"results.{rank}")
                if not written.exists():
                    raise RuntimeError(f"rank {rank} with {release} failed:\n{finished.output[-5000:]}")
                found = json.loads(written.read_text())
                versions, missing_names = found["versions"], found["missing_names"]
                assert versions[release.package].split("+")[0] == release.version, versions
                for name in of_size:
                    lines = found["cases"].get(name, ["not run, because an earlier case failed"])
                    cases[name] = list(dict.fromkeys([*cases.get(name, []), *lines]))
    return {**versions, "missing_names": missing_names, "cases": cases}


def main(arguments: Sequence[str]) -> int:
    """Try the releases, print each case that is not equal, and return 1 if one differs from its last result."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("releases", nargs="*", type=Release.from_requirement, metavar="PACKAGE==VERSION")
    all_tried = [Release("deepspeed", version) for version in TESTED_DEEPSPEED]
    all_tried += [Release("torch", version) for version in TRIED_TORCH]
    releases = parser.parse_args(arguments).releases or all_tried
    changed = 0
    for release in releases:
        found = try_release(release, GOLDEN)
        cases = found["cases"]
        print(f"{release}: {sum(lines == ['equal'] for lines in cases.values())} of {len(cases)} equal", flush=True)
        for name, lines in cases.items():
            if lines != ["equal"]:
                print(f"  {name}: {'; '.join(lines)[:500]}")
        changed += add_result(release.package, release.version, found)
        if release.package == "torch":
            release.remove()
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
