"""Read, check and write the files of circom and snarkjs.

    .r1cs  R1cs, write_r1cs        a circuit's constraints
    .ptau  Ptau, write_ptau        the powers of tau of a ceremony
    .zkey  Zkey, write_zkey        a Groth16 proving key
    .wtns  Witness, write_wtns     the values of a circuit's wires

>>> with Zkey.open("circuit.zkey") as key, Witness.open("witness.wtns") as witness:
...     key.family, key.n_public, witness.n_values

Files are memory-mapped. open() validates the size of every section, check() the rest; FormatError names file, section
and offset.
"""

from typing import TYPE_CHECKING

from accelerant._renamed import renamed_names
from accelerant.zk.formats.circuit import TERM, CustomGate, R1cs, Witness, write_r1cs, write_wtns
from accelerant.zk.formats.container import Label
from accelerant.zk.formats.describe import describe, open_file
from accelerant.zk.formats.ptau import Ptau, PtauContribution, write_ptau
from accelerant.zk.formats.zkey import COEFFICIENT, Zkey, ZkeyContribution, write_zkey

__all__ = [
    "COEFFICIENT", "TERM", "CustomGate", "Label", "Ptau", "PtauContribution", "R1cs", "Witness", "Zkey",
    "ZkeyContribution", "describe", "open_file", "write_ptau", "write_r1cs", "write_wtns", "write_zkey",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker reports the names that are not there
    __getattr__ = renamed_names(__name__, {"Contribution": "ZkeyContribution"})
