"""Compare the C++ kernel with stock's ``step()``, bit for bit."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.cpp_extension import _get_build_directory

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import (
    FP32_STATES,
    STATES,
    AdamStep,
    AdamTensors,
    ElementRange,
    RangeUpdate,
    UpdatedStates,
)
from deep_opt_states.device.kernels.arithmetic import Arithmetic, Tail
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.device.kernels.library import NAME, InstructionSet, Library, library
from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic
from deep_opt_states.runtime.worker import Worker
from tests.kernels.adam_steps import (
    BETAS,
    GRADS,
    PARAMS,
    STEP,
    Stock,
    copied,
    differences,
    fused,
    machine_arithmetic,
    random_tensors,
    steps_of,
    with_infinities,
)

SETS = [one for one in InstructionSet if one <= library().instruction_set]


def train_both(
    steps: list[AdamStep],
    numel: int,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    kernel: FusedAdam,
    *,
    adamw: bool = True,
    seed: int = 0,
    infinities: bool = False,
) -> list[str]:
    """Return the differences after the first step that has any."""
    ours, gradient = random_tensors(numel, grad_dtype, param_dtype, seed)
    theirs = copied(ours)
    stock = Stock(theirs, adamw=adamw)
    for step in steps:
        grad = with_infinities(gradient(), step.step) if infinities else gradient()
        ours.grad.copy_(grad)
        kernel.begin_step([step])
        kernel.update(0, ours)
        stock.update(step, grad)
        if found := differences(ours, theirs):
            return [f"step {step.step}", *found]
    return []


@pytest.mark.promise("P1")
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("grad_dtype", GRADS)
@pytest.mark.parametrize("param_dtype", PARAMS)
def test_every_combination_of_dtypes_gives_the_bits_of_stock(
    grad_dtype: torch.dtype, param_dtype: torch.dtype | None, instruction_set: InstructionSet
) -> None:
    for adamw in (True, False):
        kernel = fused(adamw=adamw, num_threads=2, instruction_set=instruction_set)
        assert train_both(steps_of(8), 10_007, grad_dtype, param_dtype, kernel, adamw=adamw) == []


@pytest.mark.promise("P1")
@settings(max_examples=30)
@given(
    numel=st.integers(1, 700),
    grad_dtype=st.sampled_from(GRADS),
    param_dtype=st.sampled_from(PARAMS),
    adamw=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    bias_correction=st.booleans(),
    eps=st.sampled_from([1e-8, 0.0, 1e-3]),
    num_threads=st.integers(1, 2),
    instruction_set=st.sampled_from(SETS),
    infinities=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_odd_lengths_and_every_option_give_the_bits_of_stock(
    numel: int,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    adamw: bool,
    weight_decay: float,
    bias_correction: bool,
    eps: float,
    num_threads: int,
    instruction_set: InstructionSet,
    infinities: bool,
    seed: int,
) -> None:
    steps = steps_of(3, weight_decay=weight_decay, bias_correction=bias_correction, eps=eps)
    kernel = fused(adamw=adamw, num_threads=num_threads, instruction_set=instruction_set)
    found = train_both(steps, numel, grad_dtype, param_dtype, kernel, adamw=adamw, seed=seed, infinities=infinities)
    assert found == []


@pytest.mark.promise("P1")
@settings(max_examples=60)
@given(
    numel=st.integers(1, 700),
    begin=st.integers(0, 40),
    offset=st.integers(0, 3),
    grad_dtype=st.sampled_from(GRADS),
    param_dtype=st.sampled_from(PARAMS),
    adamw=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    num_threads=st.integers(1, 2),
    instruction_set=st.sampled_from(SETS),
    infinities=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_an_update_to_other_memory_has_the_bits_of_one_in_place_and_leaves_its_input_alone(
    numel: int,
    begin: int,
    offset: int,
    grad_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    adamw: bool,
    weight_decay: float,
    num_threads: int,
    instruction_set: InstructionSet,
    infinities: bool,
    seed: int,
) -> None:
    """Move the new states by ``offset`` from the alignment that non-temporal stores need."""
    kernel = fused(adamw=adamw, num_threads=num_threads, instruction_set=instruction_set)
    ours, gradient = random_tensors(numel, grad_dtype, param_dtype, seed)
    ours.grad.copy_(with_infinities(gradient(), 1) if infinities else gradient())
    before, in_place = copied(ours), copied(ours)
    elements = ElementRange(begin=min(begin, numel), end=numel, sub_group_numel=numel)
    updated = UpdatedStates(*(torch.full((numel + 16,), 7.0)[offset:][: elements.numel] for _ in STATES))
    update = RangeUpdate(sub_group=0, tensors=ours.narrow(elements), element_range=elements)
    kernel.begin_step(steps_of(1, weight_decay=weight_decay))
    kernel.update_ranges([replace(update, updated=updated)])
    kernel.update_ranges([replace(update, tensors=in_place.narrow(elements))])
    for name in STATES:
        assert same_bits(getattr(ours, name), getattr(before, name))
        assert same_bits(getattr(updated, name), getattr(in_place.narrow(elements), name))
    if ours.param is not None and in_place.param is not None:
        assert same_bits(ours.param, in_place.param)


@pytest.mark.parametrize("numel", [64, 400_003])
def test_many_elements_updated_to_aligned_memory_have_the_bits_of_those_in_place(numel: int) -> None:
    kernel = fused(num_threads=2)
    ours, gradient = random_tensors(numel, torch.bfloat16, torch.bfloat16, 5)
    ours.grad.copy_(gradient())
    in_place = copied(ours)
    slab = HostDevice().host_slab(12 * (numel + 16))
    stride_bytes = 4 * (numel + 15) // 64 * 64
    updated = UpdatedStates(*(slab.tensor(index * stride_bytes, numel, torch.float32) for index in range(3)))
    kernel.begin_step(steps_of(1))
    update = RangeUpdate(sub_group=0, tensors=ours, element_range=ElementRange.whole(numel))
    kernel.update_ranges([replace(update, updated=updated)])
    kernel.update_ranges([replace(update, tensors=in_place)])
    assert all(same_bits(getattr(updated, name), getattr(in_place, name)) for name in STATES)
    assert ours.param is not None
    assert in_place.param is not None
    assert same_bits(ours.param, in_place.param)


@pytest.mark.parametrize("pow_when_repeated", [False, True])
def test_assumed_steps_change_no_bit_of_the_steps_that_follow(pow_when_repeated: bool) -> None:
    """Check steps that are assumed twice or three times, each with another factor than the step has then."""
    arithmetic = replace(machine_arithmetic(), pow_when_repeated=pow_when_repeated)
    plain, eager = (FusedAdam(arithmetic, BETAS, adamw=True, num_threads=1) for _ in range(2))
    ours, gradient = random_tensors(1003, torch.bfloat16, torch.bfloat16, 3)
    expected = copied(ours)
    assumed = [[0], [1, 1], [2], [3, 3, 3], [4]]
    steps = steps_of(5)
    for step, indices in zip(steps, assumed, strict=True):
        for index in indices:
            eager.assume_step([replace(steps[index], grad_scale=0.25 * index)])
        for kernel, tensors in ((plain, expected), (eager, ours)):
            kernel.begin_step([step])
            tensors.grad.copy_(expected.grad if kernel is eager else gradient())
            kernel.update(0, tensors)
    assert differences(ours, expected) == []


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    integer = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found.view(integer), expected.view(integer))


@pytest.mark.thorough
def test_many_steps_of_a_large_sub_group_give_the_bits_of_stock() -> None:
    assert train_both(steps_of(60), 1_000_003, torch.bfloat16, torch.bfloat16, fused(num_threads=2)) == []


def test_changed_betas_and_a_loaded_checkpoint_give_the_bits_of_stock() -> None:
    """Check the cases of stock's beta^t: the running product, a new product, and ``pow`` after a jump of the steps."""
    plain = steps_of(12)
    changed = [replace(step, beta1=0.8) if 3 <= step.step < 6 else step for step in plain]
    jumped = [replace(step, step=step.step + 40 if step.step > 8 else step.step) for step in changed]
    repeated = [*jumped, jumped[-1], replace(jumped[-1], step=7)]
    assert train_both(repeated, 1001, torch.bfloat16, torch.bfloat16, fused()) == []


