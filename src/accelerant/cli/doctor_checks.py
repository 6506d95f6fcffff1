"""Checks of everything that Accelerant needs: installation, torch, backends, compilers, cache, extras, devices.

The last checks prove that each device computes, not only that its driver answers: field_add is compiled and launched
through the device's provider, its result compared with integer arithmetic, and its time taken between the device's own
events; meanwhile NVML, which is independent of torch, reports the utilization and memory of an NVIDIA device.
"""

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from accelerant._version import __version__
from accelerant.algebra.field.program import field_add_source
from accelerant.bench.record import environment_variable, installed_version
from accelerant.bench.suites import first_wrong, operands
from accelerant.config import settings
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.kernel import Builder
from accelerant.runtime.dispatch import force
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.monitoring.monitor import Sample, sample
from accelerant.runtime.monitoring.readers import driver_version, minimum_driver, nvml_missing, visible_devices_problem
from accelerant.runtime.provider import Buffer, ComputeDevice, ComputeProvider

_TIMEOUT_S = 60
_PACKAGE = Path(__file__).parents[1]

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Check(JsonRecord):
    """A line of the report: "warning" works, but not as well as it could; `advice` is what to do, "" for nothing."""

    name: str
    status: Status
    found: str
    advice: str = ""


def checks(progress: Callable[[str], None] = lambda _: None) -> Iterator[Check]:
    """Run the checks in order, reporting the name of each part; one that raises becomes a failed check."""
    parts: dict[str, Callable[[], Iterator[Check]]] = {
        "installation": _installation, "torch": _torch, "backends": _backends, "compiler NVRTC": _nvrtc,
        "compiler Triton": _triton, "compiler LLVM": _llvm, "compiler C": _c_compiler,
        "temporary folder": _temporary_folder, "disk cache": _cache, "arrays": _arrays,
        "extras": _extras,
    }  # fmt: skip
    for name, part in parts.items():
        progress(name)
        yield from _guarded(name, part)
    try:
        devices = [device for device in registry.devices() if device.available]
    except Exception:  # noqa: BLE001 - the check of the backends has reported it
        devices = []
    for device in devices:
        label = f"{device.backend}:{device.index}"
        yield _described(device)
        progress(f"compute on {label}")
        yield from _guarded(f"compute {label}", functools.partial(prove, device))


_UNITS = {
    "multiprocessors": "{} multiprocessors", "cores": "{} cores", "clock_mhz": "{} MHz",
    "memory_bus_bits": "{} bits of memory bus", "memory_bandwidth_gb_s": "{} GB/s",
    "shared_bytes_per_block": "{} bytes of shared memory a block", "threads_per_block": "{} threads a block",
    "warp_size": "warps of {}", "vector_bits": "vectors of {} bits", "dtypes": "{}",
    "matrix_dtypes": "matrix units: {}", "cudnn": "cuDNN {}", "pci_address": "PCI {}", "uuid": "{}",
    "mig_profile": "MIG slice {}",
}  # fmt: skip
"""Properties of a device that are shown, in this order, as texts."""


def _described(device: ComputeDevice) -> Check:
    """Return the line of a device's specification; a warning if it is slowed for its heat, or its memory fails."""
    parts = [device.name, *[f"{device.memory_bytes / 2**30:.1f} GiB"] * bool(device.memory_bytes)]
    for name, text in _UNITS.items():
        if value := device.properties.get(name):
            parts.append(text.format(", ".join(value) if isinstance(value, list) else value))
    now = sample(device)
    advice = ""
    if now.ecc_uncorrected:
        parts.append(f"{now.ecc_uncorrected} uncorrected memory errors")
        advice = "do not trust this device: restart it, and replace it if the errors come again"
    elif {"thermal", "hardware", "power brake"} & set(now.slow_down or ()):
        parts.append(f"slowed down now: {', '.join(now.slow_down or ())}")
        advice = "check cooling and power supply"
    return Check(f"device {device.label}", "warning" if advice else "ok", "; ".join(parts), advice)


