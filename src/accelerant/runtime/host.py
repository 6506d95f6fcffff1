"""The host: cores, memory, the processor's name, child processes, and locks that a forked child can take."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import subprocess
import sys
import weakref
from glob import iglob
from pathlib import Path
from typing import Any, TypeVar

from accelerant.errors import UnsupportedCase, UnsupportedDtype

LockT = TypeVar("LockT")

_CONTROL_GROUP = Path("/sys/fs/cgroup")

_GPU_NODES = ("/dev/dri/renderD*", "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kgsl-3d0", "/dev/mali*", "/dev/pvr*")
"""Device files of GPUs on Linux: of most drivers, NVIDIA's, Windows', Qualcomm's, Arm's and Imagination's."""

_cores_of_worker: int | None = None


def usable_cores() -> int:
    """Return the number of cores this process may keep busy: its affinity, limited by its control group's quota."""
    if _cores_of_worker is not None:
        return _cores_of_worker
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = (_CONTROL_GROUP / "cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no quota ("max"), or not Linux
    return cores


def set_usable_cores(count: int | None) -> None:
    """Set the number that usable_cores returns, in one of several worker processes of a host; None for all cores."""
    global _cores_of_worker
    _cores_of_worker = count


def control_group_room() -> int:
    """Return the bytes that Linux's control group leaves to this process, often far below the machine's memory."""
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        used = (_CONTROL_GROUP / "memory.current").read_text().strip()
        return 1 << 62 if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return 1 << 62


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load_percent", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    )


def read_meminfo(path: Path) -> dict[str, int]:
    """Return the figures of Linux's /proc/meminfo, or a process's status, that are sizes, in bytes."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def has_gpu_node() -> bool:
    """Return whether Linux shows a device file of a GPU; True on other systems, where GPUs have none. Asked once."""
    return sys.platform != "linux" or _any_file(_GPU_NODES)


@functools.cache
def _any_file(patterns: tuple[str, ...]) -> bool:
    return any(any(iglob(pattern)) for pattern in patterns)


def host_memory() -> dict[str, int]:
    """Return Linux's memory figures in bytes; elsewhere "MemTotal", and on Windows "MemAvailable"."""
    path = Path("/proc/meminfo")
    if path.is_file():
        return read_meminfo(path)
    if hasattr(os, "sysconf"):
        return {"MemTotal": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    windows = getattr(ctypes, "windll", None)
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if windows is not None and windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return {"MemTotal": status.total, "MemAvailable": status.available}
    return {}


def processor_name() -> str:
    """Return the processor's model name."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else platform.processor()


def processor_family() -> tuple[str, int]:
    """Return maker and family of an x86 processor, ("AuthenticAMD", 26) for Zen 5; ("", 0) where they are not known."""
    found = re.search(r"(GenuineIntel|AuthenticAMD)\s+cpu family\s*:\s*(\d+)", _cpuinfo())
    return (found[1], int(found[2])) if found else ("", 0)


def has_matrix_tiles() -> bool:
    """Return whether the processor multiplies tiles of bfloat16 (AMX); False where that is not known."""
    return " amx_bf16" in _cpuinfo()


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether the processor has products of bfloat16; False where that is not known."""
    return any(f" {flag}" in _cpuinfo() for flag in ("amx_bf16", "avx512_bf16"))


_VECTOR_BITS = {"avx512f": 512, "avx2": 256, "avx": 256, "sse2": 128, "sve": 128, "asimd": 128}
_MATRIX_FLAGS = {
    "amx_bf16": "bfloat16", "avx512_bf16": "bfloat16", "bf16": "bfloat16", "amx_int8": "int8", "avx512_vnni": "int8",
    "avx_vnni": "int8", "i8mm": "int8", "amx_fp16": "float16",
}  # fmt: skip
"""Flags of /proc/cpuinfo, of x86 and ARM, and the operands of the dot or matrix products that they stand for."""


@functools.cache
def processor_facts() -> dict[str, Any]:
    """Return the processor's clock, last cache, vectors and dtypes, as ComputeDevice.properties has them; on Linux."""

    def text(path: str) -> str:
        try:
            return Path("/", path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    facts: dict[str, Any] = {}
    info = text("proc/cpuinfo")
    highest = text("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    clocks = [float(clock) for clock in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", info, re.MULTILINE)]
    if highest.isdecimal() or clocks:
        facts["clock_mhz"] = int(highest) // 1000 if highest.isdecimal() else round(max(clocks))
    caches = [text(f"sys/devices/system/cpu/cpu0/cache/index{level}/size").strip() for level in range(5)]
    if sizes := [int(size[:-1]) * 1024 for size in caches if re.fullmatch(r"\d+K", size)]:
        facts["last_cache_bytes"] = max(sizes)
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    if flags:
        facts["vector_bits"] = max([0, *(bits for flag, bits in _VECTOR_BITS.items() if flag in flags)])
        halves = ["float16"] * bool({"avx512_fp16", "fphp"} & flags)
        facts["dtypes"] = ["float64", "float32", *halves]
        facts["matrix_dtypes"] = sorted({name for flag, name in _MATRIX_FLAGS.items() if flag in flags})
    return facts


def python_child(program: str, *arguments: str, site: bool = False, **streams: Any) -> subprocess.Popen[str]:
    """Start a Python program that imports from where this process does, but not from the current folder.

    A module's name in a folder of downloaded files would be enough to run its code. -I and -S also ignore PYTHON*
    variables and, without `site`, .pth files and the environment's folders, where NVRTC is found.
    """
    package = str(Path(__file__).absolute().parents[2])
    paths = [path for path in sys.path if path == package or (os.path.isabs(path) and not _is_current(path))]
    paths = paths if package in paths else [package, *paths]
    isolated = f"import sys; sys.path[:] = {paths!r}\n{program}"
    flags = ["-I"] if site else ["-I", "-S"]
    return subprocess.Popen([sys.executable, *flags, "-c", isolated, *arguments], text=True, **streams)


def run_python(program: str, text: str = "", *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program of python_child to its end, with a text as its input; an error here, of time too, kills it."""
    pipe = subprocess.PIPE
    with python_child(program, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        try:
            output, errors = child.communicate(text, timeout_s)
        except BaseException:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


def _is_current(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:  # one of the two does not exist
        return False


def refuse_masked(x: object, name: str) -> None:
    """Raise UnsupportedDtype for a masked array of NumPy: its mask would be lost, and the hidden values used."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise UnsupportedDtype(f"{name} is a masked array; pass x.filled(value) or x.compressed() instead")


def refuse_without_values(x: object, name: str) -> None:
    """Raise UnsupportedCase for a tensor of torch that has no dense values: sparse, nested, or on the device meta."""
    layout = str(getattr(x, "layout", "torch.strided"))
    nested, meta = getattr(x, "is_nested", False), getattr(x, "is_meta", False)
    if nested or meta or layout != "torch.strided":
        kind = "nested" if nested else "meta" if meta else layout.removeprefix("torch.")
        raise UnsupportedCase(f"{name} is a {kind} tensor; wanted a dense one with values, such as x.to_dense()")


def refuse_other_than_real(array: Any) -> None:
    """Raise UnsupportedDtype for an array that NumPy made of other than real numbers.

    NumPy converts them without a word: it drops imaginary parts, reads digits in texts, and makes NaN of None.
    """
    held = {type(each).__name__ for each in array.flat} if array.dtype.kind == "O" else set()
    wrong = sorted(held & {"NoneType", "str", "bytes", "complex"})
    if wrong or array.dtype.kind not in "biufO":
        raise UnsupportedDtype(f"wanted real numbers, got {', '.join(wrong) or array.dtype}")


def as_torch_takes_it(array: Any) -> Any:
    """Return an array of NumPy, or a copy in the machine's byte order with strides that torch.from_numpy takes."""
    if array.dtype.kind in "biufc":
        if not array.dtype.isnative:
            return array.astype(array.dtype.newbyteorder("="))
        if not array.flags.aligned or any(step < 0 or step % array.itemsize for step in array.strides):
            return array.copy()
    return array


_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe(lock: LockT) -> LockT:
    """Return a lock that is free in a forked child, whoever held it; what it guards is there as that thread left it."""
    _locks.add(lock)
    return lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [lock._at_fork_reinit() for lock in list(_locks)])  # as Python's modules
