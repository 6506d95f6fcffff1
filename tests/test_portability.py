"""Windows and macOS import the package and run the CPU path. They are imitated: no such machine runs these tests."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import accelerant

ROOT = Path(accelerant.__file__).parent
POSIX_MODULES = {"crypt", "fcntl", "grp", "nis", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": {
        "fork", "forkpty", "getegid", "geteuid", "getgid", "getgroups", "getloadavg", "getpgid", "getpriority",
        "getuid", "killpg", "memfd_create", "mkfifo", "nice", "openpty", "posix_fadvise", "posix_fallocate",
        "posix_spawn", "sched_getaffinity", "sched_setaffinity", "sched_yield", "sendfile", "setsid", "statvfs",
        "sysconf", "sysconf_names", "uname", "wait3", "wait4", "WNOHANG", "O_NONBLOCK", "O_DIRECTORY", "O_CLOEXEC",
    },
    "signal": {
        "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1",
        "SIGUSR2", "alarm", "pause", "setitimer", "pthread_sigmask", "sigwait",
    },
    "time": {"clock_gettime", "tzset"},
    "select": {"poll", "epoll"},
    "socket": {"AF_UNIX"},
}  # fmt: skip
BLOCKED = ("triton", "cuda", "pyopencl", "wgpu", "pynvml", "amdsmi")
"""Packages without wheels for these systems, or without a use there."""


def python_files():
    return sorted(path for path in ROOT.rglob("*.py") if path.name != "triton_kernels.py")


# --- the text --------------------------------------------------------------------------------------------------------
NAMED = re.compile(
    rf"\b(import|from)\b.*\b({'|'.join(sorted({*POSIX_MODULES, *BLOCKED}))})\b"
    rf"|\.({'|'.join(sorted(set().union(*POSIX_NAMES.values())))})\b"
)


def offences(text):
    """Uses of what only POSIX has, unless something asked first whether it is there."""
    if not NAMED.search(text):
        return []
    tree = ast.parse(text)
    return sorted(found for node in ast.iter_child_nodes(tree) for found in _offences(node, frozenset(), True))


def _offences(node, asked, at_import):
    """Walk a node; `asked` are the names that a surrounding condition has asked for."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        at_import = False
    if isinstance(node, ast.Try) and any(_catches_absence(handler) for handler in node.handlers):
        asked = asked | {"*"}
    if isinstance(node, (ast.If, ast.IfExp, ast.BoolOp, ast.While)):
        asked = asked | set(_asked_for(node.values[0] if isinstance(node, ast.BoolOp) else node.test))
    if "*" not in asked:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                if name.partition(".")[0] in POSIX_MODULES:
                    yield f"line {node.lineno}: import {name}"
                if at_import and name.partition(".")[0] in BLOCKED:
                    yield f"line {node.lineno}: import {name} with the module"
        if isinstance(node, ast.Attribute) and node.attr not in asked:
            module = getattr(node.value, "id", "")
            if node.attr in POSIX_NAMES.get(module, ()):
                yield f"line {node.lineno}: {module}.{node.attr}"
    for child in ast.iter_child_nodes(node):
        yield from _offences(child, asked, at_import)


