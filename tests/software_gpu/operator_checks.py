"""Check operators: the CPU's bits, devices that differ, waits of the host, autocast, storages and parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.operator_cases import CASES, OperatorInputs, Result
from tests.software_gpu.settings import changed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _tensors(part)]


def _computed(case: Callable[[OperatorInputs], Result], device_type: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the results and the gradients of all inputs, and the state of the generator after that."""
    torch.manual_seed(7)
    inputs = OperatorInputs(device_type, dtype)
    results = _tensors(case(inputs))
    differentiable = [result for result in results if result.requires_grad]
    if differentiable:
        gradients = OperatorInputs(device_type, torch.float32, seed=1)
        torch.autograd.backward(
            differentiable, [gradients(*result.shape, grad=False).to(result.dtype) for result in differentiable]
        )
    found = [result.detach() for result in results]
    found += [leaf.grad for leaf in inputs.leaves if leaf.grad is not None]
    assert all(tensor.device.type == device_type for tensor in found)
    return [*found, torch.get_rng_state().to(device_type)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _differences(on_cpu: Iterable[torch.Tensor], on_device: Iterable[torch.Tensor]) -> list[str]:
    """Return how the tensors differ in shape, dtype, strides or bits."""
    found = []
    for place, (expected, seen) in enumerate(zip(on_cpu, on_device, strict=True)):
        if (expected.shape, expected.dtype) != (seen.shape, seen.dtype):
            found.append(f"{place}: {expected.shape} of {expected.dtype}, {seen.shape} of {seen.dtype}")
        elif not torch.equal(_bits(expected), _bits(seen)):
            found.append(f"{place}: {expected} {seen.cpu()}")
    return found


def _compare(case: Callable[[OperatorInputs], Result]) -> None:
    """Compare the device with the CPU in all dtypes that the CPU supports."""
    compared = 0
    for dtype in DTYPES:
        try:
            expected = _computed(case, "cpu", dtype)
        except RuntimeError as error:
            if "not implemented for" not in str(error):
                raise
            continue
        differences = _differences(expected, _computed(case, DEVICE_TYPE, dtype))
        assert differences == [], f"{dtype}: {differences}"
        compared += 1
    assert compared > 0


def devices_that_differ_are_refused() -> None:
    tensor, index = torch.ones(3, device=DEVICE_TYPE), torch.tensor([0, 1])
    for wrong in (
        lambda: tensor + torch.ones(3),
        lambda: torch.ones(3) @ tensor,
        lambda: torch.cat([tensor, torch.ones(3)]),
        lambda: tensor.add_(torch.ones(3)),
        lambda: torch.ones(3).add_(tensor),
        lambda: torch.tensor(1.0).add_(tensor[0]),
        lambda: torch.add(tensor, 1, out=torch.empty(3)),
        lambda: F.embedding(index, torch.ones(3, 2, device=DEVICE_TYPE)),
        lambda: tensor.gather(0, index),
        lambda: torch._foreach_add([tensor], [torch.ones(3)]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            wrong()


def scalars_of_the_host_are_taken_by_value() -> None:
    with changed(lazy=True, lazy_s=100.0):
        scalar = torch.tensor(2.0)
        result = torch.ones(3, device=DEVICE_TYPE) * scalar
        scalar.fill_(5)
        assert result.tolist() == [2] * 3


def indices_of_the_host_are_copied_and_the_host_waits_for_that() -> None:
    tensor = torch.arange(5.0, device=DEVICE_TYPE)
    with device.recorded_host_waits() as waits:
        chosen = tensor[torch.tensor([3, 1])]
        tensor[torch.tensor([0])] = 7.0
    assert [wait.reason for wait in waits] == ["copy H2D, blocking"] * 2
    assert chosen.tolist() == [3, 1]
    assert tensor.tolist() == [7, 1, 2, 3, 4]


def operators_whose_results_depend_on_data_wait_and_are_recorded_by_name() -> None:
    tensor = torch.tensor([1.0, -1.0, 3.0], device=DEVICE_TYPE)
    mask, index = tensor > 0, torch.tensor([1, 2], device=DEVICE_TYPE)
    with device.recorded_host_waits() as waits:
        tensor.nonzero()
        tensor.masked_select(mask)
        assert tensor[mask].shape == (2,)
        torch.equal(tensor, tensor)
        tensor.unique()
        bool(mask.any())
    assert [wait.reason for wait in waits] == [
        "aten::nonzero",
        "aten::masked_select",
        "aten::index",
        "aten::equal",
        "aten::_unique2",
        "item",
    ]
    with device.recorded_host_waits() as waits:
        # The same operator as for a mask, with a result whose shape is known.
        tensor[index]
        tensor.masked_fill(mask, 0)
        torch.where(mask, tensor, 0)
        torch.nn.utils.get_total_norm([tensor])
    assert waits == []


def an_operator_reads_memory_when_it_is_executed() -> None:
    with changed(lazy=True, lazy_s=100.0):
        gate_stream = device.Stream()
        tensor = torch.zeros(100, device=DEVICE_TYPE)
        device.synchronize()
        with device.stream(gate_stream):
            doubled = tensor * 2
        tensor.fill_(4)
        device.current_stream().synchronize()
        gate_stream.synchronize()
        # The missing wait between the streams shows: the product is of values that were written later.
        assert doubled.tolist() == [8] * 100


def autocast_follows_the_lists_of_cuda() -> None:
    options = {"device": DEVICE_TYPE}
    single, half = torch.rand(4, 4, **options), torch.rand(4, 4, dtype=torch.bfloat16, **options)
    image, kernel = torch.rand(1, 2, 5, 5, **options), torch.rand(3, 2, 3, 3, **options)
    lower: list[Callable[[], torch.Tensor]] = [
        lambda: single @ single,
        lambda: F.linear(single, single),
        lambda: torch.bmm(single[None], single[None]),
        lambda: torch.addmm(single[0], single, single),
        lambda: F.conv2d(image, kernel),
        lambda: torch.einsum("ij,jk->ik", single, single),
    ]
    full: list[Callable[[], torch.Tensor]] = [
        *(partial(function, half) for function in (torch.exp, torch.log, torch.rsqrt, F.softplus)),
        lambda: half.softmax(-1),
        lambda: half.log_softmax(-1),
        lambda: half.sum(),
        lambda: half.sum(0),
        lambda: half.cumsum(0),
        lambda: half.prod(),
        lambda: half.norm(),
        lambda: half.norm(2, 0),
        lambda: half.pow(2),
        lambda: F.layer_norm(half, (4,)),
        lambda: F.cross_entropy(half, torch.zeros(4, dtype=torch.int64, **options)),
        lambda: F.mse_loss(half, half),
    ]
    unchanged: list[Callable[[], torch.Tensor]] = [
        lambda: F.gelu(half),
        lambda: half + half,
        lambda: half.mean(),
        lambda: F.relu(half),
    ]
    widest: list[Callable[[], torch.Tensor]] = [
        lambda: torch.addcmul(single, half, half),
        lambda: torch.cat([single, half]),
        lambda: torch.dot(single[0], half[0]),
    ]
    with torch.autocast(DEVICE_TYPE, torch.bfloat16):
        for place, compute in enumerate(lower):
            assert compute().dtype == torch.bfloat16, f"lower {place}"
        for place, compute in enumerate(full):
            assert compute().dtype == torch.float32, f"full {place}"
        for place, compute in enumerate(unchanged):
            assert compute().dtype == torch.bfloat16, f"unchanged {place}"
        for place, compute in enumerate(widest):
            assert compute().dtype == torch.float32, f"widest {place}"
        product = single @ single
    assert torch.equal(product.cpu(), (single.cpu().bfloat16() @ single.cpu().bfloat16()))
    assert (single @ single).dtype == torch.float32


def parameters_move_between_devices_and_keep_their_attributes() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, device=DEVICE_TYPE))
    parameter.attribute = "kept"  # type: ignore[attr-defined]
    parameter.data = parameter.data.cpu() * 2
    assert parameter.device.type == "cpu"
    parameter.data = parameter.data.to(DEVICE_TYPE)
    assert (parameter.device.type, parameter.attribute) == (DEVICE_TYPE, "kept")  # type: ignore[attr-defined]
    assert parameter.tolist() == [2] * 4
    module = torch.nn.Linear(3, 3)
    before = module.weight
    module.to(DEVICE_TYPE)
    assert module.weight is before
    assert before.device.type == DEVICE_TYPE
    module(torch.ones(2, 3, device=DEVICE_TYPE)).sum().backward()
    assert before.grad is not None
    assert before.grad.device.type == DEVICE_TYPE


def storages_are_resized_shared_and_exchanged() -> None:
    tensor = torch.arange(6.0, device=DEVICE_TYPE)
    allocated = device.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert device.memory_allocated() == allocated - 512
    tensor.untyped_storage().resize_(24)
    assert tensor.isnan().all().item(), "new memory"
    tensor.copy_(torch.arange(6.0))
    tensor.resize_(3, 4)
    assert tensor.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert tensor.flatten()[6:].isnan().all().item()
    tensor.resize_(2, 2)
    assert tensor.tolist() == [[0, 1], [2, 3]]
    other = torch.empty(0, device=DEVICE_TYPE)
    other.set_(tensor.untyped_storage(), 2, (2,), (2,))
    assert other.tolist() == [2, 4]
    other.fill_(9)
    assert tensor.tolist() == [[0, 1], [9, 3]]
    other.set_(tensor)
    assert other.data_ptr() == tensor.data_ptr()
    other.set_()
    assert other.numel() == 0
    assert tensor.narrow(0, 1, 1).data_ptr() == tensor.data_ptr() + 8
    assert tensor.untyped_storage().device.type == DEVICE_TYPE


def tensors_are_saved_loaded_and_copied() -> None:
    tensors = {
        "whole": torch.arange(6.0, device=DEVICE_TYPE),
        "half": torch.ones(3, dtype=torch.bfloat16, device=DEVICE_TYPE),
    }
    tensors["view"] = tensors["whole"][2:4]
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    for where in (None, "cpu", DEVICE_TYPE):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=where)
        for name, tensor in tensors.items():
            assert loaded[name].device.type == (where or DEVICE_TYPE)
            assert torch.equal(loaded[name].cpu(), tensor.cpu())
        assert loaded["view"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
    copied = copy.deepcopy(tensors["whole"])
    assert copied.data_ptr() != tensors["whole"].data_ptr()
    assert torch.equal(copied, tensors["whole"])
    assert "device='software_gpu:0'" in repr(copied)


def a_result_that_differs_from_the_meta_kernel_is_an_error() -> None:
    """Check that a wrong shape or dtype of a meta kernel cannot pass unnoticed, with a kernel that is wrong."""
    library = torch.library.Library("software_gpu_test", "DEF")
    library.define("wrong(Tensor x) -> Tensor")
    library.impl("wrong", lambda x: x.double(), "CPU")
    library.impl("wrong", lambda x: torch.empty_like(x), "Meta")
    torch.ops.software_gpu_test.wrong(torch.ones(2, device=DEVICE_TYPE))
    with pytest.raises(RuntimeError, match="software_gpu_test::wrong: the CPU's kernel gave"):
        device.synchronize()
    device.take_error()


def _case_named(name: str) -> Callable[[], None]:
    def check() -> None:
        _compare(CASES[name])

    check.__module__ = __name__
    return check


globals().update({f"{name.replace(' ', '_')}_has_the_bits_of_the_cpu": _case_named(name) for name in CASES})
