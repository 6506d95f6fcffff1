"""Compiling for NVIDIA without a device: CUDA C++ and the portable kernels through NVRTC, Triton through Triton."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError
from accelerant.runtime.compilation import kernel
from accelerant.runtime.compilation.cache import kernel_key
from accelerant.runtime.compilation.kernel import Binary, KernelSource, Resources, portable_header
from accelerant.runtime.compilation.signatures import host_code

DIALECTS = ("cuda", "portable", "triton")  # dialects that are compiled, the preferred first

_FIXED: dict[str, Any] = {"std": "c++17"}
"""NVRTC's options that are the same for each kernel and change its code; part of the cache's key."""


def cuda_key(source: KernelSource, target: str) -> str:
    """Return the disk cache's key for the result of compile_cuda."""
    dialect, program = source.pick(DIALECTS)
    folders = source.compile_options.folders
    return kernel_key(
        program=program if isinstance(program, str) else program.key,
        header=portable_header() if dialect == "portable" else "",
        entries=sorted(source.entries),
        options=[
            *source.compile_options.for_nvrtc(),
            *source.raw_options,
            *[source.shared_bytes] * bool(source.shared_bytes),
        ],
        headers=[kernel.header_hashes(program, folders), toolkit_headers(program)] if isinstance(program, str) else [],
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
    if isinstance(program, kernel.Builder):
        built = program.build(target)
        if isinstance(built, Binary):
            source.refuse_options(type(program).__name__)
            return built
        program = built
    options = [*source.compile_options.for_nvrtc(), *source.raw_options]
    result = run_nvrtc(program, target, source.name, options, portable=dialect == "portable", names=[*source.entries])
    if not result.cubin:
        log = explained(result.log or result.status, program, source.name)
        raise CompileError(f"kernel {source.name!r} does not compile for {target}", log)
    return Binary(
        code=result.cubin,
        symbols=result.symbols,
        resources={entry: read_resources(result.log, symbol) for entry, symbol in result.symbols.items()},
        metadata={"shared_bytes": source.shared_bytes} if source.shared_bytes else {},
        log=result.log,
    )


@dataclass(frozen=True, slots=True)
class NvrtcResult:
    """NVRTC's status ("NVRTC_SUCCESS"), the log of NVRTC and ptxas, and the code; empty where it did not compile."""

    status: str
    log: str
    cubin: bytes = b""
    ptx: str = ""
    symbols: dict[str, str] = field(default_factory=dict)


def load_nvrtc() -> Any:
    """Import NVRTC's bindings; raise CompileError if they are not installed."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise CompileError("CUDA C++ needs NVRTC (Linux, Windows): pip install cuda-bindings nvidia-cuda-nvrtc")
    _load_nvrtc_12()
    from cuda.bindings import nvrtc

    return nvrtc


@functools.cache
def _load_nvrtc_12() -> None:
    """Load NVRTC 12 for cuda-bindings 12, which would take the newest of several NVRTCs that are installed."""
    if not importlib.metadata.version("cuda-bindings").startswith("12."):
        return
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations or () if packages is not None else ():
        with contextlib.suppress(OSError):
            ctypes.CDLL(f"{folder}/cuda_nvrtc/lib/libnvrtc.so.12", ctypes.RTLD_GLOBAL)
            return


def run_nvrtc(
    text: str, target: str, name: str, options: Sequence[str], *, portable: bool = False, names: Sequence[str] = ()
) -> NvrtcResult:
    """Compile CUDA C++ or portable C for an architecture; `names` are entry points to make: "scale<float, 4>"."""
    nvrtc = load_nvrtc()
    folders = [*toolkit_headers(text)]
    arguments = [f"--gpu-architecture={target}", "--ptxas-options=-v"]
    if nvrtc.nvrtcVersion()[1:] >= (12, 9):  # its cache would leave out ptxas, whose log has the registers and spills
        arguments.append("--no-cache")
    arguments += [f"--{option}={value}" for option, value in _FIXED.items()]
    arguments += [*options, *(f"--include-path={folder}" for folder in folders)]
    encoded = [argument.encode() for argument in arguments]
    standard = _standard_headers(any(Path(folder, "cuda", "std").is_dir() for folder in folders))
    if portable:
        quiet = f"#pragma nv_diag_suppress 177\n{portable_header()}\n#pragma nv_diag_default 177"  # unused functions
        text = f"{quiet}\n{kernel.first_line(name)}\n{text}"
    _, program = nvrtc.nvrtcCreateProgram(
        text.encode(), name.encode(), len(standard), [*map(str.encode, standard.values())], [*map(str.encode, standard)]
    )
    for expression in names:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())

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
        symbols = {each: nvrtc.nvrtcGetLoweredName(program, each.encode())[1].decode() for each in names}
        return NvrtcResult(code.name, log, fetch("CUBIN"), fetch("PTX").decode(errors="replace").rstrip("\0"), symbols)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def toolkit_headers(text: str) -> dict[str, int]:
    """Return the folders of CUDA's headers, if the text includes any, and the time of their last change (ns)."""
    if not re.search(r"^[ \t]*#[ \t]*include\b", text, re.MULTILINE):
        return {}
    return {str(folder): folder.stat().st_mtime_ns for folder in _toolkit_folders()}


@functools.cache
def _toolkit_folders() -> tuple[Path, ...]:
    folders: list[Path] = []
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        from cuda.pathfinder import find_nvidia_header_directory

        if folder := find_nvidia_header_directory("cudart"):
            folders += [Path(folder), Path(folder) / "cccl"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return tuple(folder for folder in folders if folder.is_dir())


_BUILT_IN = ("assert.h", "cassert", "cstdio", "math.h", "stdio.h")
"""Headers of functions that NVRTC has without them: printf, assert, sqrtf."""

_STANDARD = (
    "array", "atomic", "bit", "cfloat", "climits", "cmath", "complex", "concepts", "cstddef", "cstdint", "cstdlib",
    "cstring", "functional", "initializer_list", "iterator", "limits", "numbers", "numeric", "optional", "span",
    "tuple", "type_traits", "utility", "variant",
)  # fmt: skip
"""Headers of C++ that CUDA has for devices, as <cuda/std/NAME>."""

_OF_C = {"float.h": "cfloat", "limits.h": "climits", "stddef.h": "cstddef", "stdint.h": "cstdint"}


@functools.cache
def _standard_headers(has_cuda_std: bool) -> dict[str, str]:
    """Return the headers that the compiler gets from memory: name -> text."""
    headers = dict.fromkeys(_BUILT_IN, "")
    if has_cuda_std:
        text = "#include <cuda/std/{}>\nnamespace std {{ using namespace ::cuda::std; }}\n"
        headers |= {name: text.format(name) for name in _STANDARD}
        headers |= {name: f"#include <cuda/std/{other}>\n" for name, other in _OF_C.items()}
    return headers


def explained(log: str, text: str, name: str) -> str:
    """Return the compiler's log, preceded by errors that say what to do about host code and missing headers."""
    lines = [
        f"{name}({line}): error: {what} is code for the host: take it out; NVRTC compiles kernels and their functions"
        for line, what in host_code(text)
    ]
    missing = re.search(r'^(.+\(\d+\)): .*cannot open source file "([^"]+)"', log, re.MULTILINE)
    if missing and (missing[2] in (*_STANDARD, *_OF_C) or missing[2].startswith("cuda")):
        advice = "pip install nvidia-cuda-runtime nvidia-cuda-cccl, or install the CUDA toolkit and set CUDA_HOME"
        lines.append(f"{missing[1]}: error: <{missing[2]}> needs CUDA's headers, which are not installed: {advice}")
    return "\n".join([*lines, log])


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
    """Return NVRTC and its version: that of the wheel, which cuda-bindings prefers, since loading it takes 70 ms."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        release = importlib.metadata.version("cuda-bindings").split(".")[0]
        major, minor = importlib.metadata.version(f"nvidia-cuda-nvrtc{'-cu12' * (release == '12')}").split(".")[:2]
        if major == release:
            return f"nvrtc {major}.{minor}"
    _, *version = load_nvrtc().nvrtcVersion()
    return f"nvrtc {version[0]}.{version[1]}"
