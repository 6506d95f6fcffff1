"""The CPU path of zk needs NumPy and llvmlite; torch is not imported for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import accelerant

field = accelerant.zk.field("bn254_fr")
p = field.modulus
x = field.array([1, 2, p - 1])
assert field.decode(field.mul(field.encode([3, p - 1]), [5, p - 1])) == [15, 1]
assert (x**2 / x + 1 - x).sum().ints() == 3
assert field.decode(field.dot(field.random(3), [0, 0, 0])) == 0
assert field.decode(field.inv([1])) == [1]
assert field.decode(field.add([p + 1], [1], reduce=True)) == [2]
for wrong in (lambda: field.add([p], [1]), lambda: field.neg("a"), lambda: field.inv([0])):
    try:
        wrong()
    except accelerant.errors.AccelerantError:
        pass
assert "field_mul" in str(accelerant.ledger())
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "triton", "cuda")))
"""


@pytest.mark.slow
def test_fields_on_the_cpu_import_no_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["accelerant", "accelerant.zk", "accelerant.runtime.registry"])
def test_modules_that_import_no_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