@pytest.mark.promise("P2")
@given(st.data())
def test_ranges_have_the_bits_of_the_whole(data: st.DataObject) -> None:
    """Check ranges that cut vectors and the tail, too: the tail is the sub-group's, not the range's."""
    numel = data.draw(st.integers(1, 300))
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=6)))
    instruction_set = data.draw(st.sampled_from(SETS))
    whole, gradient = random_tensors(numel, torch.bfloat16, torch.bfloat16, seed=numel)
    whole.grad.copy_(gradient())
    by_range = copied(whole)
    kernel = fused(num_threads=data.draw(st.integers(1, 3)), instruction_set=instruction_set)
    kernel.begin_step([STEP])
    kernel.update(0, whole)
    for begin, end in zip([0, *cuts], [*cuts, numel], strict=True):
        element_range = ElementRange(begin=begin, end=end, sub_group_numel=numel)
        kernel.update(0, by_range.narrow(element_range), element_range)
    assert differences(by_range, whole) == []


@given(st.data())
def test_list_of_ranges_has_the_bits_of_each_range_alone(data: st.DataObject) -> None:
    """Check shares of threads that end inside ranges, and empty ranges, too."""
    numels = data.draw(st.lists(st.sampled_from([1, 31, 33, 1000, 40_007, 90_001]), min_size=1, max_size=5))
    instruction_set = data.draw(st.sampled_from(SETS))
    together, alone = [], []
    for index, numel in enumerate(numels):
        tensors, gradient = random_tensors(numel, torch.bfloat16, torch.bfloat16, seed=index)
        tensors.grad.copy_(gradient())
        begin, end = sorted(data.draw(st.integers(0, numel)) for _ in range(2))
        together.append((copied(tensors), ElementRange(begin=begin, end=end, sub_group_numel=numel)))
        alone.append(tensors)
    kernel = fused(num_threads=data.draw(st.integers(1, 3)), instruction_set=instruction_set)
    kernel.begin_step([STEP] * len(numels))
    kernel.update_ranges(
        [
            RangeUpdate(sub_group=index, tensors=tensors.narrow(element_range), element_range=element_range)
            for index, (tensors, element_range) in enumerate(together)
        ]
    )
    kernel.update_ranges([])
    for index, ((found, element_range), expected) in enumerate(zip(together, alone, strict=True)):
        kernel.update(index, expected.narrow(element_range), element_range)
        assert differences(found, expected) == []


