"""A kernel before and after compilation: KernelSource -> Binary -> Kernel.

A source holds the same algorithm in one or more *dialects*, each a text or a Builder that makes the program for each
target; a provider compiles the first one it knows:

    portable   C with the macro header portable.h: CUDA, HIP, OpenCL and the CPU from one text
    cuda       CUDA C++
    triton     a Triton function with its specialization (made by triton.py)
    llvm       a builder of LLVM IR for the CPU

CompileOptions are for a whole kernel, in the words of each compiler. A part that is stated overrides fast_math; where a
compiler cannot do that, it is refused.

  option           NVRTC                     OpenCL                       C compiler of the CPU   clang for AMD
  optimize=0 to 3  ptxas -O                  0: -cl-opt-disable           -O, 3 by default        the same
  fast_math        --use_fast_math           -cl-fast-relaxed-math        _FAST_C below           the same, ftz, prec_*
  ftz              --ftz                     true: -cl-denorms-are-zero   true is refused         -fgpu-flush-denorm...
  prec_div, _sqrt  --prec-div, --prec-sqrt   true: _PRECISE below         precise                 one option for both
  fmad             --fmad                    -cl-mad-enable, FP_CONTRACT  -ffp-contract           -ffp-contract
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from accelerant._version import __version__
from accelerant.errors import CompileError, ConfigError, MissingFile
from accelerant.runtime.files import JsonRecord, read_regular

CUDA_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The NVIDIA architectures that every op serves; Hopper-only kernels declare ("sm_90a",)."""


@dataclass(frozen=True, slots=True)
class Resources(JsonRecord):
    """Registers, spilled bytes and stack of a thread, shared memory of a block; None where it is not reported."""

    registers: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code for a target as the disk cache keeps it; `metadata`, JSON values, is for the launcher."""

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
    """A kernel to compile: dialect name -> program text or Builder, and its entry points.

    Attributes:
        entries: entry point -> the types of its arguments: "*" for a pointer into device memory (any element type:
            "*u64", "*bf16"), "i8" to "i64", "u8" to "u64", "bool", "f32", "f64" for scalars, "struct" for one passed
            by value as bytes (CUDA only, through LoadedKernel.pack). In "cuda" the names are those of C++.
        targets: the architectures it is written for; CI compiles it for each. Empty: any.
        options: CompileOptions, or options that the compiler gets as they are; part of the cache's key.
        shared_bytes: dynamic shared memory a block; for text in the dialect "cuda" alone.
    """

    name: str
    dialects: Mapping[str, str | Builder]
    entries: Mapping[str, tuple[str, ...]]
    targets: tuple[str, ...] = CUDA_TARGETS
    options: CompileOptions | tuple[str, ...] = ()
    shared_bytes: int = 0

    def __repr__(self) -> str:
        return f"KernelSource({self.name!r} in {', '.join(self.dialects)}: {', '.join(self.entries)})"

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

    def text(self, known: tuple[str, ...], compiler: str) -> str:
        """Return the text of a dialect, by `pick`; CompileError where the compiler would get a builder's result."""
        _, program = self.pick(known)
        if not isinstance(program, str):
            raise CompileError(
                f"kernel {self.name!r}: {compiler} compiles text, not the result of a {type(program).__name__}"
            )
        return program


@dataclass(slots=True)
class Kernel:
    """A compiled, loaded entry point, which its provider launches; `arguments` are types as in KernelSource.entries."""

    name: str
    backend: str
    device: int
    target: str
    arguments: tuple[str, ...]
    resources: Resources
    compile_ms: float
    from_cache: bool
    metadata: Mapping[str, Any] = field(repr=False)
    handle: Any = field(repr=False)


@functools.cache
def portable_header() -> str:
    """Return the text of portable.h, which precedes every kernel in the portable dialect."""
    return (Path(__file__).parent / "portable.h").read_text(encoding="utf-8")


def first_line(name: str) -> str:
    """Return the directive after which the compiler's messages name a file and count its lines."""
    return '#line 1 "{}"'.format(re.sub(r'[\\"\n]', "_", name))


_PACKAGE = Path(__file__).parents[2]
_BUILDER = ("runtime/compilation/llvm.py", "runtime/compilation/llvm.py")


