"""Checks of Accelerant's installation: packages, compilers, cache, devices.

The last checks run computations on each device (proof.py).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from accelerant._version import __version__
from accelerant.algebra.field.program import field_add_source
from accelerant.bench.proof import Check, Status, prove
from accelerant.config import settings
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.kernel import Builder
from accelerant.runtime.provider import ComputeDevice

__all__ = ["Check", "Status", "checks"]

_TIMEOUT_S = 60
_PACKAGE = Path(__file__).parents[1]


def checks(progress: Callable[[str], None] = lambda _: None) -> Iterator[Check]:
    """Run the checks in order; one that raises becomes a failed check.

    Args:
        progress: called with the name of each part.
    """
    parts: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("installation", _installation),
        ("torch", _torch),
        ("backends", _backends),
        ("compiler NVRTC", _nvrtc),
        ("compiler Triton", _triton),
        ("compiler LLVM", _llvm),
        ("compiler C", _c_compiler),
        ("disk cache", _cache),
        ("extras", _extras),
    ]
    for name, part in parts:
        progress(name)
        yield from _guarded(name, part)
    for device in _present():
        label = f"{device.backend}:{device.index}"
        progress(f"compute on {label}")
        yield from _guarded(f"compute {label}", functools.partial(prove, device))


def _guarded(name: str, part: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from part()
    except Exception as error:  # noqa: BLE001 - reported as a failed check
        first = str(error).splitlines()[0] if str(error) else ""
        yield Check(name, "failed", f"{type(error).__name__}: {first}", "report this with the output of --json")


def _present() -> list[ComputeDevice]:
    try:
        return [device for device in registry.devices() if device.available]
    except Exception:  # noqa: BLE001 - the check of the backends has reported it
        return []


# --- what is installed -----------------------------------------------------------------------------------------------


def _installation() -> Iterator[Check]:
    yield Check("accelerant", "ok", f"{__version__} in {_PACKAGE}")
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    advice = "" if good else "install Python 3.11 or newer"
    yield Check("python", "ok" if good else "failed", f"{version} at {sys.executable}, {platform.platform()}", advice)
    found = settings()
    yield Check("settings", "ok", f"backend {found.backend}, fallback {found.fallback}, log {found.log}")


def _torch() -> Iterator[Check]:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    built = built or (f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU only")
    status: Status = "ok"
    advice = ""
    if built == "the CPU only" and _nvidia_is_there():
        status, advice = "warning", "there is an NVIDIA driver: install a CUDA build of torch to use it"
    yield Check("torch", status, f"{torch.__version__}, built for {built}", advice)
    driver = _driver()
    if driver is not None:
        yield driver


def _nvidia_is_there() -> bool:
    return bool(list(Path("/dev").glob("nvidia[0-9]*"))) or Path("/proc/driver/nvidia/version").exists()


def _driver() -> Check | None:
    """Check NVIDIA's driver; None if there is neither driver nor device."""
    if not registry.reason_absent("cuda"):
        devices = registry.create("cuda").devices()
        found = f"CUDA {devices[0].properties.get('driver', '?')}"
        path = Path("/proc/driver/nvidia/version")
        version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", path.read_text()) if path.is_file() else None
        if version is not None:
            found += f", version {version[1]}"
        return Check("NVIDIA driver", "ok", f"{found}, {len(devices)} device{'s' * (len(devices) != 1)}")
    if _nvidia_is_there():
        reason = registry.reason_absent("cuda")
        return Check("NVIDIA driver", "failed", reason, "run nvidia-smi; restart or reinstall the driver")
    return None


_HINTS: dict[str, Callable[[], bool]] = {
    "cuda": _nvidia_is_there,
    "rocm": lambda: Path("/dev/kfd").exists(),
    "apple": lambda: sys.platform == "darwin" and platform.machine() == "arm64",
}
"""Backend -> whether its hardware seems to be present, regardless of software."""


def _backends() -> Iterator[Check]:
    wanted = settings().backend
    for name in registry.BACKENDS:
        reason = registry.reason_absent(name)
        if not reason:
            devices = registry.create(name).devices()
            names = ", ".join(dict.fromkeys(device.name for device in devices))
            yield Check(f"backend {name}", "ok", f"{len(devices)} x {names}")
        elif wanted == name:
            yield Check(
                f"backend {name}",
                "failed",
                f"absent: {reason}",
                "it is the backend that the settings ask for: change ACCELERANT_BACKEND",
            )
        elif name in _HINTS and _HINTS[name]():
            yield Check(f"backend {name}", "warning", f"absent: {reason}", "its hardware seems to be here")
        else:
            yield Check(f"backend {name}", "ok", f"absent: {reason}")
    if wanted not in ("auto", *registry.BACKENDS):
        yield Check("settings", "failed", f"no backend {wanted!r}", f"set it to auto, {', '.join(registry.BACKENDS)}")


# --- compilers -------------------------------------------------------------------------------------------------------


def _llvm() -> Iterator[Check]:
    import llvmlite
    from llvmlite import binding

    found = f"llvmlite {llvmlite.__version__}, LLVM {binding.llvm_version_info[0]}, for {binding.get_host_cpu_name()}"
    yield Check("compiler LLVM", "ok", found)


