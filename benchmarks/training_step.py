"""What does an iteration take, by phase, and what does each part of it gain?

Forward, backward, what is seen of the update, the iteration, tokens a second, MFU and memory: of stock and its
neighbours; of ours with one thing more at a time; and with more micro-batches a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks import arms
from benchmarks.arms import Arm
from benchmarks.rows import Row
from benchmarks.sizes import larger, usual
from benchmarks.turn_rows import all_of, exposed_and_hidden, faster, of_arm, same_bits, waived, what_it_is
from benchmarks.turns import Setting, Turn, take_turns
from deep_opt_states import machine
from deep_opt_states.profiler.peaks import peak_flops

ACCUMULATIONS = (4, 16)
MICRO_BATCHES = (8,)


@dataclass(frozen=True, kw_only=True)
class Effort:
    iterations: int
    rounds: int


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    neighbours = (arms.STOCK_BOUND, arms.SUPER, arms.SUPER_UNCLIPPED, arms.ZENFLOW, arms.NO_OFFLOAD)
    most = Effort(iterations=2, rounds=1) if quick else Effort(iterations=5, rounds=3)
    yield from _compare(setting, (*arms.ABLATION, *neighbours), most)
    pair = (arms.STOCK, arms.OURS_AS_IT_IS)
    less = Effort(iterations=2, rounds=1) if quick else Effort(iterations=3, rounds=2)
    others = [replace(setting, accumulation=accumulation) for accumulation in ACCUMULATIONS]
    others += [replace(setting, micro_batch=micro_batch) for micro_batch in MICRO_BATCHES]
    others += [] if quick else larger()
    for other in others:
        yield from _compare(other, pair, less)


def _compare(setting: Setting, compared: Sequence[Arm], effort: Effort) -> Iterator[Row]:
    yield from waived(compared, "iteration", setting)
    # The first warms up for all.
    running = sorted((arm for arm in compared if arm.waived() is None), key=lambda arm: arm is not arms.STOCK)
    ran = take_turns(running, setting, iterations=effort.iterations, rounds=effort.rounds)
    for turns in ran.values():
        yield from _rows(turns, ran[arms.STOCK.name], setting)


def _rows(turns: Sequence[Turn], stock: Sequence[Turn], setting: Setting) -> Iterator[Row]:
    of = of_arm(turns[0].arm.name, setting)
    iteration_s = all_of(turns, "iteration_s")
    yield Row(quantity="forward", unit="s", samples=all_of(turns, "forward_s"), **of)
    yield Row(quantity="backward", unit="s", samples=all_of(turns, "backward_s"), **of)
    yield from exposed_and_hidden(turns, **of)
    yield Row(quantity="iteration", unit="s", samples=iteration_s, **of)
    yield Row(quantity="tokens", unit="tokens/s", samples=[setting.tokens / its for its in iteration_s], **of)
    ratios = faster(turns, stock, "iteration_s")
    yield Row(quantity="iterations faster than stock", unit="times", samples=ratios, **of)
    gpu = machine.gpu()
    peak = None if gpu is None else peak_flops(gpu.name)
    if peak is None:
        yield Row(quantity="MFU", waived="no peak is specified for what trains here", **of)
    else:
        flops = 6 * setting.parameters * setting.tokens
        yield Row(quantity="MFU", unit="share", samples=[flops / its / peak for its in iteration_s], **of)
    if gpu is None:
        yield Row(quantity="GPU memory, peak", waived="no GPU", **of)
        yield Row(quantity="page-locked memory", waived="nothing is page-locked without a GPU", **of)
    else:
        yield Row(quantity="GPU memory, peak", unit="bytes", samples=[turn.gpu_peak_bytes for turn in turns], **of)
        yield Row(quantity="page-locked memory", unit="bytes", samples=[turn.pinned_bytes for turn in turns], **of)
    yield Row(quantity="host memory of the process", unit="bytes", samples=[turn.host_bytes for turn in turns], **of)
    yield same_bits(turns, stock, **of)
    yield from what_it_is(turns, **of)
