"""What does an iteration take, by phase?

Forward, backward, what is seen of the update, the iteration, tokens a second, MFU and memory: of stock, its neighbours
and ours; and of stock and ours with larger micro-batches, more of them a step, larger models, and DeepSpeed's default
size of sub-groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import arms
from benchmarks.harness.arms import Arm
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.setting import Setting
from benchmarks.harness.sizes import Effort, effort, fits, larger, least_effort, usual, with_default_sub_groups
from benchmarks.harness.turn_rows import all_of, of_arm, phases, rows_of, running, waived
from benchmarks.harness.turns import Turn, take_turns
from deep_opt_states.host import machine
from deep_opt_states.profiler.peaks import peak_flops

ACCUMULATIONS = (4, 16)
MICRO_BATCH = 8

PICTURE = Bars(("forward", "backward", "update exposed"), "iterations faster than stock")


def measure(*, quick: bool) -> Iterator[Row]:
    setting = usual(quick=quick)
    times, fewer = effort(quick=quick), least_effort(quick=quick)
    pair = (arms.STOCK, arms.OURS_AS_IT_IS)
    # What was aimed for first: where time is bounded, the rest may be missing. The whole field comes last, these two
    # with it once more, side by side with the others.
    yield from _compare(setting, pair, times)
    yield from _compare(replace(setting, micro_batch=MICRO_BATCH), pair, times)
    for accumulation in ACCUMULATIONS:
        yield from _compare(replace(setting, accumulation=accumulation), pair, fewer)
    for other in [] if quick else larger():
        yield from _compare_larger(other, pair, fewer)
    yield from _compare(with_default_sub_groups(setting), pair, times)
    yield from _compare(setting, (*arms.competitors(setting), *pair[1:], arms.NO_OFFLOAD), times)


def _compare_larger(setting: Setting, pair: Sequence[Arm], times: Effort) -> Iterator[Row]:
    if fits(setting):
        yield from _compare(setting, pair, times)
        return
    for arm in pair:
        yield Row(quantity="iteration", waived="stock does not fit host memory", **of_arm(arm.name, setting))


def _compare(setting: Setting, compared: Sequence[Arm], times: Effort) -> Iterator[Row]:
    yield from waived(compared, "iteration", setting)
    yield from rows_of(take_turns(running(compared, setting), setting, times), _rows)


def _rows(turns: Sequence[Turn], stock: Sequence[Turn], **of: Any) -> Iterator[Row]:
    setting = turns[0].setting
    yield from phases(turns, stock, **of)
    iteration_s = all_of(turns, "iteration_s")
    yield Row(quantity="tokens", unit="tokens/s", samples=[setting.tokens / its for its in iteration_s], **of)
    gpu = machine.gpu()
    peak = None if gpu is None else peak_flops(gpu.name)
    if peak is None:
        yield Row(quantity="MFU", waived="no peak is specified for what trains here", **of)
    else:
        yield Row(quantity="MFU", unit="share", samples=[setting.flops / its / peak for its in iteration_s], **of)
        yield Row(quantity="of a peak of", unit="FLOP/s", samples=[peak], **of)
    if gpu is None:
        yield Row(quantity="GPU memory, peak", waived="no GPU", **of)
        yield Row(quantity="page-locked memory", waived="no GPU", **of)
    else:
        yield Row(quantity="GPU memory, peak", unit="bytes", samples=[turn.gpu_peak_bytes for turn in turns], **of)
        yield Row(quantity="page-locked memory", unit="bytes", samples=[turn.pinned_bytes for turn in turns], **of)
    yield Row(quantity="host memory of the process", unit="bytes", samples=[turn.host_bytes for turn in turns], **of)