def _nvrtc() -> Iterator[Check]:
    """Compile field_add for sm_90 without caches."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        needed: Status = "failed" if _nvidia_is_there() else "ok"
        yield Check("compiler NVRTC", needed, "not installed", "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc")
        return
    from accelerant.runtime.compilation.cuda import compile_cuda
    from accelerant.runtime.compilation.inspect import nvrtc_version

    began = time.perf_counter()
    binary = compile_cuda(field_add_source(), "sm_90")
    took = (time.perf_counter() - began) * 1e3
    registers = binary.resources["field_add"].registers
    yield Check(
        "compiler NVRTC", "ok", f"{nvrtc_version()}: field_add for sm_90 in {took:.0f} ms, {registers} registers"
    )


def _triton() -> Iterator[Check]:
    """Compile one shipped Triton kernel for sm_90."""
    if importlib.util.find_spec("triton") is None:
        status: Status = "ok" if sys.platform != "linux" else "warning"
        yield Check(
            "compiler Triton", status, "not installed", "pip install triton (Linux only); without it torch's ops run"
        )
        return
    version = importlib.metadata.version("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield Check("compiler Triton", "warning", f"{version}, set to interpret", "unset TRITON_INTERPRET to compile")
        return
    from accelerant.bench.shipped import shipped_kernels

    kernel = next(each for each in shipped_kernels() if "triton" in each.source.dialects)
    program = kernel.source.dialects["triton"]
    if not isinstance(program, Builder):
        yield Check("compiler Triton", "failed", f"{kernel.name} has no builder", "reinstall accelerant")
        return
    before = os.environ.get("TRITON_ALWAYS_COMPILE")
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # bypasses Triton's own cache
    began = time.perf_counter()
    try:
        binary = program.build("sm_90")
    finally:
        if before is None:
            del os.environ["TRITON_ALWAYS_COMPILE"]
        else:
            os.environ["TRITON_ALWAYS_COMPILE"] = before
    took = (time.perf_counter() - began) * 1e3
    if isinstance(binary, str):
        yield Check("compiler Triton", "failed", f"{kernel.name} became text, not code", "reinstall triton")
        return
    yield Check(
        "compiler Triton", "ok", f"{version}: {kernel.name} for sm_90 in {took:.0f} ms, {len(binary.code)} bytes"
    )


_PROBE = "#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n"


def _c_compiler() -> Iterator[Check]:
    """Check for a C compiler that finds Python.h and a C++ compiler, which torch.compile needs."""
    advice = "needed by torch.compile only: install gcc, g++ and Python's headers (Debian: build-essential python3-dev)"
    c = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    cxx = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if c is None or cxx is None:
        yield Check("compiler C", "warning", f"no {'C' if c is None else 'C++'} compiler", advice)
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(_PROBE)
        command = [
            *c.split(),
            "-shared",
            "-fPIC",
            f"-I{sysconfig.get_path('include')}",
            str(source),
            "-o",
            f"{source}.so",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            yield Check("compiler C", "warning", f"{c}: {error}", advice)
            return
    if done.returncode:
        said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[0]
        yield Check("compiler C", "warning", f"{c} does not build a module: {said}", advice)
        return
    yield Check("compiler C", "ok", f"{c} builds Python modules; C++: {cxx}")


# --- cache and extras ------------------------------------------------------------------------------------------------


def _cache() -> Iterator[Check]:
    root = settings().cache_dir / "kernels"
    advice = "kernels are compiled in each process: set ACCELERANT_CACHE_DIR to a writable folder"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"probe")
    except OSError as error:
        yield Check("disk cache", "warning", f"{root} cannot be written: {error.strerror or error}", advice)
        return
    found = KernelCache(root).entries()
    damaged = [entry for entry in found if entry.damage]
    size = sum(entry.size_bytes for entry in found)
    free = shutil.disk_usage(root).free
    text = f"{root}: {len(found)} entries, {size / 2**20:.1f} MiB, {free / 2**30:.0f} GiB free"
    if damaged:
        yield Check("disk cache", "warning", f"{text}, {len(damaged)} damaged", "accelerant cache clear --yes")
    elif free < 2**28:
        yield Check("disk cache", "warning", text, "the disk is nearly full")
    else:
        yield Check("disk cache", "ok", text)


def _extras() -> Iterator[Check]:
    for extra, requirements in sorted(_declared_extras().items()):
        missing = [name for name in requirements if not _is_installed(name)]
        there = [f"{name} {importlib.metadata.version(name)}" for name in requirements if name not in missing]
        advice = f"pip install 'accelerant[{extra}]'" if missing else ""
        found = ", ".join(there + [f"{name} not installed" for name in missing])
        needed = extra == "monitor" and missing and not registry.reason_absent("cuda")
        yield Check(f"extra {extra}", "warning" if needed else "ok", found, advice)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _declared_extras() -> dict[str, list[str]]:
    """Return the packages of each extra, from a source tree's pyproject.toml or the installed package."""
    project = _PACKAGE.parents[1] / "pyproject.toml"
    if project.is_file():
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("optional-dependencies", {})
        lines = [(extra, line) for extra, needs in declared.items() for line in needs]
    else:
        lines = []
        for line in importlib.metadata.requires("accelerant") or ():
            marker = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", line)
            if marker is not None:
                lines.append((marker[1], line))
    found: dict[str, list[str]] = {}
    for extra, line in lines:
        name = re.match(r"[\w.-]+", line)
        if extra != "dev" and name is not None and name[0] != "accelerant":
            found.setdefault(extra, []).append(name[0])
    return found
