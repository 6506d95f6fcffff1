"""Requirements of tests that the extra dev and scripts/ci-setup install: absent, tests skip, or fail where CI=true."""

import importlib.util
import os
import random
import shutil
import socket
from pathlib import Path

import pytest

from accelerant.algebra.field.llvm_kernels import host_has
from accelerant.runtime import registry

INTEROP = Path(__file__).parent / "interop"
REQUIRED_BACKENDS = ("cpu", "opencl", "webgpu")
"""Backends of every machine that runs CI; scripts/ci-setup installs PoCL and lavapipe."""


def require(reason):
    """Skip the test for a reason, or fail it where CI=true; "" is no reason."""
    if reason:
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


def require_backend(name):
    """Return the name of a backend that is present; other backends than REQUIRED_BACKENDS may be absent in CI, too."""
    reason = registry.reason_absent(name)
    if reason and name not in REQUIRED_BACKENDS:
        pytest.skip(reason)
    require(reason)
    return name


def require_module(name, extra="dev"):
    """Require a Python package that an extra installs."""
    require("" if importlib.util.find_spec(name) else f"{name} is not installed; the extra {extra} has it")


def require_form(form, limbs=4):
    """Skip the test where this processor lacks what a form of the CPU's kernels needs for elements of so many limbs."""
    if form == "vector" and limbs > 1 and not host_has("avx512ifma"):
        pytest.skip("this processor has no AVX512-IFMA")


def snarkjs_command():
    """Return the command line of the snarkjs that the tests pin."""
    return _node_command("snarkjs", INTEROP / "snarkjs" / "node_modules" / "snarkjs" / "build" / "cli.cjs")


def solidity_command():
    """Return the command line of tests/interop/solidity/call.mjs, with the packages that the tests pin."""
    folder = INTEROP / "solidity"
    _node_command("the compiler of Solidity", folder / "node_modules" / "solc")
    return _node_command("call.mjs", folder / "call.mjs")


def _node_command(what, path):
    node = shutil.which("node")
    require("" if node else "Node is not here: scripts/ci-setup installs it")
    require("" if path.exists() else f"{what} is not here: scripts/ci-setup installs it")
    return [node, str(path)]


def free_ports(count):
    """Return ports to listen on a little later: below those that the system gives to connections meanwhile."""
    found = []
    while len(found) < count:
        port = random.SystemRandom().randrange(10000, 32768)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found


def free_port():
    return free_ports(1)[0]
