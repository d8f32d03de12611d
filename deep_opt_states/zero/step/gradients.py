"""Keep each gradient where its sub-group is updated, and copy it between host and accelerator at most once.

The gradient of a parameter is the sum of all gradients that were reduced for it since the last step, and zero if there
were none. Stock DeepSpeed deviates from that in two cases, and only in these two do we not reproduce its bits:

1. A parameter gets no gradient in some backward. At the step, stock then reuses the content of its fp32 buffer, which
   is the scaled gradient of the previous step. A sum over micro-batches continues that of the previous window.
2. A gradient is reduced more than once in one backward, for example because a layer is used several times under
   reentrant checkpointing. In stock, each reduction overwrites the previous one, or an assertion fails because the
   parameter is in the bucket twice (see ``buckets.py``). Here the gradients are added up, as in PyTorch without ZeRO.

Stock copies a gradient to the host in the accumulation dtype, back to the accelerator, and to the host in fp32. Here a
gradient stays in the accumulation dtype. Only a gradient that the user sets is in fp32, until backward writes to it
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.runtime.staging import GradientTraffic, Staging
from deep_opt_states.zero.internals.compat import Parameter, has_gradient_here, l2_norm


@dataclass(frozen=True, kw_only=True)
class GradientBuffer:
    """The memory of a sub-group's gradients: tensors of shape [numel] in the accumulation dtype."""

    grad: torch.Tensor
    """The gradients as the update reads them."""
    device_accumulator: torch.Tensor | None = None
    """Memory on the accelerator in which gradients are accumulated over micro-batches, if ``grad`` is in host memory
    and the accelerator has enough memory; None otherwise."""

    @property
    def accumulator(self) -> torch.Tensor:
        """Return the tensor in which gradients are accumulated over micro-batches."""
        return self.grad if self.device_accumulator is None else self.device_accumulator


