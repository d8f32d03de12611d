"""Are the losses and the weights identical to stock's over hundreds of steps on real text?

All variants run that claim to be bit-identical, and those that do not, whose largest loss difference shows how far
they deviate. Each variant runs once. Its speed is shown next to its bits; the other benchmarks compare speeds.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import variants
from benchmarks.harness.charts import Bars
from benchmarks.harness.interleaved_runs import run_variant, try_run
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import configuration_rows, error_rows, labels_of
from benchmarks.harness.sizes import exactness_setting

STEPS = 200

CHART = Bars("largest loss difference", "last loss", "iteration")


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield for each variant whether losses and weights are stock's, the loss differences, and the iteration time."""
    setting = exactness_setting(quick=quick)
    steps = 10 if quick else STEPS
    stock = run_variant(variants.STOCK, setting, iterations=steps, any_plan=True)
    ours = (*variants.ABLATION.values(), variants.STREAMED_AND_OVERLAPPED)
    # Some variants are in both lists.
    compared = {variant.name: variant for variant in (*ours, *variants.competitors(setting), variants.NO_OFFLOAD)}
    for variant in compared.values():
        labels = labels_of(variant.name, setting)
        labels["setting"]["steps"] = steps
        if (reason := variant.waived_reason(setting)) is not None:
            yield Row(quantity="losses identical to stock's", waived=reason, **labels)
            continue
        run = try_run(variant, setting, iterations=steps, any_plan=True)
        if isinstance(run, str):
            yield from error_rows({variant.name: run}, setting)
            continue
        claimed = variant.exact
        same_losses, same_weights = run.losses == stock.losses, run.digest == stock.digest
        yield Row(quantity="losses identical to stock's", value=same_losses, claimed=claimed, **labels)
        largest = max(abs(loss - stock_loss) for loss, stock_loss in zip(run.losses, stock.losses, strict=True))
        yield Row(quantity="largest loss difference", unit="nats", samples=[largest], **labels)
        yield Row(quantity="weights identical to stock's", value=same_weights, claimed=claimed, **labels)
        yield Row(quantity="hash of the weights", value=run.digest, **labels)
        yield Row(quantity="claims to be bit-identical", value=claimed, **labels)
        yield Row(quantity="last loss", unit="nats", samples=[run.losses[-1]], **labels)
        yield Row(quantity="iteration", unit="s", samples=run.iteration_s, **labels)
        yield from configuration_rows([run], **labels)
