"""What does an iteration take, by phase, and what does each part of it gain?

Forward, backward, what is seen of the update, the iteration, tokens a second, MFU and memory: of stock and its
neighbours; of ours with one thing more at a time; and with more micro-batches a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks import arms
from benchmarks.arms import Arm
from benchmarks.rows import Row
from benchmarks.sizes import larger, usual
from benchmarks.turns import Setting, Turn, take_turn, take_turns
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
    about = {**asdict(setting), "parameters": setting.parameters}
    running = []
    for arm in compared:
        if (reason := arm.waived()) is None:
            running.append(arm)
        else:
            yield Row(arm=arm.name, quantity="iteration", waived=reason, setting=about)
    # The ratios are to stock's turn of the same round.
    running.sort(key=lambda arm: arm is not arms.STOCK)
    ran: dict[str, list[Turn]] = {arm.name: [] for arm in running}
    turn_of = partial(take_turn, setting=setting, iterations=effort.iterations)
    for turn in take_turns(running, effort.rounds, turn_of):
        ran[turn.arm.name].append(turn)
    for name, turns in ran.items():
        for row in _rows(turns, ran[arms.STOCK.name], setting):
            yield replace(row, arm=name, setting=about)


def _rows(turns: Sequence[Turn], stock: Sequence[Turn], setting: Setting) -> Iterator[Row]:
    of = partial(Row, arm="")
    iteration_s = [its for turn in turns for its in turn.iteration_s]
    # Stock's is all seen.
    exposed_s = [its for turn in turns for its in turn.exposed_s or turn.step_s]
    yield of(quantity="forward", unit="s", samples=[its for turn in turns for its in turn.forward_s])
    yield of(quantity="backward", unit="s", samples=[its for turn in turns for its in turn.backward_s])
    yield of(quantity="update exposed", unit="s", samples=exposed_s)
    if hidden_s := [its for turn in turns for its in turn.hidden_s]:
        yield of(quantity="update hidden", unit="s", samples=hidden_s)
    yield of(quantity="iteration", unit="s", samples=iteration_s)
    yield of(quantity="tokens", unit="tokens/s", samples=[setting.tokens / its for its in iteration_s])
    ratios = [
        theirs / its
        for other, turn in zip(stock, turns, strict=True)
        for theirs, its in zip(other.iteration_s, turn.iteration_s, strict=True)
    ]
    yield of(quantity="iterations faster than stock", unit="times", samples=ratios)
    gpu = machine.gpu()
    peak = None if gpu is None else peak_flops(gpu.name)
    if peak is None:
        yield of(quantity="MFU", waived="no peak is specified for what trains here")
    else:
        flops = 6 * setting.parameters * setting.tokens
        yield of(quantity="MFU", unit="share", samples=[flops / its / peak for its in iteration_s])
    if gpu is None:
        yield of(quantity="GPU memory, peak", waived="no GPU")
        yield of(quantity="page-locked memory", waived="nothing is page-locked without a GPU")
    else:
        yield of(quantity="GPU memory, peak", unit="bytes", samples=[turn.gpu_peak_bytes for turn in turns])
        yield of(quantity="page-locked memory", unit="bytes", samples=[turn.pinned_bytes for turn in turns])
    yield of(quantity="host memory of the process", unit="bytes", samples=[turn.host_bytes for turn in turns])
    same = all(turn.same_bits_as(stock[0]) for turn in turns)
    yield of(quantity="stock's bits", said=same, claimed=turns[0].arm.exact)
    yield of(quantity="is", said=turns[0].settings)
    if turns[0].plan:
        yield of(quantity="plan", said=turns[0].plan)
