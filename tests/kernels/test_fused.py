"""Compare the C++ kernel with stock's ``step()``, bit for bit, for fp32 and for bf16 states; and check its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deep_opt_states.device.kernels.adam import (
    BF16_MASTERS,
    BF16_STATES,
    DEFAULT_BETAS,
    FP32_STATES,
    STATES,
    AdamStep,
    AdamTensors,
    ElementRange,
    RangeUpdate,
    StateDtypes,
    UpdatedStates,
)
from deep_opt_states.device.kernels.arithmetic import CANDIDATES, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.library import InstructionSet, library
from deep_opt_states.device.kernels.probe_arithmetic import _train
from deep_opt_states.runtime.worker import Worker
from tests.forked_child import affinities
from tests.kernels.adam_steps import (
    BETAS,
    GRADS,
    PARAMS,
    STEP,
    Stock,
    changing,
    copied,
    differences,
    fused,
    in_dtypes,
    machine_arithmetic,
    random_tensors,
    rounded_upper_halves,
    steps_of,
    with_infinities,
)

SETS = [one for one in InstructionSet if one <= library().instruction_set]
DTYPES = {"fp32 states": FP32_STATES, "fp32 moments": BF16_MASTERS, "bf16 states": BF16_STATES}
EACH_DTYPES = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)


@pytest.fixture(autouse=True)
def one_thread_of_stock() -> Iterator[None]:
    """Let stock's op use one thread: OpenMP threads would wait for each other while other tests run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_both(
    steps: list[AdamStep],
    numel: int,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    kernel: FusedAdam,
    *,
    adamw: bool = True,
    dtypes: StateDtypes = FP32_STATES,
) -> list[str]:
    start, gradient = random_tensors(numel, grad_dtype, param_dtype, seed=0)
    ours = in_dtypes(start, dtypes)
    theirs = copied(ours)
    stock = Stock(theirs, adamw=adamw)
    for step in steps:
        grad = gradient()
        ours.grad.copy_(grad)
        kernel.begin_step([step])
        kernel.update(0, ours)
        stock.update(step, grad)
        if found := differences(ours, theirs):
            return [f"step {step.step}", *found]
    return []


@pytest.mark.P1
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("grad_dtype", GRADS)
@pytest.mark.parametrize("param_dtype", PARAMS)
def test_every_combination_of_dtypes_is_bit_identical_to_stock(
    grad_dtype: torch.dtype, param_dtype: torch.dtype | None, instruction_set: InstructionSet
) -> None:
    for adamw in (True, False):
        kernel = fused(adamw=adamw, num_threads=2, instruction_set=instruction_set)
        assert train_both(steps_of(4), 10_007, grad_dtype, param_dtype, kernel, adamw=adamw) == []


@pytest.mark.P1
@EACH_DTYPES
def test_many_steps_with_changed_betas_and_a_loaded_checkpoint_are_bit_identical_to_stock(dtypes: StateDtypes) -> None:
    """Check the cases of stock's beta^t: the running product, a new product, and ``pow`` after a jump of the steps."""
    jumped = changing(clipped_in_turn(1000))
    repeated = [*jumped, jumped[-1], replace(jumped[-1], step=7)]
    assert train_both(repeated, 1001, torch.bfloat16, torch.bfloat16, fused(dtypes=dtypes), dtypes=dtypes) == []


def clipped_in_turn(count: int) -> Iterator[AdamStep]:
    """Yield steps of which every other one does not scale the gradient: the kernel then leaves out a rounding."""
    for number, step in enumerate(steps_of(count)):
        yield step if number % 2 else replace(step, grad_scale=1.0)


def memory_like(tensors: AdamTensors, offset: int) -> UpdatedStates:
    numel = len(tensors.grad)
    whole = (torch.zeros(numel + 16, dtype=getattr(tensors, name).dtype) for name in STATES)
    return UpdatedStates(*(tensor[offset:][:numel] for tensor in whole))


