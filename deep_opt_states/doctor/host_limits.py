"""Check the host's cores and memory, the limits of this process, and the environment variables that affect them."""

from __future__ import annotations

from deep_opt_states.doctor.finding import Finding, Status
from deep_opt_states.host.machine import CoreCounts, HostMemory
from perf_model.units import size

STREAMS_IN_USE = 9
"""The number of CUDA streams in use: four lanes of the update, the stream that copies gradients to the host, those of
DeepSpeed for computing, gathering and reducing, and NCCL's."""

DEFAULT_QUEUES = 8
"""CUDA's default number of hardware queues."""


def check_cores(found: CoreCounts) -> Finding:
    """Check that this process may use more than one core."""
    quota = "no cgroup limit" if found.quota is None else f"cgroup limit {found.quota:g}"
    text = (
        f"{found.physical or 'unknown'} physical, {found.logical or 'unknown'} logical; "
        f"this process may use {found.usable} (affinity {found.allowed}, {quota})"
    )
    if found.usable == 1:
        remedy = (
            "Give it more (taskset, docker --cpus, Slurm --cpus-per-task): the speed of CPU Adam grows with the cores."
        )
        return Finding("cores", Status.WARN, text, remedy)
    return Finding("cores", Status.OK, text)


def check_omp(value: str | None, usable: int) -> Finding:
    """Check ``OMP_NUM_THREADS``, which sets the threads of PyTorch's CPU operations and of stock's Adam.

    Our update does not use it, but its rank's share of the cores.
    """
    topic = "OMP_NUM_THREADS"
    remedy = f"Unset it, or set it to the cores that a rank has: {usable} here, divided by the ranks on this machine."
    if value is None:
        return Finding(topic, Status.OK, "unset, or 1 under torchrun, which is enough: updates have their own threads")
    threads = value.split(",")[0].strip()  # the first item of a list is for the outermost level, where operations run
    if not threads.isdigit() or int(threads) == 0:
        return Finding(topic, Status.WARN, f"{value!r}; must be a positive integer", remedy)
    if int(threads) > usable:
        return Finding(topic, Status.WARN, f"{value}; must be at most the {usable} cores usable here", remedy)
    return Finding(topic, Status.OK, f"{value} of {usable} usable cores; updates have threads of their own")


def check_connections(value: str | None, has_cuda: bool) -> Finding:
    """Check ``CUDA_DEVICE_MAX_CONNECTIONS``, which Megatron's scripts set to 1."""
    topic = "CUDA_DEVICE_MAX_CONNECTIONS"
    if not has_cuda:
        return Finding(topic, Status.OK, f"{value or 'unset'}; only a GPU has hardware queues")
    if value is None:
        return Finding(topic, Status.OK, f"unset: {DEFAULT_QUEUES} hardware queues for {STREAMS_IN_USE} streams")
    if value.isdigit() and int(value) >= DEFAULT_QUEUES:
        return Finding(topic, Status.OK, f"{value} hardware queues")
    found = (
        f"{value!r}; must be at least {DEFAULT_QUEUES}, CUDA's default, for the {STREAMS_IN_USE} CUDA streams in use: "
        "streams that share a hardware queue wait for each other, so that transfers, the update and the model's "
        "kernels do not overlap"
    )
    remedy = (
        f"Unset it, or set it to a number from {DEFAULT_QUEUES} to 32; from {STREAMS_IN_USE} on, each stream has a "
        "queue of its own. Megatron's value of 1 is for its own overlap of tensor parallelism."
    )
    return Finding(topic, Status.WARN, found, remedy)


def check_memory(found: HostMemory) -> Finding:
    """Return the host memory and the limit of the container; it is always OK."""
    limited = found.limit_bytes is not None and found.limit_bytes < found.total_bytes
    limit = f"container limit {size(found.limit_bytes)}" if found.limit_bytes and limited else "no container limit"
    text = f"{size(found.total_bytes)}, {size(found.available_bytes)} available, {limit}"
    return Finding("host memory", Status.OK, text)


def check_memlock(limit_bytes: int | None, has_cuda: bool) -> Finding:
    """Check the memlock limit; ``limit_bytes`` is None if unlimited."""
    topic = "memlock limit"
    if limit_bytes is None:
        return Finding(topic, Status.OK, "unlimited")
    if has_cuda:
        found = f"{size(limit_bytes)}; training tests at start whether the driver applies it to pinned optimizer states"
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1, if pinning memory or starting NCCL fails."
        return Finding(topic, Status.WARN, found, remedy)
    return Finding(topic, Status.OK, f"{size(limit_bytes)}; nothing is pinned without a GPU")
