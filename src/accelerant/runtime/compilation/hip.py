"""Compiling portable C for AMD at run time: hiprtc, which needs neither a GPU nor headers of ROCm.

ROCm, and ROCm builds of torch, bring the library; elsewhere Debian's libamdhip64-5 and libhiprtc-builtins5 do. It runs
in a child process: one that has loaded it, with its LLVM, aborts when PoCL loads another.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError
from accelerant.runtime.compilation.cache import kernel_key
from accelerant.runtime.compilation.kernel import Binary, KernelSource, first_line, header_hashes, portable_header
from accelerant.runtime.host import run_python

HIP_DIALECTS = ("portable",)  # dialects that are compiled

_FIXED = ("-Wno-unused-command-line-argument",)
"""hiprtc 5.2 ignores for_hip's option of division, which is always correctly rounded there."""

_TIMEOUT_S = 300
_CHILD = "from accelerant.runtime.compilation.hip import _answer; _answer()"


def hip_key(source: KernelSource, target: str) -> str:
    """Return the disk cache's key for the result of compile_hip."""
    text = source.text(HIP_DIALECTS, "hiprtc")
    return kernel_key(
        program=text, header=portable_header(), entries=sorted(source.entries), options=_options(source),
        headers=header_hashes(text, source.compile_options.folders), target=target, compiler=hiprtc_version(),
    )  # fmt: skip


def compile_hip(source: KernelSource, target: str) -> Binary:
    """Compile for an architecture ("gfx90a"), without driver or device; raise CompileError with the log."""
    text = f"{portable_header()}\n{first_line(source.name)}\n{source.text(HIP_DIALECTS, 'hiprtc')}"
    options = [f"--offload-arch={target}", *_options(source)]
    found = _ask(f"for {target}", text=text, name=source.name, options=options)
    if not found["code"]:
        raise CompileError(f"kernel {source.name!r} does not compile for {target}", found["log"])
    return Binary.of(base64.b64decode(found["code"]), source.entries, found["log"])


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
    torch = sys.modules.get("torch")
    return str(torch.version.hip or "") if torch is not None else ""


def _options(source: KernelSource) -> list[str]:
    return [*source.compile_options.for_hip(), *source.raw_options, *_FIXED]


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
