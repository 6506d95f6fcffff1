"""Inspection of CUDA C++ files without a device: entry points, their resources and their theoretical occupancy.

`compile_cuda` takes the names of a kernel's entry points; `inspect_cuda` finds them in any file: extern "C" functions,
mangled names and instantiated templates. One run of NVRTC gives machine code, PTX (which has the launch bounds) and the
log of ptxas (which has registers, spills, stack and shared memory).

A multiprocessor holds blocks until it runs out of warps, blocks, registers, shared memory or barriers. Occupancy is the
number of resident warps over the most that it can hold: an upper bound on the latency that other warps can hide, not a
measure of speed.

Sources: CUDA Programming Guide 13, "Compute Capabilities", table of technical specifications (warps, blocks,
registers, shared memory); CUDA Occupancy API, header cuda_occupancy.h (units of allocation, barriers).
"""

from __future__ import annotations

import ctypes
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError, ConfigError
from accelerant.runtime.compilation.cuda import entry_log, explained, load_nvrtc, log_number, read_resources, run_nvrtc
from accelerant.runtime.compilation.host_c import run_compiler
from accelerant.runtime.compilation.kernel import CompileOptions, Resources, first_line, portable_header
from accelerant.runtime.files import JsonRecord

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
    resources: Resources
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
    options: CompileOptions = CompileOptions(),  # noqa: B008  frozen
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
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
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
    options: CompileOptions = CompileOptions(),  # noqa: B008  frozen
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
    source = f"{portable_header()}\n{first_line(name)}\n{text}"
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
        resources = Resources(registers, 4 * spills, stack, shared)
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
    """Return what follows a message's first line: further text, and the source line with the mark below it."""
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
    text = demangle(symbol.encode(), None, None, ctypes.byref(ctypes.c_int()))
    if not text:
        return symbol
    try:
        return ctypes.string_at(text).decode()
    finally:
        free(text)
