"""Clip the steps of a part of the training: updates in backward pause meanwhile."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from deep_opt_states.zero.step.eager import LAST_STEPS
from tests.ranks import ranks
from tests.tiers import thorough
from tests.zero.behaviour.behaviour_variant import (
    BehaviourNet,
    BehaviourVariant,
    final_states,
    inputs,
    loss_of,
    unequal,
)
from tests.zero.parity.case import CPU, eager
from tests.zero.parity.training import Block
from tests.zero.speculations import counted_speculations, wait_for_speculations

STEPS = 32


SKIPPED = 4


CLIPPED = range(5, 10)
"""The steps that are clipped. Together with the skipped one, they are more than a quarter of the last 20 steps."""


def train(block: Block) -> tuple[list[tuple[str, Any]], list[tuple[int, str]], list[int]]:
    """Return the states, the lines of the log with the number of their step, and the speculated units of each step."""
    torch.manual_seed(5)
    lines: list[tuple[int, str]] = []
    speculated = []
    variant = BehaviourVariant(block)
    engine = variant.engine(BehaviourNet())
    for step in range(STEPS):
        engine.optimizer.clip_grad = 1e-3 if step in CLIPPED else 0.0
        log = mock.patch("deep_opt_states.log.info", lambda line, step=step: lines.append((step, line)))
        with log, counted_speculations() as counts:
            loss = loss_of(engine(inputs(step)))
            engine.backward(loss * float("inf") if step == SKIPPED else loss)
            wait_for_speculations(engine)
            engine.step()
        speculated.append(counts.kept + counts.void)
    states = list(final_states(engine))
    variant.close()
    return states, lines, speculated


WHY = "steps were clipped, skipped or changed after backward"


@ranks(thorough(1), 2)
def test_updates_in_backward_pause_while_many_steps_are_clipped_or_skipped() -> None:
    stock, *_ = train(None)
    ours, lines, speculated = train(eager(CPU))
    assert unequal(stock, ours) == []
    last = CLIPPED[-1]
    # The skipped step was the first of them.
    again = SKIPPED + LAST_STEPS
    assert lines == [
        (last, f"updates in backward stop: 6 of the last 10 {WHY}"),
        (again, f"updates in backward start again: 5 of the last 20 {WHY}"),
    ]
    assert [number > 0 for number in speculated] == [step <= last or step > again for step in range(STEPS)]
