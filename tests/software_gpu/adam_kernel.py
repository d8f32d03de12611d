"""Execute launches of the Triton kernel by the C++ kernel, which has the same arithmetic, on a stream of the device."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from deep_opt_states.device.kernels.adam import STATES
from deep_opt_states.device.kernels.library import DTYPES, CScalars, CUpdate, library
from deep_opt_states.device.kernels.scalars import Scalars
from tests.software_gpu import device
from tests.software_gpu.settings import current


class SoftwareAdamKernel:
    def __getitem__(self, grid: tuple[int]) -> Any:
        return self._launch

    def _launch(self, *tensors: Any, TAIL: int, BLOCK: int, num_warps: int, **scalars: Any) -> None:
        master, exp_avg, exp_avg_sq, grad, param, numel, cut, skip = tensors
        # The kernel leaves the first ``skip`` elements alone.
        addresses = {
            name: None if tensor is None else device.real_address(tensor.data_ptr() + skip * tensor.element_size())
            for name, tensor in zip((*STATES, "grad", "param"), (master, exp_avg, exp_avg_sq, grad, param), strict=True)
        }
        update = CUpdate(
            **addresses,
            **{f"new_{name}": addresses[name] for name in STATES},
            scalars=CScalars(**{field.name: scalars[field.name] for field in fields(Scalars)}),
            numel=numel - skip,
            cut=cut - skip,
            master_dtype=DTYPES[master.dtype],
            moment_dtype=DTYPES[exp_avg.dtype],
            grad_dtype=DTYPES[grad.dtype],
            param_dtype=DTYPES[None if param is None else param.dtype],
            tail=TAIL,
            num_threads=1,
            cores=None,
        )
        gpu_s = (numel - skip) / current().rates.adam_params_per_s
        written = [tensor[skip:numel] for tensor in (master, exp_avg, exp_avg_sq, param) if tensor is not None]
        device.launch(
            lambda: library().update([update], library().instruction_set),
            "GPU Adam",
            reads=[grad[skip:numel]],
            writes=written,
            gpu_s=gpu_s,
        )
