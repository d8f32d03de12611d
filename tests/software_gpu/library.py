"""Compile the device's C++ extension once per version of its sources, load it, and declare its functions."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import sys
from functools import cache
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch
from torch.utils import cpp_extension

DEVICE_TYPE = "software_gpu"
FOLDER = Path(__file__).parent / "csrc"
FLAGS = ["-O1", "-Wall", "-DNDEBUG"]
"""PyTorch is compiled with NDEBUG, on which the layout of some of its classes depends."""

RESOURCES = ("h2d", "d2h", "both_directions", "pageable", "host_memory", "gpu", "cpu")
"""The shared resources of the time model, in the order of ``Resource`` in ``csrc/clock.h``."""

UNLIMITED = float("inf")
Launched = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
HostWait = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
Amounts = ctypes.c_double * len(RESOURCES)


class CRange(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64), ("writes", ctypes.c_int32))


class CSettings(ctypes.Structure):
    _fields_ = (
        ("lazy_s", ctypes.c_double),
        ("jitter_s", ctypes.c_double),
        ("capacities", Amounts),
        *((name, ctypes.c_double) for name in ("flops_per_s", "device_bytes_per_s", "launch_s", "copy_latency_s")),
        *((name, ctypes.c_double) for name in ("slowed_by_host_work", "slowed_by_copies")),
        *((name, ctypes.c_uint64) for name in ("seed", "memory_bytes")),
        *((name, ctypes.c_int32) for name in ("lazy", "execute_first", "trace", "emulated")),
        *((name, ctypes.c_int32) for name in ("kernels_per_product", "racecheck")),
    )


U64, I64, I32, F64 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
TEXT, HANDLE = ctypes.c_char_p, ctypes.c_void_p
DOUBLES, RANGES = ctypes.POINTER(F64), ctypes.POINTER(CRange)

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "last_error": (TEXT, ()),
    "configure": (None, (ctypes.POINTER(CSettings),)),
    "drain": (None, ()),
    "take_error": (None, (TEXT, U64)),
    "set_error": (None, (TEXT,)),
    "real_address": (U64, (U64,)),
    "launch": (I32, (I64, Launched, U64, TEXT, I32, DOUBLES, F64, RANGES, I32)),
    "access_on_host": (None, (TEXT, RANGES, I32)),
    "snapshot_of_host": (HANDLE, ()),
    "order_host_after": (None, (HANDLE,)),
    "delete_snapshot": (None, (HANDLE,)),
    "take_races": (TEXT, ()),
    "begin_host_work": (HANDLE, (DOUBLES,)),
    "end_host_work": (None, (HANDLE,)),
    "simulate": (None, (I32, DOUBLES, ctypes.POINTER(I32), *(DOUBLES,) * 4)),
    "register": (I32, (U64, U64)),
    "unregister": (I32, (U64,)),
    "empty_host_cache": (None, ()),
    "forked": (I32, ()),
    "on_host_wait": (None, (HostWait,)),
    "take_lag_s": (F64, ()),
    "take_spans": (TEXT, ()),
}


def _name() -> str:
    digest = hashlib.sha256(repr((FLAGS, torch.__version__, sys.implementation.cache_tag)).encode())
    for path in sorted(FOLDER.iterdir()):
        digest.update(path.read_bytes())
    return f"software_gpu_{digest.hexdigest()[:12]}"


def _every_source(folder: Path) -> Path:
    path = folder / "every_source.cpp"
    # Another process may compile the file at the same time.
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text("".join(f'#include "{source}"\n' for source in sorted(FOLDER.glob("*.cpp"))))
    written.replace(path)
    return path


def compile_library() -> Path:
    name = _name()
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    # The linker writes the library while other processes may look for it already.
    compiled = folder / "compiled"
    if not compiled.exists():
        try:
            # PyTorch's loader lets one of several processes compile, and the others wait.
            cpp_extension.load(name, str(_every_source(folder)), extra_cflags=FLAGS, is_python_module=False)
        except (OSError, RuntimeError, ImportError, SubprocessError) as error:
            raise RuntimeError(
                f"The software GPU cannot be compiled ({type(error).__name__}: {error}).\n"
                "It needs a C++20 compiler (apt-get install g++, or set CXX), ninja (pip install ninja) and the "
                "headers of Python (apt-get install python3-dev)."
            ) from error
        compiled.touch()
    return folder / f"{name}.so"


@cache
def library() -> ctypes.CDLL:
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    # Some operators have their meta kernels in Python.
    importlib.import_module("torch._meta_registrations")
    path = compile_library()
    torch.ops.load_library(str(path))
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, f"software_gpu_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


def call(name: str, *arguments: Any) -> Any:
    return getattr(library(), f"software_gpu_{name}")(*arguments)


def checked(name: str, *arguments: Any) -> None:
    if call(name, *arguments):
        raise RuntimeError(call("last_error").decode())


def amounts(**used: float) -> Any:
    unknown = used.keys() - set(RESOURCES)
    assert not unknown, unknown
    return Amounts(*(used.get(name, 0.0) for name in RESOURCES))
