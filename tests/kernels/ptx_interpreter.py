"""Interpret the PTX of a kernel instruction by instruction, with one array element per thread in each register.

Threads that execute the same instructions form a group. A branch on which they disagree divides the group, and each
part runs to the end by itself. Unknown instructions, registers that are read before they are written, accesses outside
of the tensors, races and divergent barriers are errors that name the instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.kernels.ptx_memory import WORD_BYTES, EmulatedMemory
from tests.kernels.ptx_operations import DTYPES, bits_of_type, operation
from tests.kernels.ptx_parser import Address, Instruction, Operand, Program, PtxError, bits_of

LANES = 32
"""The threads of a warp."""

SHARED_ADDRESS = 1024
"""The address of a block's shared memory. It is not zero, so that an instruction that ignores it fails."""

ACCESS = re.compile(r"(?P<kind>ld|st)\.(?P<space>global|shared)(?:\.v(?P<count>[24]))?\.(?P<type>b16|b32)")
MOVE = re.compile(r"mov\.(?P<type>[bu](?:16|32|64))")
PARAMETER = re.compile(r"ld\.param\.(?P<type>b32|b64)")
MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"


@dataclass(frozen=True)
class Launch:
    """The number of blocks, the bits of each parameter, the tensors, and the bytes of shared memory per block."""

    blocks: int
    parameters: Sequence[int]
    tensors: Sequence[EmulatedMemory]
    shared_bytes: int


@dataclass
class ThreadGroup:
    """Threads that execute the instruction at the same index. A register has the type uint16, 32, 64 or bool."""

    at: int
    block: np.ndarray
    thread: np.ndarray
    registers: dict[str, np.ndarray]

    def part(self, chosen: np.ndarray, at: int) -> ThreadGroup:
        """Return a group of the threads in ``chosen``."""
        registers = {name: value[chosen] for name, value in self.registers.items()}
        return ThreadGroup(at, self.block[chosen], self.thread[chosen], registers)


def interpret(program: Program, launch: Launch) -> None:
    """Execute all blocks of ``launch``. Raise ``PtxError`` with the instruction that is unknown or not allowed."""
    with np.errstate(all="ignore"):
        Interpreter(program, launch).run()