@st.composite
def cuts(draw: st.DrawFn, numel: int) -> list[ElementRange]:
    """Draw ranges that cut vectors and the tail; some are empty. The tail is the sub-group's, not the range's."""
    borders = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=5))), numel]
    return [ElementRange(begin=begin, end=end, sub_group_numel=numel) for begin, end in pairwise(borders)]


@pytest.mark.P1
@pytest.mark.P2
@given(st.data(), st.lists(st.integers(1, 700), min_size=1, max_size=3), st.integers(0, 7))
def test_every_option_ranges_and_updates_to_other_memory_are_bit_identical_to_stock(
    data: st.DataObject, numels: list[int], large: int
) -> None:
    """Update all ranges of all sub-groups in one call, to memory at any distance from the alignment of stores."""
    if large == 0:
        numels = [40_007, *numels]  # several threads share it
    dtypes = data.draw(st.sampled_from(list(DTYPES.values())))
    is_fp32 = dtypes is FP32_STATES
    grad_dtype = data.draw(st.sampled_from(GRADS if is_fp32 else GRADS[:2]))
    param_dtype = data.draw(st.sampled_from(PARAMS if is_fp32 else (None, torch.bfloat16)))
    adamw, goes_elsewhere, infinities = (data.draw(st.booleans()) for _ in range(3))
    instruction_set, offset = data.draw(st.sampled_from(SETS)), data.draw(st.integers(0, 3))
    kernel = fused(
        adamw=adamw, num_threads=data.draw(st.integers(1, 2)), instruction_set=instruction_set, dtypes=dtypes
    )
    steps = steps_of(
        3,
        weight_decay=data.draw(st.sampled_from([0.0, 0.1])),
        bias_correction=data.draw(st.booleans()),
        eps=data.draw(st.sampled_from([1e-8, 0.0, 1e-3])),
    )
    seed = data.draw(st.integers(0, 2**32))
    note(f"{dtypes}, {grad_dtype}, {param_dtype}, adamw {adamw}, {instruction_set}, offset {offset}, seed {seed}")
    start, gradients = zip(*(random_tensors(numel, grad_dtype, param_dtype, seed) for numel in numels), strict=True)
    ours = [in_dtypes(tensors, dtypes) for tensors in start]
    theirs = [copied(tensors) for tensors in ours]
    stocks = [Stock(tensors, adamw=adamw) for tensors in theirs]
    ranges = [data.draw(cuts(numel)) for numel in numels]
    for step in steps:
        updates = []
        elsewhere = [memory_like(tensors, offset) for tensors in ours]
        before = [copied(tensors) for tensors in ours]
        kernel.begin_step([step] * len(numels))
        for index, (tensors, gradient) in enumerate(zip(ours, gradients, strict=True)):
            grad = with_infinities(gradient(), step.step) if infinities else gradient()
            tensors.grad.copy_(grad)
            stocks[index].update(step, grad)
            for elements in ranges[index]:
                updated = UpdatedStates(*map(elements.view, elsewhere[index])) if goes_elsewhere else None
                views = tensors.narrow(elements)
                updates.append(RangeUpdate(sub_group=index, tensors=views, element_range=elements, updated=updated))
        grads = [tensors.grad.clone() for tensors in ours]
        kernel.update_ranges(updates)
        assert all(torch.equal(t.grad.view(torch.int16), g.view(torch.int16)) for t, g in zip(ours, grads, strict=True))
        for tensors, old, new in zip(ours, before, elsewhere, strict=True):
            if goes_elsewhere:
                assert differences(replace(tensors, param=None), replace(old, param=None)) == [], "the input changed"
                for name, value in new._asdict().items():
                    getattr(tensors, name).copy_(value)
        assert [differences(*pair) for pair in zip(ours, theirs, strict=True)] == [[]] * len(numels)
    kernel.update_ranges([])
    kernel.zero(ours[0])
    assert not any(tensor.any() for tensor in vars(ours[0]).values() if tensor is not None)


