"""Portable kernels on the CPU, by the C compiler of the system (cc, gcc or clang), as a library of machine code.

Each entry point becomes a function that runs the blocks [begin, end) of a grid of so many columns and rows:

    int acl_run_NAME(i64 begin, i64 end, i64 grid, i64 rows, i32 width, i32 height, i32 threads, <arguments>)

Threads of a block run in turn, row by row, as a loop; those that wait at a barrier have stacks of their own.
"""

import ctypes
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError, OutOfMemory
from accelerant.runtime.compilation.kernel import (
    Binary,
    KernelSource,
    Resources,
    first_line,
    header_hashes,
    portable_header,
    sources_hash,
)
from accelerant.runtime.compilation.signatures import find_kernels, without_comments
from accelerant.runtime.files import read_regular

_TIMEOUT_S = 300
_FLAGS = (
    "-std=gnu11", "-Werror=implicit-function-declaration", "-fPIC", "-shared", "-fno-strict-aliasing",
    "-fvisibility=hidden",
)  # fmt: skip
_FRAME = "-Wframe-larger-than=65536"
"""For kernels with barriers, whose threads have stacks of 256 KiB: the warning of gcc or clang is an error."""
_INDICES = re.compile(r"\bacl_(?:(?:global|local|group)_id|local_size)(?:_y)?\b|\bacl_barrier\b")
_C_TYPES = {
    "i8": "signed char", "u8": "unsigned char", "i16": "short", "u16": "unsigned short", "bool": "_Bool", "i32": "i32",
    "u32": "u32", "i64": "i64", "u64": "u64", "f32": "float", "f64": "double",
}  # fmt: skip

_HEAD = """\
#define ACL_HOST 1
typedef struct {
    long long group, group_y;
    int local, local_y, size, size_y;
} acl_item;
int acl_run_blocks(void (*)(void *const *), void *const *, long long, long long, long long, long long, int, int, int);
"""
_LOOP = """\
    for (i64 acl_group = acl_begin; acl_group < acl_end; acl_group++) {{
        const i64 acl_x = acl_group % acl_grid, acl_y = acl_group / acl_grid % acl_rows;
        for (i32 acl_outer = 0; acl_outer < acl_threads; acl_outer += acl_width) {{
            const i32 acl_local_y = acl_outer / acl_width % acl_height;
            for (i32 acl_local = 0; acl_local < acl_width; acl_local++) {{
                {body}
            }}
        }}
    }}
    return 0;
"""


@functools.cache
def c_compiler() -> tuple[tuple[str, ...], str]:
    """Return the command of the C compiler (CC, or cc, gcc, clang) and its version, or raise CompileError."""
    stated = shlex.split(os.environ.get("CC", ""))
    names = stated[:1] or ["cc", "gcc", "clang"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None or sys.platform == "win32":
        raise CompileError(
            f"portable C on the CPU needs a C compiler, on Linux or macOS; found none of {', '.join(names)}: install "
            "gcc or clang, or choose another device"
        )
    command = (path, *stated[1:])
    return command, (run_compiler([*command, "--version"]).stdout.strip().splitlines() or ["unknown"])[0]


def c_key(source: KernelSource, program: str) -> dict[str, Any]:
    """Return all that the machine code depends on, besides the processor."""
    return {
        "program": program,
        "fixed": [*_FLAGS, _FRAME, sources_hash(*_SOURCES)],
        "entries": sorted(source.entries.items()),
        "options": [*source.compile_options.for_cc(), *source.raw_options],
        "headers": header_hashes(program, source.compile_options.folders),
        "compiler": c_compiler(),
    }


_SOURCES = (
    "runtime/compilation/host_c.py", "runtime/compilation/host_block.c", "runtime/compilation/portable.h",
    "runtime/compilation/signatures.py",
)  # fmt: skip


def compile_c(source: KernelSource, program: str) -> Binary:
    """Compile a portable program for this processor; raise CompileError with the compiler's log."""
    command, _ = c_compiler()
    text, has_barriers = _unit(source, program)
    native = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    with tempfile.TemporaryDirectory(prefix="accelerant-cc-") as folder:
        unit, library = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        unit.write_text(text, encoding="utf-8")
        units = [str(unit)] + [str(Path(__file__).parent / "host_block.c")] * has_barriers
        options = [*source.compile_options.for_cc(), *source.raw_options, *[_FRAME] * has_barriers]
        done = run_compiler([*command, *_FLAGS, native, *options, *units, "-o", str(library), "-lm"])
        if done.returncode or not library.is_file() or "frame-larger-than" in done.stderr:
            log = done.stderr.replace(f"{folder}/", "").strip() or f"{command[0]} ended with status {done.returncode}"
            raise CompileError(f"kernel {source.name!r} does not compile for the CPU by {command[0]}", log)
        code = library.read_bytes()
    symbols = {entry: f"acl_run_{entry}" for entry in source.entries}
    return Binary(code, symbols, {entry: Resources() for entry in symbols}, {"blocks": True}, done.stderr.strip())


def load_c(binary: Binary, entry: str, types: Sequence[Any]) -> Callable[..., None]:
    """Load an entry point; the function takes begin to threads, as above, and the arguments, of these types."""
    with tempfile.TemporaryDirectory(prefix="accelerant-cc-") as folder:  # the library stays in memory without its file
        path = Path(folder) / "kernel.so"
        path.write_bytes(binary.code)
        try:
            library = ctypes.CDLL(str(path))
            function = library[binary.symbols[entry]]
        except (OSError, AttributeError) as error:
            raise CompileError(
                f"compiled code of {entry!r} cannot be loaded (may files in the temporary folder not be executed? "
                f"set TMPDIR): {error}"
            ) from None
    function.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_int32] * 3, *types]
    function.restype = ctypes.c_int

    def run(*arguments: Any) -> None:
        if function(*arguments):
            raise OutOfMemory(f"kernel {entry!r}: no memory for the stacks of its threads, which wait at a barrier")

    run.library = library  # type: ignore[attr-defined]  # with its other functions
    return run


