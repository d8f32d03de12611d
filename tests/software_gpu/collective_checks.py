"""Check collectives on streams of the device: the bits of Gloo, and the rules of NCCL for waits and tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.profiler.profile import sample
from deep_opt_states.profiler.ranks import Ranks, collective, collective_groups
from tests.profiler.test_profile import SMALL
from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.plugged import plugged
from tests.software_gpu.process_group import BACKEND, SoftwareProcessGroup
from tests.software_gpu.settings import changed

Collective = Callable[[Callable[..., torch.Tensor], dist.ProcessGroup | None], list[torch.Tensor]]


def _reference() -> dist.ProcessGroup:
    """Return a Gloo group of all ranks, for tensors of the host."""
    return dist.new_group(backend="gloo")


def _all_reduce(make: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    whole, largest = make(1001), make(5)
    dist.all_reduce(whole, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return [whole, largest]


def _broadcast(make: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensor = make(7)
    dist.broadcast(tensor, dist.get_world_size() - 1, group=group)
    return [tensor]


def _gather_into_one(make: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensor = make(6)
    result = tensor.new_empty(6 * dist.get_world_size())
    dist.all_gather_into_tensor(result, tensor, group=group)
    return [result]


def _reduce_and_scatter_one(make: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensor = make(4 * dist.get_world_size())
    result = tensor.new_empty(4)
    dist.reduce_scatter_tensor(result, tensor, group=group)
    return [result]


def _gather(make: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensor = make(2, 3)
    results = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(results, tensor, group=group)
    return results


def _reduce_and_scatter(make: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensors = [make(5) for _ in range(dist.get_world_size())]
    result = torch.empty_like(tensors[0])
    dist.reduce_scatter(result, tensors, group=group)
    return [result]


def _exchange(make: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    tensors = [make(3) for _ in range(dist.get_world_size())]
    results = [torch.empty_like(tensor) for tensor in tensors]
    dist.all_to_all(results, tensors, group=group)
    whole = make(4 * dist.get_world_size())
    exchanged = torch.empty_like(whole)
    dist.all_to_all_single(exchanged, whole, group=group)
    return [*results, exchanged]


def _to_one_rank(make: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    reduced, tensor, received = make(5), make(3), make(3)
    gathered = [torch.empty_like(tensor) for _ in range(size)] if rank == 0 else None
    dist.gather(tensor, gathered, 0, group=group)
    dist.scatter(received, [make(3) for _ in range(size)] if rank == 0 else None, 0, group=group)
    dist.reduce(reduced, 0, group=group)
    return [received, *(gathered or []), *([reduced] if rank == 0 else [])]


def _compare(collective: Collective) -> None:
    """Compare the results on the device with those of Gloo on the host, in the dtypes that are trained in."""
    reference = _reference()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results = []
        for where, group in (("cpu", reference), (DEVICE_TYPE, None)):
            generator = torch.Generator().manual_seed(dist.get_rank())

            def make(*shape: int, where: str = where, generator: torch.Generator = generator) -> torch.Tensor:
                return torch.randn(*shape, generator=generator).to(dtype).to(where)  # noqa: B023

            results.append([tensor.cpu() for tensor in collective(make, group)])
        for expected, seen in zip(*results, strict=True):
            assert torch.equal(expected.view(torch.uint8), seen.view(torch.uint8)), (collective.__name__, dtype)


def all_reduce_and_broadcast_have_the_bits_of_gloo() -> None:
    _compare(_all_reduce)
    _compare(_broadcast)


def gathers_have_the_bits_of_gloo() -> None:
    _compare(_gather)
    _compare(_gather_into_one)


def reduced_and_scattered_tensors_have_the_bits_of_gloo() -> None:
    _compare(_reduce_and_scatter)
    _compare(_reduce_and_scatter_one)


def exchanges_have_the_bits_of_gloo() -> None:
    _compare(_exchange)
    _compare(_to_one_rank)


def objects_are_exchanged() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for host_tensors in (False, True):
        with mock.patch.object(SoftwareProcessGroup, "host_tensors", host_tensors):
            objects = [{"rank": rank}, "text"]
            dist.broadcast_object_list(objects, size - 1)
            assert objects == [{"rank": size - 1}, "text"]
            gathered: list[object] = [None] * size
            dist.all_gather_object(gathered, ("rank", rank))
            assert gathered == [("rank", other) for other in range(size)]


def tensors_of_the_host_are_refused_while_only_the_device_trains() -> None:
    with mock.patch.object(SoftwareProcessGroup, "host_tensors", False):
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(2))
        mixed = [torch.ones(2) for _ in range(dist.get_world_size())]
        with pytest.raises(RuntimeError, match="same device, found cpu"):
            dist.all_gather(mixed, torch.ones(2, device=DEVICE_TYPE))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 2


def tensors_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        dist.all_reduce(torch.ones(4, 4, device=DEVICE_TYPE).t()[1:])


def a_collective_does_not_wait_on_the_host() -> None:
    tensor = torch.ones(100, device=DEVICE_TYPE)
    with changed(lazy=True), device.recorded_host_waits() as waits:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        dist.all_reduce(tensor)
        assert waits == []
        assert tensor.tolist() == [dist.get_world_size() ** 2] * 100


def a_barrier_waits_on_the_host_for_all_ranks() -> None:
    with mock.patch.object(SoftwareProcessGroup, "host_tensors", False):
        with device.recorded_host_waits() as waits:
            dist.barrier()
        assert [wait.reason for wait in waits] == ["stream.synchronize"]


def _read_after_a_collective(*, wait: bool) -> bool:
    """Return whether the default stream reads the result, if it waits for the collective or does not."""
    size = dist.get_world_size()
    with changed(lazy=True, lazy_s=100.0):
        tensor = torch.ones(1000, device=DEVICE_TYPE)
        result = torch.empty(1000 * size, device=DEVICE_TYPE)
        device.synchronize()
        work = dist.all_gather_into_tensor(result, tensor, async_op=True)
        if wait:
            work.wait()
        seen = result * 1
        device.current_stream().synchronize()
        right = bool((seen == 1).all().item())
        work.wait()
        device.synchronize()
        assert result.tolist() == [1] * 1000 * size
    return right


def a_missing_wait_for_the_handle_shows() -> None:
    assert _read_after_a_collective(wait=True)
    assert not _read_after_a_collective(wait=False)


def a_collective_waits_for_the_stream_of_the_caller() -> None:
    def reduced() -> list[float]:
        with changed(lazy=True, lazy_s=100.0):
            tensor = torch.zeros(10, device=DEVICE_TYPE)
            device.synchronize()
            tensor.add_(1)
            work = dist.all_reduce(tensor, async_op=True)
            work._done.synchronize()
            seen: list[float] = tensor.tolist()
        return seen

    size = dist.get_world_size()
    assert reduced() == [size] * 10
    # With this fault, the sum is of the values before, and the addition comes behind. One rank has no other to add.
    if size > 1:
        with mock.patch.object(device.Stream, "wait_stream"):
            assert reduced() != [size] * 10


def groups_may_be_used_in_another_order_by_every_rank() -> None:
    """Issue the collectives of several groups in an order of this rank: each group has a stream of its own."""
    groups = [dist.new_group(backend=dist.get_backend()) for _ in range(4)]
    rank = dist.get_rank()
    tensors = [torch.full((100,), float(place), device=DEVICE_TYPE) for place in range(4)]
    for lazy in (False, True):
        with changed(lazy=lazy):
            order = [(place + rank) % 4 for place in range(4)]
            works = [dist.all_reduce(tensors[place], group=groups[place], async_op=True) for place in order]
            for work in works:
                work.wait()
            for place, tensor in enumerate(tensors):
                assert (tensor / dist.get_world_size() ** (1 + lazy)).tolist() == [place] * 100


def a_dropped_handle_keeps_its_tensors_until_the_collective_is_over() -> None:
    size = dist.get_world_size()
    with changed(lazy=True, lazy_s=100.0):
        result = torch.empty(1000 * size, device=DEVICE_TYPE)
        tensor = torch.ones(1000, device=DEVICE_TYPE)
        dist.all_gather_into_tensor(result, tensor, async_op=True)
        del tensor
        reused = torch.zeros(1000, device=DEVICE_TYPE)
        device.synchronize()
        assert result.tolist() == [1] * 1000 * size
        assert reused.tolist() == [0] * 1000


def a_failed_collective_is_an_error_of_the_next_wait() -> None:
    group = dist.group.WORLD
    with mock.patch.object(dist.ProcessGroupGloo, "allreduce", side_effect=RuntimeError("connection closed")):
        work = dist.all_reduce(torch.ones(3, device=DEVICE_TYPE), group=group, async_op=True)
        work.wait()
        with pytest.raises(RuntimeError, match=r"(?s)earlier task.*connection closed"):
            device.synchronize()
    assert device.take_error() != ""


def a_rank_that_comes_late_is_waited_for() -> None:
    tensor = torch.full((10,), float(dist.get_rank()), device=DEVICE_TYPE)
    time.sleep(0.05 * dist.get_rank())
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(dist.get_world_size()))] * 10


def collectives_are_measured_on_all_ranks() -> None:
    ranks = Ranks()
    with plugged():
        group = collective_groups(ranks, BACKEND, {}).in_node
        if ranks.size == 1:
            assert group == "one rank"
            return
        assert not isinstance(group, str), group
        for reduces in (False, True):
            prepare = partial(collective, CudaDevice(0), group, 2**16, "rate", reduces=reduces)
            samples = sample(prepare, SMALL, ranks)
            assert all(rates["rate"] > 0 for rates in samples)
            assert ranks.gather(samples) == [samples] * ranks.size
