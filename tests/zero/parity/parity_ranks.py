"""Train every case of the world size and a tier, and write the differences; started by ``test_parity.py``.

Arguments: ``quick`` or ``thorough``, and the path of the results, to which the rank is appended. One process trains
many cases, since importing DeepSpeed takes longer than most cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import astuple, replace

import torch.distributed as dist

from tests.fork_server import import_all
from tests.zero.parity.case import Case
from tests.zero.parity.case_runs import Result, write_results
from tests.zero.parity.cases import CASES, DEPARTURES
from tests.zero.parity.naive_rewrites import NAIVE, applied
from tests.zero.parity.training import Record, differences, run_resumed, run_variant
from tests.zero.process_group import process_group


def same_as_stock(case: Case) -> Result:
    """Train the case with stock and with the plugin; a case that resumes, from each one's checkpoint with the other."""
    if case.resume:
        stock = run_resumed(case, None, None)
        variants = {f"stock to {block}": run_resumed(case, None, block) for block in case.blocks}
        variants |= {f"{block} to stock": run_resumed(case, block, None) for block in case.blocks}
    else:
        stock = run_variant(case, None)
        variants = {str(block): run_variant(case, block) for block in case.blocks}
    return result(stock, variants)


def same_as_zero_gradients(case: Case) -> Result:
    """Train the case with the plugin, and with stock on gradients of zero; ``stock differs`` shows the departure."""
    zeroed = run_variant(replace(case, zero_instead_of_skip=True), None)
    found = result(zeroed, {str(block): run_variant(case, block) for block in case.blocks})
    return {**found, "stock differs": differences(zeroed, run_variant(case, None))}


def naive(name: str) -> Result:
    case = next(case for case in (*CASES, *DEPARTURES) if case.name == NAIVE[name][0])
    stock = run_variant(replace(case, zero_instead_of_skip=True), None)
    with applied(name):
        return result(stock, {"naive": run_variant(case, case.blocks[0])})


def result(stock: Record, variants: dict[str, Record]) -> Result:
    return {
        "numbers": stock.numbers,
        "stock class": stock.optimizer_class,
        "classes": {name: variant.optimizer_class for name, variant in variants.items()},
        "deferred": {name: [variant.deferred, len(variant.published)] for name, variant in variants.items()},
        "speculations": {name: astuple(variant.speculations) for name, variant in variants.items()},
        "differences": {name: differences(stock, variant) for name, variant in variants.items()},
    }


def main(tier: str, path: str) -> None:
    trained = {
        case.name
        for case in (*CASES, *DEPARTURES)
        if case.world_size == dist.get_world_size() and case.thorough == (tier == "thorough")
    }
    work: dict[str, Callable[[], Result]] = {}
    for case in (case for case in CASES if case.name in trained):
        work[case.name] = lambda case=case: same_as_stock(case)
    for case in (case for case in DEPARTURES if case.name in trained):
        work[case.name] = lambda case=case: same_as_zero_gradients(case)
    for name in (name for name, (case, *_) in NAIVE.items() if case in trained):
        work[name] = lambda name=name: naive(name)
    write_results(work, path)


if __name__ == "__main__":
    # Before the process group, which keeps the garbage collections of DeepSpeed from all modules that are imported.
    import_all()
    with process_group():
        main(*sys.argv[1:])