def builder_key(builder: object, *sources: str) -> str:
    """Return a Builder's fields and the hash of its code: a key without writing the text, which takes up to 60 ms."""
    return f"{builder!r} {sources_hash(*_BUILDER, *sources)}"


@dataclass(frozen=True, slots=True)
class LlvmProgram:
    """A Builder of LLVM IR that a function writes, for any target; fields as in builder_key and providers/cpu.py."""

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
    """Return the SHA-256 of this version, and of files and folders' files with the endings; paths are the package's."""
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


_PARTS = ("ftz", "prec_div", "prec_sqrt", "fmad")
_PRECISE = "-cl-fp32-correctly-rounded-divide-sqrt"
_FAST_C = ("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
"""The parts of -ffast-math that neither assume finite numbers nor, as -ffast-math does when gcc links a library, set
the whole process to flush subnormals."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of a kernel's compilation; the module's docstring has each compiler's words for them.

    Attributes:
        optimize: level, 0 to 3; None is the compiler's default.
        fast_math: less precise functions, division and square root, subnormals to zero, fused multiply-add.
        ftz: flush subnormal float32 numbers to zero.
        prec_div, prec_sqrt: correctly rounded division and square root in float32.
        fmad: contract a multiplication and an addition to one operation.
        defines: macro -> value, a text or a number; None defines it as 1.
        include: folders with headers, the first searched first.
        nvrtc, ptxas, opencl, cc: further options of one compiler, as they are.

    Raises:
        ConfigError: a level, macro or folder that cannot be.
    """

    optimize: int | None = None
    fast_math: bool = False
    ftz: bool | None = None
    prec_div: bool | None = None
    prec_sqrt: bool | None = None
    fmad: bool | None = None
    defines: Mapping[str, Any] | tuple[tuple[str, str], ...] = ()
    include: Sequence[str | Path] = ()
    nvrtc: Sequence[str] = ()
    ptxas: Sequence[str] = ()
    opencl: Sequence[str] = ()
    cc: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.optimize not in (None, 0, 1, 2, 3) or isinstance(self.optimize, bool):
            raise ConfigError(f"optimize must be 0, 1, 2 or 3, got {self.optimize!r}")
        for name in ("fast_math", *_PARTS):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name == "fast_math"):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        for name in ("nvrtc", "ptxas", "opencl", "cc"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(each, str) and each and "\0" not in each for each in given):
                raise ConfigError(f"{name} must be a list of options, got {given!r}")
            object.__setattr__(self, name, tuple(given))
        if isinstance(self.include, (str, Path)):
            raise ConfigError(f"include must be a list of folders, got {str(self.include)!r}")
        object.__setattr__(self, "include", tuple(map(Path, self.include)))
        for folder in self.folders:
            if not folder.is_dir():
                raise MissingFile(f"include {folder}: no such folder")
        pairs = self.defines.items() if isinstance(self.defines, Mapping) else self.defines
        object.__setattr__(self, "defines", tuple(_define(name, value) for name, value in pairs))

    @property
    def macros(self) -> dict[str, str]:
        """The defines, with their values as text."""
        return dict(self.defines)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders with headers."""
        return tuple(map(Path, self.include))

    def __bool__(self) -> bool:
        return self != CompileOptions()

    def for_nvrtc(self) -> list[str]:
        """Return NVRTC's options."""
        chosen = [f"--ptxas-options=-O{self.optimize}"] if self.optimize is not None else []
        chosen += ["--use_fast_math"] if self.fast_math else []
        stated = ((name, getattr(self, name)) for name in _PARTS)
        chosen += [f"--{name.replace('_', '-')}={str(on).lower()}" for name, on in stated if on is not None]
        chosen += [f"-D{name}={value}" for name, value in self.macros.items()]
        chosen += [f"--include-path={folder}" for folder in self.folders]
        return [*chosen, *self.nvrtc, *(f"--ptxas-options={each}" for each in self.ptxas)]

    def for_opencl(self) -> tuple[str, list[str]]:
        """Return the lines that precede a program of OpenCL C, and the driver's options."""
        against = {"ftz": False, "prec_div": True, "prec_sqrt": True, "fmad": False}
        for name, value in against.items():
            if self.fast_math and getattr(self, name) is value:
                raise CompileError(f"{name}={value}: OpenCL's fast math has no parts; leave out {name} or fast_math")
        head = "#pragma OPENCL FP_CONTRACT OFF\n" if self.fmad is False else ""
        head += "".join(f"#define {name} {value}\n" for name, value in self.macros.items())
        options = ["-cl-opt-disable"] if self.optimize == 0 else []
        options += ["-cl-fast-relaxed-math"] if self.fast_math else []
        options += ["-cl-denorms-are-zero"] if self.ftz else []
        options += [_PRECISE] if self.prec_div or self.prec_sqrt else []
        options += ["-cl-mad-enable"] if self.fmad else []
        for folder in self.folders:
            if re.search(r"[\s\"']", str(folder)):
                raise CompileError(f"include {str(folder)!r}: OpenCL takes no folder with spaces or quotes in its name")
            options.append(f"-I{folder}")
        return head, [*options, *self.opencl]

    def for_cc(self) -> list[str]:
        """Return the options of the CPU's C compiler."""
        if self.ftz:
            raise CompileError("ftz=True: on the CPU, a C compiler keeps subnormal numbers; leave out ftz")
        return [*self._for_clang(), *["-fno-reciprocal-math"] * bool(self.prec_div), *self.cc]

    def for_hip(self) -> list[str]:
        """Return clang's options for AMD."""
        if None not in (self.prec_div, self.prec_sqrt) and self.prec_div != self.prec_sqrt:
            raise CompileError("prec_div, prec_sqrt: for AMD they are one option; state them alike")
        stated = self.prec_sqrt if self.prec_div is None else self.prec_div
        rounds = not self.fast_math if stated is None else stated
        flushes = self.fast_math if self.ftz is None else self.ftz
        return [
            *self._for_clang(),
            *["-fno-reciprocal-math"] * rounds,
            f"-f{'' if rounds else 'no-'}hip-fp32-correctly-rounded-divide-sqrt",
            f"-f{'' if flushes else 'no-'}gpu-flush-denormals-to-zero",
        ]

    def _for_clang(self) -> list[str]:
        options = [f"-O{3 if self.optimize is None else self.optimize}", *(_FAST_C if self.fast_math else ())]
        options += [f"-ffp-contract={'off' if self.fmad is False else 'fast'}"]
        options += [f"-D{name}={value}" for name, value in self.macros.items()]
        return [*options, *(f"-I{folder}" for folder in self.folders)]


