"""Reading a kernel's text: its entry points and their arguments, code for the host, and index checks for `debug`.

Conditions and macros with arguments are not evaluated, but `#define NAME TYPE`, typedef, using and the template's
parameters are. An argument of another type is refused by name; the caller may state the types.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from accelerant.errors import BoundsError, CompileError
from accelerant.runtime.compilation.kernel import KernelSource, first_line

_MARKS = {"cuda": "__global__", "opencl": "__kernel|kernel", "portable": "ACL_KERNEL"}
_STRINGS = re.compile(r"/\*.*?(?:\*/|\Z)|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.DOTALL)
_ATTRIBUTES = re.compile(r"(__\w+|ACL_BLOCK|alignas|decltype)\Z")
_QUALIFIERS = {
    "__restrict__", "__restrict", "restrict", "volatile", "__grid_constant__", "ACL_GLOBAL", "__global", "global",
    "typename", "struct", "enum", "class", "__private", "private", "register", "inline",
}  # fmt: skip
_CONSTANTS = {"const", "__constant", "constant", "ACL_CONSTANT"}
_LOCAL = {"ACL_LOCAL", "__local", "local", "__shared__"}

_LONG = "32" if sys.platform == "win32" else "64"
_WORDS = {
    "bool": "bool", "_Bool": "bool", "float": "f32", "double": "f64", "half": "f16", "__half": "f16", "nv_half": "f16",
    "__nv_bfloat16": "bf16", "nv_bfloat16": "bf16", "bfloat16": "bf16", "void": "void", "size_t": "u64",
    "ptrdiff_t": "i64", "uchar": "u8", "ushort": "u16", "uint": "u32", "intptr_t": "i64", "uintptr_t": "u64",
    **{f"{sign}int{bits}_t": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"{sign}{bits}": f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Type of one word -> kind; those of C's own words are computed."""

_C_WORDS = {"signed", "unsigned", "char", "short", "int", "long"}
_VECTOR = re.compile(r"(u?char|u?short|u?int|u?long|u?longlong|float|double|half)(2|3|4|8|16)")


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a kernel; kinds as in KernelSource.entries, "*f32x4" for float4*, and "*void" for any pointer."""

    name: str
    kind: str
    constant: bool = False


@dataclass(frozen=True, slots=True)
class KernelSignature:
    """A kernel's definition in a text, its body from start to end; template parameters are (kind, name, default)."""

    name: str
    parameters: tuple[str, ...]
    templates: tuple[tuple[str, str, str], ...]
    body: tuple[int, int]
    line: int = field(compare=False)

    def __str__(self) -> str:
        names = f"<{', '.join(name for _, name, _ in self.templates)}>" if self.templates else ""
        return self.name + names


def without_comments(text: str) -> str:
    """Return the text with blanks for comments and the contents of strings; lines and positions stay."""
    return _STRINGS.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def closing_at(plain: str, start: int, pair: str, end: int = sys.maxsize) -> int:
    """Return the position of the bracket that closes the one before `start`; the end if none does."""
    depth = 1
    for match in re.compile(f"[{re.escape(pair)}]").finditer(plain, start, end):
        depth += 1 if match[0] == pair[0] else -1
        if not depth:
            return match.start()
    return min(end, len(plain))


def dialect_of(text: str, name: str = "the text") -> str:
    """Return the dialect of a text, by its kernels or its file's name (.cl); raise CompileError without one."""
    plain = without_comments(text)
    for dialect in ("portable", "cuda", "opencl"):
        if re.search(rf"\b(?:{_MARKS[dialect]})\b", plain):
            return dialect
    if name.endswith(".cl"):
        return "opencl"
    raise CompileError(
        f"{name} has no kernel: mark one with __global__ (CUDA C++), __kernel (OpenCL) or ACL_KERNEL (portable C)"
    )


def find_kernels(text: str, dialect: str) -> list[KernelSignature]:
    """Return the kernels that the text defines, in its order."""
    plain = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", _blank, without_comments(text), flags=re.MULTILINE)
    closing_of = _brackets(plain)
    heads = re.finditer(r"\bnamespace\s+([\w:]+)\s*(?=\{)", plain) if dialect == "cuda" else ()
    namespaces = [(head.end(), closing_of[head.end()], head[1]) for head in heads]
    found = []
    for mark in re.finditer(rf"\b(?:{_MARKS[dialect]})\b", plain):
        if (head := _name_after(plain, mark.end(), closing_of)) is None:
            continue
        name, opening = head
        closing = closing_of[opening]
        rest = re.compile(r"\s*(?:__\w+\s*\(\(.*?\)\)\s*)*\{", re.DOTALL).match(plain, closing)
        if rest is None:  # a declaration
            continue
        scopes = [scope for start, end, scope in namespaces if start < mark.start() < end and scope]
        found.append(
            KernelSignature(
                name="::".join([*scopes, name]),
                parameters=tuple(_split(plain[opening + 1 : closing - 1])),
                templates=_template(plain, mark.start()) if dialect == "cuda" else (),
                body=(rest.end() - 1, closing_of[rest.end() - 1]),
                line=plain.count("\n", 0, mark.start()) + 1,
            )
        )
    return found