def _catches_absence(handler):
    names = (
        {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)} if handler.type else {"Exception"}
    )
    return bool(names & {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"})


def _asked_for(condition):
    """Names in hasattr(module, "name") anywhere in a condition; "*" for a look at sys.platform or os.name."""
    for node in ast.walk(condition):
        called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if called == "hasattr" and isinstance(node.args[1], ast.Constant):
            yield node.args[1].value
        if isinstance(node, ast.Attribute) and (getattr(node.value, "id", ""), node.attr) in {
            ("sys", "platform"),
            ("os", "name"),
        }:
            yield "*"
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
            yield "*"


@pytest.mark.parametrize(("text", "found"), [
    ("import fcntl", ["line 1: import fcntl"]),
    ("def f():\n    from pwd import getpwnam", ["line 2: import pwd"]),
    ("try:\n    import resource\nexcept ImportError:\n    resource = None", []),
    ("try:\n    import resource\nexcept ValueError:\n    pass", ["line 2: import resource"]),
    ("import os\nn = os.sched_getaffinity(0)", ["line 2: os.sched_getaffinity"]),
    ("import os\nn = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else 1", []),
    ("import os\nif hasattr(os, 'fork'):\n    os.sysconf('SC_PAGE_SIZE')", ["line 3: os.sysconf"]),
    ("import sys, signal\nif sys.platform != 'win32':\n    signal.SIGKILL", []),
    ("import signal\ndef stop(p):\n    p.send_signal(signal.SIGKILL)", ["line 3: signal.SIGKILL"]),
    ("import triton", ["line 1: import triton with the module"]),
    ("def f():\n    import triton", []),
])  # fmt: skip
def test_the_search_finds_what_it_is_for(text, found):
    assert offences(text) == found


def test_nothing_needs_posix():
    found = {str(path.relative_to(ROOT)): offences(path.read_text(encoding="utf-8")) for path in python_files()}
    assert {path: lines for path, lines in found.items() if lines} == {}


# --- the imitation ---------------------------------------------------------------------------------------------------
IMITATE = """
import gc; gc.disable()  # all that is imported stays
import ast, ctypes, importlib, importlib.machinery, importlib.util, os, pkgutil, re, signal, sys, time, select, socket
from pathlib import Path

platform, root = sys.argv[1], Path(sys.argv[2])
blocked, posix_modules, posix_names = map(ast.literal_eval, sys.argv[3:])

class WithoutBlocked(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else super().find_spec(name, path, target)

sys.meta_path[:] = [WithoutBlocked if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]

# What is not ours is imported before the platform changes: it was built for this one.
import torch, torch.testing, torch._dynamo, torch.utils.checkpoint
for path in root.rglob("*.py"):
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"^ *(?:from|import) (\\w[\\w.]*)(?= import|$)", text, re.MULTILINE):
        top = name.partition(".")[0]
        if top != "accelerant" and top not in blocked and top not in posix_modules:
            try:
                importlib.import_module(name)
            except ImportError:
                pass
import rich.progress, typer.testing
assert not [name for name in sys.modules if name.partition(".")[0] in blocked]

sys.platform = platform
if platform == "win32":
    for name in posix_modules:
        sys.modules[name] = None  # import raises ImportError
    for module, names in posix_names.items():
        for name in names:
            if hasattr(sys.modules[module], name):
                delattr(sys.modules[module], name)

    class Kernel32:
        def GlobalMemoryStatusEx(self, status):
            figures = (ctypes.c_uint64 * 8).from_address(ctypes.addressof(status._obj))
            assert figures[0] == 64  # the length that Windows insists on, and no load
            figures[1], figures[2] = 8 << 30, 5 << 30
            return 1

    ctypes.windll = type("Windll", (), {"kernel32": Kernel32()})
else:
    for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create"):
        if hasattr(os, name):
            delattr(os, name)
is_file, exists = Path.is_file, Path.exists
Path.is_file = lambda self: not str(self).startswith(("/proc", "/sys/")) and is_file(self)
Path.exists = lambda self, **kw: not str(self).startswith(("/proc", "/sys/")) and exists(self, **kw)

import accelerant as acl
imported = []
for info in pkgutil.walk_packages(acl.__path__, "accelerant."):
    if not info.name.endswith(("triton_kernels", "__main__", "_vllm_layers")):
        importlib.import_module(info.name)
        imported.append(info.name)
assert len(imported) > 40, imported

import numpy as np
found = {device.backend: device for device in acl.devices()}
assert set(found) == {"cuda", "rocm", "apple", "opencl", "webgpu", "cpu"}
assert found["cpu"].available and found["cpu"].torch_device == "cpu"
for name in ("cuda", "opencl"):
    assert not found[name].available and found[name].reason, found[name]
total = 8 << 30 if platform == "win32" else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
assert found["cpu"].memory_bytes == total

x = torch.randn(4, 16, requires_grad=True)
weight, bias = torch.ones(16), torch.zeros(16)
y = acl.ops.softmax(acl.ops.gelu(acl.ops.layer_norm(x, weight, bias), approximate="tanh"))
acl.ops.matmul(y, torch.randn(16, 3)).sum().backward()
torch.testing.assert_close(acl.ops.gelu(x), torch.nn.functional.gelu(x))
assert x.grad.isfinite().all()
goldilocks = acl.zk.field("goldilocks")
assert goldilocks.add(np.array([1, 2**64 - 2**32], np.uint64), np.array([5, 1], np.uint64)).tolist() == [6, 0]
memory = acl.runtime.registry.create("cpu").memory()
assert memory.free_bytes == 5 << 30 if platform == "win32" else 0 < memory.free_bytes <= memory.total_bytes
assert acl.ledger().to_dict()["ops"]

from typer.testing import CliRunner
from accelerant.cli.app import build_app
shown = CliRunner().invoke(build_app(), ["devices", "--json"])
assert shown.exit_code == 0, shown.output
print("ran", platform, len(imported))
"""


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["win32", pytest.param("darwin", marks=pytest.mark.soak)])
def test_the_package_imports_and_runs_on_the_cpu(platform, tmp_path):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "ACCELERANT"))},
        "ACCELERANT_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    arguments = [platform, str(ROOT), repr(BLOCKED), repr(sorted(POSIX_MODULES)), repr(POSIX_NAMES)]
    ran = subprocess.run(
        [sys.executable, "-c", IMITATE, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.startswith(f"ran {platform}")
