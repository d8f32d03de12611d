"""Check that the PTX interpreter executes small kernels as a GPU does, and refuses those that a GPU would not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.ptx_interpreter import SHARED_ADDRESS, Launch, interpret
from tests.kernels.ptx_memory import EmulatedMemory
from tests.kernels.ptx_parser import PtxError, parse

BLOCKS, THREADS = 2, 64

HEADER = f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry update(
\t.param .u64 .ptr .global .align 1 input,
\t.param .u64 .ptr .global .align 1 output
)
.reqntid {THREADS}
{{
\t.reg .pred %p<9>;
\t.reg .b16 %rs<9>;
\t.reg .b32 %r<9>;
\t.reg .b64 %rd<9>;
\tld.param.b64 %rd1, [input];
\tld.param.b64 %rd2, [output];
\tmov.u32 %r1, %ctaid.x;
\tmov.u32 %r2, %tid.x;
\tmov.u32 %r3, %ntid.x;
\tmul.wide.u32 %rd3, %r1, {4 * THREADS};
\tmad.wide.u32 %rd3, %r2, 4, %rd3;
\tadd.s64 %rd4, %rd1, %rd3;
\tadd.s64 %rd5, %rd2, %rd3;
\tld.global.b32 {{ %r4 }}, [ %rd4 + 0 ];
"""
"""A kernel that loads one number per thread to %r4. The thread's address in the output is in %rd5."""


def executed(*lines: str) -> list[int]:
    """Return the output of a kernel of ``lines``, whose input is 0, 1, 2, ..."""
    numbers = np.arange(BLOCKS * THREADS, dtype=np.uint32)
    output = np.full_like(numbers, 99)
    tensors = [
        EmulatedMemory(numbers.view(np.uint16), 4096, writable=False),
        EmulatedMemory(output.view(np.uint16), 1 << 40),
    ]
    program = parse(HEADER + "".join(f"\t{line}\n" for line in lines) + "\tret;\n}\n")
    interpret(program, Launch(blocks=BLOCKS, parameters=[4096, 1 << 40], tensors=tensors, shared_bytes=4 * THREADS))
    return output.tolist()


STORE = "st.global.b32 [ %rd5 + 0 ], { %r4 };"
SHARE = (
    "mov.b32 %r5, global_smem;",
    "mad.wide.u32 %rd6, %r2, 4, 0;",
    "cvt.u32.u64 %r6, %rd6;",
    "add.s32 %r6, %r6, %r5;",
    "st.shared.b32 [ %r6 + 0 ], %r4;",
)
"""Each thread stores its number in shared memory, at the address %r6."""

FROM_NEIGHBOUR = ("xor.b32 %r6, %r6, 4;", "ld.shared.b32 {%r4}, [%r6];", STORE)


def test_each_thread_loads_computes_and_stores() -> None:
    every = list(range(BLOCKS * THREADS))
    assert executed(STORE) == every
    assert executed("setp.lt.u32 %p1, %r2, 3;", f"@%p1 {STORE}") == [n if n % THREADS < 3 else 99 for n in every]
    assert executed("setp.lt.u32 %p1, %r2, 3;", f"@!%p1 {STORE}") == [99 if n % THREADS < 3 else n for n in every]
    assert executed("mov.b32 {%rs1, _}, %r4;", "mov.b32 %r4, {%rs1, %rs1};", STORE) == [n * 0x10001 for n in every]
    assert executed("add.s32 %r4, %r4, -1;", STORE) == [(n - 1) % 2**32 for n in every]


def test_threads_that_diverge_execute_their_own_instructions() -> None:
    lines = ("setp.lt.u32 %p1, %r4, 70;", "@%p1 bra $low;", "add.s32 %r4, %r4, 1000;", "$low:", STORE)
    assert executed(*lines) == [n if n < 70 else n + 1000 for n in range(BLOCKS * THREADS)]
    loop = ("$again:", "add.s32 %r4, %r4, 10;", "setp.lt.u32 %p1, %r4, 100;", "@%p1 bra $again;", STORE)
    assert executed(*loop) == [next(m for m in range(n + 10, 999, 10) if m >= 100) for n in range(BLOCKS * THREADS)]


def test_threads_exchange_numbers_through_shared_memory() -> None:
    assert executed(*SHARE, "bar.sync 0;", *FROM_NEIGHBOUR) == [n ^ 1 for n in range(BLOCKS * THREADS)]