def entry_of(
    text: str, dialect: str, name: str | None, macros: Mapping[str, str] | None = None
) -> tuple[str, tuple[Parameter, ...]]:
    """Return an entry point as the compiler takes it, and its parameters; CompileError unless one kernel fits."""
    kernels = find_kernels(text, dialect)
    listed = ", ".join(map(str, kernels)) or "none"
    if name is None:
        if len(kernels) != 1:
            raise CompileError(f"name a kernel of the text; it has {listed}")
        name = kernels[0].name
    base, _, rest = name.partition("<")
    base = base.strip().removeprefix("::")
    matching = [each for each in kernels if each.name == base or each.name.endswith(f"::{base}")]
    if not (exact := [each for each in matching if each.name == base] or matching):
        raise CompileError(f"no kernel {name!r} in the text (one that a macro writes is not found); it has {listed}")
    if len({(each.name, each.parameters) for each in exact}) > 1:
        lines = ", ".join(str(each.line) for each in exact)
        raise CompileError(f"several kernels are named {name!r}, at lines {lines}")
    found = exact[0]
    given = _split(rest.rstrip().removesuffix(">")) if rest else []
    if len(given) > len(found.templates) or (rest and not rest.rstrip().endswith(">")):
        raise CompileError(f"kernel {found} takes {len(found.templates)} template arguments, got {name!r}")
    aliases = {**_aliases(without_comments(text)), **(macros or {})}
    for i, (kind, parameter, default) in enumerate(found.templates):
        value = given[i] if i < len(given) else default
        if not value:
            values = ["float" if kind in ("typename", "class") else "4" for kind, _, _ in found.templates]
            example = f"{found.name}<{', '.join(values)}>"
            raise CompileError(f"kernel {found} is a template: name it with its arguments, like '{example}'")
        if kind in ("typename", "class"):
            aliases[parameter] = value
    parameters = tuple(_parameter(found, i, each, aliases, dialect) for i, each in enumerate(found.parameters))
    return found.name + (f"<{', '.join(given)}>" if given or found.templates else ""), parameters


def host_code(text: str) -> list[tuple[int, str]]:
    """Return the lines of a CUDA file that only a host compiler takes, with the reason: (line, "int main"), ..."""
    plain = without_comments(text)
    found = [(plain.count("\n", 0, match.start()) + 1, " ".join(match[0].split())) for match in _HOST.finditer(plain)]
    includes = re.finditer(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)', text, re.MULTILINE)
    found += [
        (text.count("\n", 0, match.start()) + 1, f"#include <{match[1]}>")
        for match in includes
        if match[1] in _HOST_HEADERS
    ]
    return sorted(found)


_HOST = re.compile(
    r"\b(?:int|void)\s+main\s*\([^)]*\)?|<<<|\bcuda[A-Z]\w*(?=\s*\()|\bstd::(?:cout|cerr|vector|string|thread|chrono)\b|"
    r"\b(?:malloc|calloc|fopen|exit)(?=\s*\()"
)
_HOST_HEADERS = {
    "iostream", "fstream", "sstream", "iomanip", "vector", "string", "map", "unordered_map", "set", "list", "deque",
    "memory", "thread", "mutex", "random", "stdexcept", "exception", "filesystem", "sys/time.h", "time.h", "unistd.h",
    "helper_cuda.h", "helper_functions.h", "cublas_v2.h", "cudnn.h", "cufft.h", "thrust/device_vector.h",
    "thrust/host_vector.h", "torch/extension.h", "pybind11/pybind11.h", "Python.h",
}  # fmt: skip


# --- parts of a declaration ------------------------------------------------------------------------------------------
def _name_after(plain: str, start: int, closing_of: Mapping[int, int]) -> tuple[str, int] | None:
    """Return the function's name after a mark, and the position of its parenthesis; None where none follows."""
    position = start
    while True:
        token = re.compile(r"\s*(?:([A-Za-z_]\w*)(\s*\()?|([*&:]))").match(plain, position)
        if token is None:
            return None
        position = token.end()
        if token[2]:
            if not _ATTRIBUTES.match(token[1]):
                return token[1], position - 1
            position = closing_of[position - 1]


