"""Parse the PTX of one kernel into instructions and operands. Whatever is not known here is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

HEADER = re.compile(
    r"\.version \d+\.\d+|\.target sm_\w+|\.address_size 64|\.extern \.shared \.align 16 \.b8 (?P<shared>\w+)\[\];"
    r"|\.global \.align 1 \.b8 _\$_str\[11\] = \{[\d, ]+\};"
)
"""The lines before the kernel. The string names a switch of CUDA's library, which no instruction reads."""

PARAMETER = re.compile(r"\.param \.[a-z](?P<bits>\d+) (?:\.ptr \.global \.align \d+ )?(?P<name>\w+)")
REGISTERS = re.compile(r"\.reg \.(?:pred|[bf](?P<bits>\d+))\s+(?P<prefix>%\w+?)<\d+>;")
INSTRUCTION = re.compile(r"(?:@(?P<negated>!?)(?P<guard>%\w+)\s+)?(?P<name>[a-z][\w.:]*)(?:\s+(?P<operands>.+))?")
OPERAND = re.compile(r"\s*(\{[^{}]*\}|\[[^\[\]]*\]|[%$\w.-]+)\s*(?:,|$)")
INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?")
FLOAT = re.compile(r"0[fF](?P<bits>[0-9a-fA-F]{8})")
ADDRESS = re.compile(r"\[\s*(?P<base>[%\w]+)\s*(?:\+\s*(?P<offset>-?\d+)\s*)?\]")


class PtxError(Exception):
    """An instruction that is unknown or whose effect is not allowed. The message contains it."""


@dataclass(frozen=True)
class Address:
    """A sum of a register or a parameter and a constant, in bytes."""

    base: str
    offset: int


Operand = str | int | Address | tuple["Operand", ...]
"""A register or a name, the bits of a constant, an address, or a list in braces."""


@dataclass(frozen=True)
class Instruction:
    """An instruction. A thread skips it unless ``guard`` is None or holds; with ``negated``, if ``guard`` holds."""

    name: str
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    text: str


@dataclass
class Program:
    """The kernel of a PTX file.

    ``parameters`` has the bits of each parameter, ``registers`` the bits of the registers with each prefix (1 for
    predicates), and ``labels`` the index of the instruction after each label.
    """

    shared: set[str] = field(default_factory=set)
    parameters: dict[str, int] = field(default_factory=dict)
    threads: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)


@lru_cache(maxsize=64)
def parse(ptx: str) -> Program:
    """Return the only kernel of ``ptx``. Raise ``PtxError`` if a line has an unknown form."""
    lines = _lines(ptx)
    program = Program()
    for line in lines:
        if line.startswith(".visible .entry "):
            break
        header = _matched(HEADER, line)
        if header["shared"]:
            program.shared.add(header["shared"])
    for line in lines:
        if line == ")":
            break
        parameter = _matched(PARAMETER, line.rstrip(","))
        program.parameters[parameter["name"]] = int(parameter["bits"])
    program.threads = int(_matched(re.compile(r"\.reqntid (\d+)"), next(lines))[1])
    _matched(re.compile("{"), next(lines))
    for line in lines:
        if line == "}":
            break
        _parse_line(line, program)
    # Only debug information follows.
    if match := re.search(r"\.(entry|func)\b", "\n".join(lines)):
        raise PtxError(f"another function: {match[0]}")
    return program


def _lines(ptx: str) -> Iterator[str]:
    """Yield the lines that contain more than a comment."""
    stripped = (" ".join(line.partition("//")[0].split()) for line in ptx.splitlines())
    return (line for line in stripped if line)


def _parse_line(line: str, program: Program) -> None:
    """Add one line of the kernel's body to ``program``."""
    if line.startswith(".loc "):
        return
    if line.startswith(".reg "):
        registers = _matched(REGISTERS, line)
        program.registers[registers["prefix"]] = int(registers["bits"] or 1)
    elif line.endswith(":"):
        program.labels[line[:-1]] = len(program.instructions)
    elif line.endswith(";"):
        program.instructions += [_instruction(part.strip()) for part in line[:-1].split(";")]
    else:
        raise PtxError(f"unknown line: {line}")


# The edited kernels of a test share nearly all lines.
@lru_cache(maxsize=10000)
def _instruction(text: str) -> Instruction:
    match = _matched(INSTRUCTION, text)
    return Instruction(
        name=match["name"],
        operands=_operands(match["operands"] or ""),
        guard=match["guard"],
        negated=match["negated"] == "!",
        text=text,
    )


def _operands(text: str) -> tuple[Operand, ...]:
    """Return the operands of a list that is separated by commas."""
    operands: list[Operand] = []
    at = 0
    while at < len(text):
        match = OPERAND.match(text, at)
        if match is None:
            raise PtxError(f"unknown operands: {text}")
        operands.append(_operand(match[1]))
        at = match.end()
    return tuple(operands)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return _operands(text[1:-1].strip())
    if text.startswith("["):
        match = _matched(ADDRESS, text)
        return Address(match["base"], int(match["offset"] or 0))
    if constant := FLOAT.fullmatch(text):
        return int(constant["bits"], 16)
    if INTEGER.fullmatch(text):
        return int(text.rstrip("U"), 0)
    return str(_matched(re.compile(r"[%$]?[A-Za-z_][\w$.]*"), text)[0])


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise PtxError(f"unknown: {text}")
    return match


def bits_of(register: str, registers: Mapping[str, int]) -> int:
    """Return the bits of ``register``, which is a prefix and a number."""
    prefix = register.rstrip("0123456789")
    if prefix not in registers:
        raise PtxError(f"{register} is not declared")
    return registers[prefix]
