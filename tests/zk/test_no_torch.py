"""The CPU path of zk needs NumPy and llvmlite; torch is not imported for it."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

def loaded(*names):
    return sorted(name for name in sys.modules if name.partition(".")[0] in names)

import accelerant.algebra.curve.weierstrass
assert loaded("torch", "llvmlite", "triton") == []
import accelerant
import accelerant.runtime.registry
from accelerant.zk.formats import describe
from accelerant.zk.multi_scalar import ntt

field = accelerant.zk.field("bn254_fr")
p = field.modulus
x = field.array([1, 2, p - 1])
assert field.decode(field.mul(field.encode([3, p - 1]), [5, p - 1])) == [15, 1]
assert (x**2 / x + 1 - x).sum().ints() == 3
assert field.decode(field.dot(field.random(3), [0, 0, 0])) == 0
assert field.decode(field.inv([1])) == [1]
assert field.decode(field.add([p + 1], [1], reduce=True)) == [2]
assert ntt([1, 2, 3, 4], "babybear")[0] == 10

g1, g2 = accelerant.zk.curve("bn254_g1"), accelerant.zk.curve("bn254_g2")
p, q = g1.mul(g1.generator, [1, g1.order - 1]), g2.mul(g2.generator, [5, 5])
assert g1.decode(g1.sum(p)) is None
assert g1.is_in_subgroup(g1.add(p, p)).all()
assert accelerant.zk.pairing_product_is_one(p, q)
describe(sys.argv[1], check=True)

for wrong in (lambda: field.add([field.modulus], [1]), lambda: field.neg("a"), lambda: g1.neg([(1, 1)])):
    try:
        wrong()
    except accelerant.errors.AccelerantError:
        pass
    else:
        raise SystemExit("what is wrong was taken")
assert "field_mul" in str(accelerant.ledger())
print(loaded("torch", "triton", "cuda"))
"""


def test_zk_on_the_cpu_imports_no_torch():
    key = Path(__file__).parents[1] / "vectors" / "formats" / "bn254" / "product.zkey"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(key)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