def _brackets(plain: str) -> dict[int, int]:
    """Return for each opening bracket the position after the one that closes it; the text's end if none does."""
    found: dict[int, int] = {}
    open_at: dict[str, list[int]] = {"(": [], "{": []}
    for match in re.finditer(r"[(){}]", plain):
        waiting = open_at["(" if match[0] in "()" else "{"]
        if match[0] in "({":
            found[match.start()] = len(plain)
            waiting.append(match.start())
        elif waiting:
            found[waiting.pop()] = match.end()
    return found


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    parts = [" ".join(part.split()) for part in parts]
    return [] if parts in ([""], ["void"]) else parts


def _template(plain: str, mark: int) -> tuple[tuple[str, str, str], ...]:
    start = max(plain.rfind(character, 0, mark) for character in ";{}") + 1
    if (head := re.search(r"\btemplate\s*<", plain[start:mark])) is None:
        return ()
    parameters = []
    for part in _split(plain[start + head.end() : closing_at(plain, start + head.end(), "<>", mark)]):
        declared, _, default = part.partition("=")
        words = re.findall(r"\w+|\.\.\.", declared)
        kind = "pack" if "..." in words else words[0] if words else ""
        parameters.append((kind, words[-1] if len(words) > 1 else "", default.strip()))
    return tuple(parameters)


def _aliases(plain: str) -> dict[str, str]:
    """Return the names that the text gives to types: name -> their text."""
    found: dict[str, str] = {}
    for pattern in (
        r"^[ \t]*#[ \t]*define[ \t]+(?P<name>\w+)[ \t]+(?P<type>[\w \t:*]+)$",
        r"\btypedef\s+(?P<type>[\w\s:*]+?)\s*\b(?P<name>\w+)\s*;",
        r"\busing\s+(?P<name>\w+)\s*=\s*(?P<type>[\w\s:*]+?)\s*;",
    ):
        found |= {match["name"]: match["type"] for match in re.finditer(pattern, plain, re.MULTILINE)}
    return found


def _words(text: str, aliases: Mapping[str, str], depth: int = 0) -> Iterator[str]:
    """Yield the words and symbols of a type, names of types replaced by what they stand for."""
    for word in re.findall(r"(?:::)?[A-Za-z_][\w]*(?:::\w+)*|[^\w\s]|\d+", text):
        plain = re.sub(r"^(?:::)?(?:cuda::)?(?:std::)?", "", word)
        if plain in aliases and depth < 8 and plain not in aliases[plain].split():
            yield from _words(aliases[plain], aliases, depth + 1)
        else:
            yield plain


def _parameter(
    kernel: KernelSignature, position: int, text: str, aliases: Mapping[str, str], dialect: str
) -> Parameter:
    """Return a parameter; raise CompileError, which names it, for one that a launch cannot pass."""
    declared = text.partition("=")[0].strip()
    arrays = declared.count("[")
    declared = re.sub(r"\[[^\]]*\]", "", declared).strip()
    kept = [word for word in re.findall(r"\w+|\S", declared) if word not in _QUALIFIERS]
    name = f"argument {position}"
    last, before = kept[-1], kept[-2] if len(kept) > 1 else ":"
    named = last.isidentifier() and last not in {*_C_WORDS, *_CONSTANTS} and before != ":"
    if named and (before not in _CONSTANTS or len(kept) > 2):
        name = last
        declared = re.sub(rf"\b{name}\s*$", "", declared)

    def refused(reason: str) -> CompileError:
        shown = "" if name.startswith("argument ") else f" ({name})"
        return CompileError(
            f"kernel {kernel}, argument {position}{shown}: {reason}, got {text!r}; state the types of all "
            "arguments (arguments=) if a launch can pass it"
        )

    words = [word for word in _words(declared, aliases) if word not in _QUALIFIERS]
    if _LOCAL & {*words}:
        raise refused("local memory is declared in the kernel, not passed")
    if (stars := words.count("*") + arrays) > 1 or "&" in words or "..." in words:
        raise refused("wanted an array or a number")
    element = words[: words.index("*")] if "*" in words else words
    kind = _kind([word for word in element if word not in _CONSTANTS], dialect)
    if kind is None or (not stars and (kind in ("void", "f16", "bf16") or "x" in kind)):
        raise refused("wanted a pointer to numbers, or a number")
    return Parameter(name, f"*{kind}" if stars else kind, bool(stars and _CONSTANTS & {*element}))


