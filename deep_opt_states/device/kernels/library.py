"""Load our C++ kernel as a shared library, which ninja compiles at first use, like DeepSpeed's ops."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from subprocess import SubprocessError

import torch

FOLDER = Path(__file__).parent / "csrc"
SOURCES = ("update.cpp", "plain.cpp", "avx2.cpp", "avx512.cpp", "avx512_bf16.cpp")

# Only the source fuses products. Support for errno and traps would prevent vectorized loops.
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


# Releases with a common cache keep libraries of their own.
_CONTENT = repr(FLAGS).encode() + b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()))
NAME = f"deep_opt_states_adam_{hashlib.sha256(_CONTENT).hexdigest()[:12]}"


class KernelUnavailable(RuntimeError):
    """The error for a kernel of ours that can be neither loaded nor compiled on this machine."""


class InstructionSet(IntEnum):
    """The instruction sets that the kernel is compiled for, each including the ones before it."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3


class CScalars(ctypes.Structure):
    """The ctypes counterpart of ``Scalars`` in ``csrc/update.h``."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("grad_scale", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2")),
        *((name, ctypes.c_float) for name in ("bias_correction2", "eps", "step_size", "decay")),
        ("decay_kind", ctypes.c_int32),
    )


class CUpdate(ctypes.Structure):
    """The ctypes counterpart of ``Update`` in ``csrc/update.h``."""

    _fields_ = (
        ("scalars", CScalars),
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_void_p) for name in ("new_master", "new_exp_avg", "new_exp_avg_sq", "grad", "param")),
        *((name, ctypes.c_int64) for name in ("numel", "cut")),
        *((f"{name}_dtype", ctypes.c_int32) for name in ("master", "moment", "grad", "param")),
        *((name, ctypes.c_int32) for name in ("tail", "num_threads")),
        ("cores", ctypes.POINTER(ctypes.c_int32)),
    )


class Library:
    """The loaded shared library, with typed functions."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._update, self._zero = loaded.deep_opt_states_update, loaded.deep_opt_states_zero
        self._update.argtypes = (ctypes.POINTER(CUpdate), ctypes.c_int64, ctypes.c_int32)
        self._zero.argtypes = (ctypes.POINTER(CUpdate),)
        self._update.restype = self._zero.restype = None
        loaded.deep_opt_states_instruction_set.restype = ctypes.c_int32
        self.instruction_set = InstructionSet(loaded.deep_opt_states_instruction_set())

    def update(self, updates: Sequence[CUpdate], instruction_set: InstructionSet) -> None:
        """Run all ``updates`` on the threads of the first one, without the GIL, and return when all are done."""
        if updates:
            self._update((CUpdate * len(updates))(*updates), len(updates), instruction_set)

    def zero(self, update: CUpdate) -> None:
        """Zero the tensors of ``update`` on the threads that would update them."""
        self._zero(ctypes.byref(update))


def library() -> Library:
    """Return the library, which one rank of a machine compiles. Raise ``KernelUnavailable`` if that fails."""
    found = _loaded()
    if isinstance(found, KernelUnavailable):
        raise found.with_traceback(None)
    return found


@cache
def _loaded() -> Library | KernelUnavailable:
    """Return the library or the error, because PyTorch's loader would next report only that the file is missing."""
    from torch.utils import cpp_extension

    folder = ""
    try:
        folder = cpp_extension._get_build_directory(NAME, verbose=False)
        cpp_extension.load(
            NAME,
            [str(FOLDER / source) for source in SOURCES],
            extra_cflags=FLAGS,
            extra_ldflags=["-fopenmp"],
            is_python_module=False,
        )
        return Library(ctypes.CDLL(str(Path(folder) / f"{NAME}.so")))
    except (OSError, RuntimeError, ImportError, SubprocessError) as error:
        unavailable = KernelUnavailable(
            f"The C++ Adam kernel cannot be compiled or loaded ({type(error).__name__}: {_summary(error, folder)}).\n"
            "It needs a C++ compiler with OpenMP (apt-get install g++, or set CXX), ninja (pip install ninja), and a "
            "folder that this user can write to (set TORCH_EXTENSIONS_DIR)."
        )
        unavailable.__cause__ = error
        return unavailable


def _summary(error: Exception, folder: str) -> str:
    """Return the error in one line: from the output of ninja, the first error of a compiler or of the shell."""
    first, *others = str(error).splitlines() or [""]
    if not others:
        return first
    complaint = next((line for line in others if "error: " in line or line.endswith(": not found")), first)
    return f"{complaint}; full output: ninja -v -C {folder}"


DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""The dtypes' values in ``csrc/update.h``."""
