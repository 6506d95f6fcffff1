"""Compiling for NVIDIA without a device: CUDA C++ and the portable kernels through NVRTC, Triton through Triton."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerant.errors import CompileError
from accelerant.runtime.compilation.cache import kernel_key
from accelerant.runtime.compilation.kernel import Binary, Builder, KernelSource, Resources, portable_header

__all__ = [
    "DIALECTS", "NvrtcResult", "compile_cuda", "compiler_version", "cuda_key", "load_nvrtc", "read_resources",
    "run_nvrtc",
]  # fmt: skip

DIALECTS = ("cuda", "portable", "triton")
"""Dialects that are compiled, the preferred first."""

_FIXED: dict[str, Any] = {"std": "c++17"}
"""NVRTC's options that are the same for each kernel and change its code; part of the cache's key."""


def cuda_key(source: KernelSource, target: str) -> str:
    """Return the disk cache's key for the result of compile_cuda."""
    dialect, program = source.pick(DIALECTS)
    return kernel_key(
        program=program if isinstance(program, str) else program.key,
        header=portable_header() if dialect == "portable" else "",
        entries=sorted(source.entries),
        options=source.options,
        fixed={} if dialect == "triton" else _FIXED,  # Triton's are in its Builder's key
        target=target,
        compiler=compiler_version(source),
    )


def compiler_version(source: KernelSource) -> str:
    """Return the compiler of a source with its version: "nvrtc 13.0", "triton 3.4"."""
    dialect, _ = source.pick(DIALECTS)
    return _triton_version() if dialect == "triton" else _nvrtc_version()


def compile_cuda(source: KernelSource, target: str) -> Binary:
    """Compile for an architecture ("sm_90a"), without driver or device; raise CompileError with the log."""
    dialect, program = source.pick(DIALECTS)
    if isinstance(program, Builder):
        built = program.build(target)
        if isinstance(built, Binary):
            return built
        program = built
    if dialect == "portable":
        program = f"{portable_header()}\n#line 1\n{program}"
    options = [*(f"--{name}={value}" for name, value in _FIXED.items()), *source.options]
    result = run_nvrtc(program, target, source.name, options)
    if not result.cubin:
        raise CompileError(f"kernel {source.name!r} does not compile for {target}", result.log or result.status)
    return Binary(
        code=result.cubin,
        symbols={entry: entry for entry in source.entries},
        resources={entry: read_resources(result.log, entry) for entry in source.entries},
        log=result.log,
    )


@dataclass(frozen=True, slots=True)
class NvrtcResult:
    """NVRTC's status ("NVRTC_SUCCESS"), the log of NVRTC and ptxas, and the code; empty where it did not compile."""

    status: str
    log: str
    cubin: bytes = b""
    ptx: str = ""


def load_nvrtc() -> Any:
    """Import NVRTC's bindings; raise CompileError if they are not installed."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise CompileError("CUDA C++ needs NVRTC (Linux, Windows): pip install cuda-bindings nvidia-cuda-nvrtc")
    from cuda.bindings import nvrtc

    return nvrtc


def run_nvrtc(text: str, target: str, name: str, options: Sequence[str]) -> NvrtcResult:
    """Compile CUDA C++ for one architecture; `name` is the program's in the compiler's messages."""
    nvrtc = load_nvrtc()
    # Without its own cache, NVRTC always runs ptxas, whose log has the registers and spills.
    arguments = [f"--gpu-architecture={target}", "--ptxas-options=-v", "--no-cache", *options]
    encoded = [argument.encode() for argument in arguments]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, None, None)

    def fetch(what: str) -> bytes:
        """Copy a result of NVRTC into a buffer of the size that it names."""
        _, count = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        buffer: bytes = b" " * count
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer

    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = fetch("ProgramLog").decode(errors="replace").replace("\0", "").strip()
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return NvrtcResult(code.name, log)
        return NvrtcResult(code.name, log, fetch("CUBIN"), fetch("PTX").decode(errors="replace").rstrip("\0"))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def read_resources(log: str, symbol: str) -> Resources:
    """Read the resources that `ptxas -v` prints for an entry point; empty where it prints none."""
    part = entry_log(log, symbol)
    if not part:
        return Resources()
    return Resources(
        registers=log_number(part, r"Used (\d+) registers"),
        spill_bytes=log_number(part, r"(\d+) bytes spill stores"),
        stack_bytes=log_number(part, r"(\d+) bytes stack frame"),
        shared_bytes=log_number(part, r"(\d+) bytes smem") or 0,
    )


def entry_log(log: str, symbol: str) -> str:
    """Return the part of ptxas's log about an entry point."""
    head = rf"Compiling entry function '{re.escape(symbol)}'"
    part = re.search(rf"{head}.*?(?=Compiling entry function|\Z)", log, re.DOTALL)
    return part[0] if part else ""


def log_number(text: str, pattern: str) -> int | None:
    """Return the first group of a pattern as a number."""
    match = re.search(pattern, text)
    return int(match[1]) if match else None


@functools.cache
def _triton_version() -> str:
    return f"triton {importlib.metadata.version('triton')}"


@functools.cache
def _nvrtc_version() -> str:
    _, major, minor = load_nvrtc().nvrtcVersion()
    return f"nvrtc {major}.{minor}"
