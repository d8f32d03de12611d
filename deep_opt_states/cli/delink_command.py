"""Make the universal checkpoint of a model from that of one whose layers share parameters, and print the names."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deep_opt_states.sharing.delink import Delink
from deep_opt_states.sharing.renaming import DelinkError, Prefixes, parse_prefixes, prefixes_of_layers
from perf_model.json_input import read_text
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.model import ModelError


@dataclass(frozen=True, kw_only=True)
class DelinkReport:
    """The result of ``delink``, as ``--json`` prints it.

    ``apparent_bytes`` counts each new file, ``rewritten_bytes`` only the moments that are written anew. ``missing`` and
    ``unexpected`` are names that only the model of ``--model`` has, and that only the checkpoint has.
    ``copied_because`` is the reason for copies in place of links, or empty.
    """

    names: dict[str, list[str]]
    moments: str
    apparent_bytes: int
    rewritten_bytes: int
    missing: list[str]
    unexpected: list[str]
    written: bool
    copied_because: str


def run(options: argparse.Namespace) -> int:
    """Write the checkpoint, print the result, and return the exit code: 1, with the reason on stderr, if it fails."""
    try:
        delink = Delink.read(options.pseudo, _prefixes(options), options.moments)
        missing, unexpected = _differences(delink.new_names, options.model)
        apparent_bytes, rewritten_bytes = delink.apparent_bytes(), delink.rewritten_bytes()
        copied_because = ""
        if not options.dry_run:
            copied_because = delink.write(options.real.absolute(), copies=options.copy)
    except (DelinkError, ModelError, OSError) as error:
        Console(stderr=True).print(Text(str(error)), soft_wrap=True)
        return 1
    report = DelinkReport(
        names={old: list(new) for old, new in delink.names.items()},
        moments=options.moments,
        apparent_bytes=apparent_bytes,
        rewritten_bytes=rewritten_bytes,
        missing=missing,
        unexpected=unexpected,
        written=not options.dry_run,
        copied_because=copied_because,
    )
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report, options.real)
    return 0


def _prefixes(options: argparse.Namespace) -> Prefixes:
    if options.map is not None:
        if options.into is not None or options.every != 1:
            raise DelinkError(
                "--into and --every: need --share, found --map.\nWrite all names into the map, or use --share."
            )
        try:
            return parse_prefixes(read_text(options.map))
        except UnicodeDecodeError as error:
            raise DelinkError(f"--map: must be UTF-8 text, found {options.map}: {error}.\nConvert the file.") from None
    if options.into is None:
        raise DelinkError('--share: needs --into, found none.\nWrite --into "model.layers.{1..47}".')
    if options.every < 1:
        raise DelinkError(f"--every: must be at least 1, found {options.every}.\nCorrect the number.")
    return prefixes_of_layers(options.share, options.into, options.every)


def _differences(names: list[str], model: Path | None) -> tuple[list[str], list[str]]:
    """Return the names that only the model in the file has, and those that only the checkpoint has."""
    if model is None:
        return [], []
    expected = [name for name, _ in read_hf_config(model).parameters()]
    in_checkpoint, in_model = set(names), set(expected)
    return [name for name in expected if name not in in_checkpoint], [name for name in names if name not in in_model]


def _print(report: DelinkReport, real: Path) -> None:
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("parameter", overflow="fold")
    table.add_column("new names", justify="right")
    table.add_column("first and last of them", overflow="fold")
    for old, new in report.names.items():
        if new != [old]:
            ends = ", ".join(dict.fromkeys([new[0], new[-1]])) if new else "left out"
            table.add_row(Text(old), str(len(new)), Text(ends))
    console.print(table)
    num_names = sum(map(len, report.names.values()))
    console.print(Text(f"{len(report.names)} parameters become {num_names}; moments: {report.moments}"))
    size = f"{report.apparent_bytes / 1e9:.3g} GB, of which {report.rewritten_bytes / 1e9:.3g} GB are written anew"
    console.print(Text(f"{size}; the other files are {'copies' if report.copied_because else 'hard links'}"))
    if report.copied_because:
        console.print(Text(f"Files were copied: {report.copied_because}"))
    for title, names in (("Missing in the checkpoint", report.missing), ("Not in the model", report.unexpected)):
        if names:
            console.print(Text(f"{title}: {', '.join(names)}"))
    console.print(Text(f"Written: {real}" if report.written else "Nothing was written (--dry-run)."))