@pytest.mark.parametrize(("numel", "woken"), [(4096, 0), (200_000, 3)])
def test_small_ranges_wake_no_threads(numel: int, woken: int) -> None:
    """Check it on a new thread, since OpenMP keeps the threads that it has started for each calling thread."""
    kernel = fused(num_threads=4)
    tensors, _ = random_tensors(numel, torch.bfloat16, torch.bfloat16, seed=0)
    kernel.begin_step([STEP])
    worker = Worker()
    worker.submit(lambda: None).result()
    before = affinities().keys()
    for _ in range(3):
        worker.submit(lambda: kernel.update(0, tensors)).result()
    assert len(affinities().keys() - before) == woken
    worker.close()


def test_nothing_outside_the_range_is_touched() -> None:
    tensors, gradient = random_tensors(1000, torch.float16, torch.float16, seed=1)
    tensors.grad.copy_(gradient())
    before = copied(tensors)
    kernel = fused(num_threads=2)
    kernel.begin_step([STEP])
    element_range = ElementRange(begin=313, end=700, sub_group_numel=1000)
    kernel.update(0, tensors.narrow(element_range), element_range)
    for name, old in vars(before).items():
        now = getattr(tensors, name)
        for untouched in (slice(0, 313), slice(700, None)):
            assert torch.equal(now[untouched].nan_to_num(), old[untouched].nan_to_num()), name
    assert torch.equal(tensors.grad.view(torch.int16), before.grad.view(torch.int16)), "the gradient is only read"
    assert not torch.equal(tensors.master[313:700], before.master[313:700])


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("instruction_set", SETS)
def test_rounding_is_that_of_pytorch_for_every_upper_half(
    param_dtype: torch.dtype, instruction_set: InstructionSet
) -> None:
    """Check all 65,536 upper halves with lower halves at, above and below a tie; infinities and the places of NaN,
    too."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    master = (upper[:, None] + lower[None, :].int()).flatten().view(torch.float32).contiguous()
    expected = master.to(param_dtype)
    zeros = torch.zeros_like(master)
    tensors = AdamTensors(
        master=master.clone(),
        exp_avg=zeros.clone(),
        exp_avg_sq=zeros.clone(),
        grad=zeros.bfloat16(),
        param=torch.empty_like(expected),
    )
    kernel = fused(num_threads=2, instruction_set=instruction_set)
    kernel.begin_step([replace(STEP, weight_decay=0.0)])  # nothing moves
    kernel.update(0, tensors)
    assert differences(tensors, replace(tensors, master=master, param=expected)) == []


def test_gradient_of_every_16_bit_pattern_gives_the_bits_of_stock() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).short()
    for dtype in (torch.bfloat16, torch.float16):
        for instruction_set in SETS:
            grad = bits.view(dtype)
            zeros = torch.zeros(len(grad))
            ours = AdamTensors(
                master=zeros.clone(), exp_avg=zeros.clone(), exp_avg_sq=zeros.clone(), grad=grad.clone(), param=None
            )
            theirs = copied(ours)
            kernel = fused(instruction_set=instruction_set)
            kernel.begin_step([STEP])
            kernel.update(0, ours)
            Stock(theirs, adamw=True).update(STEP, grad)
            assert differences(ours, theirs) == []


def another_thread_runs_during_an_update_of(loaded: Library, attempts: int) -> bool:
    """Return whether another Python thread ran in the middle half of the time of one of up to ``attempts`` updates.

    On a busy machine the operating system may not schedule the other thread during a single update, hence the attempts.
    """
    tensors, _ = random_tensors(10_000_000, torch.bfloat16, torch.bfloat16, seed=0)
    kernel = fused()
    kernel._library = loaded
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(time.perf_counter())
            time.sleep(1e-4)

    def runs_during_one_update() -> bool:
        kernel.begin_step([STEP])
        start_s = time.perf_counter()
        kernel.update(0, tensors)
        end_s = time.perf_counter()
        quarter_s = (end_s - start_s) / 4
        return any(start_s + quarter_s < at_s < end_s - quarter_s for at_s in seen)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return any(runs_during_one_update() for _ in range(attempts))
    finally:
        done.set()
        thread.join()


def test_other_threads_of_python_run_meanwhile() -> None:
    assert another_thread_runs_during_an_update_of(library(), attempts=200)
    path = Path(_get_build_directory(NAME, verbose=False)) / f"{NAME}.so"
    holds_gil = Library(ctypes.PyDLL(str(path)))
    # The interpreter may switch threads between the clock and the call, on a busy machine more than once.
    of_single = [another_thread_runs_during_an_update_of(holds_gil, attempts=1) for _ in range(10)]
    assert not all(of_single), "with the GIL held, as DeepSpeedCPUAdam holds it"


def test_the_arithmetic_found_is_the_only_one_that_fits() -> None:
    """Check the arithmetics that compute differently here: the search distinguishes them."""
    found = find_arithmetic(FP32_STATES)
    assert found is not None
    for other in (Arithmetic(1, Tail.UNFUSED), Arithmetic(found.vector_width, Tail.UNFUSED), Arithmetic(1, found.tail)):
        if other == found:
            continue
        kernel = FusedAdam(other, BETAS, adamw=True, num_threads=1)
        assert train_both(steps_of(3), 10_007, torch.float32, None, kernel) != []


def test_zeros_reach_every_element() -> None:
    tensors, gradient = random_tensors(10_007, torch.bfloat16, torch.bfloat16, seed=0)
    tensors.grad.copy_(gradient())
    fused(num_threads=2).zero(tensors)
    assert [name for name, tensor in vars(tensors).items() if tensor.any()] == []


def affinities() -> dict[int, set[int]]:
    """Return the affinity of each thread of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_each_thread_stays_on_the_core_that_it_is_given() -> None:
    """Check that the calling thread, which is the worker in training, and OpenMP's threads are moved, and no others."""
    first, second, *_ = sorted(os.sched_getaffinity(0), reverse=True)
    kernel = fused(num_threads=2, cores=(first, second))
    # The update is large enough to wake threads.
    tensors, _ = random_tensors(100_000, torch.bfloat16, torch.bfloat16, seed=0)
    kernel.begin_step([STEP])
    worker = Worker()
    callers: list[int] = []
    worker.submit(lambda: callers.append(threading.get_native_id())).result()
    before = affinities()
    worker.submit(lambda: kernel.update(0, tensors)).result()
    moved = {thread: cores for thread, cores in affinities().items() if cores != before.get(thread)}
    worker.close()
    assert moved.pop(callers[0]) == {first}
    assert list(moved.values()) == [{second}]


@pytest.mark.usefixtures("other_defaults")
def test_arithmetic_is_found_with_other_default_dtypes_and_devices() -> None:
    assert find_arithmetic.__wrapped__(FP32_STATES) == machine_arithmetic()


def test_tensors_that_do_not_fit_are_refused_by_the_fused_kernel() -> None:
    tensors, _ = random_tensors(64, torch.bfloat16, torch.bfloat16, seed=0)
    kernel = fused()
    kernel.begin_step([STEP])
    for wrong in (
        replace(tensors, exp_avg=tensors.exp_avg[:-1]),
        replace(tensors, master=tensors.master.double()),
        replace(tensors, grad=tensors.grad.double()),
        replace(tensors, exp_avg_sq=torch.zeros(128)[::2]),
    ):
        with pytest.raises(AssertionError):
            kernel.update(0, wrong)
    with pytest.raises(AssertionError):
        kernel.update(0, tensors, ElementRange(begin=0, end=63, sub_group_numel=64))
