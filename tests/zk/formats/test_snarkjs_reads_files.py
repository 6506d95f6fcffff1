"""snarkjs reads what is written here, and says the same of it as of its own files."""

import json
import subprocess

import pytest
from parts import FAMILIES, VECTORS

from accelerant.zk.formats import Ptau, R1cs, Witness, Zkey, write_ptau, write_r1cs, write_wtns, write_zkey
from requirements import snarkjs_command

POINTS = ("alpha1", "beta1", "beta2", "gamma2", "delta1", "delta2", "ic", "a", "b1", "b2", "c", "h")
POWERS = ("tau_g1", "tau_g2", "alpha_g1", "beta_g1")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def snarkjs():
    command = snarkjs_command()

    def run(*arguments):
        line = [*command, *map(str, arguments)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(params=FAMILIES)
def written(request, tmp_path):
    """snarkjs's files of a curve, and the folder of ours, written from what was read of them."""
    theirs = VECTORS / request.param
    with R1cs.open(theirs / "product.r1cs") as file:
        names = ("n_wires", "n_pub_out", "n_pub_in", "n_prv_in", "n_labels", "n_constraints")
        sizes = {name: getattr(file, name) for name in names}
        matrices = dict(zip("abc", file.matrices(), strict=True))
        write_r1cs(tmp_path / "product.r1cs", file.family, **sizes, **matrices)
    with Witness.open(theirs / "product.wtns") as file:
        write_wtns(tmp_path / "product.wtns", file.family, file.values)
    with Zkey.open(theirs / "product.zkey") as file:
        names = (*POINTS, "n_public", "coefficients", "circuit_hash", "contributions")
        write_zkey(tmp_path / "product.zkey", file.family, **{name: getattr(file, name) for name in names})
    with Ptau.open(theirs / "prepared.ptau") as file:
        write_ptau(
            tmp_path / "prepared.ptau", file.family, power=file.power, beta_g2=file.beta_g2,
            **{name: file.powers(name) for name in POWERS}, contributions=file.contributions,
            lagrange={name: file.points[f"Lagrange {name}"] for name in POWERS},
        )  # fmt: skip
    return theirs, tmp_path


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("command", "name"), [("r1cs", "product.r1cs"), ("wtns", "product.wtns"), ("zkey", "product.zkey")]
)
def test_it_exports_the_same(snarkjs, written, command, name):
    theirs, ours = written
    exported = []
    for folder in (theirs, ours):
        snarkjs(command, "export", "json", folder / name, ours / "exported.json")
        exported.append(json.loads((ours / "exported.json").read_text()))
    assert exported[0] == exported[1]


@pytest.mark.sample(2)
def test_it_accepts_the_files(snarkjs, written):
    _, ours = written
    assert "# of Constraints: 2" in snarkjs("r1cs", "info", ours / "product.r1cs")
    assert "WITNESS IS CORRECT" in snarkjs("wtns", "check", ours / "product.r1cs", ours / "product.wtns")
    assert "Powers of Tau Ok!" in snarkjs("powersoftau", "verify", ours / "prepared.ptau")
    files = [ours / name for name in ("product.r1cs", "prepared.ptau", "product.zkey")]
    assert "ZKey Ok!" in snarkjs("zkey", "verify", *files)
