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

from typing import TYPE_CHECKING, Any

from accelerant._renamed import renamed_names
from accelerant.errors import FormatError
from accelerant.zk.formats.circuit import TERM, CustomGate, R1cs, Witness, write_r1cs, write_wtns
from accelerant.zk.formats.container import FilePath, Label, MappedFile, regular_file
from accelerant.zk.formats.ptau import Ptau, PtauContribution, write_ptau
from accelerant.zk.formats.zkey import COEFFICIENT, Zkey, ZkeyContribution, write_zkey

__all__ = [
    "COEFFICIENT", "TERM", "CustomGate", "Label", "Ptau", "PtauContribution", "R1cs", "Witness", "Zkey",
    "ZkeyContribution", "describe", "open_file", "write_ptau", "write_r1cs", "write_wtns", "write_zkey",
]  # fmt: skip

_FORMATS: tuple[type[MappedFile], ...] = (Zkey, Witness, R1cs, Ptau)


def open_file(path: FilePath) -> MappedFile:
    """Map a file of any supported format, found by its magic number; raises FormatError as describe does."""
    source = regular_file(path)
    try:
        with source.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FormatError(f"cannot read {source}: {error.strerror or error}") from None
    for file_class in _FORMATS:
        if file_class.layout.magic == magic:
            return file_class.open(source)
    kinds = ", ".join(f".{known.layout.kind}" for known in _FORMATS)
    raise FormatError(f"{source} begins with {magic!r}, which is the magic number of none of {kinds}")


def describe(path: FilePath, *, check: bool = False) -> dict[str, Any]:
    """Summarize a file of any supported format; the values of a witness are not included.

    Args:
        path: file to read; all of it is read.
        check: also call the file's check().

    Returns:
        JSON values: file, kind, size_bytes, curve, checked, and by kind sizes, contributions and, for each section of
        points, the number of points and of points at infinity. For a key, `forgeable` says why its proofs can be
        forged, if they can (Zkey.forgeable). Public inputs are those of the proof, which include the outputs of the
        circuit.

    Raises:
        FormatError: unknown format, or an inconsistent file.
    """
    with open_file(path) as file:
        if check:
            file.check()
        known = {"file": str(file.path), "kind": file.layout.kind, "size_bytes": file.size_bytes, "curve": file.family}
        return known | file.facts() | {"checked": check}


if not TYPE_CHECKING:  # a type checker reports the names that are not there
    __getattr__ = renamed_names(__name__, {"Contribution": "ZkeyContribution"})
