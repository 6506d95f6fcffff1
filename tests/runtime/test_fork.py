"""Forked children work, whatever the parent's other threads were doing; DataLoader forks by default on Linux."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from accelerant.runtime import host, registry

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

SOURCE = Path(__file__).parents[2] / "src"
NO_OPENCL = registry.reason_absent("opencl")


def run(program, *arguments, folder, timeout_s=120):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "ACCELERANT_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_lock_is_free_in_a_child():
    bare = {
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"(?<!fork_safe\()threading\.(R?Lock|Condition)\(", line)
    }
    assert bare == {"accelerant/zk/groth16/prover.py: self._changed = threading.Condition()"}  # unused by children
    locks = list(host._locks)
    assert len(locks) > 5
    holds, release = threading.Event(), threading.Event()

    def hold():
        taken = [lock for lock in locks if lock.acquire(blocking=False)]
        holds.set()
        release.wait()
        for lock in taken:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    child = os.fork()
    if child == 0:
        os._exit(sum(not lock.acquire(blocking=False) for lock in locks))
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


COMPILES = """
import os, sys, threading, time
import numpy as np, torch
import accelerant as acl
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource

cpu, body = registry.create("cpu"), "".join(f"  %t{i + 1} = mul i64 %t{i}, {2 * i + 3}\\n" for i in range(400))
x = torch.ones(8)
acl.ops.relu(x)  # not gelu: torch's own calls of oneDNN, of OpenMP and of its generator hang in a child

def compile_one(name):
    text = f"define void @{name}(i64 %begin, i64 %end, ptr %x) {{\\n  %t0 = load i64, ptr %x\\n{body}"
    text += "  store i64 %t400, ptr %x\\n  ret void\\n}\\n"
    kernel = cpu.compile(KernelSource(name, {"llvm": text}, {name: ("*i64",)}))
    x = cpu.copy_to_device(np.ones(1, np.int64))
    cpu.launch(kernel, (1,), (1,), (x,))
    return cpu.copy_to_host(x, np.int64, (1,))[0]

def work(number):
    i = 0
    while not ended:
        compile_one(f"kernel_{number}_{i}")
        acl.ops.relu(x)
        acl.ledger().to_json()
        i += 1

ended = []
wanted = compile_one("first")
threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for turn in range(int(sys.argv[1])):
    time.sleep(0.003 * (turn % 7))
    child = os.fork()
    if child == 0:
        good = compile_one(f"child_{turn}") == wanted and acl.ops.relu(x).tolist() == [1.0] * 8
        acl.ledger().to_json()
        os._exit(not good)
    deadline = time.monotonic() + 120
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os._exit(f"child {turn} hangs" and 3)
        time.sleep(0.002)
    if status[1]:
        os._exit(4)
ended.append(True)
"""


@pytest.mark.slow
@pytest.mark.search(60)
def test_a_child_compiles_while_threads_of_its_parent_do(tmp_path, record_property):
    run(COMPILES, "20", folder=tmp_path, timeout_s=300)
    record_property("forks", 20)


OPENCL = """
import os, sys
import numpy as np
from accelerant.algebra.field.program import field_add_source
from accelerant.errors import DeviceLost
from accelerant.runtime import registry

opencl = registry.create("opencl")
kernel = opencl.compile(field_add_source())
x = opencl.copy_to_device(np.array([1, 2], np.uint64))
calls = {
    "allocate": lambda: opencl.allocate(8),
    "copy_to_device": lambda: opencl.copy_to_device(np.zeros(2, np.uint64), out=x),
    "copy_to_host": lambda: opencl.copy_to_host(x, np.uint64, (2,)),
    "compile": lambda: opencl.compile(field_add_source()),
    "launch": lambda: opencl.launch(kernel, (1,), (32,), (x, x, x, 2)),
    "synchronize": lambda: opencl.synchronize(),
    "memory": lambda: opencl.memory(),
    "record_event": lambda: opencl.record_event(),
    "trim": lambda: opencl.trim(),
}
child = os.fork()
if child == 0:
    for name, call in calls.items():
        try:
            call()
        except DeviceLost as error:
            assert "forked" in str(error)
        else:
            sys.exit(f"{name} gave no error")
    sys.exit(0)  # with all handlers that run at an exit
assert os.waitpid(child, 0)[1] == 0
for call in calls.values():
    call()
assert opencl.copy_to_host(x, np.uint64, (2,)).tolist() != [1, 2]
folder = os.environ["POCL_CACHE_DIR"]
assert os.path.isdir(folder)
print(folder)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_OPENCL), reason=NO_OPENCL or "-")
def test_opencl_in_a_child_is_an_error_and_its_parent_keeps_pocls_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("POCL_CACHE_DIR", raising=False)
    folder = run(OPENCL, folder=tmp_path).strip()
    assert not Path(folder).exists()
