"""Print the plan, for people or as JSON."""

from __future__ import annotations

import argparse
import json

from perf_model.cli.inputs import read_inputs


def run(options: argparse.Namespace) -> int:
    """Print the plan, and return the exit code."""
    inputs = read_inputs(options, options.world_size, options.micro_batch)
    found = inputs.forecast()
    if options.json:
        from perf_model.cli.plan_json import to_json_dict

        print(json.dumps(to_json_dict(found, inputs), indent=2))
    else:
        from perf_model.cli.plan_screen import print_screen

        print_screen(found, inputs)
    return 0
