"""Compiling for GPUs without a device: CUDA C++ and portable C by NVRTC, Triton by Triton, for AMD by hiprtc.

hiprtc runs in a child process: one that has loaded it, with its LLVM, aborts when PoCL loads another.
"""

import base64
import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError, ConfigError
from accelerant.runtime.compilation import kernel
from accelerant.runtime.compilation.cache import kernel_key
from accelerant.runtime.compilation.host_c import run_compiler
from accelerant.runtime.compilation.signatures import host_code
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.host import run_python

DIALECTS = ("cuda", "portable", "triton")  # dialects that are compiled, the preferred first

_FIXED: dict[str, Any] = {"std": "c++17"}
"""NVRTC's options that are the same for each kernel and change its code; part of the cache's key."""


def cuda_key(source: kernel.KernelSource, target: str) -> str:
    """Return the disk cache's key for the result of compile_cuda."""
    dialect, program = source.pick(DIALECTS)
    folders = source.compile_options.folders
    return kernel_key(
        program=program if isinstance(program, str) else program.key,
        header=kernel.portable_header() if dialect == "portable" else "",
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


def compiler_version(source: kernel.KernelSource) -> str:
    """Return the compiler of a source with its version: "nvrtc 13.0", "triton 3.4"."""
    dialect, _ = source.pick(DIALECTS)
    return _triton_version() if dialect == "triton" else _nvrtc_version()


def compile_cuda(source: kernel.KernelSource, target: str) -> kernel.Binary:
    """Compile for an architecture ("sm_90a"), without driver or device; raise CompileError with the log."""
    dialect, program = source.pick(DIALECTS)
    if isinstance(program, kernel.Builder):
        built = program.build(target)
        if isinstance(built, kernel.Binary):
            source.refuse_options(type(program).__name__)
            return built
        program = built
    options = [*source.compile_options.for_nvrtc(), *source.raw_options]
    result = run_nvrtc(program, target, source.name, options, portable=dialect == "portable", names=[*source.entries])
    if not result.cubin:
        log = explained(result.log or result.status, program, source.name)
        raise CompileError(f"kernel {source.name!r} does not compile for {target}", log)
    return kernel.Binary(
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
        # unused functions
        quiet = f"#pragma nv_diag_suppress 177\n{kernel.portable_header()}\n#pragma nv_diag_default 177"
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


def read_resources(log: str, symbol: str) -> kernel.Resources:
    """Read the resources that `ptxas -v` prints for an entry point; empty where it prints none."""
    if not (part := entry_log(log, symbol)):
        return kernel.Resources()
    return kernel.Resources(
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
    return int(match[1]) if (match := re.search(pattern, text)) else None


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


# --- AMD: hiprtc -----------------------------------------------------------------------------------------------------
HIP_DIALECTS = ("portable",)  # dialects that are compiled

_FOR_HIPRTC = ("-Wno-unused-command-line-argument",)
"""hiprtc 5.2 ignores for_hip's option of division, which is always correctly rounded there."""

_TIMEOUT_S = 300
_CHILD = "from accelerant.runtime.compilation.cuda import _answer; _answer()"


def hip_key(source: kernel.KernelSource, target: str) -> str:
    """Return the disk cache's key for the result of compile_hip."""
    text = source.text(HIP_DIALECTS, "hiprtc")
    return kernel_key(
        program=text, header=kernel.portable_header(), entries=sorted(source.entries), options=_options(source),
        headers=kernel.header_hashes(text, source.compile_options.folders), target=target, compiler=hiprtc_version(),
    )  # fmt: skip


def compile_hip(source: kernel.KernelSource, target: str) -> kernel.Binary:
    """Compile for an architecture ("gfx90a"), without driver or device; raise CompileError with the log."""
    text = f"{kernel.portable_header()}\n{kernel.first_line(source.name)}\n{source.text(HIP_DIALECTS, 'hiprtc')}"
    options = [f"--offload-arch={target}", *_options(source)]
    found = _ask(f"for {target}", text=text, name=source.name, options=options)
    if not found["code"]:
        raise CompileError(f"kernel {source.name!r} does not compile for {target}", found["log"])
    return kernel.Binary.of(base64.b64decode(found["code"]), source.entries, found["log"])


@functools.cache
def hiprtc_version() -> str:
    """Return the compiler with its versions; raise CompileError without one."""
    major, minor, runtime = _ask("to name its version")["versions"]
    return f"hiprtc {major}.{minor}, HIP {_torch_hip() or runtime}"


def library_names(stem: str) -> list[str]:
    """Return the names to load a library of ROCm by; where torch is built for ROCm, those of its version alone."""
    hip = _torch_hip()
    majors = [hip.partition(".")[0]] if hip else ["7", "6", "5"]
    beside = [str(Path(str(sys.modules["torch"].__file__)).parent / "lib" / f"lib{stem}.so")] if hip else []
    return [*beside, *(f"lib{stem}.so.{major}" for major in majors)]


def _torch_hip() -> str:
    """Return the version of HIP that torch is built for; empty where it is for others, or not imported."""
    return str(torch.version.hip or "") if (torch := sys.modules.get("torch")) is not None else ""


def _options(source: kernel.KernelSource) -> list[str]:
    return [*source.compile_options.for_hip(), *source.raw_options, *_FOR_HIPRTC]


# --- the child process -----------------------------------------------------------------------------------------------
def _ask(what: str, **asked: Any) -> dict[str, Any]:
    """Let a child process compile text, or name hiprtc's version; an architecture it does not know may crash it."""
    names = [*library_names("hiprtc"), *library_names("amdhip64")]
    try:
        done = run_python(_CHILD, json.dumps({"names": names, **asked}), timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"hiprtc does not run: {error}") from None
    if done.returncode:
        raise CompileError(f"hiprtc, asked {what}, ended with status {done.returncode}", done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        raise CompileError(found["error"])
    return found


def _answer() -> None:
    """Compile what standard input asks for, or name the version; the last line of the output is JSON."""
    asked = json.load(sys.stdin)
    try:
        hiprtc = _loaded(asked["names"])
        answer = _compiled(hiprtc, asked) if "text" in asked else {"versions": _versions(hiprtc)}
    except RuntimeError as error:
        answer = {"error": str(error)}
    print("\n" + json.dumps(answer), flush=True)


def _loaded(names: Sequence[str]) -> Any:
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "hiprtcCreateProgram"):
            library.hiprtcGetErrorString.restype = ctypes.c_char_p
            return library
    raise RuntimeError(f"hiprtc is not installed: none of {', '.join(names)} has it")


def _versions(hiprtc: Any) -> list[int]:
    """Return hiprtc's version, and HIP's where the library has it: of HIP 5.2, hiprtc says that it is 9.0."""
    major, minor, runtime = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    hiprtc.hiprtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if hasattr(hiprtc, "hipRuntimeGetVersion"):
        hiprtc.hipRuntimeGetVersion(ctypes.byref(runtime))
    return [major.value, minor.value, runtime.value]


def _compiled(hiprtc: Any, asked: dict[str, Any]) -> dict[str, str]:
    """Return the log, and the code in Base64, empty where the text does not compile."""
    program, size, options = ctypes.c_void_p(), ctypes.c_size_t(), asked["options"]

    def call(function: str, *args: Any) -> None:
        if status := getattr(hiprtc, f"hiprtc{function}")(*args):
            raise RuntimeError(f"hiprtc{function}: {hiprtc.hiprtcGetErrorString(status).decode()}")

    def fetch(what: str) -> bytes:
        call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        if size.value:
            call(f"Get{what}", program, buffer)
        return buffer.raw

    name = asked["name"].encode()
    call("CreateProgram", ctypes.byref(program), asked["text"].encode(), name, 0, None, None)
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = hiprtc.hiprtcCompileProgram(program, len(options), array)
    log = fetch("ProgramLog").decode(errors="replace").replace("\0", "").strip()
    if status:
        return {"code": "", "log": log or hiprtc.hiprtcGetErrorString(status).decode()}
    return {"code": base64.b64encode(fetch("Code")).decode(), "log": log}


DEFAULT_BLOCK = 256
"""Threads a block that occupancy is computed for, where neither the kernel nor the caller says."""

_WARP = 32
_REGISTER_UNIT = 256
_PARTITIONS = 4
_MAX_THREADS = 1024
_MAX_REGISTERS = 255
_REGISTERS = 65536
KIB = 1024


# --- occupancy -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class MultiprocessorLimits:
    """Capacity of one multiprocessor: resident warps and blocks, shared memory, named barriers (0: no limit).

    The system keeps `reserved_bytes` of shared memory for each block, and blocks get it in units of
    `shared_unit_bytes`.
    """

    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int = KIB
    shared_unit_bytes: int = 128
    barriers: int = 0


LIMITS = {
    75: MultiprocessorLimits(32, 16, 64 * KIB, reserved_bytes=0, shared_unit_bytes=256),
    80: MultiprocessorLimits(64, 32, 164 * KIB),
    86: MultiprocessorLimits(48, 16, 100 * KIB),
    87: MultiprocessorLimits(48, 16, 164 * KIB),
    88: MultiprocessorLimits(48, 16, 100 * KIB),
    89: MultiprocessorLimits(48, 24, 100 * KIB),
    90: MultiprocessorLimits(64, 32, 228 * KIB, barriers=64),
    100: MultiprocessorLimits(64, 32, 228 * KIB, barriers=64),
    103: MultiprocessorLimits(64, 32, 228 * KIB, barriers=64),
    110: MultiprocessorLimits(48, 24, 228 * KIB, barriers=24),
    120: MultiprocessorLimits(48, 24, 100 * KIB, barriers=24),
    121: MultiprocessorLimits(48, 24, 100 * KIB, barriers=24),
}
"""Compute capability, times ten -> limits. Each has 65,536 registers, allocated in units of 256 a warp."""


@dataclass(frozen=True, slots=True)
class Occupancy(JsonRecord):
    """Blocks and warps of a kernel that are resident on one multiprocessor, 0 where not even one block fits.

    `percent` is of the warps that the multiprocessor can hold. `limited_by` is "warps", "blocks", "registers", "shared
    memory" or "barriers"; several equal limits are joined by " and ".
    """

    threads: int
    blocks: int
    warps: int
    percent: float
    limited_by: str


def occupancy(
    target: str, threads: int, *, registers: int, shared_bytes: int = 0, barriers: int = 0
) -> Occupancy | None:
    """Return the theoretical occupancy; None for an architecture that LIMITS does not have.

    Registers are those of a thread. Shared memory (static and dynamic) and named barriers, as ptxas prints them, are
    those of a block.
    """
    number = re.fullmatch(r"sm_(\d+)[af]?", target)
    limits = LIMITS.get(int(number[1])) if number else None
    if limits is None:
        return None
    warps = -(-threads // _WARP)
    shared = _round_up(shared_bytes + limits.reserved_bytes, limits.shared_unit_bytes)
    fits = {
        "warps": limits.warps // warps if threads <= _MAX_THREADS else 0,
        "blocks": limits.blocks,
        "registers": 0,
        "shared memory": limits.shared_bytes // shared if shared else limits.blocks,
    }
    # A warp takes units of registers from the quarter of the file that belongs to its scheduler.
    per_warp = max(_round_up(registers * _WARP, _REGISTER_UNIT), _REGISTER_UNIT)
    if registers <= _MAX_REGISTERS and per_warp * _round_up(warps, _PARTITIONS) <= _REGISTERS:
        fits["registers"] = _REGISTERS // _PARTITIONS // per_warp * _PARTITIONS // warps
    if shared_bytes > limits.shared_bytes - limits.reserved_bytes:
        fits["shared memory"] = 0
    if limits.barriers and barriers:
        fits["barriers"] = limits.barriers // barriers
    blocks = min(fits.values())
    binding = " and ".join(name for name, count in fits.items() if count == blocks)
    return Occupancy(threads, blocks, blocks * warps, 100.0 * blocks * warps / limits.warps, binding)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


# --- inspection ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CompilerMessage:
    """An error or warning ("severity") of the compiler.

    Attributes:
        line: from 1; None for messages of the assembler, which knows no lines.
        excerpt: the source line with a mark below it, as the compiler prints them; may be empty.
    """

    severity: str
    file: str
    line: int | None
    text: str
    excerpt: str = ""

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.severity}: {self.text}" + (f"\n{self.excerpt}" if self.excerpt else "")


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A kernel of the file, with its demangled name, and the resources of a thread or block.

    Shared memory is the static part. `max_threads` is from __launch_bounds__, None without. The occupancy is that of
    `max_threads` or of the block asked for; None for an unknown architecture.
    """

    name: str
    symbol: str
    resources: kernel.Resources
    barriers: int
    max_threads: int | None
    occupancy: Occupancy | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        fields = asdict(self)
        return {"name": fields.pop("name"), "symbol": fields.pop("symbol"), **fields.pop("resources"), **fields}


@dataclass(frozen=True, slots=True)
class Inspection:
    """A file compiled for one architecture, by NVRTC in `compile_ms`; entry points in the order of the PTX."""

    target: str
    entries: tuple[EntryPoint, ...]
    warnings: tuple[CompilerMessage, ...]
    cubin: bytes
    ptx: str
    compile_ms: float


def known_targets() -> tuple[str, ...]:
    """Return the architectures that NVRTC compiles for, without the suffixes a and f; CompileError without NVRTC."""
    _, numbers = load_nvrtc().nvrtcGetSupportedArchs()
    return tuple(f"sm_{number}" for number in numbers)


def nvrtc_version() -> str:
    """Return the version of NVRTC: "NVRTC 13.0"."""
    _, major, minor = load_nvrtc().nvrtcVersion()
    return f"NVRTC {major}.{minor}"


def inspect_cuda(
    text: str,
    target: str,
    *,
    name: str,
    include: Sequence[Path] = (),
    options: kernel.CompileOptions = kernel.CompileOptions(),  # noqa: B008  frozen
    entries: Sequence[str] = (),
    block: int | None = None,
    dynamic_shared_bytes: int = 0,
) -> Inspection:
    """Compile a file's text for one architecture and describe its entry points.

    Text that uses ACL_KERNEL is compiled in the portable dialect, other text as CUDA C++.

    Args:
        name: of the file, for the compiler's messages.
        include: folders to search for headers, after those of `options` and before CUDA's own.
        options: for the whole file.
        entries: templates to instantiate, with their arguments: "scale<float, 4>".
        block: threads a block for occupancy; the kernel's launch bounds or 256 by default.
        dynamic_shared_bytes: added to the static shared memory for occupancy.

    Raises:
        CompileError: with the log, which `read_messages` parses; or there is no NVRTC.
        ConfigError: the compiler does not know the architecture.
    """
    portable = re.search(r"\bACL_KERNEL\b", text) is not None
    began = time.perf_counter()
    chosen = [*options.for_nvrtc(), *(f"--include-path={folder}" for folder in include)]
    result = run_nvrtc(text, target, name, chosen, portable=portable, names=entries)
    took_ms = (time.perf_counter() - began) * 1e3
    if "--nv_arch" in result.log or "--gpu-architecture" in result.log:
        raise ConfigError(f"{nvrtc_version()} does not compile for {target!r}")
    if result.status == "NVRTC_ERROR_INVALID_OPTION":
        raise ConfigError(f"{nvrtc_version()} refuses an option: {result.log or ' '.join(chosen)}")
    if not result.cubin:
        raise CompileError(f"{name} does not compile for {target}", explained(result.log or result.status, text, name))
    found = []
    for symbol, threads in _launch_bounds(result.ptx):
        resources = read_resources(result.log, symbol)
        barriers = log_number(entry_log(result.log, symbol), r"used (\d+) barriers") or 0
        fits = None
        if resources.registers is not None:
            fits = occupancy(
                target,
                block or threads or DEFAULT_BLOCK,
                registers=resources.registers,
                shared_bytes=(resources.shared_bytes or 0) + dynamic_shared_bytes,
                barriers=barriers,
            )
        found.append(EntryPoint(_demangle(symbol), symbol, resources, barriers, threads, fits))
    warnings = tuple(message for message in read_messages(result.log, name) if message.severity == "warning")
    return Inspection(target, tuple(found), warnings, result.cubin, result.ptx, took_ms)


def amd_compiler() -> str:
    """Return the path of a clang, ROCm's first; raise ConfigError without one."""
    names = ("amdclang", "clang", *(f"clang-{version}" for version in range(24, 16, -1)))
    if (path := next(filter(None, map(shutil.which, names)), None)) is None:
        raise ConfigError("AMD's architectures need clang 17 or newer (amdclang of ROCm, or clang)")
    return path


_FOR_AMD = (
    "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-fno-color-diagnostics",
    "-fno-diagnostics-show-line-numbers",
)  # fmt: skip


def inspect_amd(
    text: str,
    target: str,
    *,
    name: str,
    include: Sequence[Path] = (),
    options: kernel.CompileOptions = kernel.CompileOptions(),  # noqa: B008  frozen
) -> Inspection:
    """Compile text in the portable dialect for an AMD architecture ("gfx90a") by clang, without ROCm.

    Arguments and errors are those of inspect_cuda. Registers are the vector registers of a thread. `ptx` has the
    assembly, and `cubin` nothing.
    """
    if not re.search(r"\bACL_KERNEL\b", text):
        raise ConfigError(f"{name}: for {target} portable C is compiled (ACL_KERNEL), not CUDA C++")
    folders = (f"-I{folder}" for folder in include)
    command = [amd_compiler(), *_FOR_AMD, f"--offload-arch={target}", *options.for_hip(), *folders]
    began = time.perf_counter()
    source = f"{kernel.portable_header()}\n{kernel.first_line(name)}\n{text}"
    done = run_compiler([*command, "-S", "-", "-o", "-"], source)
    took_ms = (time.perf_counter() - began) * 1e3
    if "invalid target ID" in done.stderr:
        raise ConfigError(f"{command[0]} does not compile for {target!r}")
    log = re.sub(r"^(.+?):(\d+):\d+: ((?:fatal )?)(error|warning):", r"\1(\2): \4:", done.stderr, flags=re.MULTILINE)
    if done.returncode:
        log = re.sub(r"^\d+ errors? generated.*", "", log, flags=re.M)
        raise CompileError(f"{name} does not compile for {target}", log)
    found = []
    for notes in done.stdout.partition("amdhsa.kernels:")[2].split("\n  - .")[1:]:
        fields = dict(re.findall(r"^ {0,4}\.(\w+): +(\S+)$", notes, re.MULTILINE))
        words = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size")
        registers, spills, stack, shared = (int(fields[word]) for word in words)
        resources = kernel.Resources(registers, 4 * spills, stack, shared)
        threads = int(fields["max_flat_workgroup_size"])
        found.append(EntryPoint(_demangle(fields["name"]), fields["name"], resources, 0, threads, None))
    warnings = tuple(message for message in read_messages(log, name) if message.severity == "warning")
    return Inspection(target, tuple(found), warnings, b"", done.stdout, took_ms)


# --- the compiler's output -------------------------------------------------------------------------------------------
_HEAD = re.compile(
    r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?(?P<severity>error|warning|note|remark)"
    r"(?: #[\w-]+)?: (?P<text>.*)$"
)
_ASSEMBLER = re.compile(r"^ptxas\b[^:]*?[;\s]\s*(?P<severity>error|fatal|warning)\s*: (?P<text>.*)$")


def read_messages(log: str, name: str) -> list[CompilerMessage]:
    """Return the errors and warnings in a CompileError's log of NVRTC.

    `name` is the file's, for messages of the assembler, which names none.
    """
    messages: list[CompilerMessage] = []
    lines = log.replace("\0", "").splitlines()
    for number, line in enumerate(lines):
        head = _HEAD.match(line)
        if head is not None and head["severity"] in ("error", "warning"):
            words, excerpt = _message_body(lines[number + 1 :])
            text = " ".join([head["text"], *words])
            messages.append(CompilerMessage(head["severity"], head["file"], int(head["line"]), text, excerpt))
            continue
        assembler = _ASSEMBLER.match(line)
        if assembler is not None and not assembler["text"].startswith("Ptx assembly aborted"):
            severity = "warning" if assembler["severity"] == "warning" else "error"
            messages.append(CompilerMessage(severity, name, None, assembler["text"].strip()))
    return messages


def _message_body(lines: Sequence[str]) -> tuple[list[str], str]:
    words: list[str] = []
    for line in lines:
        if not line.strip() or _HEAD.match(line):
            break
        if not line.strip(" ^~") and words:
            return [word.strip() for word in words[:-1]], f"{words[-1]}\n{line}"
        words.append(line)
    return [word.strip() for word in words], ""


def _launch_bounds(ptx: str) -> list[tuple[str, int | None]]:
    entries = []
    for entry in re.finditer(r"\.entry\s+([\w$]+)(.*?)^\{", ptx, re.DOTALL | re.MULTILINE):
        bound = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", entry[2])
        threads = int(bound[1]) * int(bound[2] or 1) * int(bound[3] or 1) if bound is not None else None
        entries.append((entry[1], threads))
    return entries


def _demangle(symbol: str) -> str:
    """Return a symbol's C++ name; the symbol itself where it is not mangled, or there is no C++ runtime."""
    if not symbol.startswith("_Z"):
        return symbol
    try:
        demangle, free = ctypes.CDLL("libstdc++.so.6").__cxa_demangle, ctypes.CDLL(None).free
    except (OSError, TypeError, AttributeError):
        return symbol
    demangle.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    if not (text := demangle(symbol.encode(), None, None, ctypes.byref(ctypes.c_int()))):
        return symbol
    try:
        return ctypes.string_at(text).decode()
    finally:
        free(text)
