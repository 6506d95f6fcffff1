"""A launch through the driver's own entry point, for the least host time.

cuda.core compiles and loads; its `launch` converts each argument in Python. Here a kernel's argument types become one
struct format when it is loaded; a launch packs the arguments with one call, which also refuses numbers that do not
fit, and calls cuLaunchKernel. Each thread has its own argument storage, since the driver reads it while other threads
run.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from accelerant.errors import AccelerantError, CompileError, DeviceLost, LaunchError
from accelerant.runtime.provider import check_scalar

__all__ = ["LoadedKernel", "cuda_error"]

_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "f32": "f", "f64": "d"}

_STICKY = re.compile(
    r"ILLEGAL_ADDRESS|LAUNCH_FAILED|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|INVALID_ADDRESS_SPACE|INVALID_PC|"
    r"HARDWARE_STACK_ERROR|ASSERT|LAUNCH_TIMEOUT|ECC_UNCORRECTABLE|illegal memory access|unspecified launch failure"
)
"""Errors after which no call of this process can use the device."""


def cuda_error(text: str, what: str) -> AccelerantError:
    """The error to raise for what the driver or torch said."""
    first = text.splitlines()[0] if text else "unknown error"
    if _STICKY.search(text):
        return DeviceLost(f"{what}: {first}. This process can no longer use the device; start a new one")
    return LaunchError(f"{what}: {first}")


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    size = ctypes.c_uint
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[size] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return library


def _error_name(code: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    return (name.value or str(code).encode()).decode()


_thread = threading.local()
"""Where it has `ready`, the thread has a CUDA context; libraries make one on first use, we must not assume it."""


class LoadedKernel:
    """An entry point on a device, ready to launch.

    Args:
        name: for errors.
        handle: the driver's CUkernel.
        kinds: argument types, as KernelSource.entries gives them.
        extra: pointers that the compiler's code takes besides, all null.
        shared_bytes: dynamic shared memory of a block.
        threads: threads a block where the compiler fixed them, else 0.
    """

    def __init__(
        self, name: str, handle: int, kinds: Sequence[str], *, extra: int = 0, shared_bytes: int = 0, threads: int = 0
    ) -> None:
        unknown = [kind for kind in kinds if not kind.startswith("*") and kind not in _FORMATS]
        if unknown:
            raise CompileError(f"kernel {name!r}: unknown argument type {unknown[0]!r}")
        self.name = name
        self.kinds = tuple(kinds)
        self.threads = threads
        self._handle = handle
        self._shared_bytes = shared_bytes
        self._is_pointer = tuple(kind.startswith("*") for kind in kinds)
        self._format = "@" + "".join("P" if kind.startswith("*") else _FORMATS[kind] for kind in kinds) + "P" * extra
        self._pack = struct.Struct(self._format).pack_into
        self._extra = (0,) * extra
        self._storage = threading.local()

    def start(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], stream: int) -> None:
        """Launch on a raw stream of the current device.

        Raises:
            LaunchError: an argument does not fit or the driver refused; nothing ran.
            DeviceLost: an earlier kernel broke the device.
        """
        try:
            storage, parameters = self._storage.pair
        except AttributeError:
            storage, parameters = self._new_storage()
        try:
            values = [arg.data_ptr() if pointer else arg for pointer, arg in zip(self._is_pointer, args, strict=True)]
            self._pack(storage, 0, *values, *self._extra)
        except (struct.error, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise self._misfit(args) from error
        x, y, z = (*grid, 1, 1)[:3] if len(grid) < 3 else grid
        bx, by, bz = (*block, 1, 1)[:3] if len(block) < 3 else block
        code = _driver().cuLaunchKernel(self._handle, x, y, z, bx, by, bz, self._shared_bytes, stream, parameters, None)
        if code:
            raise cuda_error(_error_name(code), f"kernel {self.name!r}, grid {tuple(grid)}, block {tuple(block)}")

    def _new_storage(self) -> tuple[Any, Any]:
        """Argument storage of this thread, and the array of pointers into it that the driver reads."""
        if not hasattr(_thread, "ready"):
            torch.cuda.set_device(torch.cuda.current_device())
            _thread.ready = True
        storage = ctypes.create_string_buffer(max(8, struct.calcsize(self._format)))
        base = ctypes.addressof(storage)
        codes = self._format[1:]
        offsets = [struct.calcsize(f"@{codes[: i + 1]}") - struct.calcsize(f"@{code}") for i, code in enumerate(codes)]
        parameters = (ctypes.c_void_p * max(1, len(codes)))(*(base + offset for offset in offsets))
        self._storage.pair = storage, parameters
        return storage, parameters

    def _misfit(self, args: Sequence[object]) -> LaunchError:
        """Which argument does not fit, in words."""
        for position, (kind, arg) in enumerate(zip(self.kinds, args, strict=False)):
            where = f"kernel {self.name!r}, argument {position}"
            if not kind.startswith("*"):
                try:
                    check_scalar(self.name, position, kind, arg)
                except LaunchError as error:
                    return error
            elif not hasattr(arg, "data_ptr"):
                return LaunchError(f"{where}: wanted a buffer, got {type(arg).__name__}")
        return LaunchError(f"kernel {self.name!r} takes {len(self.kinds)} arguments, got {len(args)}")
