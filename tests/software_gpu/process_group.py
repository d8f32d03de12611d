"""Run collectives on streams of the device, with the rules of PyTorch's NCCL backend, and Gloo for the data.

``wait()`` on the handle makes the stream that is current then wait for the collective; the host does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE

BACKEND = "software_nccl"
Tensors = Any
"""A tensor, or nested lists of tensors, as the methods of a process group take them."""

COLLECTIVES = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), 1),
    **dict.fromkeys(("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"), 2),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), 2),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter"), 2),
}
"""The methods of the process group, with the number of their arguments that are tensors."""

CALLED_IN_GLOO = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


class SoftwareWork(dist.Work):
    def __init__(self, tensors: list[torch.Tensor], done: torch.Event) -> None:
        super().__init__()
        self._tensors = tensors
        self._done = done

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        device.current_stream().wait_event(self._done)
        # From here on, tensors that are freed are reused after the collective, in the order of the current stream.
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return bool(self._done.query())

    def is_success(self) -> bool:
        return True


class HostWork(dist.Work):
    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True


class SoftwareProcessGroup(dist.ProcessGroup):
    """A process group whose tensors are on the device.

    Tensors of the host are refused, as NCCL refuses them, unless ``host_tensors`` is set for training on the CPU in the
    same process. They have a Gloo group of their own, since other ranks may order host and stream
    differently.
    """

    host_tensors = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._on_host = self._gloo("host", store, rank, size, timeout)
        self._on_stream = self._gloo("stream", store, rank, size, timeout)
        self._stream: device.Stream | None = None
        self._in_flight: list[SoftwareWork] = []

    @staticmethod
    def _gloo(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu" if self.host_tensors else DEVICE_TYPE)]

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        """Wait for all ranks on the stream, by a collective of one number, and let the host wait for that."""
        if self.host_tensors:
            self._on_host.barrier().wait()
            return HostWork()
        self.allreduce([torch.zeros(1, device=DEVICE_TYPE)], dist.AllreduceOptions()).wait()
        device.current_stream().synchronize()
        return HostWork()

    # ``DeviceMesh`` finds groups by their names. PyTorch keeps a name in the backends of a group, and a process group
    # that is implemented in Python has none.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _run(self, method: str, tensors: Sequence[Tensors], call: Callable[..., dist.Work]) -> dist.Work:
        flat = tree_leaves(tensors)
        if all(tensor.is_cpu for tensor in flat):
            if not self.host_tensors:
                raise RuntimeError(f"No backend type associated with device type cpu ({method})")
            call(_method_of(self._on_host, method), tensors).wait()
            return HostWork()
        for tensor in flat:
            if tensor.device.type != DEVICE_TYPE:
                raise RuntimeError(f"{method}: all tensors must be on the same device, found {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"{method}: tensors must be contiguous")
        stream = self._stream = self._stream or device.Stream()
        stream.wait_stream(device.current_stream())
        # The stream opens the tensors without references to their memory.
        views = tree_map(lambda each: partial(device.host_view, each.data_ptr(), each.shape, each.dtype), tensors)
        done = device.Event()
        with device.stream(stream):
            device.launch(
                lambda: call(_method_of(self._on_stream, method), tree_map(lambda view: view(), views)).wait(),
                method,
                reads=flat,
                # The first argument receives the result.
                writes=tree_leaves(tensors[0]),
            )
            done.record()
        # The tensors of a handle that was dropped without a wait are kept until the collective is over.
        self._in_flight = [work for work in self._in_flight if work._tensors and not work.is_completed()]
        work = SoftwareWork(flat, done)
        self._in_flight.append(work)
        return work


def _method_of(gloo: dist.ProcessGroupGloo, method: str) -> Any:
    return getattr(gloo, CALLED_IN_GLOO.get(method, method))


def _add(method: str, num_tensors: int) -> None:
    def run(self: SoftwareProcessGroup, *arguments: Any, **options: Any) -> dist.Work:
        tensors, others = arguments[:num_tensors], arguments[num_tensors:]
        return self._run(method, tensors, lambda run, opened: run(*opened, *others, **options))

    setattr(SoftwareProcessGroup, method, run)


for _method, _num_tensors in COLLECTIVES.items():
    _add(_method, _num_tensors)


def register_backend() -> None:
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu", DEVICE_TYPE])


_create: Callable[..., SoftwareProcessGroup] = SoftwareProcessGroup