def _define(name: object, value: object) -> tuple[str, str]:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"defines: wanted the name of a macro, got {name!r}")
    text = "1" if value is None else str(int(value)) if isinstance(value, bool) else str(value)
    if not text.isprintable():
        raise ConfigError(f"defines: the value of {name} must be one line, got {text!r}")
    return name, text


_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?\b[ \t]*(.*)|__has_include\w*[ \t]*\(([^)]*)\)", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)|//[^\n]*|(\"(?:\\.|[^\"\\\n])*\")", re.DOTALL)


def header_hashes(text: str, folders: Iterable[Path]) -> list[tuple[str, str]]:
    """Return the headers that a program may include from folders, directly or not, with SHA-256, empty if absent."""
    if not (folders := list(folders)):
        return []
    found: dict[str, str] = {}
    waiting: list[tuple[str, Path | None]] = [(text, None)]
    while waiting:
        content, own = waiting.pop()
        for directive, tested in _INCLUDE.findall(_COMMENT.sub(lambda match: match[1] or " ", content)):
            if (name := re.match(r'\s*(?:"([^"]+)"|<([^>]+)>)', directive or tested)) is None:
                raise CompileError(f"#include {directive or tested}: name the file, so that a change of it is noticed")
            wanted = name[1] or name[2]
            around = ([own] if own is not None and name[1] else []) + folders
            path = next((folder / wanted for folder in around if (folder / wanted).is_file()), None)
            key = wanted if path is None else str(path)
            if key in found:
                continue
            try:
                body = b"" if path is None else read_regular(path)
            except OSError as error:
                raise CompileError(f"cannot read the header {path}: {error.strerror}") from None
            found[key] = "" if path is None else hashlib.sha256(body).hexdigest()
            if path is not None:
                waiting.append((body.decode(errors="replace"), path.parent))
    return sorted(found.items())


