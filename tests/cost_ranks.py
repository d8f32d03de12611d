"""Train with and without updates, with stock and with the plugin, and print the changes of each part."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import variants
from benchmarks.harness.interleaved_runs import batch_for, engine_for, weights_digest
from benchmarks.harness.overrides import without_updates
from benchmarks.harness.setting import QUICK
from examples.common.one_rank import be_the_only_rank_unless_launched
from tests.launch import answer


def main() -> None:
    be_the_only_rank_unless_launched()
    for variant in (variants.STOCK, variants.OURS_DEFAULT, variants.STREAMED_AND_OVERLAPPED):
        with engine_for(variant, QUICK) as engine:
            parts = {"before": train(engine, 2)}
            with without_updates():
                parts["without"] = train(engine, 3)
            parts["after"] = train(engine, 1)
        answer({"variant": variant.name, **parts})


def train(engine: Any, steps: int) -> dict[str, Any]:
    """Train for some steps, always on the same batch."""
    losses, pending = [], False
    for _ in range(steps):
        loss = engine(*batch_for(engine, QUICK, 0))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        if hasattr(engine.optimizer, "_running"):
            pending |= engine.optimizer._running.executor.pending
    norm = float(engine.get_global_grad_norm())
    return {
        "losses": losses,
        "norm": norm,
        "steps": engine.global_steps,
        "pending": pending,
        "digest": weights_digest(engine),
    }


if __name__ == "__main__":
    main()
