"""Compile options for a whole kernel, in the words of each compiler, and the headers that its text includes.

| option | NVRTC | OpenCL | C compiler of the CPU | clang for AMD | |---|---|---|---|---| | optimize=0 to 3 | ptxas -O |
0: -cl-opt-disable | -O, 3 by default | the same | | fast_math | --use_fast_math | -cl-fast-relaxed-math | _FAST_C below
| the same, and ftz, prec_div, prec_sqrt | | ftz | --ftz | true: -cl-denorms-are-zero | true is refused |
-fgpu-flush-denormals-to-zero | | prec_div, prec_sqrt | --prec-div, --prec-sqrt | true: _PRECISE below | precise | one
option for both | | fmad | --fmad | -cl-mad-enable, FP_CONTRACT OFF | -ffp-contract | -ffp-contract |

A part that is stated overrides fast_math; where a compiler cannot do that, it is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError, ConfigError, MissingFile
from accelerant.runtime.files import read_regular

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
        """Return the options that gcc and clang share."""
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
    """Return the headers that a program may include from some folders, directly or not, with their SHA-256.

    Conditions are not evaluated. A name that no folder has counts with an empty hash, since such a file may appear. An
    include of a macro is a CompileError, and so is a header that cannot be read.
    """
    folders = list(folders)
    if not folders:
        return []
    found: dict[str, str] = {}
    waiting: list[tuple[str, Path | None]] = [(text, None)]
    while waiting:
        content, own = waiting.pop()
        for directive, tested in _INCLUDE.findall(_COMMENT.sub(lambda match: match[1] or " ", content)):
            name = re.match(r'\s*(?:"([^"]+)"|<([^>]+)>)', directive or tested)
            if name is None:
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