# --- WGSL ------------------------------------------------------------------------------------------------------------
_TYPES = {"f32": "f32", "bool": "u32", **dict.fromkeys(("i8", "i16", "i32", "i64"), "i32")}
_TYPES |= dict.fromkeys(("u8", "u16", "u32", "u64"), "u32")


def bindings(arrays: Mapping[str, str], scalars: Mapping[str, str]) -> str:
    """Declare arrays by the type of an element ("f32", "vec4<f32>"), and `scalars.NAME` for each scalar, of 32 bits."""
    lines = [
        f"@group(0) @binding({i}) var<storage, read_write> {name}: array<{kind}>;"
        for i, (name, kind) in enumerate(arrays.items())
    ]
    if scalars:
        members = ", ".join(f"{name}: {_TYPES[kind]}" for name, kind in scalars.items())
        lines.append(f"struct Scalars {{ {members} }}")
        lines.append(f"@group(0) @binding({len(arrays)}) var<uniform> scalars: Scalars;")
    return "".join(f"{line}\n" for line in lines) + _INDEX


_INDEX = """\
override BLOCK_X: u32 = 256u;

fn linear_group(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.x + group.y * groups.x;
}
"""
"""The threads of a block, and the number of a block in a grid of one dimension, which may be folded into two."""


def constants(values: Mapping[str, int | bool | Sequence[int]]) -> str:
    """Declare numbers as i32, truth values as bool, and sequences of numbers as arrays of u32."""
    lines = []
    for name, value in values.items():
        if isinstance(value, bool):
            lines.append(f"const {name}: bool = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"const {name}: i32 = {value};")
        else:
            words = ", ".join(f"{word:#x}u" for word in value)
            # a variable: not every compiler of WGSL takes an index that is no constant into an array that is one
            lines.append(f"var<private> {name}: array<u32, {len(value)}> = array<u32, {len(value)}>({words});")
    return "".join(f"{line}\n" for line in lines)


def elementwise(*element_bytes: int) -> str:
    """Declare that elements do not depend on one another, with the bytes of one of each array."""
    return f"//! elementwise {' '.join(map(str, element_bytes))}\n"


_BINDING = re.compile(r"@group\(0\) @binding\(\d+\) var<(.*)> (\w+): (.*);")


def words(name: str) -> str:
    """Declare `word_NAME(i)` and `set_word_NAME(i, word)` of an array of u32, which `windowed` can replace."""
    return (
        f"fn word_{name}(i: i32) -> u32 {{ return {name}[i]; }}\n"
        f"fn set_word_{name}(i: i32, word: u32) {{ {name}[i] = word; }}\n"
    )


def windowed(text: str, counts: Sequence[int], log_words: int) -> str | None:
    """Return the module with arrays bound as windows of 2^log_words words; None if one of several lacks `words`."""
    names = [match[2] for match in _BINDING.finditer(text) if match[1].startswith("storage")]
    windows = dict(zip(names, counts, strict=True))
    number = itertools.count()

    def bound(match: re.Match[str]) -> str:
        count = windows.get(match[2], 1)
        parts = [match[2]] if count == 1 else [f"{match[2]}_{k}" for k in range(count)]
        return "\n".join(f"@group(0) @binding({next(number)}) var<{match[1]}> {part}: {match[3]};" for part in parts)

    text = _BINDING.sub(bound, text)
    for name, count in windows.items():
        if count == 1:
            continue
        if words(name) not in text:
            return None
        at = f"i & {(1 << log_words) - 1}"
        labels = [*(f"case {k}" for k in range(count - 1)), "default"]
        read = " ".join(f"{label}: {{ word = {name}_{k}[{at}]; }}" for k, label in enumerate(labels))
        write = " ".join(f"{label}: {{ {name}_{k}[{at}] = word; }}" for k, label in enumerate(labels))
        chosen = f"switch (i >> {log_words}u)"
        text = text.replace(
            words(name),
            f"fn word_{name}(i: i32) -> u32 {{ var word = 0u; {chosen} {{ {read} }} return word; }}\n"
            f"fn set_word_{name}(i: i32, word: u32) {{ {chosen} {{ {write} }} }}\n",
        )
    return text
