"""A kernel before and after compilation: KernelSource -> Binary -> Kernel.

A source holds the same algorithm in one or more *dialects*, each a text or a Builder that makes the program for each
target; a provider compiles the first one it knows:

    portable   C with the macro header portable.h: CUDA, HIP, OpenCL and the CPU from one text
    cuda       CUDA C++
    triton     a Triton function with its specialization (made by triton.py)
    llvm       a builder of LLVM IR for the CPU
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from accelerant._version import __version__
from accelerant.errors import CompileError
from accelerant.runtime.compilation.options import CompileOptions
from accelerant.runtime.files import JsonRecord

CUDA_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The NVIDIA architectures that every op serves; Hopper-only kernels declare ("sm_90a",)."""


@dataclass(frozen=True, slots=True)
class Resources(JsonRecord):
    """Resources of a compiled kernel; None where the compiler does not report them.

    Registers of 32 bits, spilled bytes and the stack frame are a thread's; shared memory, static and dynamic, is a
    block's.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code for one target (a cubin, an object file, ...), as the disk cache keeps it, with the compiler's log.

    `symbols` are the names in the code by entry; `metadata`, JSON values only, is what the launcher needs besides.
    """

    code: bytes
    symbols: Mapping[str, str]
    resources: Mapping[str, Resources]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""

    @classmethod
    def of(cls, code: bytes, entries: Iterable[str], log: str = "") -> Binary:
        """Return code whose symbols are the names of its entry points, and whose resources are not known."""
        names = list(entries)
        return cls(code, dict(zip(names, names, strict=True)), {name: Resources() for name in names}, log=log)


@runtime_checkable
class Builder(Protocol):
    """A program that is made for each target. `key` must change whenever the result of `build` would."""

    @property
    def key(self) -> str:
        """Everything that the result depends on, besides the target."""
        ...

    def build(self, target: str) -> Binary | str:
        """Return machine code, or text that the provider compiles (LLVM IR); raise CompileError with the log."""
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
            (any element type: "*u64", "*bf16"), "i8" to "i64", "u8" to "u64", "bool", "f32", "f64" for scalars,
            "struct" for one passed by value as bytes (CUDA only, through LoadedKernel.pack). In the dialect "cuda" the
            names are those of C++: "space::name", "scale<float, 4>".
        targets: the architectures it is written for; CI compiles it for each. Empty: any.
        options: CompileOptions, which each compiler gets in its own words, or options that the compiler gets as they
            are ("-DWIDTH=8", "--ptxas-options=-O1"); part of the cache's key. Triton and LLVM take none.
        shared_bytes: dynamic shared memory a block; for text in the dialect "cuda" alone.
    """

    name: str
    dialects: Mapping[str, str | Builder]
    entries: Mapping[str, tuple[str, ...]]
    targets: tuple[str, ...] = CUDA_TARGETS
    options: CompileOptions | tuple[str, ...] = ()
    shared_bytes: int = 0

    @property
    def compile_options(self) -> CompileOptions:
        """The options that are not a compiler's own words."""
        return self.options if isinstance(self.options, CompileOptions) else CompileOptions()

    @property
    def raw_options(self) -> tuple[str, ...]:
        """The options that a compiler gets as they are."""
        return () if isinstance(self.options, CompileOptions) else self.options

    def refuse_options(self, compiler: str) -> None:
        """Raise CompileError for a compiler that takes no options ("Triton"), if there are any."""
        if self.options:
            raise CompileError(f"kernel {self.name!r}: {compiler} takes no compile options, got {self.options}")

    def pick(self, known: tuple[str, ...]) -> tuple[str, str | Builder]:
        """Return the first of the known dialects that this source has, and its program; raise CompileError without."""
        for dialect in known:
            if dialect in self.dialects:
                return dialect, self.dialects[dialect]
        raise CompileError(
            f"kernel {self.name!r} has no dialect of {', '.join(known)}; it has {', '.join(self.dialects)}"
        )


@dataclass(slots=True)
class Kernel:
    """A compiled, loaded entry point; only the provider that made it can launch it.

    `arguments` are types, as in KernelSource.entries; `compile_ms` is the time of compiling, or of reading the disk
    cache.
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


def first_line(name: str) -> str:
    """Return the directive after which the compiler's messages name a file and count its lines."""
    return '#line 1 "{}"'.format(re.sub(r'[\\"\n]', "_", name))


_PACKAGE = Path(__file__).parents[2]
_BUILDER = ("runtime/compilation/llvm.py", "runtime/compilation/philox.py")


def builder_key(builder: object, *sources: str) -> str:
    """Return the key of a Builder of LLVM IR: its fields, and a hash of the code that writes the text.

    Writing the text takes up to 60 ms, which a process that finds machine code on disk need not spend.
    """
    return f"{builder!r} {sources_hash(*_BUILDER, *sources)}"


@dataclass(frozen=True, slots=True)
class LlvmProgram:
    """A Builder of LLVM IR that a function writes, the same for each target.

    `parameters` and `sources` are those of builder_key, `written_out` and `least_share` those of providers/cpu.py.
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

    Paths are relative to the package. Of a folder's files those with the endings count.
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
