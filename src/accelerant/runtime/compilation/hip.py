"""Compiling portable C for AMD at run time: hiprtc, which needs neither a GPU nor headers of ROCm.

ROCm, and ROCm builds of torch, bring the library; elsewhere Debian's libamdhip64-5 and libhiprtc-builtins5 do. It runs
in a child process (hiprtc.py): one that has loaded it, with its LLVM, aborts when PoCL loads another.
"""

from __future__ import annotations

import base64
import functools
import json
import sys
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError
from accelerant.runtime.compilation.cache import kernel_key
from accelerant.runtime.compilation.host_c import run_compiler
from accelerant.runtime.compilation.kernel import Binary, KernelSource, Resources, first_line, portable_header
from accelerant.runtime.compilation.options import header_hashes

HIP_DIALECTS = ("portable",)
"""Dialects that are compiled."""

_FIXED = ("-Wno-unused-command-line-argument",)
"""hiprtc 5.2 ignores for_hip's option of division, which is always correctly rounded there."""


def hip_key(source: KernelSource, target: str) -> str:
    """Return the disk cache's key for the result of compile_hip."""
    text = _text(source)
    return kernel_key(
        program=text, header=portable_header(), entries=sorted(source.entries), options=_options(source),
        headers=header_hashes(text, source.compile_options.folders), target=target, compiler=hiprtc_version(),
    )  # fmt: skip


def compile_hip(source: KernelSource, target: str) -> Binary:
    """Compile for an architecture ("gfx90a"), without driver or device; raise CompileError with the log."""
    found = _ask(
        f"for {target}", text=f"{portable_header()}\n{first_line(source.name)}\n{_text(source)}", name=source.name,
        options=[f"--offload-arch={target}", *_options(source)],
    )  # fmt: skip
    if not found["code"]:
        raise CompileError(f"kernel {source.name!r} does not compile for {target}", found["log"])
    return Binary(
        code=base64.b64decode(found["code"]),
        symbols={entry: entry for entry in source.entries},
        resources={entry: Resources() for entry in source.entries},
        log=found["log"],
    )


@functools.cache
def hiprtc_version() -> str:
    """Return the compiler with its versions; raise CompileError without one."""
    major, minor, runtime = _ask("to name its version")["versions"]
    return f"hiprtc {major}.{minor}, HIP {_torch_hip() or runtime}"


def _ask(what: str, **asked: Any) -> dict[str, Any]:
    names = [*library_names("hiprtc"), *library_names("amdhip64")]
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("hiprtc.py"))]
    done = run_compiler(command, json.dumps({"names": names, **asked}))
    if done.returncode:
        raise CompileError(f"hiprtc, asked {what}, ended with status {done.returncode}", done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        raise CompileError(found["error"])
    return found


def library_names(stem: str) -> list[str]:
    """Return the names to load a library of ROCm by; where torch is built for ROCm, those of its version alone."""
    hip = _torch_hip()
    majors = [hip.partition(".")[0]] if hip else ["7", "6", "5"]
    beside = [str(Path(str(sys.modules["torch"].__file__)).parent / "lib" / f"lib{stem}.so")] if hip else []
    return [*beside, *(f"lib{stem}.so.{major}" for major in majors)]


def _torch_hip() -> str:
    """Return the version of HIP that torch is built for; empty where it is for others, or not imported."""
    torch = sys.modules.get("torch")
    return str(torch.version.hip or "") if torch is not None else ""


def _text(source: KernelSource) -> str:
    _, program = source.pick(HIP_DIALECTS)
    if not isinstance(program, str):
        kind = type(program).__name__
        raise CompileError(f"kernel {source.name!r}: hiprtc compiles text, not the result of a {kind}")
    return program


def _options(source: KernelSource) -> list[str]:
    return [*source.compile_options.for_hip(), *source.raw_options, *_FIXED]
