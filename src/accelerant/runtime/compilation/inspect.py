"""What a CUDA C++ file becomes: compiled by NVRTC with no device, its entry points found and described.

Unlike the provider's compile_cuda, which knows a kernel's entry points beforehand, this takes any file: extern "C"
functions, mangled names and instantiated templates. One run of NVRTC gives machine code, PTX (which has the launch
bounds) and the log of ptxas (which has registers, spills, stack and shared memory).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError, ConfigError
from accelerant.runtime.compilation.kernel import Resources
from accelerant.runtime.compilation.occupancy import Occupancy, occupancy
from accelerant.runtime.compilation.portable import portable_header

__all__ = [
    "DEFAULT_BLOCK",
    "EntryPoint",
    "Inspection",
    "Message",
    "compiler_version",
    "inspect_cuda",
    "known_targets",
    "read_messages",
]

DEFAULT_BLOCK = 256
"""Threads a block that occupancy is reckoned for, where neither the kernel nor the caller says."""


@dataclass(frozen=True, slots=True)
class Message:
    """What the compiler says of a place in the file.

    Attributes:
        severity: "error" or "warning".
        file: as it was named to the compiler.
        line: from 1; None where the assembler speaks, which knows no lines.
        text: the compiler's words.
        excerpt: the source line and a mark below it, as the compiler prints them; may be empty.
    """

    severity: str
    file: str
    line: int | None
    text: str
    excerpt: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.severity}: {self.text}" + (f"\n{self.excerpt}" if self.excerpt else "")


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A kernel of the file.

    Attributes:
        name: as a person writes it.
        symbol: in the machine code.
        resources: what a thread or block takes; shared memory is the static part.
        barriers: named barriers a block.
        max_threads: from __launch_bounds__; None without.
        occupancy: for `max_threads`, or for the block that was asked for; None for an unknown architecture.
    """

    name: str
    symbol: str
    resources: Resources
    barriers: int
    max_threads: int | None
    occupancy: Occupancy | None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return {
            "name": self.name,
            "symbol": self.symbol,
            **self.resources.to_dict(),
            "barriers": self.barriers,
            "max_threads": self.max_threads,
            "occupancy": None if self.occupancy is None else self.occupancy.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Inspection:
    """A file compiled for one architecture.

    Attributes:
        target: "sm_90a".
        entries: in the order of the PTX.
        warnings: what the compiler warned of.
        cubin, ptx: the code.
        compile_ms: milliseconds that NVRTC took.
    """

    target: str
    entries: tuple[EntryPoint, ...]
    warnings: tuple[Message, ...]
    cubin: bytes
    ptx: str
    compile_ms: float


def known_targets() -> tuple[str, ...]:
    """The architectures that this NVRTC compiles for, without the suffixes a and f.

    Raises:
        CompileError: there is no NVRTC.
    """
    nvrtc = _nvrtc()
    _, numbers = nvrtc.nvrtcGetSupportedArchs()
    return tuple(f"sm_{number}" for number in numbers)


def compiler_version() -> str:
    """For example "NVRTC 13.0"."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"NVRTC {major}.{minor}"


def inspect_cuda(
    text: str,
    target: str,
    *,
    name: str,
    include: Sequence[Path] = (),
    block: int | None = None,
    dynamic_shared_bytes: int = 0,
) -> Inspection:
    """Compile a file's text for one architecture and describe its entry points.

    Text that uses ACL_KERNEL is compiled in the portable dialect.

    Args:
        text: CUDA C++.
        target: "sm_90", "sm_90a".
        name: of the file, for the compiler's messages.
        include: folders to search for headers, before CUDA's own.
        block: threads a block to reckon occupancy for; the kernel's launch bounds or 256 by default.
        dynamic_shared_bytes: added to the static shared memory for occupancy.

    Raises:
        CompileError: with the log, which `read_messages` takes apart; or there is no NVRTC.
        ConfigError: the compiler does not know the architecture.
    """
    if re.search(r"\bACL_KERNEL\b", text):
        text = f'{portable_header()}\n#line 1 "{name}"\n{text}'
    began = time.perf_counter()
    cubin, ptx, log = _compile(text, target, name, [*include, *_cuda_headers()])
    took_ms = (time.perf_counter() - began) * 1e3
    bounds = dict(_launch_bounds(ptx))
    entries = []
    for symbol, threads in bounds.items():
        resources, barriers = _read_ptxas(log, symbol)
        fits = None
        if resources.registers is not None:
            fits = occupancy(
                target,
                block or threads or DEFAULT_BLOCK,
                registers=resources.registers,
                shared_bytes=(resources.shared_bytes or 0) + dynamic_shared_bytes,
                barriers=barriers,
            )
        entries.append(EntryPoint(_demangled(symbol), symbol, resources, barriers, threads, fits))
    warnings = tuple(message for message in read_messages(log, name) if message.severity == "warning")
    return Inspection(target, tuple(entries), warnings, cubin, ptx, took_ms)


# --- the compiler ----------------------------------------------------------------------------------------------------


def _nvrtc() -> Any:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise CompileError("CUDA C++ needs NVRTC (Linux, Windows): pip install cuda-bindings nvidia-cuda-nvrtc")
    from cuda.bindings import nvrtc

    return nvrtc


def _compile(text: str, target: str, name: str, include: Sequence[Path]) -> tuple[bytes, str, str]:
    """Machine code, PTX and log."""
    nvrtc = _nvrtc()
    # Without its own cache, NVRTC always runs ptxas, whose log has the registers and spills.
    options = [f"--gpu-architecture={target}", "-std=c++17", "--ptxas-options=-v", "-no-cache"]
    options += [f"--include-path={folder}" for folder in include]
    encoded = [option.encode() for option in options]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, None, None)
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = (
            _fetched(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            .decode(errors="replace")
            .replace("\0", "")
        )
        if code == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION or "--nv_arch" in log:
            raise ConfigError(f"{compiler_version()} does not compile for {target!r}")
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} does not compile for {target}", log.strip() or code.name)
        cubin = _fetched(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        ptx = _fetched(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode(errors="replace").rstrip("\0")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, ptx, log


def _fetched(size: Any, get: Any, program: Any) -> bytes:
    """What NVRTC copies into a buffer of the size that it names."""
    _, count = size(program)
    buffer: bytes = b" " * count
    get(program, buffer)
    return buffer


@functools.cache
def _cuda_headers() -> tuple[Path, ...]:
    """Where cuda_fp16.h and its kin are: a toolkit, NVIDIA's wheels, or those that Triton brings."""
    found: list[Path] = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        folder = find_nvidia_header_directory("cudart")
    except (ImportError, AttributeError, RuntimeError):
        folder = None
    if folder is not None:
        found += [Path(folder), Path(folder) / "cccl"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        found.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return tuple(folder for folder in found if folder.is_dir())


# --- reading what it wrote -------------------------------------------------------------------------------------------

_HEAD = re.compile(
    r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?(?P<severity>error|warning|note|remark)"
    r"(?: #[\w-]+)?: (?P<text>.*)$"
)
_ASSEMBLER = re.compile(r"^ptxas\b[^:]*?[;\s]\s*(?P<severity>error|fatal|warning)\s*: (?P<text>.*)$")


def read_messages(log: str, name: str) -> list[Message]:
    """The errors and warnings in a log of NVRTC.

    Args:
        log: what CompileError carries.
        name: of the file, for messages of the assembler, which names none.
    """
    found: list[Message] = []
    lines = log.replace("\0", "").splitlines()
    for number, line in enumerate(lines):
        head = _HEAD.match(line)
        if head is not None and head["severity"] in ("error", "warning"):
            words, excerpt = _body(lines[number + 1 :])
            text = " ".join([head["text"], *words])
            found.append(Message(head["severity"], head["file"], int(head["line"]), text, excerpt))
            continue
        assembler = _ASSEMBLER.match(line)
        if assembler is not None and not assembler["text"].startswith("Ptx assembly aborted"):
            severity = "warning" if assembler["severity"] == "warning" else "error"
            found.append(Message(severity, name, None, assembler["text"].strip()))
    return found


def _body(lines: Sequence[str]) -> tuple[list[str], str]:
    """What follows a message's first line: more words, and the source line with the mark below it."""
    words: list[str] = []
    for line in lines:
        if not line.strip() or _HEAD.match(line):
            break
        if not line.strip(" ^~") and words:
            return [word.strip() for word in words[:-1]], f"{words[-1]}\n{line}"
        words.append(line)
    return [word.strip() for word in words], ""


def _launch_bounds(ptx: str) -> list[tuple[str, int | None]]:
    """Each entry point with the most threads a block that it declares."""
    found = []
    for entry in re.finditer(r"\.entry\s+([\w$]+)(.*?)^\{", ptx, re.DOTALL | re.MULTILINE):
        bound = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", entry[2])
        threads = None
        if bound is not None:
            threads = int(bound[1]) * int(bound[2] or 1) * int(bound[3] or 1)
        found.append((entry[1], threads))
    return found


def _read_ptxas(log: str, symbol: str) -> tuple[Resources, int]:
    """What ptxas -v prints of an entry point: its resources, and its barriers."""
    head = rf"Compiling entry function '{re.escape(symbol)}'"
    part = re.search(rf"{head}.*?(?=Compiling entry function|\Z)", log, re.DOTALL)
    text = "" if part is None else part[0]

    def number(pattern: str) -> int | None:
        match = re.search(pattern, text)
        return int(match[1]) if match else None

    resources = Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=(number(r"(\d+) bytes smem") or 0) if text else None,
    )
    return resources, number(r"used (\d+) barriers") or 0


@functools.cache
def _demangler() -> Any:
    """The C++ runtime's own function; None where there is none of that kind."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        free = ctypes.CDLL(None).free
    except (OSError, TypeError, AttributeError):
        return None
    demangle = library.__cxa_demangle
    demangle.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    return demangle, free


def _demangled(symbol: str) -> str:
    """A symbol as a person writes it; as it is where it is not mangled or cannot be read."""
    if not symbol.startswith("_Z") or _demangler() is None:
        return symbol
    demangle, free = _demangler()
    status = ctypes.c_int()
    text = demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return symbol
    try:
        return ctypes.string_at(text).decode()
    finally:
        free(text)