def _unit(source: KernelSource, program: str) -> tuple[str, bool]:
    plain = without_comments(program)
    kernels = find_kernels(program, "portable")
    bodies = {kernel.name: plain[slice(*kernel.body)] for kernel in kernels}
    rest = plain
    for start, end in sorted((kernel.body for kernel in kernels), reverse=True):  # a helper may have the same text
        rest = f"{rest[:start]} {rest[end:]}"
    options = source.compile_options
    paths = (Path(path) for path, digest in header_hashes(program, options.folders) if digest)
    headers = (without_comments(read_regular(path).decode(errors="replace")) for path in paths)
    rest = "\n".join([rest, *options.macros.values(), *options.cc, *source.raw_options, *headers])
    missing = not bodies.keys() >= source.entries.keys()  # a macro writes them
    has_barriers = "acl_barrier" in plain + rest
    shared = bool(_INDICES.search(rest)) or missing or has_barriers or not all(source.entries.values())
    waits = {
        entry: "acl_barrier" in rest or (missing and has_barriers) or "acl_barrier" in bodies.get(entry, "")
        for entry in source.entries
    }
    lines = [_HEAD]
    if has_barriers:
        lines.append("extern __thread acl_item acl_here;\nvoid acl_host_barrier(void);")
    elif shared:
        lines.append("static __thread acl_item acl_here;")
    hidden = [] if shared else list(bodies)  # kernels that are no entries use the indices, too
    lines += [f"#define {entry}(...) {entry}(const acl_item acl_here, __VA_ARGS__)" for entry in hidden]
    lines += [portable_header(), first_line(source.name), program, first_line("accelerant")]
    lines += [f"#undef {entry}" for entry in hidden]
    lines += [_runner(entry, kinds, shared, waits[entry]) for entry, kinds in source.entries.items()]
    return "\n".join(lines), has_barriers


def _runner(entry: str, kinds: Sequence[str], shared: bool, waits: bool) -> str:
    types = ["void *" if kind.startswith("*") else f"{_C_TYPES[kind]} " for kind in kinds]
    parameters = "".join(f", {kind}acl_a{i}" for i, kind in enumerate(types))
    values = [f"acl_a{i}" for i in range(len(types))]
    head = (
        f'__attribute__((visibility("default"))) int acl_run_{entry}'
        "(i64 acl_begin, i64 acl_end, i64 acl_grid, i64 acl_rows, i32 acl_width, i32 acl_height, i32 acl_threads"
        f"{parameters}) {{\n"
    )
    if waits:
        loads = ", ".join(f"*({kind}*)acl_a[{i}]" for i, kind in enumerate(types))
        call = f"static void acl_call_{entry}(void *const *acl_a) {{ (void)acl_a; {entry}({loads}); }}\n"
        pointers = ", ".join(f"&{value}" for value in values) or "0"
        blocks = "acl_begin, acl_end, acl_grid, acl_rows, acl_width, acl_height, acl_threads"
        run = f"    return acl_run_blocks(acl_call_{entry}, acl_all, {blocks});\n"
        return f"{call}{head}    void *const acl_all[] = {{{pointers}}};\n{run}}}"
    body = f"{entry}({', '.join(['acl_here'] * (not shared) + values)});"
    values_of_here = "{acl_x, acl_y, acl_local, acl_local_y, acl_width, acl_height}"
    here = f"const acl_item acl_here = {values_of_here};"
    if shared:
        here = f"acl_here = (acl_item){values_of_here};"
    return head + _LOOP.format(body=f"{here}\n                {body}") + "}"


def run_compiler(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a compiler with a text as its input, its messages in English; raise CompileError if it does not run."""
    try:
        return subprocess.run(
            list(command), input=text, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"}, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"the C compiler {command[0]} does not run: {error}") from None