class Interpreter:
    """One launch of a program."""

    def __init__(self, program: Program, launch: Launch) -> None:
        if len(launch.parameters) != len(program.parameters):
            raise PtxError(f"{len(launch.parameters)} parameters were given: {list(program.parameters)}")
        self._program, self._launch = program, launch
        self._parameters = dict(zip(program.parameters, launch.parameters, strict=True))
        words = np.zeros(launch.blocks * launch.shared_bytes // WORD_BYTES, np.uint16)
        self._shared = EmulatedMemory(words, 0, initialized=False)
        self._special: Mapping[str, Callable[[ThreadGroup], np.ndarray]] = {
            "%tid.x": lambda group: group.thread,
            "%ctaid.x": lambda group: group.block,
            "%ntid.x": lambda group: np.full_like(group.thread, program.threads),
            "%nctaid.x": lambda group: np.full_like(group.thread, launch.blocks),
            **{name: lambda group: np.full_like(group.thread, SHARED_ADDRESS) for name in program.shared},
        }

    def run(self) -> None:
        """Execute every thread up to ``ret``."""
        number = np.arange(self._launch.blocks * self._program.threads, dtype=np.uint32)
        groups = [ThreadGroup(0, number // self._program.threads, number % self._program.threads, {})]
        while groups:
            group = groups.pop()
            while group.at < len(self._program.instructions):
                instruction = self._program.instructions[group.at]
                group.at += 1
                try:
                    parts = self._step(instruction, group)
                # A wrong number of operands is a ValueError.
                except (PtxError, ValueError) as error:
                    raise PtxError(f"{instruction.text}: {error}") from error
                if parts is not None:
                    groups += [part for part in parts if len(part.thread)]
                    break
            else:
                raise PtxError("the kernel ends without ret")

    def _step(self, instruction: Instruction, group: ThreadGroup) -> list[ThreadGroup] | None:
        """Execute one instruction. Return the groups that continue elsewhere if it is a branch or the end."""
        name, operands = instruction.name, instruction.operands
        active = self._active(instruction, group)
        if not active.any():
            return None
        if name in ("bra", "bra.uni", "ret"):
            if name == "bra.uni" and not active.all():
                raise PtxError("threads diverge")
            if name == "ret":
                return [group.part(~active, group.at)]
            (label,) = operands
            if label not in self._program.labels:
                raise PtxError("unknown label")
            target = self._program.labels[str(label)]
            if not active.all():
                return [group.part(~active, group.at), group.part(active, target)]
            group.at = target
            return None
        if name == "bar.sync":
            self._barrier(operands, active, group)
        elif name == MATRICES:
            self._load_matrices(operands, active, group)
        elif match := ACCESS.fullmatch(name):
            access = self._load if match["kind"] == "ld" else self._store
            access(match["space"], int(match["count"] or 1), match["type"], operands, active, group)
        elif match := MOVE.fullmatch(name):
            self._move(match["type"], operands, active, group)
        elif match := PARAMETER.fullmatch(name):
            self._load_parameter(match["type"], operands, active, group)
        else:
            found = operation(name)
            if len(operands) != 1 + len(found.operands):
                raise PtxError(f"{len(operands)} operands")
            target, *sources = operands
            values = [self._value(one, kind, group) for one, kind in zip(sources, found.operands, strict=True)]
            self._assign(target, found.result, found.compute(*values), active, group)
        return None

    def _active(self, instruction: Instruction, group: ThreadGroup) -> np.ndarray:
        """Return which threads execute ``instruction``, as a bool per thread."""
        if instruction.guard is None:
            return np.full(len(group.thread), True)
        guard = self._value(instruction.guard, "pred", group)
        return ~guard if instruction.negated else guard

    def _value(self, operand: Operand, kind: str, group: ThreadGroup) -> np.ndarray:
        """Return the operand of each thread, as an array of PTX type ``kind``."""
        bits = bits_of_type(kind)
        if isinstance(operand, int) and bits > 1:
            if not -(2 ** (bits - 1)) <= operand < 2**bits:
                raise PtxError(f"{operand} is too large for {kind}")
            constant = np.array(operand % 2**bits, np.dtype(f"u{bits // 8}"))
            return np.full(len(group.thread), constant).view(DTYPES[kind])
        if not isinstance(operand, str):
            raise PtxError(f"operand {operand} is no {kind}")
        if operand in self._special and bits == 32:
            return self._special[operand](group).view(DTYPES[kind])
        self._check_width(operand, kind)
        if operand not in group.registers:
            raise PtxError(f"{operand} is read before it is written")
        return group.registers[operand].view(DTYPES[kind])

    def _assign(self, target: Operand, kind: str, value: np.ndarray, active: np.ndarray, group: ThreadGroup) -> None:
        """Write a register of the threads that are active."""
        if not isinstance(target, str):
            raise PtxError(f"cannot write to {target}")
        self._check_width(target, kind)
        bits = bits_of_type(kind)
        if value.dtype != DTYPES[kind] or value.shape != group.thread.shape:
            raise PtxError(f"{value.dtype} of shape {value.shape} for {kind}")
        stored = value.view(np.bool_ if bits == 1 else np.dtype(f"u{bits // 8}"))
        if not active.all():
            if target not in group.registers:
                raise PtxError(f"{target} stays undefined in some threads")
            stored = np.where(active, stored, group.registers[target])
        group.registers[target] = stored

    def _check_width(self, register: str, kind: str) -> None:
        if bits_of(register, self._program.registers) != bits_of_type(kind):
            raise PtxError(f"{register} is no {kind}")

    def _load_parameter(self, kind: str, operands: Sequence[Operand], active: np.ndarray, group: ThreadGroup) -> None:
        target, source = operands
        if not isinstance(source, Address) or source.offset or source.base not in self._parameters:
            raise PtxError("unknown parameter")
        if self._program.parameters[source.base] != bits_of_type(kind):
            raise PtxError("the parameter has another size")
        self._assign(target, kind, self._value(self._parameters[source.base], kind, group), active, group)

    def _move(self, kind: str, operands: Sequence[Operand], active: np.ndarray, group: ThreadGroup) -> None:
        """Copy, pack a list into one register, or unpack one into a list; the first element has the lowest bits."""
        target, source = operands
        if isinstance(source, tuple):
            parts = [self._value(part, self._part(kind, source), group) for part in source]
            self._assign(target, kind, np.stack(parts, axis=-1).view(DTYPES[kind]).reshape(-1), active, group)
        elif isinstance(target, tuple):
            kind_of_part = self._part(kind, target)
            value = np.ascontiguousarray(self._value(source, kind, group)).view(DTYPES[kind_of_part])
            self._assign_list(target, kind_of_part, value.reshape(-1, len(target)), active, group)
        else:
            self._assign(target, kind, self._value(source, kind, group), active, group)

    def _part(self, kind: str, parts: tuple[Operand, ...]) -> str:
        found = f"b{bits_of_type(kind) // len(parts)}"
        if found not in DTYPES:
            raise PtxError(f"cannot divide {kind} by {len(parts)}")
        return found

    def _assign_list(
        self, targets: tuple[Operand, ...], kind: str, values: np.ndarray, active: np.ndarray, group: ThreadGroup
    ) -> None:
        for position, target in enumerate(targets):
            # PTX writes "_" for a value that is not used.
            if target != "_":
                self._assign(target, kind, np.ascontiguousarray(values[:, position]), active, group)

    def _load(
        self, space: str, count: int, kind: str, operands: Sequence[Operand], active: np.ndarray, group: ThreadGroup
    ) -> None:
        targets, source = operands
        listed = targets if isinstance(targets, tuple) else (targets,)
        if len(listed) != count:
            raise PtxError(f"{len(listed)} registers")
        size = count * bits_of_type(kind) // 8
        memory, addresses, threads = self._memory(space, source, size, active, group)
        words = np.zeros((len(group.thread), size // WORD_BYTES), np.uint16)
        words[active] = memory.load(addresses, size, threads)
        self._assign_list(listed, kind, words.view(DTYPES[kind]), active, group)

    def _store(
        self, space: str, count: int, kind: str, operands: Sequence[Operand], active: np.ndarray, group: ThreadGroup
    ) -> None:
        target, sources = operands
        listed = sources if isinstance(sources, tuple) else (sources,)
        if len(listed) != count:
            raise PtxError(f"{len(listed)} registers")
        size = count * bits_of_type(kind) // 8
        words = np.stack([self._value(source, kind, group) for source in listed], axis=-1).view(np.uint16)
        memory, addresses, threads = self._memory(space, target, size, active, group)
        memory.store(addresses, words[active], threads)

    def _memory(
        self, space: str, address: Operand, size: int, active: np.ndarray, group: ThreadGroup
    ) -> tuple[EmulatedMemory, np.ndarray, np.ndarray]:
        """Return the memory that the active threads access, their addresses in it, and their numbers."""
        if not isinstance(address, Address):
            raise PtxError("no address")
        threads = self._threads(group)[active]
        if space == "shared":
            begin = self._value(address.base, "u32", group)[active].astype(np.int64) + address.offset - SHARED_ADDRESS
            if ((begin < 0) | (begin + size > self._launch.shared_bytes)).any():
                raise PtxError("accesses memory outside of the block's shared memory")
            return self._shared, begin + group.block[active].astype(np.int64) * self._launch.shared_bytes, threads
        addresses = self._value(address.base, "s64", group)[active] + address.offset
        for tensor in self._launch.tensors:
            if tensor.contains(addresses, size):
                return tensor, addresses, threads
        raise PtxError("accesses memory outside of the tensors' range")

    def _threads(self, group: ThreadGroup) -> np.ndarray:
        """Return the number of each thread in the whole launch."""
        return group.block.astype(np.int64) * self._program.threads + group.thread

    def _barrier(self, operands: Sequence[Operand], active: np.ndarray, group: ThreadGroup) -> None:
        """Order the accesses of each block to shared and to global memory. All of its threads must be here."""
        blocks, counts = np.unique(group.block, return_counts=True)
        if operands != (0,) or not active.all() or (counts != self._program.threads).any():
            raise PtxError("not all threads of the block are at the barrier")
        for block in blocks.tolist():
            self._shared.pass_barrier(block * self._launch.shared_bytes, (block + 1) * self._launch.shared_bytes)
            for tensor in self._launch.tensors:
                tensor.pass_barrier_of_threads(block * self._program.threads, (block + 1) * self._program.threads)

    def _load_matrices(self, operands: Sequence[Operand], active: np.ndarray, group: ThreadGroup) -> None:
        """Load four matrices of 8 rows of 16 bytes per warp.

        The address of row j of matrix i is that of lane 8 * i + j. Lane t receives 4 bytes of row t / 4, from byte
        4 * (t % 4) on, of each matrix.
        """
        targets, source = operands
        if not isinstance(targets, tuple) or len(targets) != 4:
            raise PtxError("no four registers")
        lanes = np.arange(LANES)
        warp, counts = np.unique(self._threads(group) // LANES, return_counts=True)
        if not active.all() or (counts != LANES).any():
            raise PtxError(f"not all threads of a warp are here: {warp[counts != LANES]}")
        memory, addresses, threads = self._memory("shared", source, 16, active, group)
        if (addresses % 16 != 0).any():
            raise PtxError("the address of a row is no multiple of 16")
        for matrix, target in enumerate(targets):
            begins = addresses.reshape(-1, LANES)[:, 8 * matrix + lanes // 4] + 4 * (lanes % 4)
            words = memory.load(begins.reshape(-1), 4, threads)
            self._assign(target, "b32", words.view(np.uint32).reshape(-1), active, group)