def _kind(words: list[str], dialect: str) -> str | None:
    """Return the kind of a type of C's words; None for another."""
    long = "64" if dialect == "opencl" else _LONG
    if words and {*words} <= _C_WORDS:
        bits = {"char": "8", "short": "16"}.get(next((w for w in words if w in ("char", "short")), ""), "32")
        if "long" in words:
            bits = "64" if words.count("long") == 2 else long
        return f"{'u' if 'unsigned' in words else 'i'}{bits}"
    if len(words) != 1:
        return None
    if (vector := _VECTOR.fullmatch(words[0])) is not None:
        base = {"ulong": f"u{long}", "long": f"i{long}", "longlong": "i64", "ulonglong": "u64"}.get(vector[1])
        base = base or _WORDS.get(vector[1]) or {"char": "i8", "short": "i16", "int": "i32"}[vector[1]]
        return f"{base}x{vector[2]}"
    if words[0] == "ulong":
        return f"u{long}"
    return _WORDS.get(words[0])


# --- index checks ----------------------------------------------------------------------------------------------------
# y[i] = x[i + 1];    becomes    y[acl_checked(i, bytes of y / sizeof(*y), 1, line, report)] = x[acl_checked(...)];
# An index out of bounds is replaced by 0, and the first one is written to the report.

REPORT_BYTES = 256  # bytes of the report, and of the memory of an array without elements

_CHECK = (
    "{head} acl_wide acl_checked(acl_wide index, acl_wide length, int argument, int line, {report} *report) {{ "
    "if (index >= 0 && index < length) return index; "
    "if ({add}(report, 1u) == 0) {{ report[1] = argument; report[2] = line; "
    "report[4] = ({word})index; report[5] = ({word})(index >> 32); "
    "report[6] = ({word})length; report[7] = ({word})(length >> 32); }} return 0; }}"
)
_CHECK_WORDS = {
    "portable": ("long long", "ACL_GLOBAL u32", "u32", "ACL_DEVICE", "acl_atomic_add_u32"),
    "cuda": ("long long", "unsigned", "unsigned", "static __device__", "atomicAdd"),
    "opencl": ("long", "__global uint", "uint", "static", "atomic_add"),
}
"""Dialect -> a 64-bit integer, an element of the report, a 32-bit word, a function's head, an atomic sum."""


def checked_source(source: KernelSource, dialect: str, parameters: Sequence[Parameter]) -> KernelSource | None:
    """Return the kernel with checked accesses; its hidden arguments are each array's bytes and the report. Or None."""
    ((entry, kinds),) = source.entries.items()
    text = source.dialects[dialect]
    assert isinstance(text, str)
    matching = [each for each in find_kernels(text, dialect) if each.name == entry.partition("<")[0]]
    if len(matching) != 1 or any(each.name.startswith("argument ") for each in parameters):
        return None
    plain, (start, end) = without_comments(text), matching[0].body
    closing = re.compile(r"\)\s*(?:__\w+\s*\(\(.*?\)\)\s*)*\Z", re.DOTALL).search(plain, 0, start)
    if closing is None:
        return None
    wide, report, word, head, add = _CHECK_WORDS[dialect]
    if dialect == "portable":
        wide = "i64"
    pointers = [i for i, each in enumerate(parameters) if each.kind.startswith("*")]
    hidden = "".join(f", {wide} acl_bytes_{i}" for i in pointers) + f", {report} *acl_report"
    inserted = [(closing.start(), hidden)]
    for i in pointers:
        name = parameters[i].name
        size = "1" if parameters[i].kind == "*void" else f"sizeof(*{name})"
        for access in re.compile(rf"(?<![\w.>]){name}\s*\[").finditer(plain, start, end):
            inserted.append((access.end(), "acl_checked((acl_wide)("))
            rest = f"), acl_bytes_{i} / (acl_wide){size}, {i}, __LINE__, acl_report)"
            inserted.append((closing_at(plain, access.end(), "[]"), rest))
    for position, addition in sorted(inserted, reverse=True):
        text = text[:position] + addition + text[position:]
    check = _CHECK.format(head=head, report=report, word=word, add=add)
    line = "#line 1\n" if dialect == "opencl" else f"{first_line(source.name)}\n"
    kinds = (*kinds, *("i64" for _ in pointers), "*u32")
    program = f"typedef {wide} acl_wide;\n{check}\n{line}{text}"
    return replace(source, name=f"{source.name} (checked)", dialects={dialect: program}, entries={entry: kinds})


def raise_if_out_of_bounds(report: npt.NDArray[np.uint8], kernel: str, parameters: Sequence[Parameter]) -> None:
    """Raise BoundsError for the first access out of bounds in the report of a launch."""
    words = report.view(np.uint32)
    if not words[0]:
        return
    i, line = int(words[1]), int(words[2])
    index, length = words[4:8].view(np.int64).tolist()
    more = f", and {int(words[0]) - 1} more accesses are" if words[0] > 1 else ""
    where = f"kernel {kernel!r}, line {line}, argument {i} ({parameters[i].name})"
    raise BoundsError(f"{where}: index {index} is out of bounds of {length} elements{more}; the results are wrong")