def test_rows_of_matrices_are_distributed_over_the_lanes() -> None:
    """Check it with one row of 16 bytes per lane of the first two of four matrices; the other two repeat them."""
    rows = ("and.b32 %r7, %r2, 15;", "shl.b32 %r7, %r7, 4;", f"add.s32 %r7, %r7, {SHARED_ADDRESS};")
    for matrix, register in enumerate(("%r4", "%r5", "%r6", "%r8")):
        lines = ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r8}, [%r7];", f"mov.b32 %r4, {register};")
        found = executed(*SHARE, "bar.sync 0;", *rows, *lines, STORE)
        # In each block, the j-th number of row i is 4 * i + j. Lane t has number t % 4 of row t / 4 of each matrix.
        in_block = [(32 * (matrix % 2) + thread % 32) for thread in range(THREADS)]
        assert found == [number + THREADS * block for block in range(BLOCKS) for number in in_block]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["mul.f32 %r4, %r4, %r4;"], "unknown instruction mul.f32"),
        (["mul.rz.f32 %r4, %r4, %r4;"], "unknown instruction mul.rz.f32"),
        (["fma.rn.ftz.f32 %r4, %r4, %r4, %r4;"], "unknown instruction fma.rn.ftz.f32"),
        (["sqrt.approx.f32 %r4, %r4;"], "unknown instruction sqrt.approx.f32"),
        (["ld.global.b64 { %rd6 }, [ %rd4 + 0 ];"], "unknown instruction ld.global.b64"),
        ([".pragma everything"], "unknown line"),
        (["add.s32 %r4, %r4, %r5;"], "add.s32 %r4, %r4, %r5: %r5 is read before"),
        (["add.s32 %r4, %r4, %rd1;"], "%rd1 is no s32"),
        (["add.s32 %q4, %r4, 1;"], "%q4 is not declared"),
        (["add.s32 %r4, %r4, 4294967296;"], "too large"),
        (["add.s32 %r4, %r4;"], "2 operands"),
        (["mov.u32 %r4;"], "mov.u32 %r4: not enough values"),
        (["setp.lt.u32 %p1, %r2, 3;", "@%p1 mov.b32 %r5, %r4;"], "%r5 stays undefined"),
        (["setp.lt.u32 %p1, %r2, 3;", "@%p1 bra.uni $there;", "$there:"], "threads diverge"),
        (["bra $nowhere;"], "unknown label"),
        (["ld.param.b32 %r4, [input];"], "another size"),
        (["ld.global.b32 { %r4 }, [ %rd4 + 4 ];"], "outside of the tensors"),
        (["ld.global.b32 { %r4 }, [ %rd3 + 0 ];"], "outside of the tensors"),
        (["ld.global.v2.b32 { %r4, %r5 }, [ %rd1 + 4 ];"], "no multiple of 8"),
        (["ld.global.v2.b32 { %r4 }, [ %rd4 + 0 ];"], "1 registers"),
        (["st.global.b32 [ %rd4 + 0 ], { %r4 };"], "only read"),
        (["st.global.b32 [ %rd2 + 0 ], { %r4 };"], "two threads"),
        (
            ["xor.b32 %r6, %r2, 1;", "mad.wide.u32 %rd6, %r6, 4, %rd2;", "ld.global.b32 {%r5}, [%rd6];", STORE],
            "writes an element that another thread",
        ),
        ([*SHARE, *FROM_NEIGHBOUR], "reads a value that another thread wrote"),
        ([*SHARE[:4], "bar.sync 0;", *FROM_NEIGHBOUR], "was not written"),
        ([*SHARE, f"st.shared.b32 [ %r6 + {4 * THREADS} ], %r4;"], "outside of the block's shared memory"),
        (["setp.lt.u32 %p1, %r2, 3;", "@%p1 bra $there;", "bar.sync 0;", "$there:"], "not all threads"),
        (["setp.lt.u32 %p1, %r2, 3;", "@%p1 bar.sync 0;"], "not all threads"),
        (["bra $end;", "ret;", "}", ".visible .entry other("], "another function"),
    ],
    ids=str,
)
def test_what_a_gpu_would_not_execute_as_meant_is_refused(lines: list[str], error: str) -> None:
    with pytest.raises(PtxError, match=error):
        executed(*lines)


def test_a_kernel_without_an_end_is_refused() -> None:
    with pytest.raises(PtxError, match="ends without ret"):
        interpret(
            parse(HEADER + "}\n"), Launch(BLOCKS, [4096, 4096], [EmulatedMemory(np.zeros(512, np.uint16), 4096)], 0)
        )
