"""Give the layers in a universal checkpoint parameters of their own, and print the names."""

from __future__ import annotations

import argparse
import sys

from deep_opt_states.sharing.delink import Delink, DelinkError, names_of_layers
from perf_model.cli.screen import progress
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.model import ModelError


def run(options: argparse.Namespace) -> int:
    """Write the checkpoint, print the result, and return the exit code: 1, with the reason on stderr, if it fails."""
    try:
        with progress("Delinking"):
            layers = names_of_layers(options.share, options.into, options.every)
            delink = Delink.read(options.pseudo, layers, options.moments)
            model = None if options.model is None else read_hf_config(options.model)
            in_model = None if model is None else {name for name, _ in model.parameters()}
            if not options.dry_run:
                delink.write(options.real.absolute(), copies=options.copy)
    except (DelinkError, ModelError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    names = {name for new in delink.names.values() for name in new}
    lines = [f"{old} -> {new[0]} ... {new[-1]} ({len(new)})" for old, new in delink.names.items() if len(new) > 1]
    lines.append(f"{len(delink.names)} parameters become {len(names)}; moments: {delink.moments}")
    if in_model is not None:
        lines.append(f"Missing in the checkpoint: {', '.join(sorted(in_model - names)) or 'none'}")
        lines.append(f"Not in the model: {', '.join(sorted(names - in_model)) or 'none'}")
    lines.append("Nothing was written (--dry-run)." if options.dry_run else f"Written: {options.real}")
    print(*lines, sep="\n")
    return 0