class Gradients:
    """The gradients of one rank, from their reduction to the update.

    ``buffers`` holds one buffer per sub-group, in DeepSpeed's order and initially zero. ``staging`` copies gradients to
    host memory; None if the accelerator shares host memory, or if no gradients go to it.
    """

    def __init__(self, optimizer: Any, buffers: Sequence[GradientBuffer], staging: Staging | None) -> None:
        self._optimizer = optimizer
        self._buffers = buffers
        self._staging = staging
        self._waited_for_copies = False
        """Whether the current stream waits for the copies of all sums to which the current bucket may be added."""
        self._in_fp32: dict[int, torch.Tensor] = {}
        """The fp32 gradients that the user has set or may set, by ``ds_id``. They override the gradient buffer."""
        self._written: dict[int, Parameter] = {}
        """The parameters whose gradient backward or the user has written since the last step, by ``ds_id``."""
        self._stale: dict[int, Parameter] = {}
        """The parameters whose gradient was written for an earlier step and not since, by ``ds_id``."""
        self._summed: dict[int, Parameter] = {}
        """The parameters with a gradient in this accumulation window, to which the next one is added, by ``ds_id``."""
        self._unscaled: dict[int, float] = {}
        """The factor that stock multiplies into the gradient before Adam, by ``ds_id``, for gradients that still lack
        it: our kernels only read gradients."""

    # Backward

    @property
    def traffic(self) -> GradientTraffic:
        """Return the bytes that were copied so far; zero if the accelerator shares host memory."""
        return GradientTraffic() if self._staging is None else self._staging.traffic

    @torch.no_grad()
    def add_reduced_bucket(self, params: Sequence[Parameter], partitions: Sequence[torch.Tensor]) -> None:
        """Add one bucket of reduced gradients, on the stream that reduced them, which is current.

        ``partitions`` are this rank's parts of the gradients of ``params``, each of shape [partition_numel] or shorter.
        """
        optimizer = self._optimizer
        boundary = optimizer.is_gradient_accumulation_boundary()
        self._waited_for_copies = False
        # In the order of host memory, so that neighbouring gradients are copied together.
        for param, partition in sorted(zip(params, partitions, strict=True), key=lambda pair: self._position(pair[0])):
            if has_gradient_here(optimizer, param):
                first = param.ds_id not in self._summed
                self._summed[param.ds_id] = param
                total = self._add(param, partition, first, boundary)
                if boundary:
                    self._complete(param, total)
            # The partition may be the gradient itself. Everything that reads it has been issued by now, but maybe not
            # executed: record the stream, so that the allocator does not reuse the memory too early.
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        self._flush()

    def wait_for_copies(self) -> None:
        """Make the current stream wait until all gradient copies to host memory have finished.

        A host that then waits for the current stream finds the gradients in host memory, too.
        """
        if self._staging is not None:
            self._staging.wait_for_copies()

    def synchronize(self) -> None:
        """Block the host until all gradient copies to host memory have finished."""
        if self._staging is not None:
            self._staging.synchronize()

    def abandon_window(self) -> None:
        """Discard the sums of an incomplete accumulation window.

        They are discarded even for parameters that get no other gradient before the step. The gradients of a complete
        window remain valid until backward writes new ones, as in stock.
        """
        self._stale |= {ds_id: param for ds_id, param in self._summed.items() if ds_id not in self._written}
        self._summed.clear()

    def finish_window(self) -> None:
        """Complete the gradients of an accumulation window whose boundary the user set manually.

        DeepSpeed reported no boundary while they were reduced, so none of them was completed then.
        """
        for param in self._params():
            if param.ds_id in self._summed:
                self._finish(param)
        self._flush()

    def complete_window(self) -> None:
        """Complete the parameters that the last backward of the window did not reach. Call this before the norm.

        Gradients that were written for an earlier step and not for this one become zero.
        """
        for param in self._params():
            if param.ds_id in self._summed and param.ds_id not in self._written:
                self._finish(param)
        self._flush()
        for ds_id, param in self._stale.items():
            if ds_id not in self._written:
                self._forget_fp32(param)
                sub_group, view = self._place(param)
                view(self._buffers[sub_group].grad).zero_()
        self._stale = self._written
        self._written = {}
        self._summed.clear()

    # Step

    def record_pending_scale(self, sub_group: int, grad_scale: float) -> None:
        """Record that the sub-group was updated with ``grad_scale``, which was not multiplied into its gradients."""
        if grad_scale != 1.0:
            self._unscaled.update((param.ds_id, grad_scale) for param in self._optimizer.fp16_groups[sub_group])

    def buffer_of(self, sub_group: int) -> torch.Tensor:
        """Return the sub-group's gradients in the accumulation dtype, shape [numel]."""
        return self._buffers[sub_group].grad

    def grad_for_update(self, sub_group: int) -> torch.Tensor:
        """Return the gradients that the update reads, shape [numel].

        These are the gradient buffer itself, or an fp32 copy of it that includes the gradients that the user may have
        set.
        """
        buffer = self.buffer_of(sub_group)
        in_fp32 = [param for param in self._optimizer.fp16_groups[sub_group] if param.ds_id in self._in_fp32]
        if not in_fp32:
            return buffer
        grad = buffer.float()
        for param in in_fp32:
            _, view = self._place(param)
            view(grad).copy_(self._in_fp32[param.ds_id])
        return grad

    def close(self) -> None:
        """Release all memory after all copies to it have finished."""
        if self._staging is not None:
            self._staging.close()
        self._buffers = ()
        self._in_fp32.clear()

    # Readers and writers other than backward and the update

    def read(self, param: Parameter) -> torch.Tensor:
        """Return the parameter's gradient as stock's buffer would hold it now: fp32, shape [partition_numel].

        The tensor is for reading only: it is a temporary copy unless the gradient is in fp32 anyway.
        """
        if param.ds_id in self._in_fp32:
            return self.writable_fp32(param)
        partition = self._copied(param)
        grad_scale = self._unscaled.get(param.ds_id)
        return partition if grad_scale is None else partition.mul_(grad_scale)

    def writable_fp32(self, param: Parameter) -> torch.Tensor:
        """Return the parameter's gradient in fp32, shape [partition_numel], for the caller to write to.

        This tensor is the gradient until backward writes a new one. It is in host memory, where stock's fp32 buffers
        are, no matter where the sub-group is updated.
        """
        if param.ds_id not in self._in_fp32:
            self._in_fp32[param.ds_id] = self._copied(param).cpu()
        grad_scale = self._unscaled.pop(param.ds_id, None)
        if grad_scale is not None:
            self._in_fp32[param.ds_id].mul_(grad_scale)
        return self._in_fp32[param.ds_id]

    def mark_set_by_user(self, params: Iterable[Parameter]) -> None:
        """Record that the user has set the gradients of ``params``.

        A frozen parameter has no gradient that could be set: as in stock, it is ignored.
        """
        for param in params:
            if param.requires_grad:
                self._written[param.ds_id] = param

    def _add(self, param: Parameter, partition: torch.Tensor, first: bool, boundary: bool) -> torch.Tensor:
        """Return the sum so far, on the accelerator, and copy it to host memory if it belongs there now.

        Allocate nothing: a sum that is in host memory is added to ``partition``, which has no other reader any more.
        """
        sub_group, view = self._place(param)
        buffer = self._buffers[sub_group]
        accumulator = view(buffer.accumulator).narrow(0, 0, partition.numel())
        # DeepSpeed has converted the partition to the accumulation dtype, so that this copies nothing.
        partition = partition.view(-1).to(accumulator.dtype)
        if self._in_host_memory(accumulator):
            total = partition
            if not first:
                self._add_host_accumulator(total, accumulator)
        else:
            total = accumulator.copy_(partition) if first else accumulator.add_(partition)
        if boundary if buffer.device_accumulator is not None else self._in_host_memory(buffer.grad):
            self._send(param, total)
        return total

    def _add_host_accumulator(self, total: torch.Tensor, accumulator: torch.Tensor) -> None:
        """Add ``accumulator``, which is in host memory, to ``total`` on the accelerator: the host would be slow."""
        assert self._staging is not None
        if not self._waited_for_copies:
            self._staging.wait_for_copies()
            self._waited_for_copies = True
        self._staging.add_to(total, accumulator)

    def _finish(self, param: Parameter) -> None:
        """Complete the sum of a parameter, which was not known to be the last when the last gradient was added."""
        sub_group, view = self._place(param)
        buffer = self._buffers[sub_group]
        total = view(buffer.accumulator)
        if self._in_host_memory(total):
            self.wait_for_copies()
            # Copy it back for its norm: after backward, and one parameter at a time.
            total = total.to(get_accelerator().current_device_name(), non_blocking=True)
            self.traffic.h2d_bytes += total.nbytes
            self.traffic.h2d_copies += 1
        elif buffer.device_accumulator is not None:
            self._send(param, total)
        self._complete(param, total)

    def _complete(self, param: Parameter, total: torch.Tensor) -> None:
        """Record the norm of the complete gradient ``total``, which replaces one that the user has set."""
        optimizer = self._optimizer
        optimizer.norm_for_param_grads[optimizer.get_param_id(param)] = l2_norm(optimizer, total)
        self._written[param.ds_id] = param
        self._forget_fp32(param)

    def _forget_fp32(self, param: Parameter) -> None:
        self._in_fp32.pop(param.ds_id, None)
        self._unscaled.pop(param.ds_id, None)

    def _send(self, param: Parameter, total: torch.Tensor) -> None:
        """Copy ``total`` to the gradient buffer, which is in host memory. ``_flush`` must follow."""
        sub_group, offset = self._position(param)
        grad = self._buffers[sub_group].grad
        if self._staging is None:
            grad.narrow(0, offset, total.numel()).copy_(total)
        else:
            self._staging.send(grad, offset, total)

    def _flush(self) -> None:
        if self._staging is not None:
            self._staging.flush()

    @staticmethod
    def _in_host_memory(tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in host memory that the accelerator does not share."""
        return not get_accelerator().on_accelerator(tensor)

    def _params(self) -> Iterator[Parameter]:
        return (param for group in self._optimizer.fp16_groups for param in group)

    def _position(self, param: Parameter) -> tuple[int, int]:
        """Return the parameter's sub-group and the offset of its first element there."""
        sub_group, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
        return sub_group, offset

    def _copied(self, param: Parameter) -> torch.Tensor:
        """Return an fp32 copy of the parameter's part of the gradient buffer, shape [partition_numel]."""
        sub_group, view = self._place(param)
        copied: torch.Tensor = view(self.buffer_of(sub_group)).to(torch.float32, copy=True)
        return copied

    def _place(self, param: Parameter) -> tuple[int, Any]:
        """Return the parameter's sub-group, and a function that narrows a tensor of its length to the parameter."""
        sub_group, offset, numel = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
        return sub_group, lambda whole: whole.narrow(0, offset, numel)