@pytest.mark.parametrize("pow_when_repeated", [False, True])
def test_assumed_steps_change_no_bit_of_the_steps_that_follow(pow_when_repeated: bool) -> None:
    """Check steps that are assumed twice or three times, each with another factor than the step has then."""
    arithmetic = replace(machine_arithmetic(), pow_when_repeated=pow_when_repeated)
    plain, eager = (FusedAdam(arithmetic, BETAS, adamw=True, num_threads=1) for _ in range(2))
    ours, gradient = random_tensors(1003, torch.bfloat16, torch.bfloat16, 3)
    expected = copied(ours)
    steps = steps_of(5)
    for step, indices in zip(steps, [[0], [1, 1], [2], [3, 3, 3], [4]], strict=True):
        for index in indices:
            eager.assume_step([replace(steps[index], grad_scale=0.25 * index)])
        for kernel, tensors in ((plain, expected), (eager, ours)):
            kernel.begin_step([step])
            tensors.grad.copy_(expected.grad if kernel is eager else gradient())
            kernel.update(0, tensors)
    assert differences(ours, expected) == []


def every_value(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).short()
    return bits[torch.randperm(2**16, generator=generator)].view(dtype)


@pytest.mark.P1
@EACH_DTYPES
@pytest.mark.parametrize("instruction_set", SETS)
def test_all_16_bit_values_in_random_combinations_are_bit_identical_to_stock(
    instruction_set: InstructionSet, dtypes: StateDtypes
) -> None:
    generator = torch.Generator().manual_seed(1)
    for (number, step), adamw in product(enumerate(clipped_in_turn(4)), (True, False)):
        kernel = fused(adamw=adamw, instruction_set=instruction_set, dtypes=dtypes)
        grad_dtype = torch.float16 if dtypes is FP32_STATES and number < 2 else torch.bfloat16
        wild, _ = random_tensors(2**16, grad_dtype, torch.bfloat16, number)
        values: dict[str, Any] = {"grad": every_value(grad_dtype, generator)}
        for name in STATES:
            dtype = dtypes.by_name[name]
            values[name] = getattr(wild, name) if dtype == torch.float32 else every_value(dtype, generator)
        ours = replace(wild, **values)
        theirs = copied(ours)
        kernel.begin_step([step])
        kernel.update(0, ours)
        Stock(theirs, adamw=adamw).update(step, ours.grad)
        assert differences(ours, theirs) == [], step


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("instruction_set", SETS)
def test_rounding_equals_pytorch_for_every_upper_half(
    param_dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    tensors, expected = rounded_upper_halves(param_dtype)
    kernel = fused(instruction_set=instruction_set)
    kernel.begin_step([replace(STEP, weight_decay=0.0)])
    kernel.update(0, tensors)
    assert differences(tensors, replace(expected, exp_avg=tensors.exp_avg, exp_avg_sq=tensors.exp_avg_sq)) == []


NANS = torch.tensor([0x7FC00000, 0x7FC10000, -0x400000, -0x10000], dtype=torch.int32).view(torch.float32).repeat(251)
"""NaNs that bf16 can also represent: with both signs, and with and without a payload."""


@pytest.mark.parametrize("source", [*STATES, "grad", "invalid operation"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_have_the_nan_of_stock_and_bf16_parameters_have_0x7fc0(
    source: str, grad_dtype: torch.dtype, param_dtype: torch.dtype
) -> None:
    """Check the sign and the payload, which IEEE 754 leaves open; stock's are the processor's."""
    ours, gradient = random_tensors(1003, grad_dtype, param_dtype, seed=3)
    ours.grad.copy_(gradient())
    if source == "invalid operation":
        ours.exp_avg_sq.fill_(float("-inf"))
    elif source == "grad" and grad_dtype == torch.bfloat16:
        # The upper halves are copied, since PyTorch's conversion would map all of these NaNs to a single one.
        ours.grad.copy_(NANS.view(torch.bfloat16)[1::2][:1003])
    else:
        getattr(ours, source).copy_(NANS[:1003])
    theirs = copied(ours)
    kernel = fused()
    kernel.begin_step([STEP])
    kernel.update(0, ours)
    Stock(theirs, adamw=True).update(STEP, ours.grad)
    assert ours.param is not None
    assert theirs.param is not None
    assert theirs.master.isnan().all()
    assert theirs.param.isnan().all()
    integer = {4: torch.int32, 2: torch.int16}
    written = {name: getattr(ours, name) for name in (*STATES, "param")}
    bits = {name: tensor.view(integer[tensor.element_size()]) for name, tensor in written.items()}
    if param_dtype == torch.bfloat16:
        # PyTorch's vectors write 0xffff here, and its loop for single elements 0x7fc0.
        assert set(bits.pop("param").tolist()) == {0x7FC0}
    for name, found in bits.items():
        assert torch.equal(found, getattr(theirs, name).view(found.dtype)), name


@EACH_DTYPES
def test_the_search_distinguishes_all_arithmetics_that_compute_differently(dtypes: StateDtypes) -> None:
    """Check the candidates against one another: rounding to bf16 hides nearly all of their differences."""
    trained = {
        candidate: _train(FusedAdam(candidate, DEFAULT_BETAS, adamw=True, num_threads=1), dtypes)
        for candidate in CANDIDATES
        if not candidate.pow_when_repeated
    }
    for (one, bits_of_one), (other, bits_of_other) in combinations(trained.items(), 2):
        is_same = one.tail == other.tail == Tail.GRADIENT_FUSED
        assert torch.equal(bits_of_one, bits_of_other) == is_same, (one, other)


@EACH_DTYPES
def test_tensors_that_do_not_fit_are_refused_by_the_fused_kernel(dtypes: StateDtypes) -> None:
    start, _ = random_tensors(64, torch.bfloat16, torch.bfloat16, seed=0)
    tensors = in_dtypes(start, dtypes)
    kernel = fused(dtypes=dtypes)
    kernel.begin_step([STEP])
    wrong = [
        replace(tensors, exp_avg=tensors.exp_avg[:-1]),
        replace(tensors, exp_avg=tensors.exp_avg.half()),
        replace(tensors, master=tensors.master.double()),
        replace(tensors, grad=tensors.grad.double()),
        replace(tensors, exp_avg_sq=torch.zeros(128, dtype=tensors.exp_avg_sq.dtype)[::2]),
        replace(tensors, exp_avg=start.exp_avg.bfloat16(), exp_avg_sq=start.exp_avg_sq.bfloat16(), master=start.master),
    ]
    if dtypes is not FP32_STATES:
        wrong += [replace(tensors, grad=tensors.grad.half()), replace(tensors, param=torch.zeros(64))]
    for case in wrong:
        with pytest.raises(AssertionError):
            kernel.update(0, case)
    with pytest.raises(AssertionError):
        kernel.update(0, tensors, ElementRange(begin=0, end=63, sub_group_numel=64))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(("numel", "woken"), [(4096, 0), (100_000, 1)])
def test_each_thread_stays_on_the_core_that_it_is_given_and_small_ranges_wake_none(numel: int, woken: int) -> None:
    """Check that the calling thread, which is the worker in training, and OpenMP's threads are moved, and no others."""
    first, second, *_ = sorted(os.sched_getaffinity(0), reverse=True)
    kernel = fused(num_threads=2, cores=(first, second))
    tensors, _ = random_tensors(numel, torch.bfloat16, torch.bfloat16, seed=0)
    kernel.begin_step([STEP])
    worker = Worker()
    callers: list[int] = []
    worker.submit(lambda: callers.append(threading.get_native_id())).result()
    before = affinities()
    for _ in range(3):
        worker.submit(lambda: kernel.update(0, tensors)).result()
    moved = {thread: cores for thread, cores in affinities().items() if cores != before.get(thread)}
    worker.close()
    assert moved.pop(callers[0]) == {first}
    assert list(moved.values()) == [{second}] * woken
