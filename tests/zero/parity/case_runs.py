"""Train cases with stock and with the plugin, one after another in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from typing import Any

from deepspeed.accelerator import get_accelerator

from tests.zero.parity.case import Case
from tests.zero.parity.training import Record, differences, run_resumed, run_variant

Result = dict[str, Any]


def results_in_turn(work: Iterable[tuple[str, Callable[[], Result]]]) -> Iterator[tuple[str, Result]]:
    """Yield the name and the result of each piece of ``work``; after an exception, its traceback as the last result.

    The collectives of the ranks no longer match after that, so that a later piece could wait forever.
    """
    # DeepSpeed's CPU accelerator returns False on some CPUs, but trains fp16 on all of them.
    get_accelerator().is_fp16_supported = lambda: True
    for name, find in work:
        try:
            result = find()
        except Exception:  # noqa: BLE001 (reported by the test)
            yield name, {"error": traceback.format_exc()}
            return
        yield name, result


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


def result(stock: Record, variants: dict[str, Record]) -> Result:
    return {
        "numbers": stock.numbers,
        "stock class": stock.optimizer_class,
        "classes": {name: variant.optimizer_class for name, variant in variants.items()},
        "deferred": {name: [variant.deferred, len(variant.published)] for name, variant in variants.items()},
        "speculations": {name: astuple(variant.speculations) for name, variant in variants.items()},
        "differences": {name: differences(stock, variant) for name, variant in variants.items()},
    }
