"""A kernel before and after compilation: KernelSource -> Binary -> Kernel.

A source holds the same algorithm in one or more *dialects*; a provider compiles the first dialect it knows:

    portable   C with the macro header portable.h: CUDA, HIP and OpenCL from one text
    cuda       CUDA C++
    triton     a Triton function with its specialisation (made by triton.py)
    llvm       a builder of LLVM IR for the CPU

A dialect's value is the program's text, or a Builder that makes the program for each target.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from accelerant._version import __version__
from accelerant.errors import CompileError

__all__ = [
    "CUDA_TARGETS",
    "Binary",
    "Builder",
    "Kernel",
    "KernelSource",
    "LazyDialects",
    "LlvmProgram",
    "Resources",
    "builder_key",
    "portable_header",
    "sources_hash",
]

CUDA_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The NVIDIA architectures that every op serves; Hopper-only kernels declare ("sm_90a",)."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that one thread or block of a compiled kernel uses; None where the compiler does not report them.

    Attributes:
        registers: 32-bit registers a thread.
        spill_bytes: bytes a thread stores to local memory for want of registers.
        stack_bytes: stack frame of a thread.
        shared_bytes: static and dynamic shared memory of a block.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None

    def to_dict(self) -> dict[str, int | None]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code for one target, as the disk cache keeps it.

    Attributes:
        code: a cubin, an object file, or whatever the provider loads.
        symbols: entry name -> symbol in the code (they differ where the compiler mangles names).
        resources: entry name -> Resources.
        metadata: what the launcher needs besides (threads a block, scratch arguments); JSON values only.
        log: the compiler's log.
    """

    code: bytes
    symbols: Mapping[str, str]
    resources: Mapping[str, Resources]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""


@runtime_checkable
class Builder(Protocol):
    """A program that is made for each target. `key` must change whenever the result of `build` would."""

    @property
    def key(self) -> str:
        """Everything that the result depends on, besides the target."""
        ...

    def build(self, target: str) -> Binary | str:
        """Return machine code, or text that the provider compiles (LLVM IR).

        Raises:
            CompileError: with the compiler's log.
        """
        ...


class LazyDialects(Mapping[str, "str | Builder"]):
    """Dialects whose text is written on first access: a process needs only that of its device."""

    def __init__(self, **makers: Callable[[], str | Builder]) -> None:
        """Take functions by dialect, in order of preference."""
        self._makers = makers
        self._programs: dict[str, str | Builder] = {}

    def __getitem__(self, dialect: str) -> str | Builder:
        if dialect not in self._programs:
            self._programs[dialect] = self._makers[dialect]()
        return self._programs[dialect]

    def __contains__(self, dialect: object) -> bool:
        return dialect in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel to compile.

    Attributes:
        name: for people, caches and errors.
        dialects: dialect name -> program text or Builder.
        entries: entry point -> the types of its arguments: "*" for a pointer into device memory
            (any element type: "*u64", "*bf16"), "i32" "u32" "i64" "u64" "f32" "f64" for scalars, "struct" for one
            passed by value as bytes (CUDA only, through LoadedKernel.pack).
        targets: the architectures it is written for; CI compiles it for each. Empty: any.
        options: extra options of the compiler, part of the cache's key. NVRTC ("-DWIDTH=8",
            "--ptxas-options=-O1") and the OpenCL driver get them as they are; Triton and LLVM take none.
    """

    name: str
    dialects: Mapping[str, str | Builder]
    entries: Mapping[str, tuple[str, ...]]
    targets: tuple[str, ...] = CUDA_TARGETS
    options: tuple[str, ...] = ()

    def pick(self, known: tuple[str, ...]) -> tuple[str, str | Builder]:
        """Return the first of the known dialects that this source has, and its program.

        Raises:
            CompileError: it has none of them.
        """
        for dialect in known:
            if dialect in self.dialects:
                return dialect, self.dialects[dialect]
        raise CompileError(
            f"kernel {self.name!r} has no dialect of {', '.join(known)}; it has {', '.join(self.dialects)}"
        )


@dataclass(slots=True)
class Kernel:
    """A compiled, loaded entry point; only the provider that made it can launch it.

    Attributes:
        name: entry point.
        backend: the provider's name.
        device: index of the device it is loaded on.
        target: architecture it was compiled for.
        arguments: types, as in KernelSource.entries.
        resources: registers, spills, shared memory.
        compile_ms: milliseconds for compiling or reading the disk cache.
        from_cache: whether it came from the disk cache.
        metadata: see Binary.
        handle: the provider's own object.
    """

    name: str
    backend: str
    device: int
    target: str
    arguments: tuple[str, ...]
    resources: Resources
    compile_ms: float
    from_cache: bool
    metadata: Mapping[str, Any]
    handle: Any


@functools.cache
def portable_header() -> str:
    """Return the text of portable.h, which precedes every kernel in the portable dialect."""
    return (Path(__file__).parent / "portable.h").read_text(encoding="utf-8")


# --- keys of builders ------------------------------------------------------------------------------------------------

_PACKAGE = Path(__file__).parents[2]
_BUILDER = ("runtime/compilation/llvm.py", "runtime/compilation/philox.py")


def builder_key(builder: object, *sources: str) -> str:
    """Return the key of a Builder of LLVM IR: its fields, and the code that writes the text.

    Writing the text takes up to 60 ms, which a process that finds machine code on disk need not spend.

    Args:
        builder: the dataclass, or a tuple of it and what its fields only name; with the code in `sources` and the IR
            builder's, its repr is all that the text depends on.
        sources: files and folders of the package.
    """
    return f"{builder!r} {sources_hash(*_BUILDER, *sources)}"


@dataclass(frozen=True, slots=True)
class LlvmProgram:
    """A Builder of LLVM IR that a function writes, the same for each target.

    Attributes:
        parameters, sources: see builder_key.
        write: returns the text.
        written_out, least_share: see runtime/providers/cpu.py.
    """

    parameters: object
    sources: tuple[str, ...]
    write: Callable[[], str]
    written_out: bool = True
    least_share: int = 16384

    @property
    def key(self) -> str:
        """See builder_key."""
        return builder_key(self.parameters, *self.sources)

    def build(self, target: str) -> str:
        """Return the LLVM IR."""
        return self.write()


@functools.cache
def sources_hash(*paths: str, endings: tuple[str, ...] = (".py",)) -> str:
    """Return the SHA-256, in hexadecimal, of this version and of these files, and of the files below these folders.

    Args:
        paths: relative to the package, "algebra" or "runtime/compilation/llvm.py"; whatever the built text depends on
            must lie in them.
        endings: of the names of files in folders.
    """
    digest, start = hashlib.sha256(__version__.encode()), len(str(_PACKAGE)) + 1
    for relative in paths:
        path = str(_PACKAGE / relative)
        for file_path in [path] if os.path.isfile(path) else sorted(_files(path, endings)):
            with open(file_path, "rb", buffering=0) as file:
                content = file.read()
            digest.update(f"{file_path[start:].replace(os.sep, '/')} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _files(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of a folder's files. A first call waits for this: pathlib takes twice as long."""
    for root, below, names in os.walk(folder):
        below[:] = [name for name in below if name != "__pycache__"]
        yield from (os.path.join(root, name) for name in names if name.endswith(endings))
