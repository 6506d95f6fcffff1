"""Compiling for NVIDIA: CUDA C++ and the portable kernels through NVRTC, Triton through Triton; needs no device."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import re
from typing import Any

from accelerant.errors import CompileError
from accelerant.runtime.compilation.cache import kernel_key
from accelerant.runtime.compilation.kernel import Binary, Builder, KernelSource, Resources
from accelerant.runtime.compilation.portable import portable_header

__all__ = ["DIALECTS", "compile_cuda", "compiler_version", "cuda_key"]

DIALECTS = ("cuda", "portable", "triton")
"""What is compiled, the preferred first."""

_FIXED: dict[str, Any] = {"std": "c++17"}
"""NVRTC's options that are the same for each kernel and change its code; part of the cache's key."""


def cuda_key(source: KernelSource, target: str) -> str:
    """The disk cache's key of what compile_cuda makes of the same arguments."""
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
    """Of the compiler that the source goes through: "nvrtc 13.0", "triton 3.4"."""
    dialect, _ = source.pick(DIALECTS)
    return _triton_version() if dialect == "triton" else _nvrtc_version()


def compile_cuda(source: KernelSource, target: str) -> Binary:
    """Compile for an architecture; needs neither a driver nor a device.

    Args:
        source: in a dialect that CudaProvider knows.
        target: "sm_90", "sm_90a", ...

    Raises:
        CompileError: with the compiler's log.
    """
    dialect, program = source.pick(DIALECTS)
    if isinstance(program, Builder):
        built = program.build(target)
        if isinstance(built, Binary):
            return built
        program = built
    if dialect == "portable":
        program = f"{portable_header()}\n#line 1\n{program}"
    return _nvrtc(source, program, target)


def _nvrtc(source: KernelSource, program: str, target: str) -> Binary:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    # Without its own cache, NVRTC always runs ptxas, whose log has the registers and spills that we keep.
    options = ProgramOptions(
        name=source.name, arch=target, no_cache=True, ptxas_options=["-v", *source.options], **_FIXED
    )
    try:
        code = Program(program, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        raise CompileError(f"kernel {source.name!r} does not compile for {target}", str(error)) from error
    text = log.getvalue()
    return Binary(
        code=code,
        symbols={entry: entry for entry in source.entries},
        resources={entry: _resources(text, entry) for entry in source.entries},
        log=text,
    )


def _resources(log: str, entry: str) -> Resources:
    """Read what ptxas -v prints of an entry."""
    part = re.search(
        rf"Compiling entry function '{re.escape(entry)}'.*?(?=Compiling entry function|\Z)", log, re.DOTALL
    )
    if part is None:
        return Resources()

    def number(pattern: str) -> int | None:
        match = re.search(pattern, part.group(0))
        return int(match.group(1)) if match else None

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem") or 0,
    )


@functools.cache
def _triton_version() -> str:
    return f"triton {importlib.metadata.version('triton')}"


@functools.cache
def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"
