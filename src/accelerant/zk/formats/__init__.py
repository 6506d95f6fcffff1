"""Files of the circom and snarkjs tool chain, mapped into memory: read, checked and written.

    .r1cs  R1cs, write_r1cs        a circuit's constraints
    .ptau  Ptau, write_ptau        the powers of tau of a ceremony
    .zkey  Zkey, write_zkey        a Groth16 proving key
    .wtns  Witness, write_wtns     the values of a circuit's wires

>>> with Zkey.open("circuit.zkey") as key, Witness.open("witness.wtns") as witness:
...     key.family, key.n_public, witness.n_values

Each class's open() reads what does not grow with the circuit and finds every size right; check() reads the rest.
describe(path) tells what a file of any of them holds. All raise FormatError, which names file, section and offset.
Needs NumPy; torch is not imported.
"""

from accelerant.zk.formats.contributions import Label
from accelerant.zk.formats.describe import describe, open_file
from accelerant.zk.formats.ptau import Ptau, PtauContribution, write_ptau
from accelerant.zk.formats.r1cs import TERM, CustomGate, R1cs, write_r1cs
from accelerant.zk.formats.wtns import Witness, write_wtns
from accelerant.zk.formats.zkey import COEFFICIENT, Contribution, Zkey, write_zkey

__all__ = [
    "COEFFICIENT",
    "TERM",
    "Contribution",
    "CustomGate",
    "Label",
    "Ptau",
    "PtauContribution",
    "R1cs",
    "Witness",
    "Zkey",
    "describe",
    "open_file",
    "write_ptau",
    "write_r1cs",
    "write_wtns",
    "write_zkey",
]
