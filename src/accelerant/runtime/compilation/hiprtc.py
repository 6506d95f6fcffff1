"""The program of hip.py's child process: one compilation by hiprtc through ctypes, or its version.

stdin has JSON: `names` of libraries to try, `text`, `name` and `options`. The last line of stdout is JSON: `versions`,
the `log`, and the `code` in Base64, empty where the text does not compile; or `error`. Only the standard library is
imported: the file runs by itself.
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from collections.abc import Sequence
from typing import Any


def _load(names: Sequence[str]) -> Any:
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


def _compiled(hiprtc: Any, text: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Return the code and the log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(function: str, *args: Any) -> None:
        if status := getattr(hiprtc, f"hiprtc{function}")(*args):
            raise RuntimeError(f"hiprtc{function}: {hiprtc.hiprtcGetErrorString(status).decode()}")

    def fetch(what: str) -> bytes:
        call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        if size.value:
            call(f"Get{what}", program, buffer)
        return buffer.raw

    call("CreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = hiprtc.hiprtcCompileProgram(program, len(options), array)
    log = fetch("ProgramLog").decode(errors="replace").replace("\0", "").strip()
    if status:
        return b"", log or hiprtc.hiprtcGetErrorString(status).decode()
    return fetch("Code"), log


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        hiprtc = _load(asked["names"])
        if "text" not in asked:
            return {"versions": _versions(hiprtc)}
        code, log = _compiled(hiprtc, asked["text"], asked["name"], asked["options"])
        return {"code": base64.b64encode(code).decode(), "log": log}
    except RuntimeError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print("\n" + json.dumps(_answer(json.load(sys.stdin))), flush=True)
