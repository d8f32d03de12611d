"""Check the sums by which writes to parameters are noticed: the kernel's, and which writes they notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.device.kernels import triton_checksum
from deep_opt_states.device.kernels.checksum import BLOCK_NUMEL, num_sums
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.kernels.triton_checksum import TritonChecksum
from deep_opt_states.device.kernels.triton_checksum_kernel import checksum
from tests.kernels.compiled import CAPABILITIES, compile_kernel
from tests.kernels.plain_checksum import odd_hashes, sums_of
from tests.launch import run_ranks

WRITES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch.neg,
    "zeroed": torch.zeros_like,
    "scaled": lambda param: param * 0.5,
    "filled": lambda param: torch.full_like(param, 3.0),
    "reversed": lambda param: param.flip(0),
    "rolled": lambda param: param.roll(1),
    "sorted": lambda param: param.sort().values,
    "noise": lambda param: param + 2.0**-6 * torch.randn_like(param),
}


def test_the_interpreted_kernel_has_the_sums_of_pytorch_and_notices_a_changed_bit() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.kernels.interpreted_checksum"], timeout_s=300, fresh=True)
    assert finished.returncode == 0, finished.output[-3000:]
    (found,) = finished.answers()
    assert found == {"wrong": [], "unnoticed": [], "false alarms": []}


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("compares", [False, True])
def test_the_kernel_compiles_without_floating_point_instructions(compares: bool, capability: int) -> None:
    types = {"param": "*i16", "sums": "*i64", "differs": "*i64", "numel": "i64"}
    constants = {"COMPARES": compares, "BLOCK": BLOCK_NUMEL}
    compiled = compile_kernel(checksum, types, constants, capability, {})
    assert compiled.arithmetic == {}
    assert "st.global" in compiled.ptx


def test_every_factor_is_odd_and_no_two_are_equal() -> None:
    factors = odd_hashes()
    assert (factors & 1).all()
    assert len(factors.unique()) == BLOCK_NUMEL


@given(st.integers(1, 3 * BLOCK_NUMEL), st.integers(0, 2**32), st.integers(-(2**15), 2**15 - 1))
def test_every_write_to_one_element_changes_the_sum_of_its_block_and_no_other(numel: int, seed: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    param = torch.randn(numel, generator=generator).bfloat16()
    before, place = sums_of(param), int(torch.randint(numel, (), generator=generator))
    assert len(before) == num_sums(numel)
    known = int(param.view(torch.int16)[place])
    param.view(torch.int16)[place] = bits
    changed = (sums_of(param) != before).nonzero().flatten().tolist()
    assert changed == ([] if bits == known else [place // BLOCK_NUMEL])


@pytest.mark.parametrize("name", WRITES)
def test_every_write_to_all_elements_changes_every_sum(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for numel in (2, 64, BLOCK_NUMEL, 4 * BLOCK_NUMEL):
        param = torch.randn(numel, generator=generator).bfloat16()
        assert (sums_of(WRITES[name](param)) != sums_of(param)).all(), numel


def test_a_compiler_that_fails_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_checksum, "_import_kernel", dict)
    with pytest.raises(KernelUnavailable, match="needs a CUDA GPU of compute capability"):
        TritonChecksum(torch.device("cpu"))