def _guarded(name: str, part: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from part()
    except Exception as error:  # noqa: BLE001 - reported as a failed check
        first = str(error).splitlines()[0] if str(error) else ""
        yield Check(name, "failed", f"{type(error).__name__}: {first}", "report this with the output of --json")


# --- what is installed -----------------------------------------------------------------------------------------------
def _installation() -> Iterator[Check]:
    yield Check("accelerant", "ok", f"{__version__} in {_PACKAGE}")
    advice = "" if sys.version_info >= (3, 11) else "install Python 3.11 or newer"
    version = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    yield Check("python", "failed" if advice else "ok", version, advice)
    found = settings()
    try:
        with force(**dict(found.implementation)):
            yield Check("settings", "ok", f"backend {found.backend}, fallback {found.fallback}, log {found.log}")
    except ConfigError as error:
        advice = "correct ACCELERANT_IMPLEMENTATION, or [implementation] in the configuration file"
        yield Check("settings", "failed", str(error).partition("; known are")[0], advice)


def _torch() -> Iterator[Check]:
    names = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = next((f"{name} {version}" for name, version in names.items() if version), "the CPU only")
    advice = ""
    if built == "the CPU only" and _nvidia_is_there():
        advice = "there is an NVIDIA driver: install a CUDA build of torch to use it"
    yield Check("torch", "warning" if advice else "ok", f"{torch.__version__}, built for {built}", advice)
    yield from _driver()


def _nvidia_is_there() -> bool:
    return bool(list(Path("/dev").glob("nvidia[0-9]*"))) or Path("/proc/driver/nvidia/version").exists()


def _driver() -> Iterator[Check]:
    if not (reason := registry.reason_absent("cuda")):
        devices = registry.create("cuda").devices()
        version, supported = driver_version(), devices[0].properties["driver"]
        needed = minimum_driver(str(torch.version.cuda))
        cuda = torch.version.cuda
        found = f"{version or 'version unknown'}, CUDA up to {supported}; torch's CUDA {cuda} needs {needed}"
        old = bool(version and needed) and _numbers(version) < _numbers(needed)
        advice = f"install driver {needed} or newer, unless CUDA's compatibility package is here" if old else ""
        yield Check("NVIDIA driver", "warning" if old else "ok", found, advice)
    elif _nvidia_is_there():
        version = driver_version()
        advice = "do as it says" if "install" in reason else "run nvidia-smi; restart or reinstall the driver"
        yield Check("NVIDIA driver", "failed", f"{version}: {reason}" if version else reason, advice)
    if problem := visible_devices_problem(os.environ.get("CUDA_VISIBLE_DEVICES")):
        hidden = reason and not _nvidia_is_there()  # on a machine without NVIDIA's devices the variable changes nothing
        advice = "" if hidden else "change or unset it"
        yield Check("CUDA_VISIBLE_DEVICES", "warning" if advice else "ok", problem, advice)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


_HINTS: dict[str, Callable[[], bool]] = {
    "cuda": _nvidia_is_there,
    "rocm": lambda: Path("/dev/kfd").exists(),
    "apple": lambda: sys.platform == "darwin" and platform.machine() == "arm64",
}
"""Backend -> whether its hardware seems to be present, regardless of software."""


def _backends() -> Iterator[Check]:
    wanted = settings().backend
    with suppress(ConfigError):
        wanted = registry.backend_named(wanted)
    present: dict[str, list[ComputeDevice]] = {}
    for device in registry.devices():
        present.setdefault(device.backend, []).append(device)
    for name, devices in present.items():
        reason = "" if any(device.available for device in devices) else devices[0].reason
        if not reason:
            names = ", ".join(dict.fromkeys(device.name for device in devices))
            hidden = sum(not device.available for device in devices)
            more = f", {hidden} of them MIG slices that this process does not see" if hidden else ""
            yield Check(f"backend {name}", "ok", f"{len(devices)} x {names}{more}")
        elif wanted == name:
            advice = "it is the backend that the settings ask for: change ACCELERANT_BACKEND"
            yield Check(f"backend {name}", "failed", f"absent: {reason}", advice)
        elif name in _HINTS and _HINTS[name]():
            yield Check(f"backend {name}", "warning", f"absent: {reason}", "its hardware seems to be here")
        else:
            yield Check(f"backend {name}", "ok", f"absent: {reason}")
    if wanted not in ("auto", *present):
        yield Check("settings", "failed", f"no backend {wanted!r}", f"set it to auto, {', '.join(present)}")


# --- compilers -------------------------------------------------------------------------------------------------------
def _llvm() -> Iterator[Check]:
    import llvmlite
    from llvmlite import binding

    found = f"llvmlite {llvmlite.__version__}, LLVM {binding.llvm_version_info[0]}, for {binding.get_host_cpu_name()}"
    yield Check("compiler LLVM", "ok", found)


def _nvrtc() -> Iterator[Check]:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        needed: Status = "failed" if _nvidia_is_there() else "ok"
        yield Check("compiler NVRTC", needed, "not installed", "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc")
        return
    from accelerant.runtime.compilation.cuda import compile_cuda, nvrtc_version

    binary, took = _timed(lambda: compile_cuda(field_add_source(), "sm_90"))
    bindings = installed_version("cuda-bindings")
    found = f"field_add for sm_90 in {took:.0f} ms, {binary.resources['field_add'].registers} registers"
    advice = ""
    if bindings.split(".")[0] != nvrtc_version().split()[-1].split(".")[0]:
        advice = f"install the NVRTC of cuda-bindings {bindings}: pip install 'accelerant[cuda12]' has both for CUDA 12"
    yield Check("compiler NVRTC", "warning" if advice else "ok", f"{nvrtc_version()}: {found}", advice)


def _triton() -> Iterator[Check]:
    name = "compiler Triton"
    if importlib.util.find_spec("triton") is None:
        status: Status = "ok" if sys.platform != "linux" else "warning"
        yield Check(name, status, "not installed", "pip install triton (Linux only); without it torch's ops run")
        return
    version = importlib.metadata.version("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield Check(name, "warning", f"{version}, set to interpret", "unset TRITON_INTERPRET to compile")
        return
    from accelerant.ops.attention.cases import KERNELS

    kernel = KERNELS[0].source()
    program = kernel.dialects["triton"]
    assert isinstance(program, Builder)  # for the type checker: a Triton kernel always has one
    with environment_variable("TRITON_ALWAYS_COMPILE", "1"):  # bypasses Triton's own cache
        binary, took = _timed(lambda: program.build("sm_90"))
    if isinstance(binary, str):
        yield Check(name, "failed", f"{kernel.name} became text, not code", "reinstall triton")
        return
    yield Check(name, "ok", f"{version}: {kernel.name} for sm_90 in {took:.0f} ms, {len(binary.code)} bytes")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return call(), (time.perf_counter() - began) * 1e3


_PROBE = "#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n"


def _c_compiler() -> Iterator[Check]:
    """Check for a C compiler that finds Python.h and a C++ compiler, which torch.compile needs."""
    packages = "install gcc, g++ and Python's headers (Debian: build-essential python3-dev)"
    advice = f"needed by torch.compile and by portable C on the CPU: {packages}"
    c = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    cxx = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if c is None or cxx is None:
        yield Check("compiler C", "warning", f"no {'C' if c is None else 'C++'} compiler", advice)
        return
    with tempfile.TemporaryDirectory() as folder:
        source, headers = Path(folder) / "probe.c", sysconfig.get_path("include")
        source.write_text(_PROBE)
        command = [*c.split(), "-shared", "-fPIC", f"-I{headers}", str(source), "-o", f"{source}.so"]
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
def _temporary_folder() -> Iterator[Check]:
    try:
        yield Check("temporary folder", "ok", tempfile.gettempdir())
    except OSError as error:
        advice = "compilers need one: mount a tmpfs at /tmp, or set TMPDIR to a writable folder such as /dev/shm"
        yield Check("temporary folder", "failed", error.strerror or str(error), advice)


def _cache() -> Iterator[Check]:
    cache = KernelCache()
    root, refusal = cache.root, cache.refusal()
    if refusal:
        advice = "make it yours alone (chown, chmod go-w), or set ACCELERANT_CACHE_DIR to another folder"
        yield Check("disk cache", "failed", f"{root} is not used: {refusal}", advice)
        return
    advice = "kernels are compiled in each process: set ACCELERANT_CACHE_DIR to a writable folder"
    try:
        cache.require_writable()
    except ConfigError as error:
        there = len(cache.entries())
        text = f"{str(error).partition(';')[0].removeprefix('kernel cache ')}; {there} entries are read"
        yield Check("disk cache", "warning", text, "new " * bool(there) + advice)
        return
    found = cache.entries()
    damaged, foreign = sum(bool(entry.damage) for entry in found), [entry for entry in found if not entry.trusted]
    size, free = sum(entry.size_bytes for entry in found), shutil.disk_usage(root).free
    text = f"{root}: {len(found)} entries, {size / 2**20:.1f} MiB, {free / 2**30:.0f} GiB free"
    status: Status = "failed" if foreign else "warning" if damaged or free < 2**28 else "ok"
    advice = f"delete {root}" if foreign else "the disk is nearly full" if free < 2**28 else ""
    if foreign:
        text = f"{text}, {len(foreign)} not used: {foreign[0].key[:12]}: {foreign[0].damage}"
    elif damaged:
        text, advice = f"{text}, {damaged} damaged", "accelerant cache clear --yes"
    yield Check("disk cache", status, text, advice)


def _extras() -> Iterator[Check]:
    for extra, requirements in sorted(_declared_extras().items()):
        versions = {name: installed_version(name) for name in requirements}
        missing = [name for name, version in versions.items() if not version]
        advice = f"pip install 'accelerant[{extra}]'" if missing else ""
        there = [f"{name} {version}" for name, version in versions.items() if version]
        found = ", ".join(there + [f"{name} not installed" for name in missing])
        needed = extra == "monitor" and missing and not registry.reason_absent("cuda")
        yield Check(f"extra {extra}", "warning" if needed else "ok", found, advice)


def _arrays() -> Iterator[Check]:
    """Report the libraries beside torch whose arrays are taken. CuPy's packages have CUDA's version in their names."""
    packages = importlib.metadata.packages_distributions()
    found = {name: sorted({*packages.get(name.lower(), ())}) for name in ("NumPy", "CuPy", "JAX")}
    texts = [
        f"{name} {', '.join(f'{installed_version(each)} ({each})' for each in there) or 'not installed'}"
        for name, there in found.items()
    ]
    advice = "uninstall all but one of CuPy's packages: each overwrites the others" * (len(found["CuPy"]) > 1)
    yield Check("arrays", "warning" if advice else "ok", "; ".join(texts), advice)


def _declared_extras() -> dict[str, list[str]]:
    """Return the packages of each extra, from a source tree's pyproject.toml or the installed package."""
    project = _PACKAGE.parents[1] / "pyproject.toml"
    if project.is_file():
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("optional-dependencies", {})
        lines = [(extra, line) for extra, needs in declared.items() for line in needs]
    else:
        marked = ((re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", line), line)
                  for line in importlib.metadata.requires("accelerant") or ())  # fmt: skip
        lines = [(marker[1], line) for marker, line in marked if marker]
    found: dict[str, list[str]] = {}
    for extra, line in lines:
        name = re.match(r"[\w.-]+", line)
        if extra not in ("dev", "cuda12") and name is not None and name[0] != "accelerant":
            found.setdefault(extra, []).append(name[0])
    return found


# --- the proof that a device computes --------------------------------------------------------------------------------
_TIMED_LAUNCHES = 10
_BUSY_S = 2.5
_MANY, _FEW = 1 << 25, 1 << 20
_NEEDED_BYTES = 4 << 30


@dataclass(slots=True)
class _FieldAddLaunch:
    """The field_add kernel on a device: its launch, a copy of the sums to the host, and its buffers, the sums' last."""

    start: Callable[[], None]
    sums: Callable[[], Any]
    n: int
    buffers: list[Buffer]


def prove(device: ComputeDevice) -> Iterator[Check]:
    """Compile, launch, compare and time field_add on a device; on NVIDIA also observe it through NVML."""
    label = f"compute {device.backend}:{device.index}"
    provider = registry.create(device.backend)
    before = sample(device) if device.backend == "cuda" else None
    launch, x, y = _prepare(provider, device)
    launch.start()
    provider.synchronize(device.index)
    if wrong := first_wrong(x, y, launch.sums()):
        yield Check(label, "failed", wrong, "do not trust this device: check memory and driver, then run this again")
        return
    marks = []
    for _ in range(_TIMED_LAUNCHES):
        start = provider.record_event(device.index)
        launch.start()
        marks.append((start, provider.record_event(device.index)))
    provider.synchronize(device.index)
    times = [start.elapsed_ms(stop) for start, stop in marks if start is not None and stop is not None]
    if (best := min(times, default=0.0)) <= 0.0:
        yield Check(label, "failed", f"the result is right, but the device's events say {best} ms", "update the driver")
        return
    took = f"{best:.3f} ms by events ({24 * launch.n / best / 1e6:,.0f} GB/s)"
    yield Check(label, "ok", f"field_add of {launch.n:,} elements: {took}, result exact")
    if before is not None:
        yield _observed(launch, provider, device, before, best)


def _prepare(provider: ComputeProvider, device: ComputeDevice) -> tuple[_FieldAddLaunch, Any, Any]:
    """Prepare operands, edge values first, and an output with a value that no sum has."""
    roomy = device.backend == "cuda" and provider.memory(device.index).free_bytes > _NEEDED_BYTES
    x, y = operands(n := _MANY if roomy else _FEW)
    kernel = provider.compile(field_add_source(), device=device.index)
    buffers = [provider.copy_to_device(each, device.index) for each in (x, y, np.full(n, 2**64 - 1, np.uint64))]
    start = functools.partial(provider.launch, kernel, (-(-n // 256),), (256,), (*buffers, n))
    sums = functools.partial(provider.copy_to_host, buffers[2], np.uint64, (n,))
    return _FieldAddLaunch(start, sums, n, buffers), x, y


def _observed(
    launch: _FieldAddLaunch, provider: ComputeProvider, device: ComputeDevice, before: Sample, one_ms: float
) -> Check:
    """Keep the device busy until NVML shows it."""
    label = f"seen by NVML {before.device}"
    if missing := nvml_missing():
        return Check(label, "warning", missing, "pip install 'accelerant[monitor]' to see the device from outside")
    seen, peak = before, 0.0
    until = time.perf_counter() + _BUSY_S
    while time.perf_counter() < until:
        for _ in range(max(1, int(200 / one_ms))):  # 0.2 s of work, so that reading takes little of the time
            launch.start()
        provider.synchronize(device.index)
        seen = sample(device)
        if (peak := max(peak, seen.utilisation_percent or 0.0)) >= 50.0:
            break
    memory = _memory_seen(before, seen, sum(buffer.size_bytes for buffer in launch.buffers))
    if seen.utilisation_percent is None:
        return Check(label, "warning", f"{memory}; utilization: {seen.reasons['utilisation_percent']}")
    found = f"{peak:.0f} % busy, {memory}"
    if seen.power_w is not None and seen.temperature_c is not None:
        found += f", {seen.power_w:.0f} W, {seen.temperature_c:.0f} C"
    if peak == 0.0:
        advice = "NVML looks at another device than torch, or counts nothing (MIG, virtual GPU)"
        return Check(label, "failed", f"0 % busy during {_BUSY_S} s of launches; {memory}", advice)
    if memory.startswith("no"):
        return Check(label, "failed", found, "NVML looks at another device than torch")
    return Check(label, "ok", found)


def _memory_seen(before: Sample, seen: Sample, held: int) -> str:
    """Return this process's memory in NVML, or the device's rise where NVML numbers processes differently."""
    mine = [process for process in seen.processes or () if process.pid == os.getpid() and process.memory_bytes]
    if mine:
        return f"{(mine[0].memory_bytes or 0) / 2**20:,.0f} MiB held by this process"
    if (rise := (seen.memory_used_bytes or 0) - (before.memory_used_bytes or 0)) >= held:
        return f"{rise / 2**20:,.0f} MiB more in use (NVML does not list this process: it runs in a container)"
    return f"no rise of the device's memory in use ({rise / 2**20:,.0f} MiB, {held / 2**20:,.0f} are held)"
